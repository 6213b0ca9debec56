# SPDX-License-Identifier: Apache-2.0
"""Wait until files can be read or written: by poll(2), since select(2) has no files above 1023, and a session with 250 hosts has."""

from __future__ import annotations

import math
import select

READABLE = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL
WRITABLE = select.POLLOUT | select.POLLHUP | select.POLLERR | select.POLLNVAL
"""The end, and what is wrong, are what the next read or write says."""
LONGEST_S = 86_400.0
"""poll(2) takes milliseconds as an int."""


def to_read(fd: int, within_s: float) -> bool:
    """Tell whether a file can be read, or is at its end, within that time."""
    return _either(fd, -1, within_s)[0]


def to_write(fd: int, within_s: float) -> bool:
    """Tell whether a file takes something within that time."""
    return _either(-1, fd, within_s)[1]


def to_read_or_write(read: int, write: int, within_s: float) -> tuple[bool, bool]:
    """Tell whether one file can be read, and whether the other one takes something, as soon as one of it is so."""
    return _either(read, write, within_s)


def _either(read: int, write: int, within_s: float) -> tuple[bool, bool]:
    poll = select.poll()
    for fd, events in ((read, select.POLLIN), (write, select.POLLOUT)):
        if fd >= 0:
            poll.register(fd, events)
    # Rounded up: who is told too early would ask again and again.
    found = dict(poll.poll(math.ceil(min(max(within_s, 0.0), LONGEST_S) * 1000)))
    return bool(found.get(read, 0) & READABLE), bool(found.get(write, 0) & WRITABLE)
