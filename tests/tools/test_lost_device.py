# SPDX-License-Identifier: Apache-2.0
"""A device of a host's pool that is gone, or is going: it costs the VMs whose layers it has, and no
others.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Callable, Iterator

import pytest

from semishared.config import Config
from semishared.errors import DeviceMissing, SemisharedError
from semishared.host import probe
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.base.steps import EvictBase
from semishared.model.device import steps as device_steps
from semishared.model.disk.commit_steps import CreateDiff
from semishared.model.leftover_steps import LookAround
from semishared.vmm import records as vmm_records
from semishared.wire.session import Session
from tools.test_pool import Pool, carry, device_of
from tools.world import MiB, World, qemu_io


def uuid_of(root: Path, path: str) -> str:
    return next(
        entry.name
        for entry in (root / "devices").glob("*-*[!n]")
        if os.readlink(entry) == f"{path}/.semishared"
    )


def apart(world: World, pool: Pool) -> tuple[s.ImageRef, str]:
    """Make a disk of VM 5 over a base on another device; return the image, and on which device the base
    lies.
    """
    image = world.image(size=4 * MiB)
    world.clone(image, world.disk(6))
    lost = device_of(world.bases()[0])
    filler = Path(lost, "filler")
    with filler.open("wb") as file:
        os.posix_fallocate(
            file.fileno(), 0, pool.sizes[[str(path) for path in pool.paths].index(lost)] // 2 * MiB
        )
    world.clone(image, world.disk())
    assert device_of(f"{world.disk().path}.snap") != lost, "it is too full"
    filler.unlink()
    qemu_io(world.disk().path, "qcow2", "write -P 0x31 2M 64k")
    return image, lost


def about_to_boot(world: World, vm: int = 5) -> list[str]:
    """Do what `tm/context` does before each boot; return the warnings."""
    with Session("localhost", "context", Config()) as session:
        session.run([s.PrepareVm(vm, world.disk(vm).vm_dir), s.ReplaceLostBases(vm, world.disk(vm).vm_dir)])
        return list(session.warnings)


def can_boot(world: World, vm: int = 5) -> None:
    """See what `vmm/deploy` sees of a disk; raise as it does."""
    directory = world.disk(vm).vm_dir
    for record in vmm_records.read_records(directory, [1]):
        vmm_records.check_disk(directory, record)
        vmm_records.read_chain(record.path, record)


def test_a_disk_whose_base_was_on_a_lost_device_boots_over_the_same_base_from_the_store(
    world: World, pool: Pool
) -> None:
    pool.set()
    image, lost = apart(world, pool)
    subprocess.run(["umount", "-l", lost], check=True)
    with pytest.raises(DeviceMissing, match=f"the base of disk.1: on the device {lost} "):
        can_boot(world)
    assert about_to_boot(world) == []
    can_boot(world)
    (base,) = world.bases()
    assert device_of(base) != lost and os.listdir(lost) == []
    qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k", "read -P 0x31 2M 64k")
    assert not pool.leftovers()
    assert about_to_boot(world) == [] and about_to_boot(world, 6) == [], (
        "of a VM whose own layers are gone nothing is fetched"
    )
    with pytest.raises(DeviceMissing, match=f"the layers of disk.1: on the device {lost} "):
        can_boot(world, 6)


def test_a_base_that_nobody_has_any_more_is_lost_with_its_device(world: World, pool: Pool) -> None:
    pool.set()
    image, lost = apart(world, pool)
    subprocess.run(["umount", "-l", lost], check=True)
    qemu_io(image.source, "raw", "write -P 0x99 0 64k")
    (said,) = about_to_boot(world)
    assert said.startswith(
        "the base of disk 1 lay on a device that is not there, and cannot be had again: "
    ), said
    with pytest.raises(DeviceMissing, match=f"the base of disk.1: on the device {lost} "):
        can_boot(world)
    assert os.listdir(lost) == [] and not pool.leftovers()


def test_replacing_a_lost_base_killed_at_every_point_and_done_again(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set()
    _, lost = apart(world, pool)
    subprocess.run(["umount", "-l", lost], check=True)
    uuid = uuid_of(world.root, lost)
    for number in range(1, 60):
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        try:
            about_to_boot(world)
            break
        except SemisharedError:
            pass
        finally:
            monkeypatch.delenv("SEMISHARED_KILL_AT")
        assert about_to_boot(world) == []
        can_boot(world)
        qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k")
        for left in pool.leftovers():
            assert os.path.dirname(left).endswith("/staging") and not os.path.exists(left), (
                f"killed at {number}: a link is left, for gc"
            )
            os.unlink(left)
        # As it was: its link leads to the lost device again.
        (base,) = world.bases()
        shutil.rmtree(os.path.realpath(base))
        base.unlink()
        base.symlink_to(f"../devices/{uuid}/bases/{base.name}")
    assert 5 < number < 59


def writing(
    world: World, image: s.ImageRef, overlay: s.DiskRef, outside: s.DiskRef
) -> dict[str, Callable[[], object]]:
    """Return what writes, of disks that are on the pool and outside, and would on devices."""
    root, other = str(world.root), world.image("other", size=4 * MiB, pattern=0x44)._replace(id=8)
    backup, links = f"{overlay.vm_dir}/backup", list((world.root / "devices").glob("*-*[!n]"))
    store, number, generation = next(base.name for base in world.bases() if base.is_symlink()).split("-")
    known = image._replace(store=int(store), id=int(number), generation=generation)
    target = str(world.location / "103" / str(outside.vm))
    return {
        "clone": lambda: world.clone(image, world.disk(20)),
        "clone of another": lambda: world.clone(other, world.disk(21)),
        "copy": lambda: world.on(
            s.PrepareVm(22, world.disk(22).vm_dir), s.CopyImage(world.disk(22), image, 0)
        ),
        "diff": lambda: world.on(
            s.PrepareVm(23, world.disk(23).vm_dir), CreateDiff(world.disk(23), other, 0, "")
        ),
        "stage": lambda: world.on(s.StageBase(root, other)),
        "session": lambda: world.on(
            base_steps.FetchBases(root, (base_steps.Part(known),), (), "rest", "", "none", 0, 0, (), ())
        ),
        "move in": lambda: carry(outside.vm_dir, target, outside.vm, (outside.disk,)),
        "other datastore": lambda: world.on(
            s.RenameVm(outside.vm, outside.vm_dir, target, True, "", (outside.disk,))
        ),
        "snapshot": lambda: world.on(
            s.AddLayer(overlay, 1, 0, "qcow2"), s.ActivateLayer(overlay, 1, "qcow2")
        ),
        "resize": lambda: world.on(s.GrowDisk(overlay, 128 * MiB)),
        "save-as": lambda: world.on(s.SaveDisk(overlay, str(world.store / "saved"), "raw", "")),
        "backup": lambda: world.on(
            s.BackUp(overlay.vm, overlay.vm_dir, backup, (str(overlay.disk),), "", "NONE", "<VM/>")
        ),
        "label": lambda: world.on(
            device_steps.SetDevices(root, tuple(os.path.dirname(os.readlink(link)) for link in links))
        ),
    }


def test_nothing_is_written_below_a_mount_point_where_nothing_is_mounted(world: World, pool: Pool) -> None:
    image, outside = world.image(), world.disk(8)
    world.clone(image, outside)
    world.on(EvictBase(str(world.root), world.bases()[0].name))
    pool.set()
    overlay, diff = world.disk(), world.disk(9)
    world.clone(image, overlay)
    persistent = world.image("persistent", pattern=0x55)._replace(id=9)
    world.on(s.PrepareVm(9, diff.vm_dir), CreateDiff(diff, persistent, 0, ""))
    qemu_io(f"{diff.path}.snap/0", "qcow2", "write -P 0x77 2M 64k")
    actions = writing(world, image, overlay, outside)
    for path in pool.paths:
        subprocess.run(["umount", "-l", str(path)], check=True)
    done = []
    for name, act in actions.items():
        with contextlib.suppress(SemisharedError):
            act()
            done.append(name)
        assert [os.listdir(path) for path in pool.paths] == [[]] * 3, name
    assert done == ["other datastore"], "it lies outside of the pool, and stays there"
    qemu_io(f"{world.location}/103/8/disk.1", "qcow2", "read -P 0xa1 1M 64k")
    # What does not fail for that.
    assert about_to_boot(world) == []
    world.on(s.RemoveVm(5, overlay.vm_dir), s.RemoveVm(9, diff.vm_dir))
    assert list(world.system.glob(".kept-9-*")), "its device may come back"
    world.on(LookAround(str(world.location), (101, 103), (), False))
    assert [os.listdir(path) for path in pool.paths] == [[]] * 3


class Disks(Pool):
    """Devices that can break: each on a loop device over a file that a process exports, and may stop to."""

    def __init__(self, world: World, mkfs: str) -> None:
        self.mkfs = mkfs
        self.exports: dict[str, subprocess.Popen[bytes]] = {}
        super().__init__(world, (320, 320))

    def mount(self, path: Path, size: int) -> None:
        file, seen = Path(f"{path}.disk"), Path(f"{path}.seen")
        file.touch()
        os.truncate(file, size * MiB)
        subprocess.run([*self.mkfs.split(), str(file)], check=True)
        seen.touch()
        words = ["--blockdev", f"driver=file,filename={file},node-name=file"]
        export = f"type=fuse,id=seen,node-name=file,mountpoint={seen},writable=on"
        self.exports[str(path)] = subprocess.Popen(["qemu-storage-daemon", *words, "--export", export])
        until = time.monotonic() + 60
        while seen.stat().st_size != size * MiB:
            assert time.monotonic() < until
            time.sleep(0.02)
        subprocess.run(["mount", "-o", "loop", str(seen), str(path)], check=True)

    def close(self) -> None:
        for path in self.paths:
            # One that is broken is not even seen to be mounted.
            subprocess.run(["umount", "-l", str(path)], check=False, stderr=subprocess.DEVNULL)
        for exported, process in self.exports.items():
            process.terminate()
            process.wait(60)
            # Of one that was killed the export is left.
            subprocess.run(["umount", "-l", f"{exported}.seen"], check=False, stderr=subprocess.DEVNULL)

    def fail(self, path: str) -> None:
        """Let every read and write of the disk fail from now on."""
        self.exports[path].kill()
        self.exports[path].wait(60)

    def shut_down(self, path: str) -> None:
        """Do what XFS does as soon as it cannot write its log."""
        subprocess.run(["xfs_io", "-x", "-c", "shutdown", path], check=True)

    def make_read_only(self, path: str) -> None:
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)

    def have_doubts(self, path: str) -> None:
        """Let ext4 find an error, which makes it read-only under all that is open."""
        device = subprocess.run(
            ["findmnt", "-no", "SOURCE", path], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        Path(f"/sys/fs/ext4/{os.path.basename(device)}/trigger_fs_error").write_text("1")


@pytest.fixture
def disks(world: World, how: str) -> Iterator[Disks]:
    made = Disks(world, "mkfs.ext4 -q -F -m 0 -e remount-ro" if how == "have_doubts" else "mkfs.xfs -q")
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("how", ["fail", "shut_down", "make_read_only", "have_doubts"])
def test_a_dying_device_takes_nothing_new_and_holds_nobody_else_up(
    world: World, disks: Disks, how: str
) -> None:
    disks.set()
    image = world.image(size=4 * MiB)
    world.clone(image, world.disk())
    dying = device_of(f"{world.disk().path}.snap")
    (other,) = {str(path) for path in disks.paths} - {dying}
    assert device_of(world.bases()[0]) == dying
    getattr(disks, how)(dying)
    assert disks.rows()[dying]["state"], "before anybody writes there"
    for number in (6, 7):
        world.clone(image, world.disk(number))
        assert device_of(f"{world.disk(number).path}.snap") == other
        assert device_of(world.bases()[0]) == other
        qemu_io(world.disk(number).path, "qcow2", "write -P 0x32 1M 64k")
    wrong = "broken: Input/output error" if how in ("fail", "shut_down") else "read-only"
    assert disks.rows()[dying]["state"] == wrong and disks.rows()[other]["state"] == ""
    assert f"device {dying} is {wrong}" in probe.report(str(world.location))
    with pytest.raises(
        DeviceMissing, match=f"the layers of disk.1: on the device {dying} of .*, which is {wrong}"
    ):
        can_boot(world)
    for number in (6, 7):
        can_boot(world, number)
    # What looks at all of a host, and at other VMs than those of the device.
    world.on(base_steps.ListBases(str(world.root)), base_steps.ReportDisks(str(world.location), (101, 103)))
    world.on(LookAround(str(world.location), (101, 103), (), False))
    carry(world.disk(6).vm_dir, str(world.location / "103" / "6"), 6, (1,))
    qemu_io(f"{world.location}/103/6/disk.1", "qcow2", "read -P 0x32 1M 64k")
    world.on(s.RemoveVm(7, world.disk(7).vm_dir), s.RemoveVm(6, str(world.location / "103" / "6")))
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    assert not os.path.exists(world.disk().vm_dir)
    assert not world.leases()
