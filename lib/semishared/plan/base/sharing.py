# SPDX-License-Identifier: Apache-2.0
"""Who sends which extents to whom, where hosts are to have bases: of one image, or each its own images.

Extents are known by their hashes. What two hosts or more lack is *common*, and is sent once, whichever bases
it is in; the rest is *unique*: each host has that for itself, from who has the base or from the store, all at
the same time.

    multicast  one stream from the sender to all; who misses something, or leaves, goes on as in a chain
    chain      sender -> first -> second -> ...; each passes on what has come while the rest still comes
    unicast    each from the sender itself

The sender is the host that has most of what is common; if none has any, one of those who lack most of it,
which reads the store and sends what has come. So the store is read once for it, whatever the number of hosts.

And for one host alone: from which holders it fetches a base.
"""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import AbstractSet, Iterator, Mapping, Sequence

from ...errors import NotSupported
from ...model.base.names import Ranges, ranges
from ...named import NamedTuple

# From where a host gets a base that it lacks: from those before it, so that many at once form one chain.
#
#     holders                have it (or had it when they were last heard of)
#     arriving, oldest first are getting it at this moment, and pass on what has come
#
# The first one reads the store, if nobody has the base. Each later one follows the one that came just before
# it; should that fail, one that has it, then one that came earlier, and so on by turns, and in the end the
# store. So the store is read once, a holder sends once, and a host that dies or stalls costs those behind it
# a bounded time (stage/peers.py), not the session; and several that died together cost no more than one of
# them, if there is a holder.


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


Contents = Mapping[str, Mapping[int, str]]
"""The extents of bases by their names: index and hash of each."""


class Said(NamedTuple):
    """What a host said of the bases that it is to have, by their names."""

    host: str
    udpcast: bool
    has: AbstractSet[str]
    lacks: Mapping[str, AbstractSet[int]]
    """Of those that it has not the extents that are to come: none, if all are in other bases of the host."""


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
    """Of what is common; where nothing is: 'unicast', 'store' if no host of the session has any of it, 'here'
    if nothing has to come; '' if nothing is to do.
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
        """Return the limit for each host, in bytes per second, so that the sender keeps to `wish` (0: no
        limit).
        """
        served = sum(item.sources[:1] == (self.sender,) for item in self.hosts)
        return max(wish // served, 1) if wish and self.transport == "unicast" and served else wish

    def unique_rate(self, wish: int) -> int:
        """Return the same for what is unique, which all take at once, perhaps from one and the same store."""
        return max(wish // len(self.hosts), 1) if wish and self.hosts else wish


class _Lot:
    """All that hosts lack, by hashes."""

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
        """Return what of the common the receivers lack, as a base of the sender's has it, or else
        anybody's.
        """
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
    """Return how hosts get what they lack; `elsewhere` are hosts not asked that are said to have a base.

    `contents` names all that is in `said`. Raise NotSupported if the transport that is wished for is not
    there.
    """
    lacking = [item for item in said if item.lacks]
    if not lacking:
        return Plan("", "", (), ())
    lot = _Lot(said, contents)
    sender, receivers, chosen = _lead(said, lot, transport)
    streamed = {item.host for item in receivers if item.udpcast} if chosen == "multicast" else set()
    # Who cannot stream asks those that do: also for what the sender streams without having it.
    lacking.sort(key=lambda item: (item.host != sender, item.host not in streamed))
    stream = lot.stream(sender, streamed, said)
    streams = {contents[name][at] for name, indices in stream.items() for at in indices}
    # What each host can give by the time it is asked: who is not yet here gets all that it lacks.
    gives = {item.host: lot.have[item.host] for item in said if item.host == sender or not item.lacks}
    found = []
    for item in lacking:
        wanted = lot.common & lot.lacks[item.host]
        sources: tuple[str, ...] = ()
        own: AbstractSet[str] = wanted
        if item.host != sender:
            comes = streams if item.host in streamed else set()
            sources = _sources(wanted - comes or wanted, _askable(gives, sender, chosen), sender)
            # What none of those gives, the first that lacks it reads for the others.
            own = wanted.difference(comes, *(gives[host] for host in sources))
        ways = tuple(_ways(item, said, lot, own, elsewhere))
        found.append(Assignment(item.host, item.host in streamed, sources, ways))
        # Where each asks the sender, what another has read himself is all that the sender does not give.
        gives[item.host] = lot.have[item.host] | (
            own if chosen == "unicast" and item.host != sender else lot.lacks[item.host]
        )
    as_one = tuple((name, ranges(indices)) for name, indices in stream.items())
    return Plan(chosen, sender, as_one, tuple(found), len(lot.common), lot.unique)


def _lead(said: Sequence[Said], lot: _Lot, transport: str) -> tuple[str, list[Said], str]:
    """Return the sender of what is common, who receives it, and by which transport."""
    if not lot.common:
        wanted = {name for item in said for name in item.lacks}
        having = [item.host for item in said if wanted & item.has]
        first = next(item.host for item in said if item.lacks)
        if not lot.unique:
            return first, [], "here"
        return (having[0], [], "unicast") if having else (first, [], "store")

    def worth(item: Said) -> tuple[int, bool, int]:
        lacked = len(lot.common & lot.lacks[item.host])
        # Of equals one that can also stream, if it has anything to do with what is common.
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
    """Return whom a host may ask, the best first: nobody who might be waiting for it."""
    whole = [host for host in gives if host != sender]
    order = [sender, *whole] if chosen == "unicast" else [*reversed(whole), sender]
    return {host: gives[host] for host in order}


def _sources(
    wanted: AbstractSet[str], askable: Mapping[str, AbstractSet[str]], sender: str
) -> tuple[str, ...]:
    """Return whom a host asks: those that give all of what is wanted, if there are any such MOST, and ways
    round them.
    """
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
