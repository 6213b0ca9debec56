# SPDX-License-Identifier: Apache-2.0
"""What sources cost a host: measured while they give, remembered for a while, and one that has become dear is
left.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from semishared.stage import peers, source_speed
from semishared.stage.partial import Partial
from semishared.tools.extents import EXTENT

STORE = "store 100"


class Coming(Partial):
    """A base of so many extents of which some have come."""

    def __init__(self, total: int) -> None:
        self.have, self.total = set(), total

    def missing(self) -> list[int]:
        return [index for index in range(self.total) if index not in self.have]


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "time", lambda: self.now)


@pytest.fixture()
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def give(choice: source_speed.Choice, partial: Coming, clock: Clock, extents: int, per_s: float) -> bool:
    """Have so many extents come, at that rate; tell whether the source was left."""
    for _ in range(extents):
        clock.now += 1 / per_s
        if partial.missing():
            partial.have.add(partial.missing()[0])
        if choice.is_dear():
            return True
    return False


def test_what_it_takes_to_begin_is_no_part_of_the_rate(clock: Clock) -> None:
    partial = Coming(100)
    meter = source_speed.Meter(lambda: len(partial.have))
    clock.now += 3
    partial.have.add(0)
    assert meter.came() == 0 and not meter.tells()
    for index in range(1, 9):
        clock.now += 0.1
        partial.have.add(index)
    assert meter.tells() and meter.rate() == pytest.approx(10 * EXTENT)


def test_rates_are_remembered_for_a_while_and_damage_means_nothing(tmp_path: Path, clock: Clock) -> None:
    root = str(tmp_path)
    assert source_speed.known(root) == {}
    source_speed.note(root, "h1", 5e6)
    clock.now += 3000
    source_speed.note(root, STORE, 7e6)
    assert source_speed.known(root) == {"h1": 5e6, STORE: 7e6}
    clock.now += 1000
    assert source_speed.known(root) == {STORE: 7e6}
    path = tmp_path / "holders" / "rates"
    for text in (
        "{",
        "[]",
        json.dumps({"h1": 7, "h2": ["x", "y"], "h3": [-1, clock.now], "h4": [1, 2, 3], "h5": [1, 9e9]}),
    ):
        path.write_text(text)
        assert source_speed.known(root) == {}
    path.unlink()
    path.mkdir()
    source_speed.note(root, "h1", 5e6)
    assert source_speed.known(root) == {}, "what cannot be remembered is found out again"


def test_choice_flips_when_a_source_is_throttled_and_the_next_clone_knows(
    tmp_path: Path, clock: Clock
) -> None:
    root = str(tmp_path)
    for name, rate in (("h1", 50), (STORE, 25)):
        source_speed.note(root, name, rate * EXTENT)
    partial = Coming(256)
    choice = source_speed.Choice(root, ["h1", STORE], partial)
    assert choice.begin() == "h1"
    assert give(choice, partial, clock, 20, 2.5), "it has become dear"
    assert clock.now < 1000 + 6
    # Who is left says so as one that fails does.
    choice.end(has_failed=True)
    assert choice.begin() == STORE and not give(choice, partial, clock, 256, 25)
    choice.end(has_failed=False)
    assert not partial.missing() and source_speed.known(root)["h1"] < 3 * EXTENT
    again = source_speed.Choice(root, ["h1", STORE], partial := Coming(256))
    assert again.begin() == STORE
    assert give(again, partial, clock, 60, 0.5), "now the store is, and worse"
    again.end(has_failed=True)
    assert again.begin() == "h1"
    assert give(again, partial, clock, 60, 0.05), "and the peer, by far"
    again.end(has_failed=True)
    assert again.begin() == STORE, "who was left may be the better one again"


def test_source_that_gives_next_to_nothing_is_left_and_not_chosen_again(tmp_path: Path, clock: Clock) -> None:
    partial = Coming(40)
    choice = source_speed.Choice(str(tmp_path), ["h1", STORE], partial)
    assert choice.begin() == "h1" and not choice.tried, "for so little nobody is tried beside another"
    clock.now += 10
    assert not choice.is_dear(), "a busy host takes its time to begin"
    partial.have.add(0)
    assert not choice.is_dear()
    clock.now += 6
    assert choice.is_dear()
    choice.end(has_failed=False)
    assert choice.begin() == STORE and source_speed.known(str(tmp_path)) == {"h1": pytest.approx(EXTENT / 6)}


def test_source_of_which_no_extent_comes_though_bytes_do_is_left(tmp_path: Path, clock: Clock) -> None:
    """It is alive (peers.LITTLE), and an extent would take it minutes."""
    assert source_speed.FIRST_S > peers.STALL_S
    choice = source_speed.Choice(str(tmp_path), ["h1", STORE], Coming(40))
    assert choice.begin() == "h1"
    clock.now += peers.STALL_S
    assert not choice.is_dear(), "from whom nothing comes is given up now"
    clock.now += 4
    assert choice.is_dear()
    choice.end(has_failed=True)
    assert choice.begin() == STORE and source_speed.known(str(tmp_path)) == {"h1": pytest.approx(EXTENT / 16)}


def tried(choice: source_speed.Choice, partial: Coming, clock: Clock, store: float, peer: float) -> int:
    """Have the store and who is tried give so many extents a second, until it is seen who is quicker; return
    how many the store gave.
    """
    begun, given, asked = clock.now, 0, list(choice.asked)
    while not choice.is_dear():
        clock.now += 1 / store
        given += 1
        partial.have.add(partial.missing()[0])
        while asked and (clock.now - begun - 0.4) * peer >= len(choice.asked) - len(asked) + 1:
            partial.have.add(asked.pop(0))
            choice.gave(1, begun + 0.4 + (len(choice.asked) - len(asked)) / peer)
    return given


@pytest.mark.parametrize(
    ("store", "peer", "taken"),
    [(80, 25, STORE), (80, 8, STORE), (10, 25, "h1"), (25, 25, "h1"), (1, 25, "h1")],
)
def test_peer_that_nobody_knows_is_tried_beside_the_store(
    tmp_path: Path, clock: Clock, store: float, peer: float, taken: str
) -> None:
    partial = Coming(256)
    choice = source_speed.Choice(str(tmp_path), ["h1", STORE], partial)
    assert (choice.begin(), choice.tried) == (STORE, "h1") and choice.asked == list(range(244, 256))
    given = tried(choice, partial, clock, store, peer)
    assert given < 150 and choice.has_given <= 12
    choice.end(has_failed=False)
    known = source_speed.known(str(tmp_path))
    assert known["h1"] == pytest.approx(peer * EXTENT, rel=0.15)
    assert store <= 10 or known[STORE] == pytest.approx(store * EXTENT, rel=0.15)
    assert choice.begin() == taken and not choice.tried


def test_who_fails_while_he_is_tried_is_not_asked_again(tmp_path: Path, clock: Clock) -> None:
    partial = Coming(256)
    choice = source_speed.Choice(str(tmp_path), ["h1", "h2", STORE], partial)
    for peer in ("h1", "h2"):
        assert (choice.begin(), choice.tried) == (STORE, peer)
        assert not give(choice, partial, clock, 10, 10)
        choice.drop()
        assert choice.is_dear(), "the store is not asked for all but what he was asked for"
        choice.end(has_failed=False)
    assert choice.begin() == STORE and not choice.tried


def test_store_that_fails_while_a_peer_is_tried_is_not_asked_again(tmp_path: Path, clock: Clock) -> None:
    choice = source_speed.Choice(str(tmp_path), ["h1", STORE], Coming(256))
    assert (choice.begin(), choice.tried) == (STORE, "h1")
    choice.end(has_failed=True)
    assert choice.begin() == "h1" and not choice.tried


def test_store_that_has_given_all_else_is_asked_for_the_rest(tmp_path: Path, clock: Clock) -> None:
    partial = Coming(256)
    choice = source_speed.Choice(str(tmp_path), ["h1", STORE], partial)
    assert (choice.begin(), choice.tried) == (STORE, "h1")
    assert not give(choice, partial, clock, 244, 100)
    choice.end(has_failed=False)
    assert choice.begin() == STORE and not choice.tried and len(partial.missing()) == 12


def test_who_fails_is_not_asked_again_and_turns_are_not_endless(tmp_path: Path, clock: Clock) -> None:
    choice = source_speed.Choice(str(tmp_path), ["h1", "h2", STORE], Coming(10))
    asked = []
    while not choice.is_over:
        asked.append(choice.begin())
        choice.end(has_failed=False)
    assert asked == ["h1", "h2", STORE] and source_speed.known(str(tmp_path)) == {}
    partial = Coming(100_000)
    choice, names = source_speed.Choice(str(tmp_path), ["h1", STORE], partial), []
    while not choice.is_over:
        names.append(choice.begin())
        give(choice, partial, clock, 20, 1 / len(names))
        choice.end(has_failed=False)
    assert len(names) <= source_speed.TURNS and set(source_speed.known(str(tmp_path))) == {"h1", STORE}
