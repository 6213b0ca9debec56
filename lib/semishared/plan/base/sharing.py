# SPDX-License-Identifier: Apache-2.0
"""Plan which host sends which extents to which others: of one image, or each host its own images.

Extents are known by their hashes. An extent that two hosts or more lack is *common*: it is sent once,
whichever bases it is in. All others are *unique*: each host fetches its own from a holder of the base or from
the store, all at the same time.

    multicast  one stream from the sender to all; a host that misses extents, or leaves, goes on as in a chain
    chain      sender -> first -> second -> ...; each passes on what has come while the rest still comes
    unicast    each from the sender itself

The sender is the host that has most common extents. If no host has any, the sender is a host that lacks most
of them: it reads the store and sends what has come. So the store is read once, whatever the number of hosts.

For one host alone: from which holders it fetches a base.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import AbstractSet, Iterator, Mapping, Sequence

from ...errors import NotSupported
from ...model.base.names import Ranges, ranges
from ...named import NamedTuple

MOST = 4
"""Sources that are tried before the store: each may cost the time in which a stalled one is given up."""
STORE = "store "
"""What the name of a store begins with among sources; no host's name does."""
START_S = 0.5
"""Seconds that it takes to begin with another source: an ssh, mostly."""
SPARED = 0.9
"""A store, which serves all hosts, is read only if it takes at most this part of a peer's time."""
HOPE = 1.5
"""A peer of unknown speed counts as so many times as fast as the best known one, until it was tried."""
KNOWN_S = 3600.0
"""For so many seconds a measured speed of a source counts."""
ARRIVES_S = 3600.0
"""After so many seconds a host that has not reported its end does not count as arriving any more."""


class Arriving(NamedTuple):
    """A host that is getting a base: since when (seconds since the epoch)."""

    host: str
    since: float
    maker: str = ""
    """The action that fetches the base (tools/owner.py); without it nothing arrives."""


def current(arriving: Sequence[Arriving], now: float) -> list[Arriving]:
    """Return the hosts that may still have extents to pass on."""
    return [item for item in arriving if now - ARRIVES_S < item.since <= now + 60]


def for_host(host: str, holders: Sequence[str], arriving: Sequence[Arriving]) -> list[str]:
    """Return the peers that `host` asks, in that order: at most MOST, the latest arriving one first."""
    chain = dict.fromkeys(item.host for item in reversed(arriving) if item.host != host)
    others = [name for name in dict.fromkeys(reversed(holders)) if name != host and name not in chain]
    found = [name for pair in zip_longest(chain, others) for name in pair if name]
    return found[:MOST]


def quickest(candidates: Sequence[str], rates: Mapping[str, float], left: int, current: str = "") -> str:
    """Return the candidate from which `left` bytes come soonest; of equals the first. Peers stand first.

    `rates`: bytes per second, where known. `current` has begun already. If the speed of no peer is known, a
    peer is tried before the store.
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


Contents = Mapping[str, Mapping[int, str]]
"""The extents of bases by their names: index and hash of each."""


class Said(NamedTuple):
    """A host's answer about the bases that it is to have, by their names."""

    host: str
    udpcast: bool
    has: AbstractSet[str]
    lacks: Mapping[str, AbstractSet[int]]
    """By base that it has not: the extents that have to come; none if other bases of the host have them all.
    """


class Way(NamedTuple):
    """How a host gets one base: as model/base/steps.py has it (Part)."""

    name: str
    holders: tuple[str, ...]
    shared: Ranges
    first: Ranges


class Assignment(NamedTuple):
    """How a host gets its bases."""

    host: str
    stream: bool
    sources: tuple[str, ...]
    ways: tuple[Way, ...]


class Plan(NamedTuple):
    """One round of a session."""

    transport: str
    """The transport of common extents.

    Without any: 'unicast'; 'store' if no host of the session has an extent; 'here' if none has to come; '' if
    there is nothing to do.
    """
    sender: str
    stream: tuple[tuple[str, Ranges], ...]
    """What is streamed, each extent as one of the bases has it."""
    hosts: tuple[Assignment, ...]
    common: int = 0
    """Extents, each counted once."""
    unique: int = 0
    """Extents, of all hosts together."""

    def rate(self, wish: int) -> int:
        """Return each host's limit in bytes per second, so that the sender keeps to `wish` (0: no limit)."""
        served = sum(item.sources[:1] == (self.sender,) for item in self.hosts)
        return max(wish // served, 1) if wish and self.transport == "unicast" and served else wish

    def unique_rate(self, wish: int) -> int:
        """Return the limit for unique extents, which all hosts fetch at once, perhaps from the same store."""
        return max(wish // len(self.hosts), 1) if wish and self.hosts else wish


class _Lot:
    """All extents that hosts lack, by hash."""

    def __init__(self, said: Sequence[Said], contents: Contents) -> None:
        self.contents = contents
        self.lacks = {
            item.host: {contents[name][at] for name, indices in item.lacks.items() for at in indices}
            for item in said
        }
        self.have = {
            item.host: {digest for name in (*item.has, *item.lacks) for digest in contents[name].values()}
            - self.lacks[item.host]
            for item in said
        }
        counts = Counter(digest for lacked in self.lacks.values() for digest in lacked)
        self.common = {digest for digest, hosts in counts.items() if hosts > 1}
        self.unique = len(counts) - len(self.common)

    def stream(self, sender: str, receivers: AbstractSet[str], said: Sequence[Said]) -> dict[str, list[int]]:
        """Return the common extents that receivers lack, by a base of the sender, or else of any host."""
        left = self.common & set().union(*(self.lacks[host] for host in receivers))
        found: dict[str, list[int]] = {}
        for item in sorted(said, key=lambda item: item.host != sender):
            for name in sorted({*item.has, *item.lacks}):
                for at, digest in sorted(self.contents[name].items()):
                    if digest in left:
                        left.discard(digest)
                        found.setdefault(name, []).append(at)
        return found


def plan(
    said: Sequence[Said], contents: Contents, elsewhere: Mapping[str, Sequence[str]], transport: str
) -> Plan:
    """Return how hosts get the extents they lack; `elsewhere`: holders of each base that were not asked.

    `contents` has all bases in `said`. Raise NotSupported if the wanted transport is not available.
    """
    lacking = [item for item in said if item.lacks]
    if not lacking:
        return Plan("", "", (), ())
    lot = _Lot(said, contents)
    sender, receivers, chosen = _lead(said, lot, transport)
    streamed = {item.host for item in receivers if item.udpcast} if chosen == "multicast" else set()
    # Hosts outside the stream come last and ask those in it, also for what the sender streams without having
    # it.
    lacking.sort(key=lambda item: (item.host != sender, item.host not in streamed))
    stream = lot.stream(sender, streamed, said)
    streams = {contents[name][at] for name, indices in stream.items() for at in indices}
    # What each host can give by the time it is asked. A host that lacks extents is added when it has them.
    gives = {item.host: lot.have[item.host] for item in said if item.host == sender or not item.lacks}
    found = []
    for item in lacking:
        wanted = lot.common & lot.lacks[item.host]
        sources: tuple[str, ...] = ()
        own: AbstractSet[str] = wanted
        if item.host != sender:
            comes = streams if item.host in streamed else set()
            sources = _sources(wanted - comes or wanted, _askable(gives, sender, chosen), sender)
            # The first host that lacks what no source gives reads it for the others.
            own = wanted.difference(comes, *(gives[host] for host in sources))
        ways = tuple(_ways(item, said, lot, own, elsewhere))
        found.append(Assignment(item.host, item.host in streamed, sources, ways))
        # In unicast each asks the sender, and receivers for what they have read themselves.
        gives[item.host] = lot.have[item.host] | (
            own if chosen == "unicast" and item.host != sender else lot.lacks[item.host]
        )
    as_one = tuple((name, ranges(indices)) for name, indices in stream.items())
    return Plan(chosen, sender, as_one, tuple(found), len(lot.common), lot.unique)


def _lead(said: Sequence[Said], lot: _Lot, transport: str) -> tuple[str, list[Said], str]:
    """Return the sender of common extents, their receivers, and the transport."""
    if not lot.common:
        wanted = {name for item in said for name in item.lacks}
        having = [item.host for item in said if wanted & item.has]
        first = next(item.host for item in said if item.lacks)
        if not lot.unique:
            return first, [], "here"
        return (having[0], [], "unicast") if having else (first, [], "store")

    def worth(item: Said) -> tuple[int, bool, int]:
        lacked = len(lot.common & lot.lacks[item.host])
        # Of equals, one that can also stream, if it has or lacks common extents.
        return (had := len(lot.common & lot.have[item.host])), item.udpcast and bool(had or lacked), lacked

    lead = max(said, key=worth)
    receivers = [item for item in said if item is not lead and lot.common & lot.lacks[item.host]]
    streaming = [item for item in receivers if item.udpcast] if lead.udpcast else []
    return lead.host, receivers, _transport(transport, receivers, streaming, lead)


def _transport(wish: str, receivers: Sequence[Said], streaming: Sequence[Said], lead: Said) -> str:
    if wish == "multicast" and not streaming:
        lacking = ", ".join(item.host for item in (lead, *receivers) if not item.udpcast)
        raise NotSupported(f"multicast without udpcast on {lacking}")
    if wish != "auto":
        return wish
    if len(receivers) == 1:
        return "unicast"
    return "multicast" if len(streaming) > 1 else "chain"


def _askable(gives: Mapping[str, AbstractSet[str]], sender: str, chosen: str) -> dict[str, AbstractSet[str]]:
    """Return the hosts that a host may ask, the best first; none of them may be waiting for it."""
    whole = [host for host in gives if host != sender]
    order = [sender, *whole] if chosen == "unicast" else [*reversed(whole), sender]
    return {host: gives[host] for host in order}


def _sources(
    wanted: AbstractSet[str], askable: Mapping[str, AbstractSet[str]], sender: str
) -> tuple[str, ...]:
    """Return which hosts a host asks, at most MOST: those that give most of `wanted`, then alternatives."""
    hosts = [host for host in askable if askable[host] & wanted]
    chosen: list[str] = []
    left = wanted
    while len(chosen) < MOST and (best := max(hosts, key=lambda host: len(askable[host] & left), default="")):
        if not askable[best] & left:
            break
        chosen.append(best)
        left = left - askable[best]
    for host in (sender, *hosts):
        if host in hosts and host not in chosen and len(chosen) < MOST:
            chosen.append(host)
    return tuple(host for host in hosts if host in chosen)


def _ways(
    item: Said, said: Sequence[Said], lot: _Lot, own: AbstractSet[str], elsewhere: Mapping[str, Sequence[str]]
) -> Iterator[Way]:
    for name, indices in item.lacks.items():
        content = lot.contents[name]
        holders = [other.host for other in said if name in other.has]
        common = [at for at in sorted(indices) if content[at] in lot.common]
        first = [at for at in common if content[at] in own]
        shared = [at for at in common if content[at] not in own]
        yield Way(
            name,
            tuple(dict.fromkeys((*holders, *elsewhere.get(name, ()))))[:MOST],
            ranges(shared),
            ranges(first),
        )


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
