# SPDX-License-Identifier: Apache-2.0
"""Where a file is put in a pool of unequal devices, and what may be declared to be one;
plan/device/choose.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semishared.errors import BadAttribute, BadPool
from semishared.model import attributes
from semishared.model.device.classes import KNOWN, WORDS, Want
from semishared.model.device.steps import PoolDevice
from semishared.named import to_data
from semishared.plan.care import diagnosis
from semishared.plan.care.diagnosis import BROKEN, WARNING
from semishared.plan.device import choose
from semishared.plan.device.choose import Declared, Device

GiB = 1 << 30
capacities = st.lists(st.integers(1, 16), min_size=2, max_size=8)
orders = st.sampled_from(sorted(choose.ORDERS))


def shares(found: list[int]) -> dict[str, float]:
    return {f"device-{number}": float(GiB * size) for number, size in enumerate(found)}


def devices(found: list[int], fills: list[float] | None = None) -> list[Device]:
    rates = fills or [0.0] * len(found)
    return [
        Device(uuid, int(share), int(share * (1 - fill)))
        for (uuid, share), fill in zip(shares(found).items(), rates)
    ]


# -- orders -----------------------------------------------------------------------------------------


@given(capacities, orders, st.text(max_size=12))
def test_an_order_has_every_device_once_and_is_the_same_whoever_asks(
    found: list[int], order: str, key: str
) -> None:
    given_shares = shares(found)
    asked = choose.ORDERS[order](key, given_shares)
    assert sorted(asked) == sorted(given_shares)
    assert asked == choose.ORDERS[order](key, dict(reversed(given_shares.items())))


KEYS = [f"{number}-0" for number in range(4000)]


def first(order: str, given_shares: dict[str, float]) -> list[str]:
    return [choose.ORDERS[order](key, given_shares)[0] for key in KEYS]


@pytest.mark.parametrize("order", sorted(choose.ORDERS))
@pytest.mark.parametrize("found", [[1, 2, 4], [17, 17, 17, 17, 35, 35, 35, 35], [1, 1]])
def test_each_device_comes_first_as_often_as_it_is_large(order: str, found: list[int]) -> None:
    given_shares = shares(found)
    asked = first(order, given_shares)
    for uuid, share in given_shares.items():
        wanted = share / sum(given_shares.values()) * len(KEYS)
        # Six times what chance alone makes of that, and what an interval's ends do.
        assert abs(asked.count(uuid) - wanted) < 6 * wanted**0.5 + 0.04 * wanted


@settings(max_examples=12, deadline=None)
@given(capacities, st.integers(1, 16))
def test_by_rendezvous_a_new_device_takes_and_no_other_does(found: list[int], size: int) -> None:
    before, more = shares(found), {**shares(found), "new": float(GiB * size)}
    for was, now in zip(first("rendezvous", before), first("rendezvous", more)):
        assert now in (was, "new")


@settings(max_examples=12, deadline=None)
@given(capacities)
def test_by_rendezvous_what_a_device_that_goes_had_is_all_that_moves(found: list[int]) -> None:
    before = shares(found)
    fewer = {uuid: share for uuid, share in before.items() if uuid != "device-0"}
    for was, now in zip(first("rendezvous", before), first("rendezvous", fewer)):
        assert now == was or was == "device-0"


def test_by_share_others_move_some_too() -> None:
    before = shares([17, 17, 35, 35])
    more = {**before, "new": 20.0 * GiB}
    moved = sum(now not in (was, "new") for was, now in zip(first("share", before), first("share", more)))
    assert moved > len(KEYS) // 200


# -- choosing ---------------------------------------------------------------------------------------

fills = st.lists(st.floats(0, 0.99), min_size=8, max_size=8)


@given(capacities, fills, st.text(max_size=8), st.integers(0, GiB), orders, st.integers(0, 7))
def test_what_is_chosen_has_room_if_any_has_and_is_not_much_fuller(
    found: list[int], rates: list[float], key: str, expected: int, order: str, near: int
) -> None:
    there = devices(found, rates)
    by_uuid = {device.uuid: device for device in there}
    uuid = choose.choose(there, key, expected, f"device-{near}", order)
    assert uuid == choose.choose(list(reversed(there)), key, expected, f"device-{near}", order)
    chosen, with_room = by_uuid[uuid], [device for device in there if device.room >= expected]
    if with_room:
        mean = sum(device.used for device in there) / sum(device.share for device in there)
        assert chosen in with_room
        slack = choose.NEAR if uuid == f"device-{near}" else 0
        assert chosen.fill <= choose.BOUND * mean + slack or chosen.fill == min(
            device.fill for device in with_room
        )
    else:
        assert chosen.free == max(device.free for device in there)


@settings(max_examples=25, deadline=None)
@given(capacities, st.lists(st.integers(1, 64), min_size=20, max_size=200), orders)
def test_no_device_overflows_while_another_has_room(found: list[int], sizes: list[int], order: str) -> None:
    free = {device.uuid: device.capacity for device in devices(found)}
    for number, size in enumerate(sizes):
        there = [Device(device.uuid, device.capacity, free[device.uuid]) for device in devices(found)]
        needed = size * GiB // 64
        if not any(device.room >= needed for device in there):
            return
        free[choose.choose(there, f"{number}-0", needed, order=order)] -= needed
        assert min(free.values()) >= 0


def test_a_device_near_the_base_is_taken_before_the_first_in_the_order_but_not_a_much_fuller_one() -> None:
    there = devices([4, 4, 4], [0.2, 0.2, 0.2])
    assert {choose.choose(there, key, 1, "device-1") for key in KEYS[:50]} == {"device-1"}
    assert "device-1" not in {
        choose.choose(devices([4, 4, 4], [0.2, 0.4, 0.2]), key, 1, "device-1") for key in KEYS[:50]
    }


def burst(there: list[Device], count: int, expected: int, near: str) -> dict[str, int]:
    """Place overlays that hold nothing yet; return how many came to each device."""
    got = {device.uuid: 0 for device in there}
    for vm in range(count):
        now = [device._replace(pending=got[device.uuid] * expected) for device in there]
        got[choose.choose(now, f"{vm}-0", expected, near)] += 1
    return got


def test_a_burst_over_one_base_does_not_all_lie_beside_it() -> None:
    there = devices([100] * 4, [0.2] * 4)
    got = burst(there, 50, 2 * GiB, "device-0")
    assert max(got.values()) <= 18 and min(got.values()) >= 8 and got["device-0"] >= 10, (
        "the base's a little more"
    )


@settings(max_examples=25, deadline=None)
@given(capacities, st.floats(0, 0.5), st.integers(10, 60), st.integers(0, 7))
def test_what_a_burst_is_expected_to_take_fits_where_it_lies_and_is_spread(
    found: list[int], fill: float, count: int, near: int
) -> None:
    there = devices([size * 64 for size in found], [fill] * len(found))
    expected = int(sum(device.room for device in there) * 0.4) // count
    got = burst(there, count, expected, f"device-{near}")
    total = sum(device.capacity for device in there)
    mean = (sum(device.used for device in there) + count * expected) / total
    for device in there:
        came = got[device.uuid] * expected
        assert came <= device.room
        if all(expected <= other.capacity // 10 for other in there):
            assert device.used + came <= (choose.BOUND * mean + choose.NEAR) * device.share + expected


def test_what_is_only_expected_refuses_nothing_and_does_not_send_a_disk_where_it_does_not_fit() -> None:
    there = [
        Device("a", 100 * GiB, 80 * GiB, pending=200 * GiB),
        Device("b", 10 * GiB, 9 * GiB, pending=30 * GiB),
    ]
    assert choose.choose(there, "k", 20 * GiB) == "a" and choose.choose(there, "k", GiB) == "a", (
        "the least filled of those with room now"
    )
    slow = Device("c", 100 * GiB, 80 * GiB, 1.0, "slow")
    assert choose.choose([*there, slow], "k", 20 * GiB) == "c", "where a guest would fill it, the next class"
    full = slow._replace(pending=80 * GiB)
    assert choose.choose([*there, full], "k", 20 * GiB) == "a"
    assert choose.choose(there, "k", 90 * GiB) == "a", "the most bytes left"


def test_a_slow_device_takes_what_no_fast_one_has_room_for() -> None:
    fast, slow = Device("a", 10 * GiB, GiB), Device("b", 100 * GiB, 100 * GiB, 1.0, "slow")
    assert choose.choose([slow, fast], "k", GiB // 4) == "a" and choose.choose([slow, fast], "k", GiB) == "b"


def test_a_device_of_half_the_weight_is_filled_half_as_much() -> None:
    heavy, light = devices([10, 10], [0.4, 0.4])
    assert {choose.choose([heavy, light._replace(weight=0.5)], key, GiB) for key in KEYS[:50]} == {heavy.uuid}
    assert choose.choose([light._replace(weight=0)], "k", 1) == "" == choose.choose([], "k", 1)


# -- classes ----------------------------------------------------------------------------------------

classed = st.lists(
    st.builds(
        lambda number, size, fill, promised, word: (size, fill, promised, word),
        st.just(0),
        st.integers(1, 16),
        st.floats(0, 0.99),
        st.floats(0, 1.2),
        st.sampled_from(KNOWN),
    ),
    min_size=1,
    max_size=8,
)
wants = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4, unique=True).map(
    lambda found: Want(tuple(found))
)


def of_classes(found: list[tuple[int, float, float, str]]) -> list[Device]:
    return [
        Device(
            f"device-{number}",
            size * GiB,
            int(size * GiB * (1 - fill)),
            1.0,
            word,
            int(size * GiB * promised) if word == "ram" else 0,
        )
        for number, (size, fill, promised, word) in enumerate(found)
    ]


@given(classed, wants, st.text(max_size=8), st.integers(0, GiB), st.integers(0, 4 * GiB), orders)
def test_what_is_chosen_is_of_the_first_class_that_is_wanted_and_has_room(
    found: list[tuple[int, float, float, str]], want: Want, key: str, expected: int, most: int, order: str
) -> None:
    there = of_classes(found)
    uuid = choose.choose(there, key, expected, order=order, classes=want.tried, most=most)
    having = [
        word
        for word in want.tried
        if any(device.device_class == word and device.takes(expected, most) for device in there)
    ]
    chosen = {device.uuid: device for device in there}.get(uuid)
    if having:
        assert chosen is not None and chosen.device_class == having[0]
    elif chosen is not None:
        assert chosen.device_class in want.tried and chosen.device_class != "ram"
    else:
        assert not any(device.device_class in want.tried and device.device_class != "ram" for device in there)


@given(classed, st.text(max_size=8), st.integers(0, GiB), orders)
def test_nothing_goes_to_memory_by_itself(
    found: list[tuple[int, float, float, str]], key: str, expected: int, order: str
) -> None:
    there = of_classes(found)
    without = [device for device in there if device.device_class != "ram"]
    assert choose.choose(there, key, expected, order=order) == choose.choose(
        without, key, expected, order=order
    )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
    st.lists(st.integers(1, 128), max_size=100),
    st.booleans(),
)
def test_memory_is_never_promised_twice(sizes: list[int], asked: list[int], falls_back: bool) -> None:
    promised = {f"m{number}": 0 for number in range(len(sizes))}
    want = Want(("ram", "any") if falls_back else ("ram",))
    disk = Device("disk", 100 * GiB, 100 * GiB)
    for number, size in enumerate(asked):
        memory = [
            Device(uuid, size * GiB, size * GiB, 1.0, "ram", promised[uuid])
            for uuid, size in zip(promised, sizes)
        ]
        most = size * GiB // 32
        uuid = choose.choose([*memory, disk], f"{number}-0", 0, classes=want.tried, most=most)
        if uuid in promised:
            promised[uuid] += most
        else:
            assert all(device.unpromised < most for device in memory) and uuid == (
                "disk" if falls_back else ""
            )
        assert all(
            promised[device.uuid] <= device.capacity - device.capacity // choose.RESERVE for device in memory
        )


def test_what_can_be_wanted() -> None:
    assert attributes.CLASS.parsed("RAM, any", "image 1") == "ram any" and Want(("ram", "any")).tried == (
        "ram",
        "fast",
        "slow",
    )
    assert Want(("slow", "any")).tried == ("slow", "fast") and Want().tried == ("fast", "slow")
    for text in ("", " ", "ram ram", "tape", "ram tape", "any;id"):
        with pytest.raises(BadAttribute):
            attributes.CLASS.parsed(text, "image 1")
    assert [Want(words).is_strict for words in ((), ("ram",), ("any",), ("fast", "any"))] == [
        False,
        True,
        False,
        False,
    ]


def test_memory_that_oned_would_give_to_vms_too() -> None:
    rows = [row("/m", total=GiB, class_="ram"), row("/a", total=64 * GiB)]
    ((kind, said),) = choose.unreserved(rows, GiB)
    assert kind == choose.UNRESERVED
    assert (
        said == "oned keeps 1.0 GiB of its memory from VMs, and class ram can come to take 1.1 GiB: "
        "RESERVED_MEM = 1179648 at least"
    )
    assert (
        [choose.unreserved(rows, reserved) for reserved in (2 * GiB, -1)]
        == [[], []]
        == [choose.unreserved(rows[1:], 0), []]
    )
    assert choose.unreserved([rows[0]._replace(state="not there")], 0) == []


# -- what is declared -------------------------------------------------------------------------------


def test_what_is_declared() -> None:
    found = choose.declared(" /mnt/nvme0  /mnt/nvme1=fast:2\n/mnt/hdd0=slow:0.5 ")
    assert found == (
        Declared("/mnt/nvme0"),
        Declared("/mnt/nvme1", "fast", 2),
        Declared("/mnt/hdd0", "slow", 0.5),
    )
    assert choose.declared(" ".join(device.word for device in found)) == found
    assert choose.declared("/run/m=ram") == (Declared("/run/m", "ram"),)
    assert len(choose.declared(" ".join(f"/d{number}" for number in range(16)))) == 16


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "1 to 16"),
        (" ".join(f"/d{number}" for number in range(17)), "1 to 16"),
        ("/a /b /a=slow", "/a is declared twice"),
        ("mnt/a", "'mnt/a' is no device"),
        ("/a/../b", "is no device"),
        ("/a/", "is no device"),
        ("/a//b", "is no device"),
        ("/a;id", "is no device"),
        ("/a=tape", "class 'tape' of /a is not one of fast, slow, ram"),
        ("/a=fast:x", "is no device"),
        ("/a=ram:8.5", "weight 8.5 of /a: memory is promised to the last byte, or up to 8 times over"),
        ("/a=ram:0.5", "weight 0.5 of /a: memory"),
        ("/a=fast:0", "weight 0"),
        ("/a=fast:-1", "is no device"),
        ("/a=:1", "is no device"),
    ],
)
def test_what_cannot_be_declared(text: str, why: str) -> None:
    with pytest.raises(BadPool, match=why):
        choose.declared(text)


def row(path: str, **more: Any) -> PoolDevice:
    found = PoolDevice("u", path, "fast", 1.0, 100 * GiB, 0, 0, 0, 0, [], False, "")
    return found._replace(**more)


def test_a_program_is_told_all_of_a_device_but_what_its_host_has_not_looked_at() -> None:
    """`semishared pool --json` prints devices as they cross, so no field may be left out that is known."""
    of_memory = {"mixes_memory": False, "watched": False, "limit": 0}
    told = to_data(row("/a", state="not there"))
    names = [name.rstrip("_") for name in PoolDevice._fields]
    assert list(told) == [name for name in names if name not in of_memory] and told["class"] == "fast"
    assert to_data(row("/m", **of_memory)) == {**to_data(row("/m")), **of_memory}


def test_differences_between_what_is_declared_and_what_a_host_has() -> None:
    declared = choose.declared("/a /b=slow:2 /c")
    assert choose.differences(declared, [row("/a"), row("/b", class_="slow", weight=2), row("/c")]) == []
    assert choose.differences(declared[:1], [row("/a"), row("/old", weight=0)]) == [], (
        "it takes nothing more, and its disks are there"
    )
    wrong = choose.differences(
        declared,
        [row("/a", state="not there"), row("/b"), row("/old"), row("/older", state="read-only", weight=0)],
    )
    assert [text.split(" ")[0].rstrip(",") for _, text in wrong] == ["/a", "/b", "/c", "/old", "/older"]
    assert [kind for kind, _ in wrong] == [
        choose.ABSENT,
        choose.CHANGED,
        choose.CHANGED,
        choose.CHANGED,
        choose.ABSENT,
    ]
    assert (
        "not there" in wrong[0].text
        and "declared as slow:2" in wrong[1].text
        and "is declared and no device" in wrong[2].text
    )


def test_of_two_at_one_path_that_is_judged_by_the_declaration_which_is_there() -> None:
    dead, here = row("/a", state="not there: another one is mounted in its place"), row("/a")
    for rows in ([dead, here], [here, dead]):
        (said,) = choose.differences(choose.declared("/a"), rows)
        assert said.kind == choose.ABSENT and said.text.startswith(
            "/a, which is not declared any more, is not there: another one"
        )
    (changed,) = choose.differences(choose.declared("/a=slow"), [here])
    assert choose.differences(choose.declared("/a=slow"), [here, dead]) == [changed, said]


def test_what_memory_held_before_its_host_was_started_again_is_said_to_be_lost() -> None:
    held = row("/m", class_="ram", lost=["7-1", "5-0", "5-1"])
    (said,) = choose.differences(choose.declared("/m=ram"), [held])
    assert said == (choose.LOST, "/m was emptied by a restart of the host, disks of VM 5, 7 are lost with it")


def test_memory_that_is_promised_more_than_once_is_to_be_watched() -> None:
    held, declared = row("/m", class_="ram", weight=1.5, watched=False), choose.declared("/m=ram:1.5")
    (said,) = choose.differences(declared, [held])
    assert said.kind == choose.UNWATCHED and said.text.startswith(
        "/m is promised more than once, and nothing moves disks away"
    )
    assert choose.differences(declared, [held._replace(watched=True)]) == []
    once = choose.differences(choose.declared("/m=ram"), [held._replace(weight=1.0)])
    assert once == [] == choose.differences(choose.declared("/m=fast:1.5"), [held._replace(class_="fast")])


def test_memory_that_takes_nothing_more_is_to_be_watched_as_long_as_it_can_get_full() -> None:
    held, declared = (
        row("/m", class_="ram", weight=0, watched=False, lost=["5-0"]),
        choose.declared("/m=ram:1.5"),
    )
    once, twice = held._replace(promised=95 * GiB), held._replace(promised=95 * GiB + 1)
    assert [wrong.kind for wrong in choose.differences(declared, [once])] == [choose.CHANGED, choose.LOST]
    assert [wrong.kind for wrong in choose.differences(declared, [twice])] == [
        choose.CHANGED,
        choose.LOST,
        choose.UNWATCHED,
    ]
    assert [wrong.kind for wrong in choose.differences((), [twice])] == [choose.UNWATCHED], (
        "it is declared no more, and has its disks"
    )
    assert choose.UNWATCHED not in {
        wrong.kind for wrong in choose.differences(declared, [twice._replace(watched=True)])
    }


def test_memory_that_shuts_down_before_it_is_full_is_wrong_and_the_answer_of_a_host_that_does_not_know_is_not() -> (  # noqa: E501
    None
):
    held, declared = row("/m", class_="ram"), choose.declared("/m=ram")
    (said,) = choose.differences(declared, [held._replace(limit=64 << 20)])
    assert said.kind == choose.LIMITED and said.text.startswith(
        "/m is on a zram that refuses a page beyond 64.0 MiB"
    ), said
    assert (
        choose.differences(declared, [held._replace(limit=0)]) == [] == choose.differences(declared, [held])
    )


def test_memory_that_takes_something_else_than_what_is_written_is_wrong_whatever_it_is_declared_as() -> None:
    for declared in ((), choose.declared("/m"), choose.declared("/m=ram")):
        found = [
            wrong
            for wrong in choose.differences(declared, [row("/m", mixes_memory=True)])
            if wrong.kind == choose.UNSAFE
        ]
        assert [wrong.text.partition(":")[0] for wrong in found] == [
            "/m is on a zram that guests' disks must not be on with this kernel"
        ]
    assert all(
        choose.differences(choose.declared("/m"), [held]) == []
        for held in (row("/m", mixes_memory=False), row("/m"))
    )


def test_a_label_of_before_is_named_where_add_writes_it_anew() -> None:
    declared = choose.declared("/a")
    (said,) = choose.differences(declared, [row("/a", is_old=True)])
    assert (
        said.kind == choose.OLD
        and said.text.startswith("/a has a label of before")
        and "pool add" in said.text
    )
    assert choose.differences(declared, [row("/a")]) == []
    other = choose.differences(declared, [row("/a", is_old=True, state="read-only")])
    assert [wrong.kind for wrong in other] == [choose.ABSENT], "it can be written when that is mended"
    assert [wrong.kind for wrong in choose.differences(declared, [row("/a", is_old=True, weight=0)])] == [
        choose.CHANGED
    ]


def test_doctor_says_of_each_kind_how_bad_it_is_and_what_mends_it() -> None:
    found = {kind: diagnosis.of_pool([choose.Wrong(kind, "x")], "h1")[0] for kind in choose.KINDS}
    assert [finding.severity for finding in found.values()] == [BROKEN, *[WARNING] * 6, BROKEN]
    assert "pool add h1" in found[choose.OLD].mend and "stop and start it" in found[choose.UNSAFE].mend
    assert (
        "mem_limit" in found[choose.LIMITED].mend
        and "semishared-ram.sh enable" in found[choose.UNWATCHED].mend
    )
    assert (
        "pool check h1" in found[choose.ABSENT].mend
        and "recreate" in found[choose.LOST].mend
        and "onehost" in found[choose.UNRESERVED].mend
    )
