# SPDX-License-Identifier: Apache-2.0
"""Signs of life and byte counts of the running plan, which the host side reports (hostside.py).

Also the detection of a standstill: by what a plan does, not by how long it takes.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import contextmanager
from typing import Callable, Iterator

moved: Counter[str] = Counter()
"""Bytes by kind: `store_read`, `store_written`, `received`, `sent`, `reused` (from other bases)."""
came: Counter[str] = Counter()
"""Bytes by where they came from, as far as known: the store, a host."""
evicted: list[str] = []
"""Bases that this host has removed for room by its own decision, no front-end having named them."""
asked_by = ""
"""The user and the verb that the work is for, '' for oned."""
last = time.monotonic()
last_words: list[Callable[[], None]] = []
"""What the host side does if its front-end dies now, such as resuming a suspended guest."""


@contextmanager
def if_we_die(do: Callable[[], None]) -> Iterator[None]:
    """Have the host side call `do` if its front-end dies within the block."""
    last_words.append(do)
    try:
        yield
    finally:
        last_words.remove(do)


def touch() -> None:
    global last
    last = time.monotonic()


def count(what: str, size: int) -> None:
    moved[what] += size
    touch()


NOTED_S = 2.0
"""Seconds of work before `semishared jobs` lists it: short actions write nothing (tools/jobs.py)."""
TICK_S = 1.0
"""Seconds between two looks at how far it is."""
INBOUND = ("store_read", "base_read", "received", "reused")
OUTBOUND = ("store_written", "sent", "moved", "layers_copied")
"""Kinds of which a step moves each byte once: what it reads and what it writes are the same bytes."""


class Goal:
    """What is to be moved now, and how far it is: what `semishared jobs` shows (tools/jobs.py)."""

    def __init__(self, of: int = 0, source: str = "", target: str = "") -> None:
        """`of` in bytes, 0 if unknown; `source`, `target`: where from and where to, '' for here."""
        self.of, self.source, self.target = of, source, target
        self.reached = 0
        """Bytes that are there by a report, such as QEMU's of a blockjob."""
        self._before = dict(moved)
        self._written: dict[int, int] = {}
        """Bytes that programs have written since, by process."""

    def done(self) -> int:
        """Return the bytes moved so far, by whichever counter knows of the most."""
        for pid in list(programs):
            self._written[pid] = max(self._written.get(pid, 0), written(pid))
        counted = [sum(moved[kind] - self._before.get(kind, 0) for kind in kinds) for kinds in KINDS]
        return max(self.reached, sum(self._written.values()), *counted)


KINDS = (INBOUND, OUTBOUND)
goal = Goal()


def expect(of: int = 0, source: str = "", target: str = "") -> None:
    """Say what is moved from now on; the arguments as of Goal."""
    global goal
    goal = Goal(of, source, target)


def reached(done: int, of: int, source: str = "") -> None:
    """Report how far it is, in bytes; a `source` once said stays."""
    goal.reached, goal.of, goal.source = done, of, source or goal.source


@contextmanager
def waiting() -> Iterator[None]:
    """Suspend the standstill limit within the block, for a wait that has its own limit."""
    global last
    last = float("inf")
    try:
        yield
    finally:
        touch()


# Standstill: judged by what a program does, not by how long it takes. No time limit suits a disk of
# terabytes. The kernel's counters of a program are its progress: bytes read and written, and CPU time beyond
# a waiting program's timers (librbd's bytes cross sockets, which no counter includes). No change for
# `limit_s` seconds is a standstill; but a single call may also write out, uninterrupted and uncounted, all of
# the machine's dirty pages.


limit_s = 1800.0
"""Seconds without progress ([hosts] standstill_timeout_s), more than one request to a busy disk takes."""
FLOOR = 1 << 20
"""Bytes per second that any disk writes out."""
LONGEST = 12
"""Most multiples of the limit, for any amount of dirty pages."""
TICKS = os.sysconf("SC_CLK_TCK")
MOVED = ("rchar", "wchar", "read_bytes", "write_bytes")
programs: dict[int, Work] = {}
"""The programs that work for this process."""


def patience_s() -> float:
    """Return the seconds without progress that count as a standstill, given the dirty pages now."""
    dirty = 0
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            rows = [line.split() for line in file if line.startswith(("Dirty:", "Writeback:"))]
        dirty = sum(int(row[1]) << 10 for row in rows)
    except (OSError, ValueError, IndexError):
        pass
    return max(limit_s, min(dirty / FLOOR, LONGEST * limit_s))


class Work:
    """The work of a program, by its counters."""

    def __init__(self, pid: int) -> None:
        self._pid, self._since = pid, time.monotonic()
        self._bytes, self._ticks = counted(pid)

    def idle_s(self) -> float:
        now = time.monotonic()
        moved, ticks = counted(self._pid)
        if moved != self._bytes or ticks - self._ticks > max(1.0, (now - self._since) * TICKS / 100):
            self._bytes, self._ticks, self._since = moved, ticks, now
        return now - self._since


def counted(pid: int) -> tuple[int, int]:
    """Return the bytes a program has moved and its CPU ticks; 0 for counters that are not readable."""
    moved = ticks = 0
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            moved = sum(int(line.split()[1]) for line in file if line.startswith(MOVED))
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


def written(pid: int) -> int:
    """Return the bytes that a program has written, 0 if that cannot be read."""
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("wchar"))
    except (OSError, ValueError, IndexError):
        return 0


def _turns(pid: int) -> int:
    """Return the context switches of the children of a root program (sudo), whose counters are hidden."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            children = [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        return 0
    return sum(switches(str(child)) + _turns(child) for child in children)


def switches(process: str) -> int:
    """Return the context switches of PID, or of PID/task/THREAD; 0 if they cannot be read."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as file:
            return sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)
    except (OSError, ValueError, IndexError):
        return 0


@contextmanager
def watched(pid: int) -> Iterator[Work]:
    """Count a program's work, within the block, as progress of the plan (hostside.py)."""
    work = programs[pid] = Work(pid)
    try:
        yield work
    finally:
        del programs[pid]


def of_plan_s() -> float:
    """Return the seconds without progress of this process and of all programs that work for it."""
    own = time.monotonic() - last
    return min([own, *(work.idle_s() for work in list(programs.values()))])
