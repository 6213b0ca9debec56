# SPDX-License-Identifier: Apache-2.0
"""From whom a cold host gets a base: one chain, whoever comes when, and hints that outlive nothing they
should not.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.config import Config
from semishared.config import load as load_config
from semishared.errors import BadArguments, NoSpace
from semishared.front import questions
from semishared.model.base.steps import HeldBase, Listed
from semishared.plan.base import sharing
from semishared.plan.base.eviction import Limits, room, room_for_disk
from semishared.plan.base.sharing import Arriving, for_host

STORE = f"{sharing.STORE}100"
SECOND = 100_000_000
"""Bytes: what a source gives in a second that has this as its rate."""
NAME = f"100-7-{'a' * 32}"
HOSTS = st.lists(st.sampled_from([f"h{number}" for number in range(9)]), unique=True)


@given(HOSTS, HOSTS, st.sampled_from(["h0", "h1", "h8"]))
def test_sources_are_others_few_and_end_with_one_that_has_it(
    holders: list[str], arriving: list[str], host: str
) -> None:
    found = for_host(host, holders, [Arriving(name, float(n)) for n, name in enumerate(arriving)])
    assert host not in found and len(found) == len(set(found)) <= sharing.MOST
    assert set(found) <= set(holders) | set(arriving)
    others = [name for name in arriving if name != host]
    assert found[: len(others)][:1] == others[-1:], "it follows whoever came just before"
    if set(holders) - {host} - set(others):
        assert found[bool(others)] in holders, (
            "one that surely waits for nobody is asked before a second one that may"
        )


def test_several_that_died_together_cost_no_more_than_one_if_somebody_has_it() -> None:
    arriving = [Arriving(f"h{number}", float(number)) for number in range(1, 6)]
    assert for_host("h9", ["h7", "h8"], arriving) == ["h5", "h8", "h4", "h7"]
    assert for_host("h9", [], arriving) == ["h5", "h4", "h3", "h2"]
    assert for_host("h9", ["h5"], arriving) == ["h5", "h4", "h3", "h2"], "who has had it, and gets it anew"


def test_simultaneous_hosts_are_one_chain_that_ends_in_holders(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert [questions.join(root, NAME, host) for host in ("h1", "h2", "h3")] == [[], ["h1"], ["h2", "h1"]]
    assert questions.join(root, NAME, "h2") == ["h3", "h1"], "again: not from itself"
    questions.leave(root, NAME, {"h1": True, "h2": False})
    assert questions.holders_of(root, NAME) == ["h1"]
    assert questions.join(root, NAME, "h4") == ["h3", "h1"]
    questions.leave(root, NAME, {"h3": True, "h4": True})
    assert questions.join(root, NAME, "h5") == ["h4", "h3", "h1"]
    questions.leave(root, NAME, {"h1": False, "h5": False})
    assert questions.holders_of(root, NAME) == ["h3", "h4"]


def test_hints_of_a_version_that_did_not_note_whose_they_are(tmp_path: Path) -> None:
    path = tmp_path / "holders" / NAME
    path.parent.mkdir()
    path.write_text(json.dumps({"holders": ["h0"], "arriving": [["h1", time.time()]]}))
    assert questions.join(str(tmp_path), NAME, "h2") == ["h1", "h0"]


@pytest.mark.parametrize(
    ("rates", "seconds", "current", "expected"),
    [
        ({}, 10, "", "h1"),
        ({STORE: 1.0}, 10, "", "h1"),  # a peer of which nothing is known is tried
        ({"h1": 1.0, "h2": 0.9, STORE: 1.0}, 10, "", "h1"),  # as good: the store is for all
        ({"h1": 1.0, "h2": 0.9, STORE: 1.05}, 10, "", "h1"),
        ({"h1": 1.0, STORE: 1.0}, 10, "", "h2"),  # may be better, and costs nothing to try
        ({"h1": 1.0, STORE: 2.0}, 10, "", STORE),
        ({"h1": 1.0, "h2": 0.9, STORE: 0.1}, 10, "", "h1"),  # the store is throttled
        ({"h1": 0.1, STORE: 1.0}, 10, "", STORE),  # the peer is
        ({"h1": 0.1, STORE: 0.1}, 10, "", "h2"),  # both are: a peer that nobody knows may be better
        ({"h1": 0.1}, 10, "h1", "h2"),
        ({"h1": 1.0}, 1, "h1", "h1"),  # it is not worth while to find out
        ({"h1": 1.0, "h2": 1.3}, 1, "h1", "h1"),
        ({"h1": 1.0, "h2": 1.3, STORE: 1.0}, 10, "h1", "h2"),
        ({"h1": 1.0, "h2": 0.9}, 20, "h1", STORE),  # nobody knows the store, and there is much to be won
        ({"h1": 1.0, "h2": 0.9, STORE: 1.0}, 19, STORE, "h1"),  # and nothing was
        ({"h3": 9.0, STORE: 1.0}, 10, "", "h1"),  # who is not asked says nothing
    ],
)
def test_source_is_the_one_that_costs_least(
    rates: dict[str, float], seconds: int, current: str, expected: str
) -> None:
    known = {name: rate * SECOND for name, rate in rates.items()}
    assert sharing.quickest(["h1", "h2", STORE], known, seconds * SECOND, current) == expected


@given(
    st.floats(1e6, 1e9),
    st.floats(1e6, 1e9),
    st.integers(1 << 28, 1 << 36),
    st.sampled_from(["", "h1", STORE]),
)
def test_known_source_is_at_most_a_ninth_dearer_than_the_best_and_then_it_spares_the_store(
    peer: float, store: float, left: int, current: str
) -> None:
    found = sharing.quickest(["h1", STORE], {"h1": peer, STORE: store}, left, current)
    costs = {
        name: left / rate + sharing.START_S * (name != current)
        for name, rate in (("h1", peer), (STORE, store))
    }
    assert costs[found] <= min(costs.values()) / sharing.SPARED * 1.000001
    assert found != STORE or costs[STORE] < costs["h1"]


def test_who_is_part_of_a_chain_does_not_ask_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "_limits", lambda *_: Limits(-1, 0))
    listed: dict[str, object] = {
        "question": "base",
        "name": NAME,
        "bases": [],
        "free": 100,
        "total": 1000,
        "whole": 1000,
        "needed": 1,
    }
    found = [
        questions.answer(str(tmp_path), listed, host, Config())["from_store"] for host in ("h1", "h2", "h1")
    ]
    assert found == ["quicker", "last", "last"]
    questions.leave(str(tmp_path), NAME, {"h1": True, "h2": False})
    assert questions.answer(str(tmp_path), listed, "h3", Config())["from_store"] == "quicker"


def test_base_comes_at_the_rate_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "_limits", lambda *_: Limits(-1, 0))
    listed: dict[str, object] = {
        "question": "base",
        "name": NAME,
        "bases": [],
        "free": 100,
        "total": 1000,
        "whole": 1000,
        "needed": 1,
    }
    config = load_config(str(tmp_path / "none"))
    assert questions.answer(str(tmp_path), listed, "h1", config)["rate"] == 0, (
        "nothing is limited that nobody has limited"
    )
    (tmp_path / "conf").write_text("[staging]\nrate = 40M\n")
    assert (
        questions.answer(str(tmp_path), listed, "h1", load_config(str(tmp_path / "conf")))["rate"] == 40 << 20
    )


def test_host_that_never_said_how_it_went_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert questions.join(str(tmp_path), NAME, "h1") == []
    assert questions.join(str(tmp_path), NAME, "h2") == ["h1"]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + sharing.ARRIVES_S + 1)
    assert questions.join(str(tmp_path), NAME, "h3") == []


def test_hints_about_older_generations_go_and_damaged_ones_mean_nothing(tmp_path: Path) -> None:
    root, newer, other = str(tmp_path), f"100-7-{'b' * 32}", f"100-77-{'a' * 32}"
    for name in (NAME, other):
        questions.join(root, name, "h1")
    old = tmp_path / "holders" / f"100-78-{'a' * 32}"
    old.write_text("{}")
    os.utime(old, (0, 0))
    questions.join(root, newer, "h1")
    assert sorted(path.name for path in (tmp_path / "holders").iterdir()) == sorted([newer, other])
    for text in ("{", "[]", '{"holders": 7, "arriving": [[1], "x"]}'):
        (tmp_path / "holders" / newer).write_text(text)
        assert questions.join(root, newer, "h2") == []
    with pytest.raises(BadArguments):
        questions.join(root, "../x", "h1")


def held(name: str, used: float, *leases: str) -> HeldBase:
    return HeldBase(name, 60, 1.0, used, leases, 60, False, "")


def test_room_is_made_or_refused() -> None:
    base = held(NAME, 1.0)
    listed = Listed([base], free=100, total=1000, whole=0)
    assert room(listed, Limits(-1, 50), "h1", 40, f"100-8-{'a' * 32}") == []
    assert room(listed, Limits(-1, 50), "h1", 90, f"100-8-{'a' * 32}") == [NAME]
    assert room(listed, Limits(50, 0), "h1", 10, f"100-8-{'a' * 32}") == [NAME]
    with pytest.raises(NoSpace, match="no space for a base of .* on h1"):
        room(listed, Limits(50, 0), "h1", 60, f"100-8-{'a' * 32}")
    assert room(listed, Limits(50, 0), "h1", 60, f"100-8-{'a' * 32}", must=True) == [NAME], (
        "limits are no reason"
    )
    with pytest.raises(NoSpace, match="are missing"):
        room(listed, Limits(-1, 50), "h1", 170, f"100-8-{'a' * 32}", must=True)
    with pytest.raises(NoSpace):
        room(
            listed._replace(bases=[base._replace(leases=("5-1",))]),
            Limits(-1, 50),
            "h1",
            90,
            f"100-8-{'a' * 32}",
        )


def test_room_for_a_disk_is_what_idle_bases_can_give() -> None:
    other = f"100-8-{'b' * 32}"
    rows = [
        held(NAME, 1.0),
        held(other, 2.0),
        held(f"100-9-{'c' * 32}", 0.5, "5-1"),
    ]
    listed = Listed(rows, free=100, total=1000, whole=0)
    assert room_for_disk(listed, 50, 50) == []
    assert room_for_disk(listed, 50, 60) == [NAME]
    assert room_for_disk(listed, 50, 60, last=(NAME,)) == [other], (
        "what it is copied from stays, if others will do"
    )
    assert room_for_disk(listed, 50, 150, last=(NAME,)) == [NAME, other]
    assert room_for_disk(listed, 50, 1000) == [NAME, other], "it may fit all the same"


def test_what_is_only_borrowed_is_named_to_nobody(tmp_path: Path) -> None:
    root = str(tmp_path)
    questions.leave(root, NAME, {"h1": True})
    assert questions.join(root, NAME, "fe", stays=False) == ["h1"]
    questions.arrived(root, NAME, "fe", True)
    assert questions.holders_of(root, NAME) == ["h1"]
    questions.join(root, NAME, "h2")
    questions.arrived(root, NAME, "h2", True)
    questions.arrived(root, "", "h2", True)
    assert questions.holders_of(root, NAME) == ["h1", "h2"]
