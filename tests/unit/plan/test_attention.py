# SPDX-License-Identifier: Apache-2.0
"""What waits for an operator: each kind from facts with one such symptom, as one item with its command."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List

import pytest

from semishared.model.base.steps import (
    HeldBase,
    KeptDisk,
    Listed,
    PausedGuest,
    Reported,
    ReportedDisk,
    ReportedVm,
)
from semishared.model.device.steps import PoolDevice
from semishared.opennebula.xml import Datastore, Host, Image, Vm
from semishared.plan.care import attention
from semishared.plan.care.attention import KINDS, Facts, Machine
from semishared.plan.care.checks import BROKEN, WARNING
from semishared.plan.care.fence import BEGUN, FENCED, Mark

NOW = 1_800_000_000.0
DAY = 86400
EPILOG_FAILURE = 40
GENERATION = "a" * 32
GiB = 1 << 30


def vm(state: int = 3, lcm: int = 3, more: str = "", began: float = NOW - 40 * DAY, host: str = "h1") -> Vm:
    """Return VM 12, made 40 days ago."""
    history = f"<HISTORY><HOSTNAME>{host}</HOSTNAME><STIME>{began:.0f}</STIME><RSTIME>0</RSTIME></HISTORY>"
    return Vm.parse(
        f"<VM><ID>12</ID><NAME>web</NAME><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE>"
        f"<STIME>{NOW - 40 * DAY:.0f}</STIME><USER_TEMPLATE>{more}</USER_TEMPLATE>"
        f"<HISTORY_RECORDS>{history}</HISTORY_RECORDS></VM>"
    )


def failed(error: str = "SS024 image 7 cannot be reached", path: str = "ERROR") -> Vm:
    text = f"<{path}>Error executing image transfer script: {error}</{path}>"
    if path == "LAST_ERROR":
        text = f"<SEMISHARED><LAST_ERROR>2026-11-28 01:20 UTC clone: {error}</LAST_ERROR></SEMISHARED>"
    return vm(lcm=EPILOG_FAILURE, more=text)


def host(more: str = "") -> Host:
    return Host.parse(f"<HOST><ID>1</ID><NAME>h1</NAME><TEMPLATE>{more}</TEMPLATE></HOST>")


def image(persistent: int = 1, vms: str = "") -> Image:
    return Image.parse(f"<IMAGE><ID>7</ID><PERSISTENT>{persistent}</PERSISTENT><VMS>{vms}</VMS></IMAGE>")


def store() -> Datastore:
    return Datastore.parse("<DATASTORE><ID>100</ID><NAME>images</NAME></DATASTORE>")


def base(**more: Any) -> HeldBase:
    """Return a base that was staged yesterday and has a lease of the VM's."""
    name, leases = f"100-7-{GENERATION}", ("12-0",)
    whole = HeldBase(name, GiB, NOW - DAY, NOW - DAY, leases, GiB, damaged=False, device="")
    return whole._replace(**more)


def disk(uncommitted: Any = None) -> ReportedDisk:
    return ReportedDisk(0, "diff", "local", "qcow2", "/d", 5, 0, None, "", uncommitted, "", None)


def kept(**more: Any) -> KeptDisk:
    path = "/var/lib/one/datastores/101/.kept-9-00ff"
    return KeptDisk(path, 9, 1, {"id": 7}, 3 << 20, GiB)._replace(**more)


def device(**more: Any) -> PoolDevice:
    whole = PoolDevice("u", "/mnt/a", "ssd", 1.0, 100 * GiB, 50 * GiB, 1, 0, 0, [], is_old=False, state="")
    return whole._replace(**more)


@dataclass
class World:
    """Facts of a clean cloud: one host, one VM, one base."""

    vm: Vm = field(default_factory=vm)
    host: Host = field(default_factory=host)
    image: Any = field(default_factory=image)
    reported: Reported = field(default_factory=lambda: Reported([ReportedVm(12, 101, [disk()], "")], [], []))
    base: HeldBase = field(default_factory=base)
    free: int = 50
    devices: List[PoolDevice] = field(default_factory=list)
    paused: List[PausedGuest] = field(default_factory=list)
    since: Dict[int, float] = field(default_factory=dict)
    more: Dict[str, Any] = field(default_factory=dict)

    def items(self) -> List[attention.Item]:
        listed = Listed([self.base], 100 * GiB, self.free * GiB, 100 * GiB)
        machine = Machine("h1", [self.reported], [listed], self.devices, self.paused)
        facts = Facts(
            "fe",
            NOW,
            lambda seconds: f"at {seconds:.0f}",
            {12: self.vm},
            {7: self.image} if self.image is not None else {},
            [self.host],
            [machine],
            self.since,
        )
        return attention.items(facts._replace(**self.more))


def test_nothing_waits_in_a_clean_cloud() -> None:
    assert World().items() == []
    assert World(devices=[device()]).items() == []


RETRY = "onevm recover --retry 12"
KEPT = "semishared commit 9 1; or, to lose it: semishared gc --discard .kept-9-00ff"
AS_NEW = KEPT.replace("9 1;", "9 1 --as-new-image NEW;")
LARGER = (
    "semishared pool list h1: give it a larger device (docs/how-to/pool-devices.md), or migrate the VM away"
)
VERIFY = "semishared base verify --hosts h1"
LOST = [(store(), {"SEMISHARED_STORE": "x", "bad\nname": "y"})]
SYMPTOMS: Dict[str, Any] = {
    "vm-failed": (
        World(vm=failed()),
        RETRY,
        "waits in EPILOG_FAILURE: SS024 image 7 cannot be reached; mount",
    ),
    "vm-failed by our note": (World(vm=failed(path="LAST_ERROR")), RETRY, "SS024 image 7"),
    "vm-failed while cloning": (
        World(vm=vm(state=11, lcm=0, more="<ERROR>SS020 image 7 is not there</ERROR>")),
        RETRY,
        "waits in CLONING_FAILURE: SS020 image 7 is not there",
    ),
    "guest-paused": (
        World(paused=[PausedGuest("one-12", full=False)]),
        "as root on h1: virsh --connect qemu:///system resume one-12",
        "guest one-12 has stood still since an I/O error",
    ),
    "guest-paused for room": (
        World(paused=[PausedGuest("one-12", full=True)]),
        "semishared base prune --hosts h1; then as root on h1: virsh --connect qemu:///system resume one-12",
        "there was no room for what it wrote",
    ),
    "disk-kept": (
        World(reported=Reported([], [kept()], [])),
        KEPT,
        "3.0 MiB of disk 1 of VM 9, which is gone",
    ),
    "disk-kept of no image": (World(reported=Reported([], [kept()], []), image=None), AS_NEW, "image 7"),
    "disk-kept of an image that others have": (
        World(reported=Reported([], [kept()], []), image=image(vms="<ID>12</ID>")),
        AS_NEW,
        "image 7",
    ),
    "disk-kept-unreadable": (
        World(reported=Reported([], [kept(error="layer 1 is damaged")], [])),
        "copy /var/lib/one/datastores/101/.kept-9-00ff elsewhere first; then, to lose it: semishared gc "
        "--discard .kept-9-00ff",
        "cannot be read: layer 1 is damaged",
    ),
    "disk-kept-unreadable for its record": (
        World(reported=Reported([], [kept(image=None)], [])),
        "copy /var/lib/one/datastores/101/.kept-9-00ff elsewhere first; then, to lose it: semishared gc "
        "--discard .kept-9-00ff",
        "cannot be read: no record says of which image it is",
    ),
    "record-unreadable": (
        World(reported=Reported([ReportedVm(12, 101, [], "x", {"0": "disk.0.json is no JSON"})], [], [])),
        "semishared status 12: nothing that it is of is removed; copy what there is",
        "VM 12: disk.0.json is no JSON",
    ),
    "record-unreadable with its directory": (
        World(reported=Reported([ReportedVm(12, 101, [], "Input/output error")], [], [])),
        "semishared status 12: nothing that it is of is removed; copy what there is",
        "VM 12: Input/output error",
    ),
    "system-unreadable": (
        World(reported=Reported([], [], ["/d/101 on h1 cannot be read"])),
        "as root on h1: dmesg; mend or mount its disk",
        "/d/101 on h1 cannot be read",
    ),
    "disk-uncommitted": (
        World(
            reported=Reported([ReportedVm(12, 101, [disk(5 << 20)], "")], [], []), since={12: NOW - 2 * DAY}
        ),
        "semishared commit 12 0",
        "5.0 MiB of disk 0 of VM 12 (web) are on h1 alone",
    ),
    "disk-uncommitted since it is not known when": (
        World(reported=Reported([ReportedVm(12, 101, [disk(5 << 20)], "")], [], [])),
        "semishared commit 12 0",
        "5.0 MiB",
    ),
    "base-damaged": (
        World(base=base(damaged=True)),
        "semishared base verify 7 --hosts h1",
        "base of image 7, generation aaaaaaaa, is damaged and out of use",
    ),
    "base-mended": (
        World(base=base(mended=NOW - DAY, reread=("12-0", "9-0", "13-0"))),
        "onevm poweroff 12; then onevm resume 12",
        "VM 12 (web) runs since before the base of image 7 was found damaged, and mended",
    ),
    "bases-unverified": (
        World(base=base(staged=NOW - 90 * DAY, verified=NOW - 31 * DAY)),
        VERIFY,
        "bases that nothing has read for 30 days: 1 (1.0 GiB)",
    ),
    "disk-full": (
        World(free=10),
        "semishared base prune --hosts h1; or migrate VMs away",
        "its disk is 90 % full: 10.0 GiB are free",
    ),
    "disk-full beside a pool": (
        World(
            host=host("<SEMISHARED><TOTAL_MB>100</TOTAL_MB><FREE_MB>3</FREE_MB></SEMISHARED>"),
            devices=[device()],
        ),
        "semishared base prune --hosts h1; or migrate VMs away",
        "its disk is 97 % full: 3.0 MiB are free",
    ),
    "device-full": (
        World(devices=[device(free=GiB), device(path="/mnt/b")]),
        "semishared pool rebalance h1",
        "device /mnt/a is 99 % full: 1.0 GiB are free",
    ),
    "disk-larger": (
        World(reported=Reported([ReportedVm(12, 101, [disk()._replace(size=200 * GiB)], "")], [], [])),
        LARGER,
        "disk 0 of VM 12 may grow to 200.0 GiB, and its host's disk has 100.0 GiB in all",
    ),
    "disk-larger than its device": (
        World(
            reported=Reported(
                [ReportedVm(12, 101, [disk()._replace(size=11 * GiB, device="/mnt/b")], "")], [], []
            ),
            devices=[device(), device(path="/mnt/b", total=10 * GiB, free=9 * GiB)],
        ),
        LARGER,
        "may grow to 11.0 GiB, and device /mnt/b has 10.0 GiB in all",
    ),
    "host-build": (
        World(more={"outdated": {"h2": "host h2 has semishared b, the front-end a"}}),
        "onehost sync --force",
        "SS011 host h2 has semishared b",
    ),
    "host-health": (
        World(host=host("<HEALTH_SEMISHARED>store 100 hangs</HEALTH_SEMISHARED>")),
        "semishared doctor",
        "its monitoring says: store 100 hangs",
    ),
    "fence-begun": (
        World(more={"marks": {"h1": Mark(BEGUN, 1, since=5)}}),
        "semishared fence h1",
        "its fencing was begun and did not end",
    ),
    "attributes-lost": (
        World(more={"lost": LOST}),
        "semishared doctor --fix",
        "datastore 100 (images) has lost SEMISHARED_STORE,",
    ),
}


@pytest.mark.fault(77, "each thing that waits for an operator is found as one item, with its command")
@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_symptom_is_one_item_with_its_command(name: str) -> None:
    world, command, what = SYMPTOMS[name]
    (item,) = world.items()
    kind = name.partition(" ")[0]
    assert (item.kind, item.command, item.severity) == (kind, command, KINDS[kind].severity)
    assert what in item.what and "\n" not in item.what + item.command and "{" not in item.what + item.command
    assert item.machine == {"host-build": "h2", "attributes-lost": "fe"}.get(kind, "h1")


def test_every_kind_has_a_symptom() -> None:
    assert {name.partition(" ")[0] for name in SYMPTOMS} == set(KINDS)
    assert {check.severity for check in KINDS.values()} == {WARNING, BROKEN}
    assert set(KINDS) > attention.IN_DOCTOR


WELL = {
    "a failure that is not ours": World(vm=failed("cannot stat /x")),
    "an error of ours that failed no state": World(vm=vm(more="<ERROR>SS024 x</ERROR>")),
    "uncommitted since an hour": World(
        reported=Reported([ReportedVm(12, 101, [disk(5)], "")], [], []), since={12: NOW - 3600}
    ),
    "a guest started since the base was mended": World(
        vm=vm(began=NOW - 5), base=base(mended=NOW - DAY, reread=("12-0",))
    ),
    "a guest that has moved since": World(vm=vm(host="h2"), base=base(mended=NOW - DAY, reread=("12-0",))),
    "a VM that is off since": World(vm=vm(state=8, lcm=0), base=base(mended=NOW - DAY, reread=("12-0",))),
    "a lease that is given up": World(base=base(mended=NOW - DAY, reread=("12-1",))),
    "a base that was verified of late": World(base=base(staged=NOW - 90 * DAY, verified=NOW - 29 * DAY)),
    "a base that came of late": World(base=base(staged=NOW - 29 * DAY)),
    "a disk with room": World(free=11),
    "a disk that is as large as what it lies on": World(
        reported=Reported([ReportedVm(12, 101, [disk()._replace(size=100 * GiB)], "")], [], [])
    ),
    "a host whose fence has ended": World(more={"marks": {"h1": Mark(FENCED, 1)}}),
    "a host that is well": World(host=host("<HEALTH_SEMISHARED>OK</HEALTH_SEMISHARED>")),
    "a device that is away, which doctor says": World(devices=[device(total=0, free=0, state="offline")]),
}


@pytest.mark.parametrize("name", WELL)
def test_what_needs_nothing_is_no_item(name: str) -> None:
    assert WELL[name].items() == []


def test_since_is_told_where_it_is_known() -> None:
    def since(world: World) -> str:
        (item,) = world.items()
        return item.since

    assert since(SYMPTOMS["vm-failed by our note"][0]) == "2026-11-28 01:20 UTC"
    assert since(SYMPTOMS["disk-uncommitted"][0]) == f"at {NOW - 2 * DAY:.0f}"
    assert since(SYMPTOMS["base-mended"][0]) == f"at {NOW - DAY:.0f}"
    assert since(SYMPTOMS["bases-unverified"][0]) == f"at {NOW - 31 * DAY:.0f}"
    assert since(SYMPTOMS["disk-kept"][0]) == since(SYMPTOMS["disk-full"][0]) == ""


def test_the_worst_is_first_and_nothing_is_said_twice() -> None:
    same = {"0": "the record is damaged", "1": "the record is damaged"}
    reported = Reported([ReportedVm(12, 101, [], "x", same)], [kept()], [])
    found = World(reported=reported, vm=failed()).items()
    assert [item.kind for item in found] == ["record-unreadable", "vm-failed", "disk-kept"]


@pytest.mark.fault(77, "nothing that a host says of itself becomes a command, or a line")
def test_what_a_host_says_is_no_command() -> None:
    (item,) = World(paused=[PausedGuest("one-1; rm -rf /\nx", full=False)]).items()
    assert item.command.endswith("resume GUEST") and "\n" not in item.what
    strange = kept(path="/d/101/.kept-9; reboot", image={"id": "7; reboot"})
    (item,) = World(reported=Reported([], [strange], [])).items()
    assert item.command == AS_NEW.replace(".kept-9-00ff", "NAME") and "reboot" not in item.command


def test_oned_is_asked_for_those_vms_whose_pool_says_too_little() -> None:
    machine = Machine("h1", [Reported([ReportedVm(12, 101, [disk(5)], "")], [], [])])
    mended = Machine("h1", [], [Listed([base(mended=1.0, reread=("12-0",))], 1, 1, 1)])
    clean = Machine("h1", [Reported([ReportedVm(12, 101, [disk()], "")], [], [])])
    assert attention.in_question([vm()], [clean]) == []
    assert attention.in_question([vm()], [machine]) == attention.in_question([vm()], [mended]) == [12]
    assert attention.in_question([failed()], []) == [12]
    assert attention.in_question([], [machine]) == [], "oned has no such VM any more"


@pytest.mark.reads_checkout
def test_the_page_has_each_kind_with_its_severity() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/how-to/attention.md").read_text()
    rows = dict(re.findall(r"(?m)^\| `([a-z-]+)` \| (broken|warning) \|", page))
    words = {BROKEN: "broken", WARNING: "warning"}
    assert rows == {kind: words[check.severity] for kind, check in KINDS.items()}
