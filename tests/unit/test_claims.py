# SPDX-License-Identifier: Apache-2.0
"""Who may commit to an image: the record there and back, and what is no record."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import CommitRefused, NotOwner, SemisharedError, StaleDiff, TooLarge, UnknownClaim
from semishared.model.refs import Owner
from semishared.store.commit import claims
from semishared.store.commit.claims import Claim

OWNER = Owner(23, 1, 5, "a" * 32, "h1", "f" * 32)
CLAIM = Claim(OWNER, "a" * 32, 8 << 20, ("token", 8 << 20, 7), (0, 3), frozenset({0, 9, 4000}))


@given(st.frozensets(st.integers(0, 100_000), max_size=50))
def test_a_record_is_the_same_after_its_way_through_json(touched: frozenset[int]) -> None:
    claim = CLAIM._replace(touched=touched)
    assert Claim.from_data(json.loads(json.dumps(claim.to_data()))) == claim


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"touched": "?"},
        {"touched": "YWJj"},
        {"owner": None},
        {"owner": {}},
        {"size": "8"},
        {"state": 7},
        {"snapshots": ["x"]},
    ],
    ids=repr,
)
def test_what_anybody_can_write_there_is_no_record(data: Any) -> None:
    whole = {**CLAIM.to_data(), **data} if isinstance(data, dict) and data else data
    assert Claim.from_data(whole) is None
    with pytest.raises(UnknownClaim, match="/store/image"):
        claims.parse("/store/image", json.dumps(whole))


@pytest.mark.parametrize("text", [b"", b"\xff", "{"])
def test_what_is_no_json_is_not_nobodys(text: bytes | str) -> None:
    with pytest.raises(UnknownClaim):
        claims.parse("/store/image", text)


def test_a_million_extents_are_some_bytes() -> None:
    claim = CLAIM._replace(touched=frozenset(range(1_000_000)))
    assert len(json.dumps(claim.to_data())) < 2000


@pytest.mark.parametrize(
    ("claim", "owner", "now", "error"),
    [
        (None, {}, {}, NotOwner),
        (CLAIM, {"vm": 24}, {}, NotOwner),
        (CLAIM, {"cloud": "0" * 32}, {}, NotOwner),
        (CLAIM, {"epoch": 4}, {}, StaleDiff),
        (CLAIM, {"generation": "b" * 32}, {}, NotOwner),
        (CLAIM, {}, {"snapshots": (0,)}, CommitRefused),
        (CLAIM, {}, {"size": 4 << 20}, CommitRefused),
        (CLAIM, {}, {"state": ("other", 8 << 20, 7)}, CommitRefused),
        (CLAIM, {"epoch": 6, "host": "h2"}, {}, None),
    ],
)
def test_who_may_commit(
    claim: Claim | None, owner: Any, now: Any, error: type[SemisharedError] | None
) -> None:
    asked = ("/store/image", claim, OWNER._replace(**owner), CLAIM._replace(**now))
    if error is None:
        assert claims.check(*asked) == claim
        return
    with pytest.raises(error, match="/store/image"):
        claims.check(*asked)


def test_a_new_diff_of_the_same_disk_begins_anew() -> None:
    later = OWNER._replace(generation="b" * 32, epoch=6)
    new = Claim(later, "b" * 32, 8 << 20, ("other", 8 << 20, 8))
    assert claims.claimed("/store/image", CLAIM, new) == new
    moved = CLAIM._replace(owner=OWNER._replace(epoch=9))
    assert claims.claimed("/store/image", CLAIM, moved._replace(touched=frozenset())) == moved
    with pytest.raises(CommitRefused):
        claims.claimed("/store/image", None, new._replace(generation=""))


@pytest.mark.fault(
    46, "a claim is given up by the disk that has it, and not by what is left of an earlier life of it"
)
@pytest.mark.parametrize(
    ("own", "gives_up"),
    [({}, True), ({"epoch": 6}, True), ({"epoch": 4}, False), ({"epoch": -1}, False), ({"vm": 24}, False)],
)
def test_who_gives_up_a_claim(own: dict[str, Any], gives_up: bool) -> None:
    assert claims.is_of(CLAIM, OWNER._replace(**own)) is gives_up
    assert not claims.is_of(None, OWNER)


@pytest.mark.fault(
    40,
    "a record of the largest set of extents, touched anywhere, is read again, and of a larger one "
    "none is written",
)
def test_what_is_written_of_an_image_can_be_read() -> None:
    largest = frozenset(
        8 * at + (byte & 7) for at, byte in enumerate(random.Random(7).randbytes(claims.MOST))
    )
    claim = CLAIM._replace(touched=largest)
    text = json.dumps(claim.to_data())
    assert len(text) < claims.LIMIT
    assert claims.parse("/store/image", text).touched == largest
    with pytest.raises(TooLarge):
        CLAIM._replace(touched=frozenset({8 * claims.MOST})).to_data()
