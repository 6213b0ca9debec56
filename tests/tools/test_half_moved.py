# SPDX-License-Identifier: Apache-2.0
"""A disk that was about to leave its device under its guest when the move was killed, and the guest ended
with nobody to see to it.

Its names lead to the new device, where a copy of what lay below its delta is; all that was written since is
on the old one. Whatever is done to the VM next is done to the latter.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from semishared.model import steps as s
from semishared.model.disk.commit_steps import CreateDiff
from tools.test_pool import Pool, carry
from tools.test_pool_moves import elsewhere
from tools.world import MiB, World, qemu_io


class HalfMoved:
    """Disk 1 of VM 5, a diff or an overlay: 0x77 at 2 MiB below its delta, 0x78 at 3 MiB in that."""

    def __init__(self, world: World, pool: Pool, *, is_diff: bool) -> None:
        pool.set()
        self.disk = world.disk()
        image, disk = world.image(), self.disk
        if is_diff:
            world.on(s.PrepareVm(5, disk.vm_dir), CreateDiff(disk, image, 0, ""))
        else:
            world.clone(image, disk)
        self.folder, self.record = Path(f"{disk.path}.snap"), Path(disk.vm_dir, ".semishared/disk.1.json")
        qemu_io(str(self.folder / "0"), "qcow2", "write -P 0x77 2M 64k")
        self.was, (other, target) = os.readlink(self.folder), elsewhere(pool, self.folder)
        delta, before = self.folder / "1000000", json.loads(self.record.read_text())
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-b", "0", "-F", "qcow2", str(delta)], check=True
        )
        qemu_io(str(delta), "qcow2", "write -P 0x78 3M 64k")
        self.note = Path(disk.vm_dir, ".semishared/go-over.json")
        disks = [{"how": "device", "before": before, "after": before}]
        self.note.write_text(json.dumps({"version": 1, "disks": disks}))
        self.record.write_text(self.record.read_text().replace(".snap/0", ".snap/1000000"))
        self.new = Path(other, ".semishared/layers/5-1-0123456789ab")
        self.new.mkdir(parents=True, exist_ok=True)
        (self.new / "0").write_bytes((self.folder / "0").read_bytes())
        self.left = Path(f"{disk.path}.left.snap")
        os.symlink(self.was, self.left)
        self.folder.unlink()
        os.symlink(f"../../.semishared/devices/{target}/layers/{self.new.name}", self.folder)

    def check(self, directory: str | Path, layer: str = "0") -> None:
        """See that a disk in this VM directory has all that was written."""
        qemu_io(f"{directory}/disk.1.snap/{layer}", "qcow2", "read -P 0x77 2M 64k", "read -P 0x78 3M 64k")

    def check_settled(self, directory: str | Path) -> None:
        """See that nothing is left of the move."""
        assert (
            not Path(directory, ".semishared/go-over.json").exists()
            and not Path(directory, "disk.1.left.snap").is_symlink()
        )
        assert json.loads(Path(directory, ".semishared/disk.1.json").read_text())["path"].endswith(
            "disk.1.snap/0"
        )


@pytest.mark.parametrize("what", ["all of its VM", "it alone"])
def test_a_diff_that_is_deleted_is_kept(world: World, pool: Pool, what: str) -> None:
    half = HalfMoved(world, pool, is_diff=True)
    world.on(s.RemoveDisk(half.disk, "") if what == "it alone" else s.RemoveVm(5, half.disk.vm_dir))
    (kept,) = world.system.glob(".kept-5-*")
    assert (
        os.readlink(kept / "disk.1.snap") == half.was and not half.new.exists() and not half.left.is_symlink()
    )
    half.check(kept, "1000000")


def test_a_disk_that_comes_to_have_the_number_of_a_deleted_one_is_itself(world: World, pool: Pool) -> None:
    half = HalfMoved(world, pool, is_diff=False)
    world.on(s.RemoveDisk(half.disk, ""))
    assert not half.note.exists() and not half.left.is_symlink() and not pool.layers()
    world.clone(world.image("another"), half.disk)
    record = half.record.read_bytes()
    world.on(s.GrowDisk(half.disk, 128 * MiB))
    assert half.record.read_bytes() == record


@pytest.mark.parametrize("is_diff", [False, True])
@pytest.mark.parametrize("where", ["host", "datastore"])
def test_what_goes_elsewhere_is_what_was_written(world: World, pool: Pool, where: str, is_diff: bool) -> None:
    half, target = HalfMoved(world, pool, is_diff=is_diff), str(world.location / "103" / "5")
    if where == "host":
        carry(half.disk.vm_dir, target, 5, (1,))
    else:
        (seen,) = world.on(s.RenameVm(5, half.disk.vm_dir, target, False, ""))
        assert isinstance(seen, dict)
    half.check(target)
    half.check_settled(target)
    assert not half.new.exists()


def test_a_disk_that_is_grown_is_what_was_written(world: World, pool: Pool) -> None:
    half = HalfMoved(world, pool, is_diff=False)
    world.on(s.GrowDisk(half.disk, 128 * MiB))
    half.check(half.disk.vm_dir)
    half.check_settled(half.disk.vm_dir)


@pytest.mark.parametrize("is_diff", [False, True])
def test_a_restore_is_not_undone_by_what_was_left(world: World, pool: Pool, is_diff: bool) -> None:
    half, backup = HalfMoved(world, pool, is_diff=is_diff), world.location / "backup"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", str(backup), "64M"], check=True)
    qemu_io(str(backup), "qcow2", "write -P 0x99 4M 64k")
    data = backup.read_bytes()
    world.on(s.RestoreDisk(half.disk, 64 * MiB), data=[data], sha256=hashlib.sha256(data).hexdigest())
    half.check_settled(half.disk.vm_dir)
    qemu_io(f"{half.disk.path}.snap/0", "qcow2", "read -P 0x99 4M 64k", "read -P 0 3M 64k")
