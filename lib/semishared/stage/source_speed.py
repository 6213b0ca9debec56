# SPDX-License-Identifier: Apache-2.0
"""What a base costs from each source: its speed now and before (plan/base/sharing.py decides by it).

A remembered speed is a hint: the measurement corrects a wrong one within a second.
"""

from __future__ import annotations

import os
import time
from typing import Callable, Sequence

from ..errors import SemisharedError
from ..model.base import names as base_names
from ..plan.base import sharing
from ..tools import extents, files
from .partial import Partial

LEAST = 8
"""Extents that must have come before the measured rate counts."""
LONG_S, FIRST_S = 5.0, 15.0
"""Seconds from the first extent, or without any, after which the rate counts in any case.

A silent peer is given up before that (peers.STALL_S).
"""
ASKED = 12
"""Extents that a peer is asked for to measure it: those that come with the first, and LEAST."""
WORTH = 4 * ASKED
"""Extents that must be missing before a peer is measured beside the store."""
LOOK_S = 0.5
"""Seconds between two looks at whether another source would be quicker."""
TURNS = 6
"""How often a source may be chosen."""


class Meter:
    """Measures how fast extents come from one source; `count` returns how many have come."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count, self._had, self._first = count, count(), 0.0
        self._begun, self._before = time.monotonic(), self._had

    def came(self) -> int:
        """Return how many extents came after the first; the time before it is spent on the start."""
        came = self._count() - self._had
        if came and not self._first:
            self._first, self._had = time.monotonic(), self._had + came
            return 0
        return came

    def tells(self) -> bool:
        """Return True once the rate is meaningful."""
        came = self.came()
        since, limit = (self._first, LONG_S) if self._first else (self._begun, FIRST_S)
        return came >= LEAST or time.monotonic() - since > limit

    def rate(self) -> float:
        """Return bytes per second; an upper bound while at most one extent has come."""
        if not self._first:
            return self.rate_so_far()
        return max(self.came(), 1) * extents.EXTENT / max(time.monotonic() - self._first, 1e-3)

    def rate_so_far(self) -> float:
        """Return bytes per second since the start; an upper bound while nothing has come."""
        return (
            max(self._count() - self._before, 1) * extents.EXTENT / max(time.monotonic() - self._begun, 1e-3)
        )


class Trial:
    """Measures a peer while the receiver reads the store.

    Extents of the peer wait until the store's are written, so their times of arrival count.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._came: list[tuple[float, int]] = []

    def gave(self, count: int, at: float) -> None:
        """Count extents that arrived at that time."""
        if count:
            self._came.append((at, count))

    def _later(self) -> int:
        return sum(count for _, count in self._came[1:])

    def tells(self) -> bool:
        """Return True once the rate is meaningful."""
        return self._later() >= LEAST or bool(self._came) and time.monotonic() - self._came[0][0] > LONG_S

    def rate(self) -> float:
        """Return bytes per second; an upper bound while only the first arrival is there."""
        took = self._came[-1][0] - self._came[0][0] if self._later() else time.monotonic() - self._begun
        return max(self._later(), 1) * extents.EXTENT / max(took, 1e-3)


class Choice:
    """Picks the source of a base: `begin` returns it, `end` follows when that source is done or left.

    A peer of unknown speed is tried beside the store: `tried` is that peer, `asked` the extents that it is
    asked for, `has_given` how many of them came.
    """

    def __init__(self, root: str, candidates: Sequence[str], partial: Partial) -> None:
        self._root, self._candidates, self._partial = root, list(candidates), partial
        self._rates, self._turns, self._is_left = known(root), TURNS, False
        self._name, self._looked = "", 0.0
        self.tried, self.asked, self.has_given = "", list[int](), 0
        self._begin_meters()

    def _begin_meters(self) -> None:
        self._meter = Meter(lambda: len(self._partial.have) - self.has_given)
        self._trial = Trial()

    def _left(self) -> int:
        return len(self._partial.missing()) * extents.EXTENT

    @property
    def is_over(self) -> bool:
        """Return True if no source is left to ask."""
        return not self._candidates or not self._turns

    def begin(self) -> str:
        """Return the source to ask next: the quickest, or the store beside which a peer is tried."""
        self._turns, self._is_left, self.has_given = self._turns - 1, False, 0
        self._name, self.tried, self.asked = (
            sharing.quickest(self._candidates, self._rates, self._left()),
            "",
            [],
        )
        stores = [name for name in self._candidates if name.startswith(sharing.STORE)]
        missing = self._partial.missing()
        if stores and self._name not in (*stores, *self._rates) and len(missing) >= WORTH:
            self._name, self.tried, self.asked = stores[0], self._name, missing[-ASKED:]
        self._begin_meters()
        return self._name

    def is_dear(self) -> bool:
        """Return True if the receiver is to leave this source: another is quicker, or the trial is done."""
        if self.tried:
            self._meter.came()
            self._is_left = self._trial.tells()
        # The last turn is not left.
        elif (
            not self._is_left
            and self._turns
            and self._meter.tells()
            and time.monotonic() - self._looked > LOOK_S
        ):
            self._looked = time.monotonic()
            rates = {**self._rates, self._name: self._meter.rate()}
            self._is_left = sharing.quickest(self._candidates, rates, self._left(), self._name) != self._name
        return self._is_left

    def gave(self, count: int, at: float) -> None:
        """Count extents that arrived from the tried peer at that time."""
        self.has_given += count
        self._trial.gave(count, at)

    def drop(self, *, has_failed: bool = True) -> None:
        """End the trial; do not ask that peer again if it `has_failed`."""
        if has_failed:
            self._candidates.remove(self.tried)
        self.tried, self._is_left = "", True

    def end(self, *, has_failed: bool) -> None:
        """Remember the measured speeds. A source that was not left for another one has no more to give.

        The speed is remembered also where the site's rate limit set it: then all sources are equally quick.
        """
        if self.tried and not has_failed:
            # A rate of too few extents is not remembered, but good enough to compare these two.
            self._rates |= {self._name: self._meter.rate_so_far(), self.tried: self._trial.rate()}
        for name, meter in ((self._name, self._meter), (self.tried, self._trial)):
            if name and meter.tells():
                self._rates[name] = meter.rate()
                note(self._root, name, self._rates[name])
        if not self._is_left and (has_failed or not self.tried):
            self._candidates.remove(self._name)


def known(root: str) -> dict[str, float]:
    """Return the remembered bytes per second of each source that was used recently."""
    return {name: rate for name, (rate, _) in _remembered(root).items()}


def note(root: str, source: str, rate: float) -> None:
    """Remember the bytes per second of a source; an error is ignored, as the next use measures again."""
    path = base_names.rates(root)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        files.remove_stale(os.path.dirname(path))
        files.write_json(path, {**_remembered(root), source: (rate, time.time())})
    except (OSError, SemisharedError):
        pass  # the next use measures it again


def _remembered(root: str) -> dict[str, tuple[float, float]]:
    found, now = files.hint(base_names.rates(root)), time.time()
    pairs = {name: pair for name, pair in found.items() if isinstance(pair, list) and len(pair) == 2}
    numbers = {
        name: (at, rate)
        for name, (rate, at) in pairs.items()
        if isinstance(at, (int, float)) and isinstance(rate, (int, float))
    }
    return {
        name: (rate, at)
        for name, (at, rate) in numbers.items()
        if rate > 0 and now - sharing.KNOWN_S < at <= now + 60
    }
