# SPDX-License-Identifier: Apache-2.0
"""From where a host gets a base that it lacks: from those before it, so that many at once form one chain.

    holders                have it (or had it when they were last heard of)
    arriving, oldest first are getting it at this moment, and pass on what has come

The first one reads the store, if nobody has the base. Each later one follows the one that came just before it; should that
fail, one that has it, then one that came earlier, and so on by turns, and in the end the store. So the store is read once, a
holder sends once, and a host that dies or stalls costs those behind it a bounded time (base/peers.py), not the session; and
several that died together cost no more than one of them, if there is a holder.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple, Sequence

MOST = 4
"""Sources that are tried before the store: each may cost the time in which a stalled one is given up."""
ARRIVES_S = 3600.0
"""After so long a host that never said how it went is not arriving any more."""


class Arriving(NamedTuple):
    """A host that is getting a base: since when (seconds since the epoch)."""

    host: str
    since: float


def current(arriving: Sequence[Arriving], now: float) -> list[Arriving]:
    """Return those of whom there may still be something to be had."""
    return [item for item in arriving if now - ARRIVES_S < item.since <= now + 60]


def for_host(host: str, holders: Sequence[str], arriving: Sequence[Arriving]) -> list[str]:
    """Return whom `host` asks, in that order."""
    chain = dict.fromkeys(item.host for item in reversed(arriving) if item.host != host)
    others = [name for name in dict.fromkeys(reversed(holders)) if name != host and name not in chain]
    found = [name for pair in zip_longest(chain, others) for name in pair if name]
    return found[:MOST]
