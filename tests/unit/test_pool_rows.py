# SPDX-License-Identifier: Apache-2.0
"""What stays on a device, or goes, and why; plan/device/pool_rows.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, List, Optional

import pytest

from semishared.config import Config
from semishared.front import pool_moves as front
from semishared.model.device.steps import HeldItem, MoveBase, MoveLayers
from semishared.opennebula.xml import Vm, parse
from semishared.plan.device import pool_rows
from semishared.plan.device.balance import Move
from semishared.plan.device.pool_rows import Held, Row

ACTIVE, POWEROFF, STOPPED = 3, 8, 4
RUNNING, MIGRATING = 3, 4


def vm(number: int, state: int, lcm: int = 0, host: str = "h1", more: str = "") -> Vm:
    history = f"<HISTORY_RECORDS><HISTORY><SEQ>0</SEQ><HOSTNAME>{host}</HOSTNAME><DS_ID>101</DS_ID></HISTORY></HISTORY_RECORDS>"  # noqa: E501
    text = f"<VM><ID>{number}</ID><DEPLOY_ID>one-{number}</DEPLOY_ID><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE>{history}{more}</VM>"  # noqa: E501
    return Vm(parse(text, "VM"))


def layers(number: int, device: str = "a", **more: Any) -> HeldItem:
    name = f"{number}-0-0123456789ab"
    item = HeldItem("layers", name, device, 5, vm=number, disk=0, vm_dir=f"/ds/101/{number}")
    return item._replace(**more)


def base_with(*leases: str) -> HeldItem:
    return HeldItem("bases", "100-1-00", "a", 1, leases)


def held(*said: HeldItem) -> List[Held]:
    return pool_rows.held(said)


@pytest.mark.parametrize(
    "found, why",
    [
        (vm(5, ACTIVE, RUNNING), ""),
        (vm(5, POWEROFF), ""),
        (vm(5, ACTIVE, MIGRATING), "something is under way in its VM (LCM state 4)"),
        (vm(5, STOPPED), "its VM neither runs nor is powered off or suspended (state 4)"),
        (vm(5, ACTIVE, RUNNING, "h2"), "its VM is on h2: semishared gc"),
        (None, "OpenNebula has no such VM: semishared gc"),
    ],
)
def test_which_disks_can_be_moved_by_what_oned_says_of_their_vms(found: Optional[Vm], why: str) -> None:
    (one,) = held(layers(5))
    assert pool_rows.staying([one], {5: found}, "h1") == ({one.item: why} if why else {})


def test_what_a_running_guest_has_in_memory_stays() -> None:
    one, other = held(layers(5, "m"), layers(6, "m"))
    stays = pool_rows.staying([one, other], {5: vm(5, ACTIVE, RUNNING), 6: vm(6, POWEROFF)}, "h1", {"m"})
    assert list(stays) == [one.item] and "in memory" in stays[one.item]


def test_what_qemu_decrypts_for_a_running_guest_stays_and_goes_when_that_is_off() -> None:
    secret = "<TEMPLATE><DISK><DISK_ID>0</DISK_ID></DISK><DISK><DISK_ID>1</DISK_ID><LUKS_SECRET>8f2c</LUKS_SECRET></DISK></TEMPLATE>"  # noqa: E501
    one, other, off = held(layers(5), layers(5, disk=1, name="5-1-0123456789ab"), layers(6, disk=1))
    (running, still) = (vm(5, ACTIVE, RUNNING, more=secret), vm(6, POWEROFF, more=secret))
    stays = pool_rows.staying([one, other, off], {5: running, 6: still}, "h1")
    assert list(stays) == [other.item] and "encrypted (LUKS_SECRET)" in stays[other.item]


def test_steps_of_disks_name_the_domain_whatever_oned_says_of_it_and_bases_come_first() -> None:
    disk, off, base = held(layers(5), layers(6), base_with())
    moves = [Move(one.item, "b") for one in (disk, off, base)]
    assert pool_rows.in_order(moves)[0].item == base.item
    step = pool_rows.step(disk, moves[0], "/root", vm(5, ACTIVE, RUNNING), 7)
    assert isinstance(step, MoveLayers) and (step.domain, step.target, step.rate) == ("one-5", "b", 7)
    step = pool_rows.step(off, moves[1], "/root", vm(6, POWEROFF), 0)
    assert isinstance(step, MoveLayers) and step.domain == "one-6", "its host sees whether it is off"
    (kept,) = held(layers(5, vm_dir="/ds/101/.kept-5-0123456789ab"))
    step = pool_rows.step(kept, Move(kept.item, "b"), "/root", None, 0)
    assert isinstance(step, MoveLayers) and step.domain == ""
    assert isinstance(pool_rows.step(base, moves[2], "/root", None, 0), MoveBase)


def test_who_reads_on_from_a_base_that_went_is_told_unless_its_disk_went_after_it() -> None:
    (base,) = held(base_with("5-0", "6-0", "6-1", "7-0"))
    vms = {5: vm(5, ACTIVE, RUNNING), 6: vm(6, ACTIVE, RUNNING), 7: vm(7, POWEROFF)}
    went: List[Row] = [
        {"vm": 5, "disk": 0, "how": "moved"},
        {"vm": 6, "disk": 0, "how": "moved"},
        {"vm": 6, "disk": 1, "how": "failed"},
    ]
    assert pool_rows.reading_on([base], "a", vms, went) == [6]
    assert (
        pool_rows.reading_on([base], "a", vms, went[:1]) == [6]
        and pool_rows.reading_on([base], "b", vms, []) == []
    )


def test_why_nothing_takes_a_disk_names_the_classes_that_it_wants() -> None:
    usual, fast, ram = held(layers(5), layers(6, classes=("fast",)), layers(7, classes=("ram",)))
    assert pool_rows.no_room(usual) == "no other device has room for it"
    assert "of class fast (SEMISHARED_CLASS)" in pool_rows.no_room(
        fast
    ) and "of class ram" in pool_rows.no_room(ram)


def test_disk_is_left_alone_whose_vm_has_another_state_than_when_the_moves_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {
        5: vm(5, ACTIVE, RUNNING),
        6: vm(6, POWEROFF),
        7: vm(7, POWEROFF),
        8: vm(8, ACTIVE, MIGRATING),
        9: vm(9, ACTIVE, RUNNING),
    }
    monkeypatch.setattr(front, "Oned", lambda: SimpleNamespace(vm=now.get))
    moving = front.Moving(Config(), "h1", "/root", lambda **_: None)
    moving._vms = {
        5: vm(5, ACTIVE, RUNNING),
        6: vm(6, POWEROFF),
        7: vm(7, ACTIVE, RUNNING),
        8: vm(8, ACTIVE, RUNNING),
        9: vm(9, POWEROFF),
    }
    said = {number: moving._changed(number) for number in now}
    assert [number for number in now if not said[number]["why"]] == [5, 6]
    assert said[7]["why"] == said[9]["why"] == "it has another state by now" and "under way" in str(
        said[8]["why"]
    )
    assert [number for number in now if said[number]["is_off"]] == [6, 7]
