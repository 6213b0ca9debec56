# SPDX-License-Identifier: Apache-2.0
"""Guests on hosts of two Debian releases: deployed on each, and moved live from each to the other while they
write.
"""

from __future__ import annotations

import pytest

from lab.cloud import SYSTEM, Cloud
from lab.guest import Guest, content
from lab.oned import ActionFailed

KIB = 1024
DATA = content("base", 0, KIB)
WRITTEN = ("vdb", "vdc", "vdd")
PER_SECOND = 4
"""Blocks that a guest writes to each disk."""


def start(guest: Guest, *disks: str) -> None:
    for disk in disks:
        guest.loop(disk, f"loop-{disk}", 4 * KIB, 4 * KIB, PER_SECOND)


def stop(guest: Guest, *disks: str) -> None:
    for disk in disks:
        guest.wait_written(disk)
        counts = guest.loop_stop(disk)
        assert (counts["errors"], counts["mismatches"]) == (0, 0), (disk, counts)
        assert counts["writes"] > 10


@pytest.mark.parametrize("born", ["h1", "h2"])
def test_a_guest_that_writes_moves_live_between_releases(cloud: Cloud, os_image: int, born: str) -> None:
    """One disk in place, an overlay over a base, and one that is of the host alone."""
    mine = cloud.data_image(f"mine-{born}", DATA, persistent=True)
    cow = cloud.data_image(f"cow-{born}", DATA, format="qcow2")
    disks = [{"IMAGE_ID": str(image)} for image in (os_image, mine, cow)]
    vm = cloud.deploy(f"born-on-{born}", [*disks, {"TYPE": "fs", "SIZE": "16", "FORMAT": "qcow2"}], born)
    guest = cloud.guest(vm)
    for disk in ("vdb", "vdc"):
        guest.check(disk, "base", 0, KIB)
        guest.write(disk, "before", 2 * KIB, 64)
    start(guest, *WRITTEN)
    other = "h2" if born == "h1" else "h1"
    for target in (other, born):
        left = cloud.lab.node(cloud.oned.vm(vm).last.host.name), cloud.vm_dir(vm)
        cloud.oned.vm_migrate(vm, target, SYSTEM, how="live")
        assert cloud.oned.state(vm) == ("ACTIVE", 3)
        assert cloud.files(*left) == []
        guest = cloud.guest(vm)
        for disk in ("vdb", "vdc"):
            guest.check(disk, "base", 0, KIB)
            guest.check(disk, "before", 2 * KIB, 64)
    stop(guest, *WRITTEN)
    cloud.terminate(vm)
    assert cloud.read(cloud.source(mine), "raw", 64 << 10, 2 * KIB << 10) == content("before", 2 * KIB, 64)
    assert cloud.leftovers() == []


@pytest.mark.fault(
    70, "a guest whose machine another host's QEMU lacks is refused there before anything comes"
)
def test_a_guest_of_a_newer_machine_is_refused_before_anything_is_copied(cloud: Cloud, os_image: int) -> None:
    """Its template says q35, which QEMU takes for the newest of those: Debian 12's has none of 13's."""
    if cloud.lab.machine == "pc":
        pytest.skip("both hosts have one release: neither QEMU is older")
    cow = cloud.data_image("newer", DATA, format="qcow2")
    vm = cloud.deploy("newer", [{"IMAGE_ID": str(image)} for image in (os_image, cow)], "h2", machine="q35")
    cloud.guest(vm).write("vdb", "kept", 2 * KIB, 64)
    for how in ("live", "save"):
        begun = len(cloud.oned.calls)
        with pytest.raises(ActionFailed, match=rf"SS093 VM {vm} cannot run on h1 .*'pc-q35-10\.\d' is not"):
            cloud.oned.vm_migrate(vm, "h1", SYSTEM, how=how)
        called = [call.action for call in cloud.oned.calls[begun:]]
        assert not {"migrate", "restore"} & set(called), called
        assert cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm)) == []
        if how == "save":
            cloud.oned.vm_recover(vm, "failure")
        assert cloud.oned.state(vm) == ("ACTIVE", 3) and cloud.oned.vm(vm).last.host.name == "h2"
        guest = cloud.guest(vm)
        guest.check("vdb", "base", 0, KIB)
        guest.check("vdb", "kept", 2 * KIB, 64)
    for host in ("h2", "h1"):
        cloud.oned.vm_stop(vm)
        cloud.oned.vm_resume(vm)
        if host == "h2":
            cloud.oned.vm_deploy(vm, "h2", SYSTEM)
            cloud.guest(vm).check("vdb", "kept", 2 * KIB, 64)
    with pytest.raises(ActionFailed, match=rf"SS093 VM {vm} cannot run on h1 .*'pc-q35-10\.\d' is not"):
        cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    assert cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm)) == []
    assert cloud.files(cloud.lab.front_ends[0], cloud.vm_dir(vm)) != []
    cloud.oned.vm_recover(vm, "delete")
    assert cloud.leftovers() == []


def test_a_machine_that_a_template_names_is_asked_for_before_anything_is_copied(
    cloud: Cloud, os_image: int
) -> None:
    if cloud.lab.machine == "pc":
        pytest.skip("both hosts have one release: neither QEMU is older")
    vm = cloud.create("named", [{"IMAGE_ID": str(os_image)}], "pc-q35-10.0")
    with pytest.raises(ActionFailed, match=rf"SS093 VM {vm} cannot run on h1 .*'pc-q35-10\.0' is not"):
        cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    assert cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm)) == []
    cloud.oned.vm_recover(vm, "delete")
    vm = cloud.deploy("at-home", [{"IMAGE_ID": str(os_image)}], "h2", machine="pc-q35-10.0")
    cloud.guest(vm)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
