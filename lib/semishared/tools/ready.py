# SPDX-License-Identifier: Apache-2.0
"""Wait until files can be read or written: by poll(2), since select(2) has no files above 1023, and a session
with 250 hosts has.
"""

from __future__ import annotations

import math
import select

LONGEST_S = 86_400.0
"""poll(2) takes milliseconds as an int."""
NONE = -1


def to_read(fd: int, within_s: float) -> bool:
    """Tell whether a file can be read, or is at its end, within that time."""
    return to_read_or_write(fd, NONE, within_s)[0]


def to_write(fd: int, within_s: float) -> bool:
    """Tell whether a file takes something within that time."""
    return to_read_or_write(NONE, fd, within_s)[1]


def to_read_or_write(read: int, write: int, within_s: float) -> tuple[bool, bool]:
    """Tell whether one file can be read, and whether the other one takes something, as soon as one of it is
    so.

    Also where there is an end or an error to be told, which the next read or write does.
    """
    poll = select.poll()
    for fd, events in ((read, select.POLLIN), (write, select.POLLOUT)):
        if fd != NONE:
            poll.register(fd, events)
    # Rounded up: who is told too early would ask again and again.
    found = dict(poll.poll(math.ceil(min(max(within_s, 0.0), LONGEST_S) * 1000)))
    return read in found, write in found
