# SPDX-License-Identifier: Apache-2.0
"""What a benchmark finds: samples, the baseline's samples of the same run, what was expected, what is
allowed.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple


def _within(ratio: float, limit: float) -> bool:
    return 1 / limit <= ratio <= limit


COMPARE: Dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, "within": _within}
"""`within` a factor, of a ratio."""


ENOUGH = 4
"""Samples without which no ratio of times is held against a budget."""
STRETCHED = 1.3
"""How much longer rounds may take for that."""


class Pace:
    """How much of the time that rounds may take they have: less when a run is behind its time, more when it
    is ahead (run.py).
    """

    factor = 1.0


def rounds_within(seconds: float, most: int) -> Iterator[int]:
    """Count rounds, at most `most`, and none more that would end after `seconds`, or somewhat later where
    there are not ENOUGH yet.

    At least one: n says how many it were.
    """
    started = time.monotonic()
    for number in range(most):
        spent = time.monotonic() - started
        if number and spent * (number + 1) / number > seconds * Pace.factor * (
            STRETCHED if number < ENOUGH else 1
        ):
            return
        print(f"  round {number + 1} of {most}", flush=True)
        yield number


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def quartiles(values: Sequence[float]) -> List[float]:
    """Return the first and third quartile (the extremes of fewer than four values)."""
    if len(values) < 4:
        return [min(values), max(values)]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def around_the_median(values: Sequence[float]) -> List[float]:
    """Return between which samples, six or more, the median of all that could be taken lies with at least 95
    %, however they are spread.

    A sample is below that median as often as a coin falls: so many of n are on one side with the probability
    of the binomial distribution.
    """
    count, outside, chance = len(values), 0, 0.5 ** len(values)
    while 2 * (chance + math.comb(count, outside + 1) / 2**count) <= 0.05:
        outside += 1
        chance += math.comb(count, outside) / 2**count
    return [sorted(values)[outside], sorted(values)[count - 1 - outside]]


def summary(values: Sequence[float]) -> Dict[str, Any]:
    """Return median, spread (quartiles) and number of some samples."""
    return {
        "median": rounded(median(values)),
        "spread": [rounded(v) for v in quartiles(values)],
        "n": len(values),
    }


def rounded(value: float) -> float:
    """Keep four significant digits: more would be noise."""
    return float(f"{value:.4g}")


@dataclass
class Figure:
    """One measured figure.

    `expected` is what the author thought before the first measurement, of the ratio if there is a baseline,
    and `because` is the reason. `budget` is (of what, how it compares, limit): of the median "ratio" or
    "value", or of the "worst ratio" or "worst value" of all; see COMPARE. A ratio of fewer than ENOUGH
    samples is shown, and not judged.
    """

    name: str
    what: str
    unit: str
    values: Sequence[float]
    baseline: str = ""
    against: Sequence[float] = field(default_factory=list)
    paired: bool = True
    expected: Optional[float] = None
    because: str = ""
    budget: Optional[Tuple[str, str, float]] = None
    budget_from: str = ""
    if_missed: str = ""
    """Why the budget is missed, should it be: the page says so then."""
    interval: bool = False
    """Whether to say between which ratios their median lies with 95 %."""
    is_exact: bool = False
    """Whether it is counted, not timed: then one sample is enough."""
    pairs: int = 0
    """How many there have to be: with fewer the budget is missed."""

    def ratios(self) -> List[float]:
        """Return the ratio of each pair, or that of the medians where samples are no pairs."""
        if not self.against:
            return []
        if self.paired and len(self.values) == len(self.against):
            return [value / other for value, other in zip(self.values, self.against) if other]
        return [median(self.values) / median(self.against)]

    def data(self) -> Dict[str, Any]:
        """Return the figure as it is written to bench.json."""
        found: Dict[str, Any] = {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            **summary(self.values),
        }
        ratios = self.ratios()
        found["baseline"] = {"what": self.baseline, **summary(self.against)} if self.against else None
        found["ratio"] = rounded(median(ratios)) if ratios else None
        if len(ratios) == 1 and len(self.values) > 1:  # of no pairs: as far apart as the samples are
            ratios = [value / median(self.against) for value in self.values]
        found["ratio_spread"] = [rounded(v) for v in quartiles(ratios)] if len(ratios) > 1 else None
        found["ratio_interval"] = (
            [rounded(v) for v in around_the_median(ratios)] if self.interval and len(ratios) > 5 else None
        )
        found["expected"] = self.expected
        found["because"], found["if_missed"] = self.because, self.if_missed
        found["budget"] = None
        found["met"] = None
        if self.budget:
            kind, sign, limit = self.budget
            if kind.startswith("worst"):
                found["worst"] = rounded(self._judged(kind, sign))
            found["budget"] = {"of": kind, "sign": sign, "limit": limit, "from": self.budget_from}
            if not kind.endswith("ratio") or self.is_exact or len(self.values) >= ENOUGH:
                found["met"] = self.holds()
            if len(self.values) < self.pairs:
                found["met"], found["if_missed"] = (
                    False,
                    f"{len(self.values)} pairs, and there have to be {self.pairs}",
                )
        return found

    def holds(self) -> bool:
        """Return whether what was measured is within the budget, however few samples there are."""
        assert self.budget
        kind, sign, limit = self.budget
        return bool(COMPARE[sign](self._judged(kind, sign), limit))

    def _judged(self, kind: str, sign: str) -> float:
        values = self.ratios() if kind.endswith("ratio") else self.values
        return (min if sign == ">=" else max)(values) if kind.startswith("worst") else median(values)
