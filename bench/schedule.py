# SPDX-License-Identifier: Apache-2.0
"""How long a run without names may take, and what keeps it to that: time for rounds that is given or taken,
and an end for what hangs.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import Dict, Iterator

SECONDS: Dict[str, int] = {
    "orders": 30,
    "rebalance": 15,
    "guests": 385,
    "beside": 150,
    "moved": 390,
    "creation": 20,
    "io": 60,
    "choice": 470,
    "peer": 570,
    "clone": 130,
    "ceph": 185,
    "actions": 200,
    "prolog": 85,
    "many": 160,
    "commit": 280,
    "shares": 220,
    "devices": 80,
    "plain": 70,
    "memory": 80,
    "stage": 400,
    "migrate": 175,
    "extents": 135,
    "cluster": 320,
}
"""What a run without names takes, and about how many seconds of each, set-up included, on two idle cores.

First those that want a fixed number of pairs, so that the others can make up for what they took; last what
could best be done without.
"""
LIMIT_S = 77 * 60
"""What is aimed at for all of them."""
END_S = 79 * 60
"""When whatever is still to be done is left out: `make bench` ends within 80 minutes."""
ROUNDS = 0.6
"""The part of those seconds that goes into rounds of which there may be fewer, or more."""
SLOWEST, QUICKEST = 0.4, 1.3
"""Within which the time for rounds is made shorter or longer."""
PATIENCE = 60
"""Seconds after twice the time that it should take, when a benchmark hangs."""


def seconds_of(name: str) -> str:
    """Say what is expected of a benchmark."""
    return f"{SECONDS[name]} s" if name in SECONDS else "no time"


def pace(name: str, spent: float) -> float:
    """Return what part of its time for rounds a benchmark gets, `spent` seconds after the run began."""
    order = list(SECONDS)
    due = sum(SECONDS[one] for one in order[order.index(name) :])
    return min(max(1 + ((LIMIT_S - spent) / due - 1) / ROUNDS, SLOWEST), QUICKEST)


@contextmanager
def ends(name: str, spent: float = 0) -> Iterator[None]:
    """End what is in the block, by an error in the main thread, where it takes much longer than it should, or
    no time is left.
    """
    if name not in SECONDS:
        yield
        return

    limit = min(2 * SECONDS[name] + PATIENCE, END_S - spent)
    if limit <= 0:
        raise TimeoutError("there was no time left")

    def late(*_: object) -> None:
        raise TimeoutError(f"it was not done after {limit:.0f} s")

    before = signal.signal(signal.SIGUSR2, late)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(limit, signal.pthread_kill, (main, signal.SIGUSR2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGUSR2, before)
