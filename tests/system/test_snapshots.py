# SPDX-License-Identifier: Apache-2.0
"""Snapshots and sizes of a running guest's disks: one guest per test, every place, while it writes and
verifies.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any, Callable

import pytest

from lab.cloud import DATASTORES, Cloud
from lab.guest import content
from lab.oned import ActionFailed

KIB = 64
DATA = content("base", 0, KIB)
DISKS = [
    # name of the disk in the guest, place, format
    ("vdb", "overlay", "raw"),
    ("vdc", "copy", "raw"),
    ("vdd", "store-clone", "qcow2"),
    ("vde", "in-place", "raw"),
    ("vdf", "in-place", "qcow2"),
    ("vdg", "overlay", "qcow2"),
    ("vdh", "copy", "qcow2"),
    ("vdi", "store-clone", "raw"),
    ("vdj", "remote-first", "raw"),
    ("vdk", "remote-first", "qcow2"),
]
PLACES = ("overlay", "copy", "remote-first", "store-clone", "in-place")
FORMATS = ("raw", "qcow2")
MERGED = ("vdb", "vdg", "vdh", "vdi", "vdk")
"""Disks whose first snapshot is deleted under the guest: a frozen layer takes it over. Of the others, the one
right below.
"""
NAMES = {target: disk for disk, (target, _, _) in enumerate(DISKS, 1)}


def images(cloud: Cloud, prefix: str, image_for: Callable[[str, str], int]) -> list[int]:
    return [
        cloud.data_image(f"{prefix}-{format}", DATA, persistent=True, format=format)
        if place == "in-place"
        else image_for(place, format)
        for _, place, format in DISKS
    ]


def deployed(cloud: Cloud, name: str, os_image: int, data: list[int]) -> int:
    return cloud.deploy(name, [{"IMAGE_ID": str(image)} for image in (os_image, *data)])


def layers(cloud: Cloud, vm: int, disk: int) -> list[str]:
    """Return the files beside a disk: layers, or the snapshots of a disk in place."""
    node = cloud.lab.node(cloud.oned.vm(vm).last.host.name)
    record = json.loads(node.path(f"{cloud.vm_dir(vm)}/.semishared/disk.{disk}.json").read_text())
    source = record["image"]["source"]
    folder = f"{source}.snap" if record["how"] == "in-place" else record["path"].rpartition("/")[0]
    return [name for name in cloud.files(node, folder) if name != "seq.json"]


def test_live_snapshots_of_every_kind_of_disk_under_a_guest_that_writes(
    cloud: Cloud, os_image: int, image_for: Callable[[str, str], int], cell: Callable[..., None]
) -> None:
    """Snapshot, write, delete and revert: what a snapshot holds is what the guest had written, and no write
    errs.
    """
    data = images(cloud, "live", image_for)
    vm = deployed(cloud, "live-snap", os_image, data)
    guest = cloud.guest(vm)
    for target in NAMES:
        guest.write(target, "one", 1024, 64)
        guest.write(target, "only", 1536, 64)
    guest.loop("vdb", "loop", 4096, 2048, 4)
    guest.loop("vde", "loop", 4096, 2048, 4)
    for disk in NAMES.values():
        assert cloud.oned.disk_snapshot_create(vm, disk, "first") == 0
    for target in NAMES:
        guest.write(target, "two", 1024, 64)
    for disk in NAMES.values():
        assert cloud.oned.disk_snapshot_create(vm, disk, "second") == 1
    for target in NAMES:
        guest.write(target, "three", 2048, 64)
    # From a snapshot of the running guest.
    for target, disk in NAMES.items():
        saved = cloud.oned.disk_saveas(vm, disk, f"from-0-{target}", snapshot=0)
        assert cloud.read(cloud.source(saved), DISKS[disk - 1][2], 64 << 10, 1024 << 10) == content(
            "one", 1024, 64
        )
        assert cloud.read(cloud.source(saved), DISKS[disk - 1][2], KIB << 10) == DATA
    for target, disk in NAMES.items():
        cloud.oned.disk_snapshot_delete(vm, disk, 0 if target in MERGED else 1)
    for target in NAMES:
        guest.check(target, "only", 1536, 64)
        guest.check(target, "base", 0, KIB)
        guest.check(target, "two", 1024, 64)
        guest.check(target, "three", 2048, 64)
    for target in ("vdb", "vde"):
        guest.wait_written(target)
        counts = guest.loop_stop(target)
        assert (counts["errors"], counts["mismatches"]) == (0, 0)
        assert counts["writes"] > 10
    assert layers(cloud, vm, 1) == ["1", "2"]
    assert layers(cloud, vm, 2) == ["0", "2"]
    assert layers(cloud, vm, 4) == ["0"]
    cloud.oned.vm_poweroff(vm, hard=True)
    for target, disk in NAMES.items():
        number, seed = (1, "two") if target in MERGED else (0, "one")
        saved = cloud.oned.disk_saveas(vm, disk, f"off-{target}", snapshot=number)
        assert cloud.read(cloud.source(saved), DISKS[disk - 1][2], 64 << 10, 1024 << 10) == content(
            seed, 1024, 64
        )
        cloud.oned.disk_snapshot_revert(vm, disk, number)
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for target in NAMES:
        guest.check(target, "base", 0, KIB)
        guest.check(target, "only", 1536, 64)
        guest.check(target, "two" if target in MERGED else "one", 1024, 64)
        with pytest.raises(Exception, match=r"."):
            guest.check(target, "three", 2048, 64)
    # Down to a root of its own: nothing below the copy, the base below the overlay.
    cloud.oned.disk_snapshot_delete(vm, NAMES["vdb"], 1)
    cloud.oned.disk_snapshot_delete(vm, NAMES["vdc"], 0)
    cloud.oned.disk_snapshot_delete(vm, NAMES["vdd"], 0)
    cloud.oned.disk_snapshot_delete(vm, NAMES["vdj"], 0)
    # What libvirt says the guest reads is read again after it has been off: by then only the files know.
    cloud.oned.vm_poweroff(vm, hard=True)
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for target, seed in (("vdb", "two"), ("vdc", "one"), ("vdd", "one"), ("vdj", "one")):
        guest.check(target, seed, 1024, 64)
        guest.check(target, "only", 1536, 64)
    # Layers travel: names in headers must be relative, whoever wrote them.
    cloud.oned.disk_snapshot_create(vm, NAMES["vdb"], "again")
    guest.write("vdb", "four", 1024, 64)
    cloud.oned.vm_migrate(vm, "h2", how="poweroff-hard", datastore_id=102)
    guest = cloud.guest(vm)
    guest.check("vdb", "four", 1024, 64)
    for target in ("vdc", "vdj"):
        guest.check(target, "one", 1024, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    for image, format in ((data[3], "raw"), (data[4], "qcow2")):
        assert cloud.read(cloud.source(image), format, 64 << 10, 1024 << 10) == content("one", 1024, 64)
    cell(("snap_create", "snap_delete", "cpds-snapshot"), PLACES, FORMATS, "live")
    cell(("snap_revert", "cpds-snapshot"), PLACES, FORMATS, "off")


def test_snapshots_of_a_suspended_guest(
    cloud: Cloud, os_image: int, image_for: Callable[[str, str], int]
) -> None:
    """The memory image names layers that are frozen, merged and gone when the guest comes back."""
    cow, full, beside, remote = (
        image_for(place, "raw") for place in ("overlay", "copy", "store-clone", "remote-first")
    )
    mine = cloud.data_image("susp-mine", DATA, persistent=True)
    vm = cloud.deploy(
        "susp",
        [{"IMAGE_ID": str(image)} for image in (os_image, cow, full, beside, mine, remote)],
        context=False,
    )
    guest = cloud.guest(vm)
    disks = {"vdb": 1, "vdc": 2, "vdd": 3, "vde": 4, "vdf": 5}
    for target in disks:
        guest.write(target, "one", 1024, 64)
    cloud.oned.disk_snapshot_create(vm, 1, "before")
    cloud.oned.disk_snapshot_delete(vm, 1, 0)
    cloud.oned.disk_snapshot_create(vm, 1, "live")
    guest.write("vdb", "two", 2048, 64)
    cloud.oned.vm_suspend(vm)
    kept = {target: cloud.oned.disk_snapshot_create(vm, disk, "suspended") for target, disk in disks.items()}
    cloud.oned.disk_snapshot_delete(vm, 1, 1)
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    guest.check("vdb", "two", 2048, 64)
    for target in disks:
        guest.check(target, "one", 1024, 64)
        guest.write(target, "three", 1024, 64)
    cloud.oned.vm_stop(vm)
    cloud.oned.vm_resume(vm)
    cloud.oned.vm_deploy(vm, "h2", 101)
    guest = cloud.guest(vm)
    for target in disks:
        guest.check(target, "three", 1024, 64)
    cloud.oned.vm_poweroff(vm, hard=True)
    for target, disk in disks.items():
        cloud.oned.disk_snapshot_revert(vm, disk, kept[target])
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    guest.check("vdb", "two", 2048, 64)
    for target in disks:
        guest.check(target, "one", 1024, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


@pytest.mark.long  # tests/faults/test_live_kill.py has an overlay of which 2 goes after 0, killed at points of it, too  # noqa: E501
def test_snapshots_are_deleted_while_the_guest_runs_after_others_were(cloud: Cloud, os_image: int) -> None:
    """libvirt goes on to know layers that were merged away, and looks into each when the next is pulled."""
    places: list[dict[str, Any]] = [{}, {"SEMISHARED_LOCAL": "copy"}, {"SEMISHARED_PLACE": "shared"}]
    data = [cloud.data_image(f"gone-{number}", DATA, **place) for number, place in enumerate(places)]
    vm = cloud.deploy("gone", [{"IMAGE_ID": str(image)} for image in (os_image, *data)])
    guest, disks = cloud.guest(vm), {"vdb": 1, "vdc": 2, "vdd": 3}
    for number, target in product(range(4), disks):
        guest.write(target, f"kept{number}", 1024 + 64 * number, 64)
        if number < 3:
            assert cloud.oned.disk_snapshot_create(vm, disks[target], f"{number}") == number
    for target, disk in disks.items():
        cloud.oned.disk_snapshot_delete(vm, disk, 0)
        cloud.oned.disk_snapshot_delete(vm, disk, 2)
        assert not {"0", "2"} & set(layers(cloud, vm, disk)), target
        cloud.oned.disk_snapshot_delete(vm, disk, 1)
        assert len(layers(cloud, vm, disk)) == 1, target
    cloud.oned.vm_poweroff(vm, hard=True)
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for number, target in product(range(4), disks):
        guest.check(target, f"kept{number}", 1024 + 64 * number, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


def test_snapshot_of_the_whole_vm_with_a_disk_that_cannot_is_refused_in_one_line(
    cloud: Cloud, os_image: int
) -> None:
    mine = cloud.data_image("whole-mine", DATA, persistent=True)
    vm = cloud.deploy("whole", [{"IMAGE_ID": str(image)} for image in (os_image, mine)], context=False)
    cloud.guest(vm)
    before = layers(cloud, vm, 0)
    host = cloud.lab.node("h1")
    message = f"<VMM_DRIVER_ACTION_DATA><DATASTORE><BASE_PATH>{DATASTORES}/101</BASE_PATH></DATASTORE></VMM_DRIVER_ACTION_DATA>"  # noqa: E501
    argv = ["/var/tmp/one/vmm/semishared/snapshot_create", f"one-{vm}", "0", str(vm), "h1"]
    done = host.run(argv, input=message.encode(), check=False)
    assert done.returncode == 1
    said = [line for line in done.stderr.decode().splitlines() if line]
    assert len(said) == 1
    assert "disk 1 (in-place, raw) cannot take part" in said[0]
    assert layers(cloud, vm, 0) == before
    cloud.oned.disk_detach(vm, 1)
    done = host.run(argv, input=message.encode(), check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ActionFailed, match="1 system snapshots"):
        cloud.oned.disk_snapshot_create(vm, 0, "refused")
    cloud.terminate(vm)
    assert cloud.leftovers() == []


def test_disks_grow_running_off_and_undeployed(
    cloud: Cloud, os_image: int, image_for: Callable[[str, str], int], cell: Callable[..., None]
) -> None:
    data = images(cloud, "grow", image_for)
    disks = [{"IMAGE_ID": str(image)} for image in (os_image, *data)]
    disks += [{"TYPE": "fs", "SIZE": "16", "FORMAT": format} for format in FORMATS]
    vm = cloud.deploy("grow", disks, context=False)
    guest = cloud.guest(vm)
    numbers = {**NAMES, "vdl": 11, "vdm": 12}
    sizes = {target: 16 + 8 * number for target, number in numbers.items()}
    reverted = ("vdb", "vdc", "vdd", "vde", "vdf", "vdj")
    for target in reverted:
        assert cloud.oned.disk_snapshot_create(vm, numbers[target], "small") == 0
    for target, size in sizes.items():
        cloud.oned.disk_resize(vm, numbers[target], size)
    assert {name: guest.disks()[name] >> 20 for name in sizes} == sizes
    for target, size in sizes.items():
        guest.write(target, "end", (size << 10) - 64, 64)
    cloud.oned.vm_poweroff(vm, hard=True)
    for target in sizes:
        cloud.oned.disk_resize(vm, numbers[target], sizes[target] + 16)
    cloud.oned.vm_undeploy(vm)
    for target in sizes:
        sizes[target] += 32
        cloud.oned.disk_resize(vm, numbers[target], sizes[target])
    cloud.oned.vm_deploy(vm, "h2", 101)
    guest = cloud.guest(vm)
    assert {name: guest.disks()[name] >> 20 for name in sizes} == sizes
    for target, size in sizes.items():
        guest.check(target, "base" if target in NAMES else "zero", 0, KIB)
        guest.check(target, "end", ((size - 32) << 10) - 64, 64)
    # Back to when they were smaller; the size that OpenNebula knows does not go back.
    cloud.oned.vm_poweroff(vm, hard=True)
    for target in reverted:
        cloud.oned.disk_snapshot_revert(vm, numbers[target], 0)
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    assert {name: guest.disks()[name] >> 20 for name in sizes} == sizes
    for target in reverted:
        guest.check(target, "base", 0, KIB)
        guest.check(target, "zero", ((sizes[target] - 32) << 10) - 64, 64)
    cloud.terminate(vm)
    info = json.loads(
        cloud.lab.fe.run(["qemu-img", "info", "--output=json", "-f", "raw", cloud.source(data[3])]).stdout
    )
    assert info["virtual-size"] == sizes["vde"] << 20
    assert cloud.leftovers() == []
    cell("resize", (*PLACES, "volatile"), FORMATS, ("off", "live"))
