# SPDX-License-Identifier: Apache-2.0
"""Who sends which extents to whom: what several hosts lack once, the rest to who lacks it, and nobody waits
for himself.
"""

from __future__ import annotations

from typing import Dict, List, Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import NotSupported
from semishared.model.base.names import ALL, Ranges, ranges, within
from semishared.plan.base.sharing import Assignment, Plan, Said, plan

ONE = {"a": {index: f"a{index}" for index in range(5)}}
"""One image."""


def said(have: str, lack: str, without: str = "") -> List[Said]:
    """Return hosts that have, or lack, the one image; those `without` cannot stream."""
    having = [Said(name, name not in without.split(), {"a"}, {}) for name in have.split()]
    return having + [
        Said(name, name not in without.split(), set(), {"a": set(ONE["a"])}) for name in lack.split()
    ]


@pytest.mark.parametrize(
    ("hosts", "wish", "transport", "sender"),
    [
        (said("h1 h2", ""), "auto", "", ""),
        (said("", "h1"), "auto", "store", "h1"),
        (said("h1", "h2"), "auto", "unicast", "h1"),
        (said("", "h1 h2"), "auto", "unicast", "h1"),
        (said("h1", "h2 h3"), "auto", "multicast", "h1"),
        (said("h1 h4", "h2 h3", "h1"), "auto", "multicast", "h4"),
        (said("h1", "h2 h3", "h1"), "auto", "chain", "h1"),
        (said("", "h1 h2 h3 h4", "h1"), "auto", "multicast", "h2"),
        (said("", "h1 h2 h3", "h1"), "auto", "chain", "h2"),
        (said("h1", "h2 h3", "h2"), "auto", "chain", "h1"),
        (said("h1", "h2 h3"), "multicast", "multicast", "h1"),
        (said("h1", "h2 h3"), "chain", "chain", "h1"),
    ],
)
def test_transport_and_sender(hosts: List[Said], wish: str, transport: str, sender: str) -> None:
    found = plan(hosts, ONE, {}, wish)
    assert (found.transport, found.sender) == (transport, sender)
    assert any(item.stream for item in found.hosts) == bool(found.stream) == (transport == "multicast")


def test_chain_has_a_way_round_each_link() -> None:
    found = plan(said("h0", "h1 h2 h3 h4 h5"), ONE, {}, "chain")
    assert [item.sources for item in found.hosts] == [
        ("h0",),
        ("h1", "h0"),
        ("h2", "h1", "h0"),
        ("h3", "h2", "h1", "h0"),
        ("h4", "h3", "h2", "h0"),
    ]


def test_rate_limit_is_the_senders_whatever_the_number_of_hosts_it_serves() -> None:
    found = plan(said("h0", "h1 h2 h3 h4"), ONE, {}, "unicast")
    assert found.rate(8_000_000) == 2_000_000
    assert found.rate(0) == 0 and found.rate(3) == 1
    assert plan(said("h0", "h1 h2 h3 h4"), ONE, {}, "chain").rate(8_000_000) == 8_000_000, (
        "each link is another host's"
    )
    assert found.unique_rate(8_000_000) == 2_000_000 and found.unique_rate(0) == 0, (
        "all at once from one store"
    )


def test_wish_for_multicast_that_cannot_be_is_refused_with_who_lacks_it() -> None:
    with pytest.raises(NotSupported, match="udpcast on h2"):
        plan(said("h1", "h2 h3", "h2 h3"), ONE, {}, "multicast")
    assert plan(said("h1", ""), ONE, {}, "multicast") == Plan("", "", (), ())


def test_second_boot_of_a_cluster() -> None:
    """Four images of one template, each with something of its own, each for its own host; one host has
    another one's.
    """
    contents = {
        name: {**{at: f"t{at}" for at in range(100)}, 7: f"{name}7", 100: f"{name}100"} for name in "abcd"
    }
    hosts = [
        Said(f"h{number}", True, set(), {name: set(contents[name])}) for number, name in enumerate("abcd", 1)
    ]
    found = plan(hosts, contents, {"d": ["h9"]}, "auto")
    assert (found.transport, found.sender, found.common, found.unique) == ("multicast", "h1", 99, 8)
    assert found.stream == (("a", ((0, 7), (8, 100))),)
    first, *others = found.hosts
    (way,) = first.ways
    assert way.shared == () and way.first == ((0, 7), (8, 100)), "h1 reads the store for all"
    assert [item.ways[0].shared for item in others] == [((0, 7), (8, 100))] * 3
    assert found.hosts[3].ways[0].holders == ("h9",)


def test_what_a_host_has_of_other_bases_is_neither_sent_nor_streamed_by_another() -> None:
    contents = {"a": {0: "x", 1: "y"}, "b": {0: "x", 1: "z"}, "c": {5: "x", 6: "w"}}
    hosts = [
        Said("h1", True, set(), {"a": {0, 1}}),
        Said("h2", True, set(), {"b": {0, 1}}),
        Said("h3", True, {"c"}, {"a": {1}}),
    ]
    found = plan(hosts, contents, {}, "unicast")
    assert (found.sender, found.common, found.unique) == ("h3", 2, 1), "x is there already"
    same = plan([Said("h1", True, {"a"}, {"b": set()})], {"a": {0: "x"}, "b": {0: "x"}}, {}, "auto")
    assert same.transport == "here" and same.hosts == (Assignment("h1", False, (), same.hosts[0].ways),)


def test_who_has_and_lacks_nothing_of_what_is_common_sends_nothing() -> None:
    hosts = [Said("h0", True, set(), {}), *[Said(host, False, set(), {"a": {0}}) for host in ("h1", "h2")]]
    found = plan(hosts, {"a": {0: "x", 9: "x"}}, {}, "unicast")
    assert found.sender == "h1" and [item.sources for item in found.hosts] == [(), ("h1",)]


def test_what_the_sender_has_not_comes_from_the_first_that_reads_it() -> None:
    contents = {"a": {0: "x", 1: "y", 2: "z"}, "b": {0: "y"}}
    hosts = [
        Said("h1", True, {"b"}, {}),
        *[Said(host, True, set(), {"a": {0, 1, 2}}) for host in ("h2", "h3", "h4", "h5", "h6")],
    ]
    found = plan(hosts, contents, {}, "unicast")
    assert [item.sources for item in found.hosts] == [("h1",), *[("h1", "h2")] * 4]
    assert [item.ways[0].first for item in found.hosts] == [((0, 1), (2, 3)), *[()] * 4]


def test_what_the_sender_streams_for_all_no_receiver_reads_from_the_store() -> None:
    contents = {"a": {0: "x", 1: "y"}, "b": {0: "x"}}
    hosts = [
        Said("h1", True, {"b"}, {}),
        *[Said(host, host != "h4", set(), {"a": {0, 1}}) for host in ("h2", "h3", "h4")],
    ]
    found = plan(hosts, contents, {}, "auto")
    assert (found.sender, found.stream) == ("h1", (("b", ((0, 1),)), ("a", ((1, 2),))))
    assert [(item.host, item.stream, item.ways[0].first) for item in found.hosts] == [
        ("h2", True, ()),
        ("h3", True, ()),
        ("h4", False, ()),
    ]


digests = st.sampled_from([f"d{number}" for number in range(12)])
CONTENTS = st.dictionaries(
    st.sampled_from("abcd"), st.dictionaries(st.integers(0, 9), digests, min_size=1, max_size=8), min_size=1
)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[List[Said], Dict[str, Dict[int, str]]]:
    contents, found = draw(CONTENTS), []
    for number in range(draw(st.integers(1, 6))):
        wanted = draw(st.sets(st.sampled_from(sorted(contents))))
        has = draw(st.sets(st.sampled_from(sorted(wanted)))) if wanted else set()
        lacks = {
            name: draw(st.sets(st.sampled_from(sorted(contents[name])))) for name in sorted(wanted - has)
        }
        found.append(Said(f"h{number}", draw(st.booleans()), has, lacks))
    return found, contents


@given(sessions(), st.sampled_from(("auto", "chain", "unicast")))
def test_every_extent_comes_and_the_common_ones_once(
    session: tuple[List[Said], Dict[str, Dict[int, str]]], wish: str
) -> None:
    hosts, contents = session
    found = plan(hosts, contents, {}, wish)
    by_name = {item.host: item for item in hosts}
    assert {item.host for item in found.hosts} == {item.host for item in hosts if item.lacks}
    streamed = [contents[name][at] for name, shared in found.stream for at in within(shared, contents[name])]
    assert len(streamed) == len(set(streamed)), "each once"
    lacked = {
        item.host: {contents[name][at] for name, at_all in item.lacks.items() for at in at_all}
        for item in hosts
    }
    common = {
        digest
        for digest in set().union(*lacked.values())
        if sum(digest in each for each in lacked.values()) > 1
    }
    assert (found.common, found.unique) == (len(common), sum(len(each - common) for each in lacked.values()))
    assert set(streamed) <= common
    there: Dict[str, Set[str]] = {item.host: set() for item in hosts}
    for item in hosts:
        there[item.host] = {
            digest for name in {*item.has, *item.lacks} for digest in contents[name].values()
        } - lacked[item.host]
    from_store: List[str] = []
    # What is in two bases of a host it reads once: what comes goes to each that lacks it.
    for way in found.hosts:
        mine = by_name[way.host]
        assert way.host not in way.sources and len(way.sources) <= 4
        own: Set[str] = set()
        # Whoever is asked is before in the order, or has it all: no circle.
        for name, _, shared, first in way.ways:
            asked = {contents[name][at] for at in within(shared, sorted(mine.lacks[name]))}
            read = {contents[name][at] for at in within(first, sorted(mine.lacks[name]))}
            assert (
                asked | read == {contents[name][at] for at in mine.lacks[name]} & common and not asked & read
            )
            reached = set().union(*(there[host] for host in way.sources)) | (
                set(streamed) if way.stream else set()
            )
            assert asked <= reached
            own |= read
        from_store += [] if found.sender == way.host else sorted(own)
        there[way.host] |= lacked[way.host]
    assert len(from_store) == len(set(from_store)), "nobody reads for himself what another has read for all"


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)))
def test_ranges_are_sets(wanted: Set[int], others: Set[int]) -> None:
    found: Ranges = ranges(sorted(wanted))
    assert within(found, sorted(others)) == sorted(wanted & others)
    assert within(ALL, sorted(others)) == sorted(others) and within((), others) == []
