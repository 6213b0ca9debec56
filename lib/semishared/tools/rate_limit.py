# SPDX-License-Identifier: Apache-2.0
"""Keep to a rate, and out of the way of the guests: what is not urgent takes what they leave."""

from __future__ import annotations

import os
import time
from typing import Callable

from ..errors import SemisharedError
from . import progress
from .run import run

BURST_S = 0.1
"""What was not used for this long is given up: after a pause the rate is not exceeded to make up for it."""


class Pace:
    """Bytes per second, 0 for no limit; `wait(n)` returns when n bytes more may go."""

    def __init__(
        self, rate: float, now: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
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
    """Give this process, and what it starts, the idle class of I/O, and `nice` less priority; as far as this host lets it.

    What talks to other hosts stays as nice as it is: who answers late holds them up, or is taken for dead.
    """
    try:
        os.nice(nice)
        run(["ionice", "--class", "3", "--pid", str(os.getpid())])
    except (OSError, SemisharedError):
        pass
