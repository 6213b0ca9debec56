# SPDX-License-Identifier: Apache-2.0
"""The device of a disk is not there, or not for a moment, when it is seen what there is of it: none of that
is taken for gone.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Callable, Iterator

import pytest

from semishared.device import offline
from semishared.disk import diff_rebase, epochs, records, recovery, retained_diffs, vm_dir
from semishared.errors import BadRecord, DeviceMissing, MissingImage
from semishared.guest import active_layer
from semishared.model import steps as s
from semishared.model.disk.commit_steps import CreateDiff
from semishared.model.disk.record import Record
from semishared.tools import files, layers
from tools.test_half_moved import HalfMoved
from tools.test_hung_device import HOLD, hanging, scaled  # noqa: F401
from tools.test_lost_device import can_boot
from tools.test_pool import Pool, carry, device_of
from tools.world import MiB, World, qemu_io


@contextmanager
def away(world: World, pool: Pool, path: str, how: str) -> Iterator[None]:
    """Have the device `path` hang, be put aside by whoever has just looked, or not be mounted."""
    if how == "hung":
        with hanging(world, path, HOLD):
            yield
        offline.look(str(world.root))
    elif how == "aside":
        (link,) = [
            link
            for link in (world.root / "devices").glob("*-*[!n]")
            if os.readlink(link) == f"{path}/.semishared"
        ]
        files.symlink(f"hung:{path}/.semishared", str(link))
        try:
            yield
        finally:
            files.symlink(f"{path}/.semishared", str(link))
    else:
        subprocess.run(["mount", "--move", path, pool.aside()], check=True)
        try:
            yield
        finally:
            subprocess.run(["mount", "--move", pool.aside(), path], check=True)


class Begun:
    """Disk 1 of a VM, two layers: 0x76 at 2 MiB in the lower, 0x77 at 3 MiB in the upper, and what a guest
    that died has left.
    """

    def __init__(self, world: World, what: str, vm: int = 5) -> None:
        self.disk, image = world.disk(vm), world.image(f"image{vm}")._replace(id=vm)
        world.clone(image, self.disk)
        self.folder, self.records = Path(f"{self.disk.path}.snap"), Path(self.disk.vm_dir, ".semishared")
        self.device = device_of(self.folder)
        qemu_io(str(self.folder / "0"), "qcow2", "write -P 0x76 2M 64k")
        world.on(s.AddLayer(self.disk, 1, 0, "qcow2"), s.ActivateLayer(self.disk, 1, "qcow2"))
        qemu_io(str(self.folder / "1"), "qcow2", "write -P 0x77 3M 64k")
        if what.endswith("delta"):
            self._over("1000000", "1")
            qemu_io(str(self.folder / "1000000"), "qcow2", "write -P 0x78 4M 64k")
            record = self.records / "disk.1.json"
            own = json.loads(record.read_text())
            if what.startswith("older"):
                (self.records / "deltas.json").write_text(json.dumps({"version": 1, "disks": [own]}))
            else:
                disks = [{"how": "delta", "before": own, "after": own}]
                (self.records / "go-over.json").write_text(json.dumps({"version": 1, "disks": disks}))
            record.write_text(record.read_text().replace(".snap/1", ".snap/1000000"))
        elif what == "pull":
            # QEMU has named another file below, and what it had pulled until then died with it.
            self._over("2", "1")
            world.on(s.ActivateLayer(self.disk, 2, "qcow2"))
            qemu_io(str(self.folder / "2"), "qcow2", "write -P 0x78 4M 64k")
            subprocess.run(
                ["qemu-img", "rebase", "-u", "-b", "0", "-F", "qcow2", "-f", "qcow2", str(self.folder / "2")],
                check=True,
            )
            job = {
                "target": "vda",
                "run": "5",
                "layer": "2",
                "below": "1",
                "below_format": "qcow2",
                "stand_ins": [],
            }
            (self.records / "job.1.json").write_text(json.dumps(job))

    def _over(self, number: str, below: str) -> None:
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", number],
            check=True,
            cwd=self.folder,
        )

    def noted(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.records.iterdir()}

    def check(self) -> None:
        """See that all is ended, and that the disk has all that was written."""
        assert not recovery.left(self.disk.vm_dir)
        path = json.loads((self.records / "disk.1.json").read_text())["path"]
        assert not path.endswith("/1000000") and not (self.folder / "1000000").exists()
        qemu_io(path, "qcow2", "read -P 0x76 2M 64k", "read -P 0x77 3M 64k", "read -P 0x78 4M 64k")


ACTS: dict[str, Callable[[World, s.DiskRef], object]] = {
    "boot": lambda world, disk: recovery.recover(disk.vm_dir, ""),
    "resize": lambda world, disk: world.on(s.GrowDisk(disk, 128 * MiB)),
    "merge": lambda world, disk: world.on(s.MergeDeltas(disk.vm, disk.vm_dir, "")),
}


@pytest.mark.parametrize("how", ["hung", "absent"])
@pytest.mark.parametrize("what", ["delta", "older delta", "pull"])
def test_what_is_left_begun_on_a_device_that_is_away_stays_begun(
    world: World, pool: Pool, what: str, how: str
) -> None:
    pool.set()
    begun = Begun(world, what)
    noted, link = begun.noted(), os.readlink(begun.folder)
    with away(world, pool, begun.device, how):
        for act in ACTS.values():
            with pytest.raises(DeviceMissing, match=f"the layers of disk.1: on the device {begun.device} "):
                act(world, begun.disk)
            assert begun.noted() == noted and os.readlink(begun.folder) == link
    recovery.recover(begun.disk.vm_dir, "")
    begun.check()
    can_boot(world)


@pytest.mark.parametrize("what", ["delta", "older delta", "pull"])
def test_a_device_that_is_put_aside_in_the_middle_ends_nothing(
    world: World, pool: Pool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at devices may do so at any moment: here when all were seen to be there."""
    pool.set()
    begun = Begun(world, what)
    noted = begun.noted()
    with monkeypatch.context() as patched, away(world, pool, begun.device, "aside"):
        patched.setattr(recovery, "check_there", lambda vm_dir: None)
        with pytest.raises(DeviceMissing):
            recovery.recover(begun.disk.vm_dir, "")
        assert begun.noted() == noted
    recovery.recover(begun.disk.vm_dir, "")
    begun.check()


@pytest.mark.parametrize("how", ["hung", "absent"])
def test_who_has_nothing_begun_there_is_not_refused(world: World, pool: Pool, how: str) -> None:
    pool.set()
    found = [Begun(world, "delta", vm) for vm in (5, 6, 7, 8)] + [Begun(world, "", 9)]
    here, there = found[0], next(other for other in found[1:4] if other.device != found[0].device)
    with away(world, pool, here.device, how):
        recovery.recover(there.disk.vm_dir, "")
        there.check()
        recovery.recover(found[4].disk.vm_dir, "")
        # Its device may be lost for good.
        world.on(s.RemoveVm(here.disk.vm, here.disk.vm_dir))
        assert not os.path.exists(here.disk.vm_dir)


@pytest.mark.parametrize("how", ["hung", "absent"])
def test_a_half_moved_disk_needs_the_device_that_it_was_to_leave_alone(
    world: World, pool: Pool, how: str
) -> None:
    half = HalfMoved(world, pool, is_diff=False)
    noted, old, new = half.note.read_bytes(), device_of(half.left), device_of(half.folder)
    target = str(world.location / "103" / "5")
    with away(world, pool, old, how):
        for act in (
            lambda: recovery.recover(half.disk.vm_dir, ""),
            lambda: carry(half.disk.vm_dir, target, 5, (1,)),
        ):
            with pytest.raises(DeviceMissing, match=f"the layers of disk.1: on the device {old} "):
                act()
            assert half.note.read_bytes() == noted and os.readlink(half.left) == half.was
    with away(world, pool, new, how):
        recovery.recover(half.disk.vm_dir, "")
    half.check(half.disk.vm_dir)
    half.check_settled(half.disk.vm_dir)


@pytest.mark.parametrize("how", ["hung", "absent"])
def test_a_moved_disk_needs_the_device_that_it_was_to_leave_no_more(
    world: World, pool: Pool, how: str
) -> None:
    """The guest had gone over, and wrote to the new device, when both were ended."""
    half = HalfMoved(world, pool, is_diff=False)
    half.record.write_text(half.record.read_text().replace(".snap/1000000", ".snap/0"))
    qemu_io(str(half.folder / "0"), "qcow2", "write -P 0x78 3M 64k")
    with away(world, pool, device_of(half.left), how):
        recovery.recover(half.disk.vm_dir, "")
        half.check_settled(half.disk.vm_dir)
    half.check(half.disk.vm_dir)  # its base lies there too


def test_a_layer_that_is_there_no_more_is_no_device_that_is_away(world: World, pool: Pool) -> None:
    """The pull was over, and what it lay over gone, when the power went before the note."""
    pool.set()
    begun = Begun(world, "pull")
    (begun.folder / "1").unlink()
    recovery.recover(begun.disk.vm_dir, "")
    assert not recovery.left(begun.disk.vm_dir) and layers.backing_of(str(begun.folder / "2"))[0] == "0"


@pytest.mark.parametrize("moment", ["before it is looked at", "when its active layer was seen"])
def test_a_diff_whose_device_is_put_aside_for_a_moment_is_kept(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    pool.set()
    disk = world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), CreateDiff(disk, world.image(), 0, ""))
    folder = Path(f"{disk.path}.snap")
    qemu_io(str(folder / "0"), "qcow2", "write -P 0x77 2M 64k")
    world.on(s.AddLayer(disk, 1, 0, "qcow2"), s.ActivateLayer(disk, 1, "qcow2"))
    device, chain, backing_of = device_of(folder), retained_diffs.chain_of, layers.backing_of

    def looked(record: Record) -> list[str]:
        with ExitStack() as aside, monkeypatch.context() as patched:

            def seen(path: str) -> tuple[str, str]:
                found = backing_of(path)
                if path.endswith("/1"):
                    aside.enter_context(away(world, pool, device, "aside"))
                return found

            if moment == "before it is looked at":
                aside.enter_context(away(world, pool, device, "aside"))
            patched.setattr(layers, "backing_of", seen)
            return chain(record)

    monkeypatch.setattr(retained_diffs, "chain_of", looked)
    vm_dir.remove_disk(disk, epochs.arrived(-1, [], {}), forget=True)
    (place,) = world.system.glob(".kept-5-*")
    qemu_io(f"{place}/disk.1.snap/1", "qcow2", "read -P 0x77 2M 64k")


@pytest.mark.parametrize("how", ["hung", "absent", ""])
def test_of_a_diff_that_waits_for_nothing_nothing_is_kept_if_that_is_seen(
    world: World, pool: Pool, how: str
) -> None:
    pool.set()
    disk = world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), CreateDiff(disk, world.image(), 0, ""))
    with away(world, pool, device_of(f"{disk.path}.snap"), how) if how else nullcontext():
        world.on(s.RemoveDisk(disk, ""))
    assert len(list(world.system.glob(".kept-5-*"))) == len(pool.layers()) == bool(how)


def test_a_diff_whose_removal_was_killed_on_its_device_is_removed(world: World, pool: Pool) -> None:
    pool.set()
    disk = world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), CreateDiff(disk, world.image(), 0, ""))
    Path(f"{disk.path}.snap/0").unlink()
    world.on(s.RemoveDisk(disk, ""))
    assert not list(world.system.glob(".kept-5-*")) and not pool.layers()


def test_a_renewed_diff_whose_device_is_put_aside_for_a_moment_keeps_its_layers(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set()
    disk = world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), CreateDiff(disk, world.image(), 0, ""))
    (layer,), chain = pool.layers(), retained_diffs.chain_of

    def looked(record: Record) -> list[str]:
        with away(world, pool, device_of(layer), "aside"):
            return chain(record)

    monkeypatch.setattr(retained_diffs, "chain_of", looked)
    with pytest.raises(MissingImage):
        diff_rebase._drop_others(disk, records.record_of(disk))
    assert os.listdir(layer) == ["0"]


OLDER = {
    "a delta": ([], "delta"),
    "a move to another device": (["moves"], "device"),
    "a detach": (["remote"], "base"),
    "a copy of the directory": (["from"], "delta"),
}


@pytest.mark.parametrize("kind", OLDER)
def test_the_note_of_an_older_version_is_one_of_a_go_over(world: World, kind: str) -> None:
    more, how = OLDER[kind]
    begun, vm_dir = Begun(world, "older delta"), world.disk(5).vm_dir
    note, origin = begun.records / "deltas.json", str(world.location / "103" / "5")
    data = json.loads(note.read_text())
    (after,) = data["disks"]
    before = {**after, "image": {**after["image"], "generation": "ab" * 16}} if how == "base" else after
    known: dict[str, object] = {"remote": [before], "from": origin, "moves": True}
    given = {name: known[name] for name in more}
    note.write_text(json.dumps({**data, **given}))
    found = active_layer.noted(vm_dir)
    assert [(one.before.to_data(), one.after.to_data(), one.how) for one in found] == [(before, after, how)]
    assert active_layer.origin(vm_dir) == (origin if "from" in more else "")
    # What is written next is the present note; a killed writer has left both.
    older = note.read_text()
    active_layer.note(vm_dir, found, active_layer.origin(vm_dir))
    assert not note.exists() and active_layer.noted(vm_dir) == found
    note.write_text(older.replace("disk.1", "disk.9"))
    assert active_layer.noted(vm_dir) == found
    active_layer.forget(vm_dir)
    assert not recovery.left(vm_dir)


def test_a_note_of_a_newer_version_is_not_understood_and_stays(world: World) -> None:
    begun = Begun(world, "delta")
    note = begun.records / "go-over.json"
    note.write_text(note.read_text().replace('"version": 1', '"version": 2'))
    noted = begun.noted()
    with pytest.raises(BadRecord, match="cannot be understood"):
        recovery.recover(begun.disk.vm_dir, "")
    assert begun.noted() == noted
