# SPDX-License-Identifier: Apache-2.0
"""What lets go of a store, or is committed, has the room and the memory that it takes where its layers lie:
on a device of the pool.

All but the guest is real; what QEMU would do to it is not begun here (tests/pool/test_pool.py does that).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import pytest

from semishared.device import memory
from semishared.disk import detach, epochs, records, recovery
from semishared.disk.history import UNKNOWN
from semishared.guest import active_layer, domain
from semishared.model import steps as s
from semishared.model.base.steps import DetachVm
from semishared.model.device import steps as device_steps
from semishared.model.disk import names as disk_names
from semishared.model.disk.commit_steps import CreateDiff, FinishDisk
from tools.test_pool import Pool, device_of
from tools.world import OVERLAY_OPTIONS, MiB, World, qemu_io

SIZE = 64 * MiB


def remote(world: World, disk: s.DiskRef, *classes: str) -> None:
    """Make a remote-first disk, as `tm/clone` plans it for an image of some class."""
    image = s.ImageRef(100, 7, "raw", str(world.store / "image"))
    image = image if os.path.exists(image.source) else world.image()
    world.on(s.PrepareVm(disk.vm, disk.vm_dir), device_steps.PlaceLayers(disk, classes, SIZE, SIZE // 10))
    world.on(s.CreateRemote(disk, image, 0, OVERLAY_OPTIONS), device_steps.NoteClasses(disk, classes))


def write(disk: s.DiskRef, mib: int) -> None:
    qemu_io(f"{disk.path}.snap/0", "qcow2", f"write -P 7 0 {mib}M")


def fill(device: str, left: int) -> None:
    stat = os.statvfs(device)
    with Path(device, "full").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - left)


class Guest:
    """A guest that runs, as far as this asks, and what is there when it is about to go over."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pool = pool
        self.seen: List[List[int]] = []
        monkeypatch.setattr(domain, "state", lambda _: "running")
        monkeypatch.setattr(domain, "snapshots", lambda _: [])
        monkeypatch.setattr(detach, "go_over_live", self.goes_over)

    def promised(self) -> List[int]:
        return [int(str(row["promised"])) >> 20 for row in self.pool.rows().values() if row["class"] == "ram"]

    def goes_over(self, vm_dir: str, name: str, disks: List[active_layer.Switch], rate: int) -> None:
        self.seen.append(self.promised())

    def detach(self, *disks: s.DiskRef) -> Dict[str, Any]:
        step = DetachVm(
            5, disks[0].vm_dir, "one-5", tuple(disk.disk for disk in disks), ("",) * len(disks), 0
        )
        return detach.detach(step, epochs.arrived(UNKNOWN, [step], {}), None)._asdict()


@pytest.fixture
def guest(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Guest:
    pool.set(*map(str, pool.paths[:2]), f"{pool.paths[2]}=ram")
    return Guest(pool, monkeypatch)


def test_memory_is_promised_to_the_delta_and_the_copies_while_a_disk_lets_go(
    world: World, guest: Guest
) -> None:
    disk = world.disk()
    remote(world, disk, "ram")
    write(disk, 8)
    assert guest.promised() == [64]
    answer = guest.detach(disk)
    assert not answer["error"], answer
    # One of the disk, the delta, and the copy of the layer that its guest writes to.
    assert guest.seen == [[192]] and guest.promised() == [64]


def test_a_snapshot_over_the_image_has_a_copy_as_well(world: World, guest: Guest) -> None:
    disk = world.disk()
    remote(world, disk, "ram")
    world.on(s.AddLayer(disk, 1, 0, "qcow2"), s.ActivateLayer(disk, 1, "qcow2"))
    assert guest.promised() == [128]
    # It would be five: two, a delta, and copies of both.
    answer = guest.detach(disk)
    assert (
        answer["id"] == "SS150"
        and "disk.1: 5 layers of up to 64.0 MiB each are more than the 243.2 MiB" in answer["error"]
    ), answer
    assert guest.seen == [] and guest.promised() == [128]


def test_a_detach_for_which_memory_has_nothing_left_is_refused_and_changes_nothing(
    world: World, guest: Guest
) -> None:
    disks = [world.disk(5, number) for number in (1, 2)]
    for disk in disks:
        remote(world, disk, "ram")
    answer = guest.detach(*disks)
    assert answer["id"] == "SS150" and "when the VM is off" in answer["error"], answer
    assert guest.seen == [] and guest.promised() == [128], "what was promised to the first is given back"
    assert recovery.left(disks[0].vm_dir) == [] and world.leases() == []
    qemu_io(f"{disks[0].path}.snap/0", "qcow2", "read -P 0xa1 1M 64k")


def test_what_a_killed_detach_was_promised_the_next_action_gives_back(world: World, guest: Guest) -> None:
    disk = world.disk()
    remote(world, disk, "ram")
    folder = f"{disk.path}.snap"
    memory.more(folder, layers=2)
    record = records.record_of(disk)
    active_layer.note(disk.vm_dir, [active_layer.Switch(record, record)])
    active_layer.create(record)
    assert guest.promised() == [192]
    recovery.recover(disk.vm_dir, "")
    assert guest.promised() == [64] and not os.path.exists(disk_names.delta(disk.vm_dir, 1))


def test_copies_that_do_not_fit_beside_the_layers_are_refused_before_the_guest_is_asked(
    world: World, guest: Guest
) -> None:
    disk = world.disk()
    remote(world, disk)
    write(disk, 16)
    world.on(s.StageBase(str(world.root), s.ImageRef(100, 7, "raw", str(world.store / "image"))))
    fill(device_of(f"{disk.path}.snap"), 8 * MiB)
    answer = guest.detach(disk)
    assert answer["id"] == "SS030" and f"{disk_names.layers(disk.path)} on" in answer["error"], answer
    assert guest.seen == []


def test_idle_bases_beside_a_diff_go_for_its_last_commit(world: World, pool: Pool) -> None:
    pool.set(str(pool.paths[0]))
    image, disk = world.image(), world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), CreateDiff(disk, image, 0, ""))
    qemu_io(f"{disk.path}.snap/0", "qcow2", "write -P 0x77 2M 64k")
    idle = world.image("idle", size=4 * MiB)._replace(id=8)
    qemu_io(idle.source, "raw", "write -P 1 0 4M")
    world.on(s.StageBase(str(world.root), idle))
    assert {device_of(base) for base in world.bases()} == {str(pool.paths[0])} and len(world.bases()) == 2
    fill(str(pool.paths[0]), 4096)
    world.on(FinishDisk(disk))
    qemu_io(image.source, "raw", "read -P 0x77 2M 64k")
    assert not [
        base for base in world.bases() if base.name.startswith("100-8-") and (base / "image").exists()
    ]
