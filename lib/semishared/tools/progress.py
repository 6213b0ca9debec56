# SPDX-License-Identifier: Apache-2.0
"""Signs of life and counts of bytes of the running plan; the host side reports them (hostside.py).

And when a plan stands still: judged by what it does meanwhile, not by how long it takes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import contextmanager
from typing import Callable, Iterator, Optional

from ..errors import SemisharedError

moved: Counter[str] = Counter()
"""Bytes by what was done with them: `store_read`, `store_written`, `received`, `sent`, `reused` (of other
bases).
"""
last = time.monotonic()
last_words: list[Callable[[], None]] = []
"""What is to be done yet if the front-end dies now: a guest that rests for us must not rest for ever."""


@contextmanager
def if_we_die(do: Callable[[], None]) -> Iterator[None]:
    """Have `do` done by the host side if its front-end dies within the block."""
    last_words.append(do)
    try:
        yield
    finally:
        last_words.remove(do)


def touch() -> None:
    """Say that work goes on."""
    global last
    last = time.monotonic()


def count(what: str, size: int) -> None:
    """Count `size` bytes of `what`."""
    moved[what] += size
    touch()


@contextmanager
def waiting() -> Iterator[None]:
    """Wait, within the block, for something that has a limit of its own: that is no standstill."""
    global last
    last = float("inf")
    try:
        yield
    finally:
        touch()


# When something is stuck: by what it does meanwhile, not by how long it takes.
#
# No limit of time suits a disk of terabytes.
#
# What the kernel counts of a program is its progress: bytes it has read and written, and CPU time, if that is
# more than a waiting program's timers take (librbd's bytes cross sockets, which are in no count). Nothing of
# that for `limit_s` seconds is a standstill; but one call may also write out, uninterrupted and uncounted,
# all that the machine has yet to write.


limit_s = 1800.0
"""Seconds without progress ([hosts] standstill_timeout_s): no disk that is only slow or busy needs them for
one request.
"""
FLOOR = 1 << 20
"""Bytes per second that any disk writes out."""
LONGEST = 12
"""Times the limit: no longer, however much there is to write out."""
SIGNS_S = 10.0
"""Seconds between two looks at signs that cost a program."""
TICKS = os.sysconf("SC_CLK_TCK")
programs: dict[int, Work] = {}
"""What runs beside this process and works for it."""


def patience_s() -> float:
    """Return after how many seconds without progress something is stuck, now."""
    dirty = 0
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                name, _, amount = line.partition(":")
                if name in ("Dirty", "Writeback"):
                    dirty += int(amount.split()[0]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return max(limit_s, min(dirty / FLOOR, LONGEST * limit_s))


class Work:
    """What a program has done. With `signs`, only what that returns counts: virsh itself waits for what
    others do.
    """

    def __init__(self, pid: int, signs: Optional[Callable[[], object]] = None) -> None:
        self._pid, self._signs, self._sign = pid, signs, object()
        self._bytes, self._ticks = counted(self._pid)
        self._since = self._looked = time.monotonic()

    def idle_s(self) -> float:
        """Return since how many seconds it has done nothing."""
        now = time.monotonic()
        if self._has_worked(now):
            self._since = now
        return now - self._since

    def _has_worked(self, now: float) -> bool:
        if self._signs:
            if now - self._looked < min(SIGNS_S, limit_s / 4):
                return False
            self._looked = now
            try:
                sign = self._signs()
            except SemisharedError:
                return False
            was, self._sign = self._sign, sign
            return sign != was
        moved, ticks = counted(self._pid)
        worked = moved != self._bytes or ticks - self._ticks > max(1.0, (now - self._since) * TICKS / 100)
        if worked:
            self._bytes, self._ticks = moved, ticks
        return worked


def counted(pid: int) -> tuple[int, int]:
    """Return bytes that a program has moved, and its ticks of CPU time; 0 for what may not be known."""
    moved = ticks = 0
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            moved = sum(
                int(line.split()[1])
                for line in file
                if line.startswith(("rchar", "wchar", "read_bytes", "write_bytes"))
            )
    except PermissionError:
        moved = _turns(pid)
    except (OSError, ValueError, IndexError):
        pass
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        pass
    return moved, ticks


def _turns(pid: int) -> int:
    """Return how often the kernel has let go on what a program of root's (sudo) runs, of which it tells us no
    more: not while it hangs.
    """
    turns = 0
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
        for child in children:
            with open(f"/proc/{child}/status", encoding="utf-8", errors="replace") as file:
                turns += sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)
            turns += _turns(child)
    except (OSError, ValueError, IndexError):
        pass
    return turns


@contextmanager
def watched(pid: int, signs: Optional[Callable[[], object]] = None) -> Iterator[Work]:
    """Let what a program does count, within the block, as progress of the plan as well (hostside.py)."""
    work = programs[pid] = Work(pid, signs)
    try:
        yield work
    finally:
        del programs[pid]


def of_plan_s() -> float:
    """Return since how many seconds neither this process has made progress nor a program that works for
    it.
    """
    own = time.monotonic() - last
    return min([own, *(work.idle_s() for work in list(programs.values()))])
