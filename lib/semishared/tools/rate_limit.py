# SPDX-License-Identifier: Apache-2.0
"""Rates of copies, and I/O priorities that leave the device to the guests first."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Callable, Iterator

from . import progress

if TYPE_CHECKING:
    from .io_floor import Watch

BURST_S = 0.1
"""What was not used for this long is given up: after a pause the rate is not exceeded to make up for it."""
_stands_back = False


class Pace:
    """Bytes per second, 0 for no limit; `wait(n)` returns when n bytes more may go."""

    def __init__(
        self,
        rate: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._now, self._sleep = rate, now, sleep
        self._due = now()

    def wait(self, size: int) -> None:
        """Wait until `size` bytes may follow those before."""
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
    """Give this process, and what it starts, the idle class of I/O, and `nice` less priority; as far as this
    host lets it.

    What talks to other hosts stays as nice as it is: who answers late holds them up, or is taken for dead.
    """
    try:
        os.nice(nice)
    except OSError:
        pass
    if not _stands_back:
        _begin()


@contextmanager
def standing_back() -> Iterator[None]:
    """Copy, within the block, in the idle class of I/O, as far as this host lets it; what is started there is
    in it as well.

    Only there: a guest may be at rest for what comes before and after, which is little. And only as long as
    there is enough left (io_floor.py).
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
    """Be in the idle class from now on, as long as that goes well; return what sees to that, None if this
    host does not let us.
    """
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
