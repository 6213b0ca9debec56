# SPDX-License-Identifier: Apache-2.0
"""Running VMs that move with disks of their own: everything the guest has written is there, and nothing is
left behind.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import contextmanager
from typing import Callable, Iterator

import pytest

from lab import Node
from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from lab.guest import Guest, content
from lab.oned import ActionFailed

KIB = 1024
DATA = content("base", 0, KIB)
OTHER_SYSTEM = 102
LOCAL = ("overlay", "copy", "remote-first", "store-clone")
FORMATS = ("raw", "qcow2")
WRITTEN = tuple(f"vd{letter}" for letter in "bcdfghkl")
"""The verifier writes to eight disks at once."""
PER_SECOND = 4
"""Blocks that it writes to each: an emulated processor is kept busy by more."""


def mixed(cloud: Cloud, name: str, os_image: int, image_for: Callable[[str, str], int]) -> int:
    """Deploy a VM with every kind of disk in each format, and a snapshot of one."""
    images = [
        os_image,
        *(image_for(place, format) for place in LOCAL for format in FORMATS),
        cloud.data_image(f"mine-{name}", DATA, persistent=True),
    ]
    volatile = [{"TYPE": "fs", "SIZE": "16", "FORMAT": format} for format in FORMATS]
    vm = cloud.deploy(name, [*({"IMAGE_ID": str(image)} for image in images), *volatile])
    cloud.guest(vm).write("vdb", "before", 2 * KIB, 64)
    cloud.oned.disk_snapshot_create(vm, 1, "s0")
    # The layer of one that is deleted is replaced under the guest: QEMU goes on with the one it had open.
    kept = [cloud.oned.disk_snapshot_create(vm, 2, name) for name in ("one", "two")]
    cloud.oned.disk_snapshot_delete(vm, 2, kept[0])
    return vm


def start(guest: Guest, *disks: str) -> None:
    for disk in disks:
        guest.loop(disk, f"loop-{disk}", 4 * KIB, 4 * KIB, PER_SECOND)


def stop(guest: Guest, *disks: str) -> list[int]:
    """End the writers; return how long each waited at most, in ms."""
    gaps = []
    for disk in disks:
        guest.wait_written(disk)
        counts = guest.loop_stop(disk)
        assert (counts["errors"], counts["mismatches"]) == (0, 0), (disk, counts)
        assert counts["writes"] > 10
        gaps.append(counts["maxgap_ms"])
    return gaps


def test_mixed_vm_when_moved_live_loses_nothing(
    cloud: Cloud,
    os_image: int,
    image_for: Callable[[str, str], int],
    figure: Callable[[str, object], None],
    cell: Callable[..., None],
) -> None:
    vm = mixed(cloud, "mixed", os_image, image_for)
    guest = cloud.guest(vm)
    start(guest, *WRITTEN)
    shapes = []
    for target, system in (("h2", SYSTEM), ("h2", OTHER_SYSTEM), ("h1", OTHER_SYSTEM), ("h1", SYSTEM)):
        before = cloud.lab.node(cloud.oned.vm(vm).last.host.name), cloud.vm_dir(vm)
        cloud.oned.vm_migrate(vm, target, system, how="live")
        assert cloud.oned.state(vm) == ("ACTIVE", 3)
        assert cloud.files(*before) == []
        shapes.append(cloud.files(cloud.lab.node(target), cloud.vm_dir(vm)))
        xml = (
            cloud.lab.node(target)
            .run(["virsh", "-q", "-c", "qemu:///system", "dumpxml", f"one-{vm}"])
            .stdout.decode()
        )
        assert f"/{SYSTEM if system == OTHER_SYSTEM else OTHER_SYSTEM}/{vm}" not in xml
        guest = cloud.guest(vm)
        guest.check("vdb", "before", 2 * KIB, 64)
    figure("live migration of local disks: longest gap ms", max(stop(guest, *WRITTEN)))
    assert shapes == [shapes[0]] * 4
    assert not [name for name in shapes[0] if "1000000" in name or "go-over" in name]
    cloud.oned.disk_snapshot_create(vm, 1, "s1")
    cloud.oned.vm_poweroff(vm)
    for target, system in (("h1", OTHER_SYSTEM), ("h2", SYSTEM)):
        before = cloud.lab.node(cloud.oned.vm(vm).last.host.name), cloud.vm_dir(vm)
        cloud.oned.vm_migrate(vm, target, system)
        assert cloud.files(*before) == []
    cloud.oned.disk_snapshot_revert(vm, 1, 0)
    cloud.oned.vm_resume(vm)
    cloud.guest(vm).check("vdb", "before", 2 * KIB, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    cell("migrate", (*LOCAL, "volatile"), FORMATS, "live")


OTHERS = f"{DATASTORES}/104"


def of_another_driver(cloud: Cloud, vm: int, number: int, driver: str, source: str) -> None:
    """Give a running VM a disk that is none of ours, as libvirt has it, and oned."""
    target = f"vd{chr(ord('a') + number)}"
    h1 = cloud.lab.node("h1")
    kind = "network" if "protocol" in source else "file"
    h1.path("/var/tmp/disk.xml").write_text(
        f"<disk type='{kind}' device='disk'><driver name='qemu' type='raw' cache='none'/><source "
        f"{source}</source>"
        f"<target dev='{target}' bus='virtio'/></disk>"
    )
    h1.run(["virsh", "-q", "-c", "qemu:///system", "attach-device", f"one-{vm}", "/var/tmp/disk.xml"])
    known = {"DISK_ID": str(number), "IMAGE_ID": "99", "TM_MAD": driver, "TARGET": target}
    cloud.oned.vm(vm).template["DISK"] = [*cloud.oned.vm(vm).disks, known]


def forgotten(cloud: Cloud, vm: int, number: int) -> None:
    node = cloud.lab.node(cloud.oned.vm(vm).last.host.name)
    node.run(
        ["virsh", "-q", "-c", "qemu:///system", "detach-disk", f"one-{vm}", f"vd{chr(ord('a') + number)}"],
        check=False,
    )
    cloud.oned.vm(vm).template["DISK"] = [
        disk for disk in cloud.oned.vm(vm).disks if disk["DISK_ID"] != str(number)
    ]


def test_disks_of_other_drivers_move_where_both_hosts_see_them_and_are_named_else(
    cloud: Cloud, os_image: int
) -> None:
    """What is on the network, or in a directory in which each host reads what the other writes; nothing
    else.
    """
    vm = cloud.deploy("others", [{"IMAGE_ID": str(os_image)}], context=False)
    fe, h1, h2 = cloud.lab.fe, cloud.lab.node("h1"), cloud.lab.node("h2")
    shared, alone = f"{DATASTORES}/{STORE}/other-disk", f"{OTHERS}/other-disk"
    for node in (h1, h2):
        node.run(["mkdir", "-p", OTHERS])
        node.run(["truncate", "-s", "16M", alone])
    h1.run(["truncate", "-s", "16M", shared, f"{cloud.vm_dir(vm)}/disk.7"])
    fe.run(["truncate", "-s", "16M", "/var/tmp/nbd.img"])
    server = fe.popen(["qemu-nbd", "--shared=4", "--persistent", "--format=raw", "/var/tmp/nbd.img"])
    try:
        of_another_driver(cloud, vm, 5, "shared", f"file='{shared}'>")
        h1.run(["ln", "-s", shared, f"{cloud.vm_dir(vm)}/disk.5"])
        of_another_driver(
            cloud, vm, 6, "iscsi_libvirt", f"protocol='nbd' name=''><host name='{fe.ip}' port='10809'/>"
        )
        refused = (
            (7, f"{cloud.vm_dir(vm)}/disk.7", "disk 7.*qcow2.*own directory"),
            (8, alone, "datastore 104 on h2 is not the same"),
        )
        for number, file, why in refused:
            of_another_driver(cloud, vm, number, "qcow2", f"file='{file}'>")
            is_refused(cloud, vm, why)
            forgotten(cloud, vm, number)
        h1.run(["rm", f"{cloud.vm_dir(vm)}/disk.7"])
        cloud.oned.vm_migrate(vm, "h2", how="live")
        said = h2.run(["virsh", "-q", "-c", "qemu:///system", "domblklist", f"one-{vm}"]).stdout.decode()
        assert shared in said
        assert "vdg" in said
        assert not [
            name
            for name in cloud.files(fe, f"{DATASTORES}/{STORE}") + cloud.files(h1, OTHERS)
            if "probe" in name
        ]
    finally:
        server.kill()
        for number in (5, 6):
            forgotten(cloud, vm, number)
        h2.run(["rm", "-rf", f"{cloud.vm_dir(vm)}/disk.5", shared, OTHERS])
        h1.run(["rm", "-rf", OTHERS])
    cloud.terminate(vm)
    assert cloud.leftovers() == []


# -- what goes wrong --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(cloud: Cloud, os_image: int) -> Iterator[int]:
    """A running VM on h1 with an overlay of its own, which writes all the time; nothing of it is on h2."""
    vm = cloud.deploy(
        "own", [{"IMAGE_ID": str(os_image)}, {"TYPE": "fs", "SIZE": "64", "FORMAT": "qcow2"}], context=False
    )
    guest = cloud.guest(vm)
    start(guest, "vda", "vdb")
    yield vm
    stop(cloud.guest(vm), "vda", "vdb")
    cloud.terminate(vm)
    assert cloud.leftovers() == []


def is_untouched(cloud: Cloud, vm: int) -> None:
    """See that the guest runs on h1, on the disks it had, and that nothing of it is on h2."""
    h1, h2 = cloud.lab.node("h1"), cloud.lab.node("h2")
    assert cloud.oned.state(vm) == ("ACTIVE", 3)
    assert domains(h1) == [f"one-{vm}"]
    assert domains(h2) == []
    names = cloud.files(h1, cloud.vm_dir(vm))
    left = ("1000000", "go-over", "migration.json")
    assert not [name for name in names if any(word in name for word in left)], names
    assert [name for name in cloud.files(h2, f"{DATASTORES}/{SYSTEM}") if not name.startswith(".m")] == []
    assert cloud.guest(vm).loop_stat("vda")["errors"] == 0


def domains(node: Node) -> list[str]:
    return node.run(["virsh", "-q", "-c", "qemu:///system", "list", "--name"]).stdout.decode().split()


def is_refused(cloud: Cloud, vm: int, why: str) -> None:
    with pytest.raises(ActionFailed, match=why):
        cloud.oned.vm_migrate(vm, "h2", how="live")


def in_its_midst(cloud: Cloud, vm: int, then: Callable[[], object]) -> None:
    """Have something happen while libvirt copies the deltas of the VM, slowly."""
    kvmrc = cloud.lab.node("h1").path("/var/tmp/one/etc/vmm/kvm/kvmrc")
    before = kvmrc.read_text()
    kvmrc.write_text(f'{before}\nMIGRATE_OPTIONS="--bandwidth 1"\n')
    moving = threading.Thread(target=_ends, args=(cloud, vm))
    try:
        moving.start()
        until_moving(cloud, vm)
        then()
        cloud.lab.node("h1").run(
            ["virsh", "-q", "-c", "qemu:///system", "migrate-setspeed", f"one-{vm}", "1000"], check=False
        )
        moving.join(400)
        assert not moving.is_alive()
    finally:
        kvmrc.write_text(before)


def _ends(cloud: Cloud, vm: int) -> None:
    with pytest.raises(ActionFailed):
        cloud.oned.vm_migrate(vm, "h2", how="live")


def until_moving(cloud: Cloud, vm: int) -> None:
    said, deadline = "", time.monotonic() + 120
    while time.monotonic() < deadline:
        said = (
            cloud.lab.node("h1")
            .run(["virsh", "-q", "-c", "qemu:///system", "domjobinfo", f"one-{vm}"], check=False)
            .stdout.decode()
        )
        if re.search(r"(Data|File|Memory) processed: *[1-9]", said):
            return
        time.sleep(0.1)
    raise AssertionError(f"no migration has begun: {said}")


@contextmanager
def mounted(node: Node, directory: str, size: str) -> Iterator[None]:
    """Have a small file system in the place of a directory."""
    node.run(["mkdir", "-p", directory])
    node.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "small", directory], user="root")
    try:
        yield
    finally:
        node.run(["umount", directory], user="root")


def test_target_without_room_is_refused_before_anything_moves(cloud: Cloud, own: int) -> None:
    with mounted(cloud.lab.node("h2"), f"{DATASTORES}/{SYSTEM}", "1m"):
        is_refused(cloud, own, "are missing")
    is_untouched(cloud, own)


def test_target_without_base_and_store_is_refused_before_anything_moves(cloud: Cloud, own: int) -> None:
    h2 = cloud.lab.node("h2")
    with mounted(h2, f"{DATASTORES}/{STORE}", "1m"):
        h2.run(["rm", "-rf", f"{DATASTORES}/.semishared/bases"], user="root")
        # Nobody is known to have it: else h1 would be asked.
        cloud.lab.fe.run(["rm", "-rf", f"{DATASTORES}/.semishared/holders"], user="root")
        is_refused(cloud, own, "SS084")
    is_untouched(cloud, own)


def test_directory_that_is_there_already_is_neither_replaced_nor_removed(cloud: Cloud, own: int) -> None:
    h2, place = cloud.lab.node("h2"), cloud.vm_dir(own)
    h2.run(["sh", "-c", f"mkdir -p {place}/.semishared; echo all that there is of it > {place}/disk.7"])
    is_refused(cloud, own, "SS063")
    assert cloud.files(h2, place) == [".semishared", "disk.7"]
    assert any(
        "is kept: it is not what this migration has brought" in said for said in cloud.said("failmigrate")
    )
    h2.run(["rm", "-r", place])
    is_untouched(cloud, own)


def test_target_that_loses_its_libvirtd_in_the_midst(cloud: Cloud, own: int) -> None:
    h2 = cloud.lab.node("h2")

    def kill() -> None:
        h2.run(["pkill", "-KILL", "-x", "libvirtd"], user="root")
        h2.run(["/usr/sbin/libvirtd", "-d"], user="root")

    in_its_midst(cloud, own, kill)
    is_untouched(cloud, own)


@pytest.mark.long
def test_target_that_is_cut_off_in_the_midst(cloud: Cloud, own: int) -> None:
    h2 = cloud.lab.node("h2")
    # QEMU's copies to the other host end when TCP gives up: by default that is a quarter of an hour.
    cloud.lab.node("h1").run(["sysctl", "-qw", "net.ipv4.tcp_retries2=5"], user="root")
    try:
        in_its_midst(cloud, own, h2.cut)
    finally:
        h2.join()
    h2.run(["bash", "-c", f"virsh -q -c qemu:///system destroy one-{own} || true"], user="root")
    # That failed; then oned put the VM back.
    cloud.tm_migrate("failmigrate", own, "h2", cloud.oned.vm(own).last.seq - 1)
    is_untouched(cloud, own)


def test_migration_that_is_given_up_in_its_midst(cloud: Cloud, own: int) -> None:
    in_its_midst(
        cloud,
        own,
        lambda: cloud.lab.node("h1").run(["virsh", "-c", "qemu:///system", "domjobabort", f"one-{own}"]),
    )
    is_untouched(cloud, own)


def test_failmigrate_that_nobody_calls_is_made_good_by_the_next_action(cloud: Cloud, own: int) -> None:
    seq = cloud.oned.vm(own).last.seq
    cloud.tm_migrate("premigrate", own, "h2", seq)
    assert "go-over" in " ".join(cloud.files(cloud.lab.node("h1"), cloud.vm_dir(own)))
    cloud.oned.disk_snapshot_create(own, 0, "s")
    names = cloud.files(cloud.lab.node("h1"), cloud.vm_dir(own))
    assert not [name for name in names if "1000000" in name or "go-over" in name]
    cloud.oned.disk_snapshot_delete(own, 0, 0)
    cloud.tm_migrate("failmigrate", own, "h2", seq)
    is_untouched(cloud, own)
