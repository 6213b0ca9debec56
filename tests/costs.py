# SPDX-License-Identifier: Apache-2.0
"""What a run of the suites costs this machine, and what it may cost: minutes, processor seconds, memory,
disk.

Budgets are for two quiet cores, installed packages and a clean checkout. One that is passed is a line at the
run's end and no failure, since machines differ. Who adds a suite gives it at most SUITE_CPU_S seconds of
processor and puts the rest into `make test-full`; one that needs more says so in suites.SUITES (`cpu`), and
whoever lets that grow has to say why.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

SUITE_CPU_S = 100
DEAREST = 20
SAMPLE_S = 2.0
GIB = 1 << 30


class Budget(NamedTuple):
    """What one run may cost."""

    minutes: float
    cpu_s: float
    memory_gib: float = 16
    disk_gib: float = 40


TEST = Budget(20, 2200)
TEST_FULL = Budget(90, 9000)


def processors() -> Tuple[float, float]:
    """Return for how many seconds all processors of this machine have been busy, and for how many they have
    been there.
    """
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), sum(ticks) / os.sysconf("SC_CLK_TCK")


def _memory() -> int:
    """Return how many bytes are in use: what the kernel could not give away."""
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(values["MemTotal"].split()[0]) - int(values["MemAvailable"].split()[0])) * 1024


class Meter:
    """Counts, from when it is made, what the whole machine spends: what daemons and guests take, and whatever
    else runs.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: where the run writes; what its file system takes counts."""
        self._folder = folder
        self._began, (self._busy, self._there) = time.monotonic(), processors()
        self._memory, self._disk = _memory(), self._taken()
        self.memory = self.disk = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _taken(self) -> int:
        found = os.statvfs(self._folder)
        return (found.f_blocks - found.f_bfree) * found.f_frsize

    def _sample(self) -> None:
        while True:
            self.memory = max(self.memory, _memory() - self._memory)
            self.disk = max(self.disk, self._taken() - self._disk)
            if self._ended.wait(SAMPLE_S):
                return

    def end(self) -> Dict[str, float]:
        """Return minutes, processor seconds, the part of the time that they were busy, and peaks in GiB above
        the beginning.
        """
        self._ended.set()
        self._thread.join()
        busy, there = processors()
        return {
            "minutes": round((time.monotonic() - self._began) / 60, 1),
            "cpu seconds": round(busy - self._busy, 1),
            "busy": round((busy - self._busy) / max(there - self._there, 0.01), 3),
            "memory GiB": round(self.memory / GIB, 1),
            "disk GiB": round(self.disk / GIB, 1),
        }


def dearest(report: Dict[str, Any]) -> List[Tuple[float, str]]:
    """Return the tests that took most processor, with their seconds, by what suites.py and tests/conftest.py
    have noted.
    """
    taken = [
        (seconds, name)
        for result in report.values()
        for name, seconds in result.get("figures", {}).get("cpu", {}).items()
    ]
    return sorted(taken, reverse=True)[:DEAREST]


def passed(
    spent: Dict[str, float], budget: Budget, report: Dict[str, Any], suites: Dict[str, Dict[str, Any]]
) -> List[str]:
    """Return a line for each budget that the run, or one of its suites, has passed."""
    names = ("minutes", "cpu seconds", "memory GiB", "disk GiB")
    lines = [f"{name}: {spent[name]} of {most:g}" for name, most in zip(names, budget) if spent[name] > most]
    for name, result in report.items():
        most = suites.get(name, {}).get("cpu", SUITE_CPU_S)
        if budget == TEST and result.get("cpu seconds", 0) > most:
            lines.append(f"suite {name}: {result['cpu seconds']} cpu seconds of {most}")
    return [f"budget passed: {line}" for line in lines]
