# SPDX-License-Identifier: Apache-2.0
"""Snapshots of disks that are off, through the real plan and the real host side: place x format, trees,
reruns, moves.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from semishared.errors import BadRecord, MissingImage, NotSupported
from semishared.model import answers as answers_of
from semishared.model import steps as s
from semishared.model.disk import names as disk_names
from semishared.model.store import dir_names
from semishared.opennebula import args
from semishared.plan.disk import snapshots
from semishared.store.dir import clones
from semishared.store.dir import image as dir_image
from semishared.tools import layers, qemu_img
from tools.world import OVERLAY_OPTIONS, MiB, World, qemu_io

PLACES = ["overlay", "copy", "remote-first", "store-clone", "in-place"]
CELLS = [(place, format) for place in PLACES for format in ("raw", "qcow2")]
SIZE = 16 * MiB


class Disk:
    """One disk of a VM and what must be on it: patterns by MiB."""

    def __init__(self, world: World, place: str, format: str) -> None:
        self.world, self.place = world, place
        self.image, self.ref = world.image(format=format, size=SIZE), world.disk()
        self.make()
        self.now: Dict[int, int] = {1: 0xA1}
        self.kept: Dict[int, Dict[int, int]] = {}
        self.next = 0

    def make(self) -> None:
        image, ref = self.image, self.ref
        prepare = s.PrepareVm(ref.vm, ref.vm_dir)
        steps: Dict[str, List[Any]] = {
            "overlay": [
                s.StageBase(str(self.world.root), image),
                prepare,
                s.CreateOverlay(ref, image, 0, OVERLAY_OPTIONS),
            ],
            "copy": [prepare, s.CopyImage(ref, image, 0)],
            "remote-first": [prepare, s.CreateRemote(ref, image, 0, OVERLAY_OPTIONS)],
            "store-clone": [prepare, s.CloneOnStore(ref, image, 0)],
            "in-place": [prepare, s.LinkInPlace(ref, image, False, session=True)],
        }
        self.world.on(*steps[self.place])

    @property
    def record(self) -> Dict[str, object]:
        found: Dict[str, object] = json.loads(
            Path(self.ref.vm_dir, f".semishared/disk.{self.ref.disk}.json").read_text()
        )
        return found

    def facts(self) -> snapshots.Facts:
        (said,) = self.world.on(s.DescribeDisk(self.ref, ""))
        return snapshots.Facts.parse(answers_of.one("h1", s.DescribeDisk, said))

    def request(self, number: int) -> args.SnapshotPlace:
        return args.SnapshotPlace.parse([f"h:{self.ref.path}", str(number), str(self.ref.vm), "100"])

    def write(self, at: int, pattern: int) -> None:
        """Write as a guest: through the file and the format of the record."""
        qemu_io(self.record["path"], str(self.record["format"]), f"write -P {pattern} {at}M 64k")
        self.now[at] = pattern

    def create(self) -> int:
        number = self.next
        self.world.on(*snapshots.create(self.request(number), self.facts(), ""))
        self.kept[number], self.next = dict(self.now), number + 1
        return number

    def delete(self, number: int) -> None:
        self.world.on(*snapshots.delete(self.request(number), self.facts(), ""))
        self.kept.pop(number, None)

    def revert(self, number: int) -> None:
        self.world.on(*snapshots.revert(self.request(number), self.facts()))
        self.now = dict(self.kept[number])

    @staticmethod
    def _read(path: object, format: str, content: Dict[int, int]) -> None:
        qemu_io(path, format, *(f"read -P {content.get(at, 0)} {at}M 64k" for at in range(SIZE // MiB - 1)))

    def check(self) -> None:
        """Read every snapshot, as cpds saves it, and the present content; the image too where it is not the
        disk.
        """
        self._read(self.record["path"], str(self.record["format"]), self.now)
        assert os.path.samefile(self.ref.path, str(self.record["path"]))
        saved = {number: self.world.store / f"saved-{number}" for number in self.kept}
        self.world.on(*(s.SaveDisk(self.ref, str(path), "raw", "", number) for number, path in saved.items()))
        for number, path in saved.items():
            self._read(path, "raw", self.kept[number])
            path.unlink()
        self._read(self.image.source, self.image.format, self.now if self.place == "in-place" else {1: 0xA1})
        assert self.world.leftovers() == []

    def layers(self) -> List[str]:
        folder = (
            f"{self.image.source}.snap"
            if self.place == "in-place"
            else os.path.dirname(str(self.record["path"]))
        )
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


@pytest.mark.parametrize(("place", "format"), CELLS)
def test_create_revert_delete(world: World, place: str, format: str, cell: Callable[..., None]) -> None:
    disk = Disk(world, place, format)
    disk.write(2, 0x20)
    disk.create()
    disk.write(3, 0x30)
    disk.write(1, 0x31)
    disk.create()
    disk.write(4, 0x40)
    disk.check()
    disk.revert(0)
    disk.check()
    disk.write(5, 0x50)
    disk.create()
    disk.check()
    disk.delete(0)
    disk.check()
    disk.delete(0)
    with pytest.raises(MissingImage):
        disk.revert(0) if disk.kept.get(0) else world.on(*snapshots.revert(disk.request(0), disk.facts()))
    disk.delete(2)
    disk.check()
    disk.delete(1)
    disk.check()
    assert disk.layers() == ([] if place == "in-place" else ["3"])
    world.on(s.RemoveDisk(disk.ref, str(world.store)))
    assert not [path for path in world.top.rglob("*.snap") if "5-1" in path.name or "disk.1" in path.name]
    cell(("snap_create", "snap_delete", "snap_revert"), place, format, "off")


@pytest.mark.parametrize(("place", "format"), CELLS)
def test_disk_with_snapshots_when_restored_is_new_and_can_have_snapshots_again(
    world: World, tmp_path: Path, place: str, format: str
) -> None:
    """OpenNebula forgets the snapshots of a disk of the VM's own; numbers may begin anew."""
    backup = tmp_path / "backup"
    qemu_img.create(str(backup), "qcow2", SIZE)
    qemu_io(backup, "qcow2", "write -P 0x77 7M 64k")
    data = backup.read_bytes()
    disk = Disk(world, place, format)
    disk.create()
    disk.write(2, 0x20)
    disk.create()
    disk.write(3, 0x30)
    world.on(s.RestoreDisk(disk.ref, SIZE), data=[data], sha256=hashlib.sha256(data).hexdigest())
    disk.now = {7: 0x77}
    if place == "in-place":
        # The image has changed, its snapshots are its own.
        disk.check()
        disk.revert(1)
        disk.check()
        return
    assert disk.layers() == ["0"]
    disk.kept, disk.next = {}, 0
    disk.check()
    disk.create()
    disk.write(4, 0x40)
    disk.create()
    disk.write(7, 0x70)
    disk.check()
    disk.revert(0)
    disk.check()
    disk.write(5, 0x50)
    disk.create()
    disk.delete(0)
    disk.check()


@pytest.mark.parametrize(("place", "format"), [("overlay", "qcow2"), ("copy", "raw"), ("in-place", "qcow2")])
def test_any_order_leaves_every_remaining_content_as_it_was(world: World, place: str, format: str) -> None:
    disk = Disk(world, place, format)
    dice = random.Random(f"{place} {format}")
    for step in range(7):
        disk.write(dice.randrange(0, 15), 1 + step)
        kept = list(disk.kept)
        what = dice.choice(["create", "create", "revert", "delete"] if kept else ["create"])
        if what == "create":
            disk.create()
        else:
            getattr(disk, what)(dice.choice(kept))
    disk.check()
    for number in dice.sample(list(disk.kept), len(disk.kept)):
        disk.delete(number)
    disk.check()


@pytest.mark.parametrize("place", PLACES)
def test_every_action_twice_is_as_good_as_once(world: World, place: str) -> None:
    disk = Disk(world, place, "raw")
    disk.write(2, 0x22)
    for _ in range(2):
        world.on(*snapshots.create(disk.request(0), disk.facts(), ""))
    disk.kept[0] = dict(disk.now)
    disk.write(3, 0x33)
    for _ in range(2):
        disk.revert(0)
    disk.check()
    disk.next = 1
    disk.create()
    for _ in range(2):
        world.on(*snapshots.delete(disk.request(0), disk.facts(), ""))
    del disk.kept[0]
    disk.check()


@pytest.mark.parametrize("place", ["overlay", "copy", "store-clone"])
def test_number_that_was_skipped_after_a_failure(world: World, place: str) -> None:
    """oned counts on after a snapshot that failed: the active layer's own number is then not the one asked
    for.
    """
    disk = Disk(world, place, "raw")
    disk.write(2, 0x22)
    disk.next = 3
    disk.create()
    disk.write(3, 0x33)
    disk.check()
    assert disk.layers() == ["3", "4"]
    disk.delete(3)
    disk.check()


def test_raw_copy_whose_guest_wrote_a_qcow2_header(world: World) -> None:
    """The first bytes of a raw layer are the guest's: they name no backing file, now or as a snapshot."""
    disk = Disk(world, "copy", "raw")
    evil = world.top / "evil.qcow2"
    secret = world.top / "secret"
    secret.write_bytes(b"\x77" * MiB)
    qemu_img.create_overlay(str(evil), str(secret), "raw", 0, "")
    with open(str(disk.record["path"]), "r+b") as file:
        file.write(evil.read_bytes()[: MiB // 2])
    disk.create()
    disk.write(5, 0x55)
    facts = disk.facts()
    assert (facts.tree.layers[0].format, facts.tree.layers[0].parent) == ("raw", snapshots.NO_LAYER)
    assert facts.tree.layers[0].backing == ""
    saved = world.store / "saved"
    world.on(s.SaveDisk(disk.ref, str(saved), "raw", "", 0))
    assert saved.read_bytes()[:4] == b"QFI\xfb"
    disk.delete(0)
    qemu_io(disk.record["path"], "qcow2", "read -P 0x55 5M 64k", "read -P 0xa1 1M 64k")


def test_layers_travel_with_the_directory(world: World) -> None:
    disk = Disk(world, "overlay", "raw")
    disk.write(2, 0x22)
    disk.create()
    disk.write(3, 0x33)
    source, target = disk.ref.vm_dir, str(world.location / "103" / "5")
    (world.location / "103").mkdir()
    (found,) = world.on(s.RenameVm(5, source, target, True, ""))
    world.on(s.ReleaseVm(5, source, "", found["seen"]))  # type: ignore[index]
    disk.ref = world.disk(system=103)
    disk.check()
    disk.revert(0)
    disk.check()


@pytest.mark.parametrize(("place", "format"), CELLS)
def test_grown_disk(world: World, place: str, format: str) -> None:
    disk = Disk(world, place, format)
    disk.create()
    for _ in range(2):
        world.on(s.GrowDisk(disk.ref, 40 * MiB))
    assert qemu_img.virtual_size(str(disk.record["path"]), str(disk.record["format"])) == 40 * MiB
    qemu_io(disk.record["path"], str(disk.record["format"]), "read -P 0 39M 64k")
    world.on(s.GrowDisk(disk.ref, 20 * MiB))
    assert qemu_img.virtual_size(str(disk.record["path"]), str(disk.record["format"])) == 40 * MiB
    if place == "in-place":
        assert qemu_img.virtual_size(disk.image.source, format) == 40 * MiB
    disk.revert(0)
    disk.check()


@pytest.mark.fault(85, "a snapshot that is shorter than its disk is removed by QEMU 5.2 too")
@pytest.mark.parametrize("copy", [False, True], ids=["off", "open"])
def test_layer_over_a_shorter_one_takes_over_what_that_holds(world: World, copy: bool) -> None:
    """The disk has grown since the snapshot that goes. QEMU 5.2 would rebase for ever, and did on Debian 11
    (suite `upgrade` there): so what is read is as large.
    """
    disk = Disk(world, "overlay", "raw")
    disk.create()
    disk.create()
    world.on(s.GrowDisk(disk.ref, 40 * MiB))
    path, folder = str(disk.record["path"]), os.path.dirname(str(disk.record["path"]))
    qemu_io(path, "qcow2", "write -P 0x44 39M 64k")
    below, _ = layers.backing_of(path)
    lower, format = layers.backing_of(f"{folder}/{below}")
    world.on(s.MergeLayer(disk.ref, int(os.path.basename(path)), lower, format, copy))
    assert layers.backing_of(path)[0] == lower
    assert (qemu_img.virtual_size(f"{folder}/{below}", "qcow2") == 40 * MiB) is not copy
    assert not [name for name in os.listdir(folder) if name.startswith(".staged-")]
    for part in ("0x44 39M 64k", "0 38M 1M"):
        qemu_io(path, "qcow2", f"read -P {part}")
    disk.check()


def test_overlay_grows_where_its_base_is_not(world: World) -> None:
    """The VM is undeployed: its directory is on the front-end, where no base is."""
    disk = Disk(world, "overlay", "raw")
    (world.root / "bases").rename(world.root / "elsewhere")
    world.on(s.GrowDisk(disk.ref, 40 * MiB))
    (world.root / "elsewhere").rename(world.root / "bases")
    qemu_io(disk.record["path"], "qcow2", "read -P 0xa1 1M 64k", "read -P 0 39M 64k")


def test_refusals_are_one_line_and_change_nothing(world: World) -> None:
    disk = Disk(world, "overlay", "raw")
    volatile = world.disk(5, 3)
    world.on(s.CreateVolatile(volatile, MiB, "raw", ""))
    (said,) = world.on(s.DescribeDisk(volatile, ""))
    facts = snapshots.Facts.parse(answers_of.one("h1", s.DescribeDisk, said))
    with pytest.raises(NotSupported, match="volatile"):
        snapshots.create(args.SnapshotPlace.parse([f"h:{volatile.path}", "0", "5", "100"]), facts, "")
    with pytest.raises(BadRecord, match=r"disk 9 .* has no record"):
        world.on(s.DescribeDisk(world.disk(5, 9), ""))
    with pytest.raises(MissingImage):
        world.on(s.SaveDisk(disk.ref, str(world.store / "saved"), "raw", "", 7))
    assert disk.layers() == ["0"]


@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_in_place_snapshots_outlive_the_vm_and_serve_the_next(world: World, format: str) -> None:
    disk = Disk(world, "in-place", format)
    disk.write(2, 0x22)
    disk.create()
    disk.write(3, 0x33)
    world.on(s.EndSession(disk.ref), s.RemoveVm(5, disk.ref.vm_dir))
    disk.ref = world.disk(6)
    disk.make()
    disk.check()
    disk.revert(0)
    disk.check()


@pytest.mark.parametrize("noted", ["what it was", "9", "../../image"])
def test_clone_whose_host_died_in_a_pull_lies_over_what_it_lay_over(world: World, noted: str) -> None:
    """QEMU has named another backing file in the header of the active layer; what it copied before that died
    with it.
    """
    disk = Disk(world, "store-clone", "raw")
    for at in (2, 3, 4):
        disk.create()
        disk.write(at, 0xB0 + at)
    top, folder = str(disk.record["path"]), os.path.dirname(str(disk.record["path"]))
    below, above = layers.backing_of(top)[0], dict(disk.now)
    clones.note_pull(top)
    qemu_img.lay_over(top, "1", "qcow2")
    note = Path(dir_names.pull_note(folder))
    noted = below if noted == "what it was" else noted
    note.write_text(json.dumps({**json.loads(note.read_text()), "below": noted}))
    subprocess.run(["rm", "-r", disk.ref.vm_dir], check=True)
    world.on(s.PrepareVm(disk.ref.vm, disk.ref.vm_dir), s.AdoptClone(disk.ref, disk.image, top))
    assert layers.backing_of(top)[0] == (below if noted == below else "1") and not note.exists()
    disk.now = above if noted == below else {at: pattern for at, pattern in above.items() if at != 3}
    disk.kept.clear()
    disk.check()


def test_layer_of_a_clone_that_no_pull_has_changed_is_not_written(world: World) -> None:
    """Its host died before it, or QEMU had put all back."""
    disk = Disk(world, "store-clone", "raw")
    disk.create()
    top, stored = str(disk.record["path"]), dir_image.Stored(disk.image.source)
    clones.note_pull(top)
    before = os.stat(top)
    clones.put_back(stored, disk_names.plain(top))
    after = os.stat(top)
    assert (after.st_mtime_ns, after.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    assert not os.path.exists(dir_names.pull_note(os.path.dirname(top)))
