# SPDX-License-Identifier: Apache-2.0
"""Which disk leaves memory that gets full, and which guests go on: decided by plan/device/balance.py
alone.
"""

from __future__ import annotations

from typing import Any

import pytest

from semishared.plan.device import balance
from semishared.plan.device.balance import Item, Wait
from semishared.plan.device.choose import Device
from semishared.units import GiB, MiB

MEMORY = Device("m", 10 * GiB, 1 * GiB, 1.5, "ram")
DISKS = [MEMORY, Device("a", 100 * GiB, 50 * GiB), Device("s", 100 * GiB, 90 * GiB, 1.0, "slow")]


def item(name: str, size: int, *classes: str, device: str = "m") -> Item:
    return Item("layers", name, device, size, name, classes or ("ram", "any"))


def test_only_memory_that_is_promised_more_than_once_is_watched() -> None:
    found = [
        device.is_overcommitted
        for device in (MEMORY, MEMORY._replace(weight=1.0), MEMORY._replace(weight=0.0), DISKS[1])
    ]
    assert found == [True, False, False, False]
    assert not DISKS[1]._replace(weight=2.0).is_overcommitted and not balance.is_due(
        MEMORY._replace(weight=1.0, free=0)
    )


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_memory_that_takes_nothing_more_is_watched_for_what_it_has_promised(weight: float) -> None:
    """Drained, or declared anew."""
    memory = MEMORY._replace(weight=weight, promised=int(9.5 * GiB) + 1)
    assert memory.is_overcommitted and balance.is_due(memory)
    once = memory._replace(promised=int(9.5 * GiB))
    assert not once.is_overcommitted and not balance.is_due(once)
    assert [move.target for move in balance.order([memory, *DISKS[1:]], [item("1-0", GiB)], "m", {})] == ["a"]


def test_a_disk_leaves_memory_that_is_fuller_than_four_fifths() -> None:
    assert [balance.is_due(MEMORY._replace(free=free)) for free in (0, 2 * GiB - 1, 2 * GiB, 10 * GiB)] == [
        True,
        True,
        False,
        False,
    ]


def test_what_takes_most_within_the_next_seconds_goes_first() -> None:
    items = [
        item("1-0", 2 * GiB),
        item("2-0", 4 * GiB),
        item("3-0", 3 * GiB),
        item("4-0", 0),
        item("5-0", 9 * GiB, device="a"),
    ]
    assert [move.item.name for move in balance.order(DISKS, items, "m", {})] == ["2-0", "3-0", "1-0"]
    growing = {"1-0": 300.0 * MiB, "2-0": 5.0 * MiB}
    assert [move.item.name for move in balance.order(DISKS, items, "m", growing)] == ["1-0", "2-0", "3-0"]
    assert [move.item.name for move in balance.order(DISKS, list(reversed(items)), "m", growing)] == [
        "1-0",
        "2-0",
        "3-0",
    ]


def test_a_disk_goes_only_where_its_image_lets_it_and_where_it_fits() -> None:
    items = [
        item("1-0", 4 * GiB, "ram"),
        item("2-0", 3 * GiB, "ram", "slow"),
        item("3-0", 2 * GiB, "ram", "any"),
    ]
    assert [(move.item.name, move.target) for move in balance.order(DISKS, items, "m", {})] == [
        ("2-0", "s"),
        ("3-0", "a"),
    ]
    full = [MEMORY, DISKS[1]._replace(free=1 * GiB), DISKS[2]]
    assert [(move.item.name, move.target) for move in balance.order(full, items, "m", {})] == [
        ("2-0", "s"),
        ("3-0", "s"),
    ]
    assert balance.order([MEMORY, Device("other", 10 * GiB, 10 * GiB, 1.0, "ram")], items, "m", {}) == []


WAIT = Wait(True, ("ram", "any"), True, 10 * GiB, 1 * GiB)


@pytest.mark.parametrize(
    ("changed", "goes_on"),
    [
        ({}, True),
        ({"free": 64 * MiB - 1}, False),
        ({"free": 64 * MiB}, True),
        ({"capacity": 200 * MiB, "free": 10 * MiB}, True),
        ({"capacity": 200 * MiB, "free": 10 * MiB - 1}, False),
        ({"was_in_memory": False}, True),
        ({"is_full": False}, True),
        ({"is_full": False, "was_in_memory": False}, False),
        ({"classes": ("fast",), "was_in_memory": False}, False),
        ({"classes": ()}, False),
    ],
)
def test_a_guest_goes_on_where_room_in_memory_is_all_that_failed(
    changed: dict[str, Any], goes_on: bool
) -> None:
    assert balance.may_go_on([WAIT._replace(**changed)]) is goes_on
    assert balance.may_go_on([WAIT, WAIT._replace(**changed)]) is goes_on, (
        "one disk that has to wait is enough"
    )
    assert not balance.may_go_on([]), "who is paused without a disk that has failed was paused by somebody"
