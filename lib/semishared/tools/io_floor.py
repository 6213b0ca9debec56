# SPDX-License-Identifier: Apache-2.0
"""A minimum throughput for the idle I/O class: a process that gets too little there leaves it.

`bfq` gives the idle class a share of a busy device. `mq-deadline` gives it nothing while other classes have
requests, except each request after ten seconds (prio_aging_expire): beside a busy guest that is 25 KiB per
second, and a copy never ends. The scheduler below a path is hard to find (LVM, RAID, pools, partitions), and
may change at any time; so this module measures throughput. A process that nearly always waits for the device,
and gets less than LEAST, continues in the lowest best-effort priority. A process that waits for something
else, a network or a rate, keeps the idle class.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Deque, Sequence

from ..named import NamedTuple
from . import progress

# Thread priorities by ioprio_set(2), for which neither Python nor the C library has a function.


NUMBERS = {"aarch64": 30, "ppc64le": 273, "s390x": 282, "x86_64": 251}
"""The number of ioprio_set(2), by machine."""
BY_THREAD = 1
ANY, LOWEST, IDLE = 0, 2 << 13 | 7, 3 << 13
"""Class and level: the default, the lowest of the best-effort class, and the idle class."""


def put_in_io_class(threads: list[int], priority: int) -> bool:
    """Set the I/O priority of threads; return False if this machine refuses it for all of them."""
    import ctypes  # here: loading it takes as long as starting a program

    number = NUMBERS.get(os.uname().machine)
    if number is None:
        return False
    libc = ctypes.CDLL(None)
    return any([libc.syscall(number, BY_THREAD, thread, priority) == 0 for thread in threads])


LEAST = 8 << 20
"""Bytes per second as the kernel counts them: each copied byte two to four times."""
WINDOW_S = 4.0
LOOK_S = 0.25
MOSTLY = 0.8
"""Share of the looks in which a thread waits for a device."""
has_left = False
"""This process was starved before: its next copy does not try the idle class again."""


class Look(NamedTuple):
    """A sample of a copy: time, bytes moved, and whether a thread waits for a device."""

    at: float
    moved: int
    waits: bool
    """A thread is in uninterruptible sleep (state D)."""


def is_starved(looks: Sequence[Look]) -> bool:
    """Return True if a copy waited for its device through a whole window, and moved next to nothing."""
    if not looks or looks[-1].at - looks[0].at < WINDOW_S:
        return False
    moved, waits = looks[-1].moved - looks[0].moved, sum(look.waits for look in looks)
    return moved < LEAST * (looks[-1].at - looks[0].at) and waits >= MOSTLY * len(looks)


class Watch:
    """Moves this process and its programs out of the idle class if they starve there; until `end`.

    Start it before entering that class, as it must not be in the class itself.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
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
            # Repeat after the next window: a program starts threads as it needs them.
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
