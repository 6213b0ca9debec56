# SPDX-License-Identifier: Apache-2.0
"""A hypervisor's script fails once: where oned has the VM, what its user reads, and it is done again."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import pytest

from lab.oned import ActionFailed, Lcm
from lab.oned.states import Img
from lab.oned.template import vectors
from real.conftest import RealCloud
from real.injected import DATA, KIB, SAID, Disks, failing_on, nothing_to_remove, seen
from real.oned import RealVm

Do = Callable[[Disks], object]
RUNNING, OFF, SUSPENDED = ("ACTIVE", Lcm.RUNNING), ("POWEROFF", 0), ("SUSPENDED", 0)


class Case(NamedTuple):
    script: str
    call: Do
    """What fails, and is done once more."""
    left: Tuple[str, int] = RUNNING
    """STATE and LCM_STATE after it failed."""
    before: Tuple[Do, ...] = ()
    after: Tuple[Do, ...] = ()
    """What brings the VM back to where its guest answers, or sees what was done."""


def on(method: str, *words: Any, **named: Any) -> Do:
    """Return a function that asks oned for something of the VM."""
    return lambda disks: getattr(disks.cloud.oned, method)(disks.vm, *words, **named)


def attach(disks: Disks) -> None:
    disks.cloud.oned.disk_attach(disks.vm, disks.own)


def attach_in_place(disks: Disks) -> None:
    oned = disks.cloud.oned
    (image,) = [one.id for one in oned.images.values() if one.name == "plugged"]
    assert oned.image(image).state == Img.READY
    oned.disk_attach(disks.vm, image)


def sees_one_more(disks: Disks) -> None:
    guest = disks.cloud.guest(disks.vm)
    guest.wait_disk("vdd")
    guest.check("vdd", "base", 0, KIB)
    last = max(int(disk["DISK_ID"]) for disk in disks.cloud.oned.vm(disks.vm).disks)
    disks.cloud.oned.disk_detach(disks.vm, last)


def sees_one_less(disks: Disks) -> None:
    disks.cloud.guest(disks.vm).wait_disk("vdc", present=False)
    disks.has_own = False


def sees_it_grown(disks: Disks) -> None:
    assert disks.cloud.guest(disks.vm).disks()["vdc"] == 24 << 20


def is_on_h2(disks: Disks) -> None:
    assert disks.host == "h2"


RESUME = on("vm_resume")
CASES: Dict[str, Case] = {
    "attach": Case("kvm/attach_disk", attach, after=(sees_one_more,)),
    "attach-in-place": Case("kvm/attach_disk", attach_in_place, after=(sees_one_more,)),
    "detach": Case("kvm/detach_disk", on("disk_detach", 2), after=(sees_one_less,)),
    "resize": Case("kvm/resize_disk", on("disk_resize", 2, 24), after=(sees_it_grown,)),
    "suspend": Case("kvm/save", on("vm_suspend"), after=(RESUME,)),
    "stop": Case("kvm/save", on("vm_stop"), after=(Disks.deploy,)),
    "move": Case("kvm/save", on("vm_migrate", "h2"), after=(is_on_h2,)),
    "move-live": Case("semishared/migrate", on("vm_migrate", "h2", how="live"), after=(is_on_h2,)),
    "shutdown": Case("kvm/shutdown", on("vm_poweroff"), after=(RESUME,)),
    "cancel": Case("kvm/cancel", on("vm_poweroff", hard=True), after=(RESUME,)),
    "undeploy": Case("kvm/cancel", on("vm_undeploy", hard=True), after=(Disks.deploy,)),
    "terminate": Case("kvm/cancel", on("vm_terminate", hard=True)),
    "start": Case("kvm/deploy", RESUME, OFF, (on("vm_poweroff", hard=True),)),
    "resume": Case("kvm/restore", RESUME, SUSPENDED, (on("vm_suspend"),)),
}


def files(disks: Disks) -> Dict[str, List[str]]:
    """Return what is in the VM's directories, but for the domain's XML of each start, and what premigrate has
    told a script that did not read it.
    """
    cloud, where = disks.cloud, disks.cloud.vm_dir(disks.vm)
    told = ("deployment.", ".semishared/migration.json")
    return {
        node.name: [name for name in cloud.files(node, where) if not name.startswith(told)]
        for node in (cloud.lab.fe, *cloud.lab.hosts)
    }


@pytest.mark.parametrize("what", sorted(CASES))
def test_what_a_hypervisor_refused_is_as_it_was_and_can_be_done(
    cloud: RealCloud, os_image: int, what: str
) -> None:
    case = CASES[what]
    more = cloud.data_image("plugged", DATA, persistent=True) if what == "attach-in-place" else None
    disks = Disks(cloud, os_image, f"refused-{what}").started()
    for step in case.before:
        step(disks)
    before, images = files(disks), states(disks)
    with failing_on(cloud, "h1", case.script), pytest.raises(ActionFailed, match=SAID):
        case.call(disks)
    assert (disks.at, disks.host) == (case.left, "h1")
    seen(cloud, disks.vm)
    assert (files(disks), states(disks)) == (before, images)
    assert vectors(cloud.oned.vm(disks.vm).template, "DISK")[2]["SIZE"] == "16"
    if case.left == RUNNING:
        disks.check()
    nothing_to_remove(cloud)
    case.call(disks)
    for step in case.after:
        step(disks)
    if disks.at[0] != "DONE":
        disks.check()
    disks.gone()
    if more is not None:
        cloud.oned.image_delete(more)


def states(disks: Disks) -> List[int]:
    """Return the STATE of the images of its disks."""
    return [disks.cloud.oned.image(image).state for image in (disks.mine, disks.own)]


# -- snapshots of a whole VM, which only disks in qcow2 take part in ----------------------------------


def snapshots(vm: RealVm) -> List[str]:
    """Return the names of the snapshots that oned knows."""
    return [row["NAME"] for row in vectors(vm.template, "SNAPSHOT")]


def snapshot(cloud: RealCloud, vm: int, action: str, word: object, expected: List[str]) -> None:
    """Ask for an action on snapshots of a VM, and wait until it has come to an end."""
    call = partial(cloud.oned.api.call, f"vm.snapshot{action}", vm, word)
    cloud.oned._until(vm, call, lambda known: snapshots(known) == expected)


def test_snapshots_of_a_whole_vm_that_a_hypervisor_refused(cloud: RealCloud, os_image: int) -> None:
    own = cloud.data_image("snapped", b"", format="qcow2")
    vm = cloud.deploy("snapped", [{"IMAGE_ID": str(image)} for image in (os_image, own)])
    guest = cloud.guest(vm)
    guest.write("vdb", "one", 1024, KIB)
    with failing_on(cloud, "h1", "kvm/snapshot_create"), pytest.raises(ActionFailed, match=SAID):
        snapshot(cloud, vm, "create", "s", ["s"])
    assert (cloud.oned.state(vm), snapshots(cloud.oned.vm(vm))) == (RUNNING, [])
    snapshot(cloud, vm, "create", "s", ["s"])
    guest = cloud.guest(vm)
    guest.write("vdb", "two", 1024, KIB)
    with failing_on(cloud, "h1", "kvm/snapshot_revert"), pytest.raises(ActionFailed, match=SAID):
        snapshot(cloud, vm, "revert", 0, ["-"])
    assert (cloud.oned.state(vm), snapshots(cloud.oned.vm(vm))) == (RUNNING, ["s"])
    guest.check("vdb", "two", 1024, KIB)
    with failing_on(cloud, "h1", "kvm/snapshot_delete"), pytest.raises(ActionFailed, match=SAID):
        snapshot(cloud, vm, "delete", 0, [])
    assert (cloud.oned.state(vm), snapshots(cloud.oned.vm(vm))) == (RUNNING, ["s"])
    snapshot(cloud, vm, "revert", 0, ["s"])
    guest = cloud.guest(vm)
    guest.check("vdb", "one", 1024, KIB)
    snapshot(cloud, vm, "delete", 0, [])
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    cloud.oned.image_delete(own)
