# SPDX-License-Identifier: Apache-2.0
"""When a staging session takes place, and which hosts leave it or their source (plan/base/sharing.py)."""

from __future__ import annotations

from typing import Sequence

from ...named import NamedTuple

TRANSPORTS = ("auto", "multicast", "chain", "unicast")
ROUNDS = 3
"""Rounds in which hosts without the base are tried; the store serves each of them only in the last."""
WINDOW_S = 4.0
"""Seconds over which the speed of a host that fetches from a peer is measured."""
STREAM_WINDOW_S = 2.0
"""The same in a stream, where all wait for one that is slow."""
SLOW = 0.5
"""A receiver whose stream has less than this share of the others' speed leaves the stream."""
SLOW_SOURCE = 0.3
"""Share of the fastest host's speed below which hosts that have caught up with a source leave it."""
FIRST_S = 8.0
"""Seconds from the begin of the stream in which a receiver must have some of it."""


class Sample(NamedTuple):
    """How far a host was at a moment."""

    at: float
    """Seconds on the front-end's clock."""
    have: int
    """Extents."""
    source: str
    """Where extents come from: 'stream', 'store' or a host."""
    speed: int
    """Of the stream: bytes per second while something comes (stage/multicast.py); 0 if unknown."""
    came: int = 0
    """Bytes that came from the source."""


History = dict[str, list[Sample]]


def _recent(samples: Sequence[Sample], now: float, window: float) -> list[Sample]:
    """Return a host's samples in the window with its present source, if they span most of the window."""
    found = [item for item in samples if item.at >= now - window and item.source == samples[-1].source]
    return found if len(found) > 1 and found[-1].at - found[0].at >= window * 0.6 else []


def leave_stream(history: History, now: float, begun: float) -> list[str]:
    """Return the receivers that the stream does not reach, or without which it is faster.

    udp-sender serves all at the pace of the slowest. The slowest receivers take longest for a burst; the
    pauses between bursts do not count.
    """
    speeds, silent = {}, []
    for host, samples in history.items():
        if not samples or samples[-1].source != "stream":
            continue
        # At its best: a burst may be cut short by chance, but not a whole window long.
        best = max((item.speed for item in _recent(samples, now, STREAM_WINDOW_S)), default=0)
        if best:
            speeds[host] = best
        if now - begun > FIRST_S and not samples[-1].came:
            silent.append(host)
    reached = [host for host in speeds if host not in silent]
    # The stream reaches no receiver: all silent ones leave it.
    if silent and not reached:
        return sorted(silent)
    middle = sorted(speeds.values())[len(speeds) // 2] if speeds else 0
    return sorted({*silent, *(host for host, speed in speeds.items() if speed < SLOW * middle)})


def skips(history: History, now: float) -> list[tuple[str, str]]:
    """Return (host, source) for hosts that have caught up with a source which is slower than others are."""
    rates = {}
    for host, samples in history.items():
        recent = _recent(samples, now, WINDOW_S)
        if recent:
            rates[host] = (recent[-1].have - recent[0].have) / (recent[-1].at - recent[0].at)
    if not rates:
        return []
    best = max(rates.values())
    found = []
    for host in rates:
        source = history[host][-1].source
        ahead = history.get(source)
        if (
            ahead
            and source in rates
            and rates[source] < SLOW_SOURCE * best
            and ahead[-1].have - history[host][-1].have <= 3
        ):
            found.append((host, source))
    return sorted(found)
