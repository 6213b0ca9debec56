# SPDX-License-Identifier: Apache-2.0
"""What a base costs from each source: how fast it comes, and came to this host before (plan/sources.py decides by that).

What is remembered is a hint: where it is wrong the source shows so within a second, and is left.
"""

from __future__ import annotations

import os
import time
from typing import Sequence

from ..errors import SemisharedError
from ..model import layout_base
from ..plan import sources
from ..tools import extents, files
from .partial import Partial

LEAST = 8
"""Extents that must have come before it shows how fast they do."""
LONG_S = 5.0
"""So long after the first it shows in any case. Until it comes that is peers.STALL_S, as of every source."""
LOOK_S = 0.5
"""Between two looks whether another one would be quicker."""
TURNS = 6
"""How often a source may be chosen."""


class Meter:
    """How fast extents of a base come from one source."""

    def __init__(self, partial: Partial) -> None:
        self._partial, self._had, self._first = partial, len(partial.have), 0.0

    def came(self) -> int:
        """Return how many came after the first one: before that something was started."""
        came = len(self._partial.have) - self._had
        if came and not self._first:
            self._first, self._had = time.monotonic(), self._had + came
            return 0
        return came

    def tells(self) -> bool:
        """Tell whether the rate says something."""
        came = self.came()
        return came >= LEAST or bool(self._first) and time.monotonic() - self._first > LONG_S

    def rate(self) -> float:
        """Return bytes per second; at most so many, if only one has come."""
        return max(self.came(), 1) * extents.EXTENT / max(time.monotonic() - self._first, 1e-3)


class Choice:
    """From whom a base comes next: `begin` says it, `end` is called when nothing comes from there any more."""

    def __init__(self, root: str, candidates: Sequence[str], partial: Partial) -> None:
        self._root, self._candidates, self._partial = root, list(candidates), partial
        self._rates, self._turns, self._is_left = known(root), TURNS, False
        self._name, self._meter, self._looked = "", Meter(partial), 0.0

    def _left(self) -> int:
        return len(self._partial.missing()) * extents.EXTENT

    @property
    def is_over(self) -> bool:
        """Tell whether nobody is left to be asked."""
        return not self._candidates or not self._turns

    def begin(self) -> str:
        """Return who is to be asked."""
        self._turns, self._is_left, self._meter = self._turns - 1, False, Meter(self._partial)
        self._name = sources.quickest(self._candidates, self._rates, self._left())
        return self._name

    def is_dear(self) -> bool:
        """Tell whether another one would be quicker from now on."""
        # The last turn is to its end.
        if self._turns and self._meter.tells() and time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            rates = {**self._rates, self._name: self._meter.rate()}
            self._is_left = sources.quickest(self._candidates, rates, self._left(), self._name) != self._name
        return self._is_left

    def end(self, *, is_limited: bool) -> None:
        """Remember how it went, unless we were the limit; who was not left for another one has no more to give."""
        if self._meter.tells():
            self._rates[self._name] = self._meter.rate()
            if not is_limited:
                note(self._root, self._name, self._rates[self._name])
        if not self._is_left:
            self._candidates.remove(self._name)


def known(root: str) -> dict[str, float]:
    """Return bytes per second of each source that was used not long ago."""
    return {name: rate for name, (rate, _) in _remembered(root).items()}


def note(root: str, source: str, rate: float) -> None:
    """Remember how fast a source was."""
    path = layout_base.rates(root)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        files.remove_stale(os.path.dirname(path))
        files.write_json(path, {**_remembered(root), source: (rate, time.time())})
    except (OSError, SemisharedError):
        pass  # then it is found out again


def _remembered(root: str) -> dict[str, tuple[float, float]]:
    found, now = files.read_json(layout_base.rates(root)) or {}, time.time()
    pairs = {name: pair for name, pair in found.items() if isinstance(pair, list) and len(pair) == 2}
    numbers = {name: (at, rate) for name, (rate, at) in pairs.items() if isinstance(at, (int, float)) and isinstance(rate, (int, float))}
    return {name: (rate, at) for name, (at, rate) in numbers.items() if rate > 0 and now - sources.KNOWN_S < at <= now + 60}
