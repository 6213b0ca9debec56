# SPDX-License-Identifier: Apache-2.0
"""Rate limits of copies, and I/O priorities that put guests first."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable, Iterator, Sequence

from . import progress

if TYPE_CHECKING:
    from .io_floor import Watch

BURST_S = 0.1
"""Seconds of unused rate that count: after a longer pause the rate is not exceeded to catch up."""
_stands_back = False


class Pace:
    """Bytes per second, 0 for no limit; `wait(n)` returns when n more bytes may go."""

    def __init__(
        self,
        rate: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._now, self._sleep = rate, now, sleep
        self._due = now()

    def wait(self, size: int) -> None:
        if not self._rate:
            return
        self._due = max(self._due, self._now() - BURST_S) + size / self._rate
        while True:
            left = self._due - self._now()
            if left <= 0:
                return
            self._sleep(min(left, 1.0))
            progress.touch()


def stand_back(nice: int = 0) -> None:
    """Put this process and its programs into the idle I/O class, with `nice` less CPU priority, if permitted.

    A process that talks to other hosts keeps its CPU priority: a late answer delays them, or looks like
    death.
    """
    try:
        os.nice(nice)
    except OSError:
        pass
    if not _stands_back:
        _begin()


def priority(nice: int, io_level: int) -> list[str]:
    """Return the words before a program that has `nice` less CPU priority and, unless -1, that I/O level."""
    level = ["ionice", "-c2", f"-n{io_level}"] if io_level >= 0 else []
    return [*(["nice", "-n", str(nice)] if nice else []), *level]


def in_slice(name: str, limits: Sequence[str]) -> list[str]:
    """Return the words before a program that runs in a slice of its user's systemd, with these properties
    (systemd.resource-control(5)); none if there is no such systemd.

    As a scope it stays a child of this process, by which it is watched and ended.
    """
    runtime = f"/run/user/{os.getuid()}"
    if not os.path.exists(f"{runtime}/systemd/private"):
        return []
    run = ["env", f"XDG_RUNTIME_DIR={runtime}", "systemd-run", "--user", "--scope", "--quiet", "--collect"]
    return [*run, f"--slice={name}", *(f"--property={limit}" for limit in limits), "--"]


@contextmanager
def standing_back() -> Iterator[None]:
    """Run the block, and the programs it starts, in the idle I/O class, if permitted.

    Only the copy itself: a guest may be suspended for what comes before and after. A copy that starves there
    leaves the class (io_floor.py).
    """
    global _stands_back
    watch = None if _stands_back else _begin()
    try:
        yield
    finally:
        if watch:
            from . import io_floor

            watch.end()
            _stands_back = not io_floor.put_in_io_class([os.getpid()], io_floor.ANY)


def _begin() -> Watch | None:
    """Enter the idle I/O class and return the watch on its throughput; None if this host refuses it."""
    global _stands_back
    from . import io_floor

    watch = io_floor.Watch()
    _stands_back = io_floor.put_in_io_class(
        [os.getpid()], io_floor.LOWEST if io_floor.has_left else io_floor.IDLE
    )
    if _stands_back:
        return watch
    watch.end()
    return None
