# SPDX-License-Identifier: Apache-2.0
"""What leaves a base store: never a leased base, never more than needed, the least recently leased first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import BadAttribute
from semishared.model.base.steps import DescribedBase, HeldBase, Listed
from semishared.plan.base.eviction import (
    Limits,
    after,
    choose,
    limits,
    missing,
    of_session,
    room,
    superseded,
)
from semishared.tools.rate_limit import Pace
from semishared.units import GiB, amount

HEX = "0" * 31


def base(
    image: int, generation: int, size: int = 10, used: float = 0, leases: int = 0, staged: float = 0
) -> HeldBase:
    return HeldBase(
        f"100-{image}-{HEX}{generation}", size, staged, used, ("1-2", "1-3")[:leases], size, False, ""
    )


BASES = st.lists(
    st.builds(
        base,
        st.integers(1, 4),
        st.integers(0, 9),
        st.integers(0, 100),
        st.integers(0, 50),
        st.integers(0, 2),
        st.integers(0, 50),
    ),
    max_size=12,
    unique_by=lambda held: held.name,
)


@given(BASES, st.integers(-1, 300), st.integers(0, 300), st.integers(0, 300), st.integers(0, 100))
def test_what_goes_is_unleased_enough_and_no_more(
    bases: list[HeldBase], most: int, floor: int, free: int, needed: int
) -> None:
    limit = Limits(most, floor)
    chosen = choose(bases, limit, free, needed)
    by_name = {held.name: held for held in bases}
    assert len(set(chosen)) == len(chosen)
    assert not any(by_name[name].leases for name in chosen)
    gone = sum(by_name[name].bytes for name in chosen)
    left = missing([held for held in bases if held.name not in chosen], limit, free + gone, needed)
    if left > 0:
        assert {held.name for held in bases if not held.leases} == set(chosen), (
            "all that may go, and it is not enough"
        )
    elif chosen:
        last = by_name[chosen[-1]].bytes
        kept = [held for held in bases if held.name not in chosen[:-1]]
        assert missing(kept, limit, free + gone - last, needed) > 0, "the last one was needed"
    order = [(by_name[name].name not in superseded(bases), by_name[name].used) for name in chosen]
    assert order == sorted(order)
    spared = [held for held in bases if not held.leases and held.name not in chosen]
    for held in spared:
        assert not order or (held.name not in superseded(bases), held.used) >= order[-1]


def test_older_generations_go_first_although_they_were_leased_later() -> None:
    old, new, other = base(1, 1, used=90, staged=1), base(1, 2, used=10, staged=2), base(2, 1, used=20)
    assert choose([new, old, other], Limits(25, 0), 1000) == [old.name]
    assert choose([new, old, other], Limits(15, 0), 1000) == [old.name, new.name]
    assert choose([new, old, other], Limits(15, 0), 1000, keep=(new.name,)) == [old.name, other.name]


def test_limits_in_all_their_spellings() -> None:
    assert limits("none", "none", 100) == Limits(-1, 0)
    assert limits("200G", "5%", 1000) == Limits(200 * GiB, 50)
    assert limits("0", "1.5M", 1000) == Limits(0, 3 << 19)
    assert limits("30%", "5%", 100, 1000) == Limits(300, 5), "of all that a host has, and of the file system"
    for wrong in ("", "-1", "101%", "-5%", "x", "5 %%", "nan", "1e400", "inf%"):
        with pytest.raises(BadAttribute):
            limits(wrong, "none", 100)


def test_amounts() -> None:
    assert [amount(text) for text in ("100", "40M", "40MB", "40mib", "2k", "1T")] == [
        100,
        40 << 20,
        40 << 20,
        40 << 20,
        2048,
        1 << 40,
    ]


@given(
    st.lists(st.tuples(st.integers(1, 5_000_000), st.floats(0, 2)), min_size=1, max_size=40),
    st.integers(100_000, 50_000_000),
)
def test_pace_is_never_exceeded_by_more_than_the_burst(chunks: list[tuple[int, float]], rate: int) -> None:
    clock = [0.0]
    pace = Pace(rate, lambda: clock[0], lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    times: list[tuple[float, int]] = []
    for size, pause in chunks:
        clock[0] += pause
        pace.wait(size)
        times.append((clock[0], size))
    for first in range(len(times)):
        for last in range(first, len(times)):
            sent = sum(size for _, size in times[first + 1 : last + 1])
            assert sent <= rate * (times[last][0] - times[first][0] + 0.1) + 1


def test_base_that_is_mended_drives_out_another_only_where_it_does_not_fit() -> None:
    row = base(8, 1, 50, 1, staged=1)
    listed = Listed([row], free=60, total=0, whole=0)
    over = Limits(1, 0)
    assert room(listed, over, "h1", 60, must=True) == [row.name]
    assert room(listed, over, "h1", 60, must=True, mends=True) == []
    assert room(listed._replace(free=40), over, "h1", 60, must=True, mends=True) == [row.name]


# -- several file systems: a pool ---------------------------------------------------------------------


@given(
    BASES,
    st.sets(st.integers(0, 11)),
    st.integers(-1, 300),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 100),
)
def test_what_goes_is_for_the_limit_of_all_or_for_the_floor_of_one(
    bases: list[HeldBase], here: set[int], most: int, floor: int, free: int, needed: int
) -> None:
    bases = [held._replace(here=number in here) for number, held in enumerate(bases)]
    limit = Limits(most, floor)
    chosen = choose(bases, limit, free, needed)
    goes, stay = (
        [held for held in bases if held.name in chosen],
        [held for held in bases if held.name not in chosen],
    )
    assert len(goes) == len(chosen) and not any(held.leases for held in goes)
    if floor + needed - free > sum(held.bytes for held in goes if held.here):
        assert all(held.leases for held in stay if held.here), "all that may go there, and it is not enough"
    if most >= 0 and sum(held.bytes for held in stay) + needed > most:
        assert all(held.leases for held in stay), "all that may go, and it is not enough"
    assert all(held.here for held in bases if held.name in choose(bases, Limits(-1, floor), free, needed)), (
        "others make no room here"
    )


def row(image: int, here: bool, size: int = 10, used: float = 0) -> HeldBase:
    return base(image, 1, size, used, staged=used)._replace(here=here)


def test_a_limit_holds_for_all_devices_of_a_host_and_a_floor_for_the_one() -> None:
    there, here = row(1, False, used=1), row(2, True, used=2)
    listed = Listed([there, here], free=100, total=120, whole=1000)
    assert room(listed, Limits(29, 0), "h1", 10) == [there.name], (
        "the one that was used longest ago, wherever it is"
    )
    assert room(listed, Limits(30, 0), "h1", 10) == []
    listed = listed._replace(free=10)
    assert room(listed, Limits(-1, 5), "h1", 10) == [here.name], "only what is there makes room there"
    assert room(listed, Limits(29, 5), "h1", 10) == [here.name], "which is of use for both"


def test_bases_of_a_session_that_come_to_several_devices_count_together() -> None:
    idle, other = row(1, True, used=1), row(2, False, used=2)
    listed = Listed([idle, other], free=100, total=0, whole=0)
    first = DescribedBase(listed.bases, 0, 100, 0, "", "", False, False, 10, "a", None, [], "")
    second = first._replace(where="b", bases=[idle._replace(here=False), other._replace(here=True)])
    gone: list[str] = []
    coming = 0
    for listed, needed in of_session([first, second]):
        gone += room(after(listed, gone, coming), Limits(25, 0), "h1", needed)
        coming += needed
    assert gone == [idle.name, other.name], (
        "10 and 10 come to 20 of which 25 may stay: none of those is asked to go twice"
    )
    assert after(second, [other.name], 0).free == 110
