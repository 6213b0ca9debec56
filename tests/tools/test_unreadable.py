# SPDX-License-Identifier: Apache-2.0
"""What cannot be read is not absent: a damaged record, and every action that removes what it is of; no guest
runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable

import pytest

from semishared.errors import BadRecord
from semishared.model import steps as s
from tools.test_commit import active, attach, ended, kept
from tools.world import World, qemu_io


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def other_json(path: Path) -> None:
    path.write_text("{}\n")


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def gone(path: Path) -> None:
    path.unlink()


def delete_disk(world: World, disk: s.DiskRef) -> None:
    world.on(s.RemoveDisk(disk, str(world.store)))


def delete_vm(world: World, disk: s.DiskRef) -> None:
    world.on(s.RemoveVm(disk.vm, disk.vm_dir))


def mvds(world: World, disk: s.DiskRef) -> None:
    ended(world, disk)


DAMAGES = (zeroed, cut, emptied, other_json, a_directory, gone)
REMOVALS = (mvds, delete_disk, delete_vm)


@pytest.mark.fault(30, "no uncommitted byte goes because a record cannot be read")
@pytest.mark.parametrize("removal", REMOVALS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_no_uncommitted_byte_goes_with_a_damaged_record(
    world: World, damage: Callable[[Path], None], removal: Callable[[World, s.DiskRef], None]
) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x77 3M 64k")
    layer = os.stat(active(disk))
    damage(Path(disk.vm_dir, ".semishared/disk.1.json"))
    try:
        removal(world, disk)
    except BadRecord as e:
        assert "disk.1.json" in e.detail
        assert os.path.realpath(disk.path) and os.stat(active(disk)).st_ino == layer.st_ino
    else:
        (found,) = kept(world)
        (held,) = [
            path
            for path in Path(found["path"]).rglob("*")
            if path.is_file() and path.stat().st_ino == layer.st_ino
        ]
        qemu_io(str(held), "qcow2", "read -P 0x77 3M 64k")


@pytest.mark.parametrize("damage", (zeroed, cut, gone))
def test_a_disk_that_holds_nothing_goes_whatever_its_record_says(
    world: World, damage: Callable[[Path], None]
) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    damage(Path(disk.vm_dir, ".semishared/disk.1.json"))
    delete_vm(world, disk)
    assert not os.path.lexists(disk.vm_dir)
