# SPDX-License-Identifier: Apache-2.0
"""A floor under the idle class of I/O: what gets next to nothing in it leaves it.

`bfq` gives the idle class some of a busy device. `mq-deadline` gives it nothing at all while others have
requests, but for each of its requests after ten seconds (prio_aging_expire): beside a guest that is always at
it, that is 25 KiB per second, and a copy is never over. Which scheduler is below a path is not easily told
(LVM, RAID, pools, partitions), and it may be changed at any time: so what counts is what comes. Whoever waits
for the device nearly always, and gets less than LEAST, goes on in the lowest of the usual classes. Who waits
for something else, a network or a rate, keeps the idle class, however slow that is.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Deque, Sequence

from ..named import NamedTuple
from . import progress

# The I/O priority of threads: ioprio_set(2), for which neither python nor the C library has a function.


NUMBERS = {"aarch64": 30, "ppc64le": 273, "s390x": 282, "x86_64": 251}
"""Of the system call, by machine."""
BY_THREAD = 1
ANY, LOWEST, IDLE = 0, 2 << 13 | 7, 3 << 13
"""A class and what is within it: that of whoever asked for none, the last of the usual one, and the one that
gets what all others leave.
"""


def put_in_io_class(threads: list[int], priority: int) -> bool:
    """Give threads an I/O priority; tell whether this machine let us, also if some of them have ended
    meanwhile.
    """
    import ctypes  # as long to load as one program takes to start

    number = NUMBERS.get(os.uname().machine)
    if number is None:
        return False
    libc = ctypes.CDLL(None)
    return any([libc.syscall(number, BY_THREAD, thread, priority) == 0 for thread in threads])


LEAST = 8 << 20
"""Bytes per second as the kernel counts them: each that is copied two to four times, as it is read and
written, asked for and done.
"""
WINDOW_S = 4.0
LOOK_S = 0.25
MOSTLY = 0.8
"""Of all looks: waits for a device."""
has_left = False
"""It was so once in this process: the next copy does not wait for the same again."""


class Look(NamedTuple):
    """What was seen of a copy at a moment."""

    at: float
    moved: int
    waits: bool
    """One of its threads waits for a device (state D), and could not even be killed."""


def is_starved(looks: Sequence[Look]) -> bool:
    """Tell whether a copy was held up by its device over all of a window, and got next to nothing."""
    if not looks or looks[-1].at - looks[0].at < WINDOW_S:
        return False
    moved, waits = looks[-1].moved - looks[0].moved, sum(look.waits for look in looks)
    return moved < LEAST * (looks[-1].at - looks[0].at) and waits >= MOSTLY * len(looks)


class Watch:
    """Sees to it, up to `end`, that this process and what it starts leave the idle class if they get next to
    nothing there.

    To be begun before that class is taken: the watch itself must not be in it.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Change nothing any more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        global has_left
        looks: Deque[Look] = deque()
        while not self._over.wait(LOOK_S):
            looks.append(_look())
            while looks[-1].at - looks[0].at > WINDOW_S + LOOK_S:
                looks.popleft()
            if not is_starved(looks):
                continue
            looks.clear()
            has_left = True
            # And again after the next window, if it is so then: a program begins threads as it needs them.
            if not put_in_io_class([thread for pid in _pids() for thread in _threads(pid)], LOWEST):
                return


def _look() -> Look:
    pids = _pids()
    moved = sum(progress.counted(pid)[0] for pid in pids)
    return Look(time.monotonic(), moved, any(_waits(pid, thread) for pid in pids for thread in _threads(pid)))


def _pids() -> list[int]:
    return [os.getpid(), *list(progress.programs)]


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _waits(pid: int, thread: int) -> bool:
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "D"
    except (OSError, IndexError):
        return False
