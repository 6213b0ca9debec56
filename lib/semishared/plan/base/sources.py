# SPDX-License-Identifier: Apache-2.0
"""From where a host gets a base that it lacks: from those before it, so that many at once form one chain.

    holders                have it (or had it when they were last heard of)
    arriving, oldest first are getting it at this moment, and pass on what has come

The first one reads the store, if nobody has the base. Each later one follows the one that came just before
it; should that fail, one that has it, then one that came earlier, and so on by turns, and in the end the
store. So the store is read once, a holder sends once, and a host that dies or stalls costs those behind it a
bounded time (stage/peers.py), not the session; and several that died together cost no more than one of them,
if there is a holder.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Mapping, Sequence

from ...named import NamedTuple

MOST = 4
"""Sources that are tried before the store: each may cost the time in which a stalled one is given up."""
STORE = "store "
"""What the name of a store begins with among sources: no host's does."""
START_S = 0.5
"""Seconds that it takes to begin with another source: an ssh, mostly."""
SPARED = 0.9
"""A store is read only if it takes no longer than this part of the time: it is there for all hosts."""
HOPE = 1.5
"""So many times as fast as the best known peer is whoever is not known, until it was tried."""
KNOWN_S = 3600.0
"""For so long it counts how fast a source has been."""
ARRIVES_S = 3600.0
"""After so long a host that never said how it went is not arriving any more."""


class Arriving(NamedTuple):
    """A host that is getting a base: since when (seconds since the epoch)."""

    host: str
    since: float
    maker: str = ""
    """Of whose action it is (tools/owner.py): without it nothing arrives."""


def current(arriving: Sequence[Arriving], now: float) -> list[Arriving]:
    """Return those of whom there may still be something to be had."""
    return [item for item in arriving if now - ARRIVES_S < item.since <= now + 60]


def for_host(host: str, holders: Sequence[str], arriving: Sequence[Arriving]) -> list[str]:
    """Return whom `host` asks, in that order."""
    chain = dict.fromkeys(item.host for item in reversed(arriving) if item.host != host)
    others = [name for name in dict.fromkeys(reversed(holders)) if name != host and name not in chain]
    found = [name for pair in zip_longest(chain, others) for name in pair if name]
    return found[:MOST]


def quickest(candidates: Sequence[str], rates: Mapping[str, float], left: int, current: str = "") -> str:
    """Return from which of the `candidates`, peers first, `left` bytes come soonest; the first of those that
    are as good.

    `rates` are bytes per second of those that are known; `current` is one that has begun. Of peers none of
    whom is known one is tried, and the store is not before.
    """
    hope = HOPE * max(
        (rate for name, rate in rates.items() if name in candidates and not name.startswith(STORE)),
        default=0.0,
    )

    def seconds(name: str) -> float:
        rate, is_store = rates.get(name, hope), name.startswith(STORE)
        if not rate:
            return float("inf") if is_store else START_S
        takes = left / rate + START_S * (name != current)
        return takes / SPARED if is_store else takes

    return min(candidates, key=seconds)
