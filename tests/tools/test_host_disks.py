# SPDX-License-Identifier: Apache-2.0
"""Disks on a host, through the real host side: in place, on the store, volatile, saved, removed, and races
with delete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from semishared.disk import create
from semishared.disk.epochs import Planned
from semishared.errors import (
    BadRecord,
    DataInTheWay,
    ImageChanged,
    LateAction,
    MissingImage,
    NotSupported,
    ReadOnly,
    SemisharedError,
    StoreUnavailable,
    TransferCorrupt,
    VmGone,
)
from semishared.model import steps as s
from semishared.store.dir import clones
from semishared.store.dir import image as dir_image
from semishared.store.dir.image import Stored
from semishared.tools import extents, files, qemu_img
from tools.world import MiB, World, qemu_io


@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_in_place_disk_is_the_image_behind_a_link_on_the_store(world: World, format: str) -> None:
    image, disk = world.image(format=format), world.disk()
    link = world.link(image, disk)
    first = f"{world.store}/.semishared/image/image"
    assert os.readlink(link) == first
    assert os.readlink(first) == "../../image"
    assert json.loads(Path(disk.vm_dir, ".semishared/disk.1.json").read_text())["path"] == first
    qemu_io(link, format, "write -P 0x88 3M 64k")
    qemu_io(image.source, format, "read -P 0x88 3M 64k")
    world.on(s.EndSession(disk))
    assert not os.path.lexists(link)
    qemu_io(image.source, format, "read -P 0x88 3M 64k", "read -P 0xa1 1M 64k")
    assert not os.path.exists(Path(disk.vm_dir, ".semishared/disk.1.json"))


def test_linking_and_ending_twice_is_as_good_as_once(world: World) -> None:
    image, disk = world.image(), world.disk()
    world.link(image, disk)
    world.link(image, disk)
    world.on(s.EndSession(disk))
    world.on(s.EndSession(disk))
    qemu_io(image.source, "raw", "read -P 0xa1 1M 64k")


def test_end_of_a_session_refuses_a_file_that_might_hold_the_only_data(world: World) -> None:
    disk = world.disk()
    Path(disk.vm_dir).mkdir(parents=True)
    Path(disk.path).write_bytes(b"precious")
    with pytest.raises(DataInTheWay, match=r"disk\.1"):
        world.on(s.EndSession(disk))
    assert Path(disk.path).read_bytes() == b"precious"


@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_clone_on_the_store_is_gone_with_its_disk(world: World, format: str) -> None:
    image, disk = world.image(format=format), world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), s.CloneOnStore(disk, image, 100 * MiB))
    clone = world.store / ".semishared/image/clones/5-1"
    assert os.readlink(disk.path) == str(clone)
    assert qemu_img.virtual_size(disk.path, "qcow2") == 100 * MiB
    qemu_io(disk.path, "qcow2", "write -P 0x99 2M 64k", "read -P 0xa1 1M 64k")
    qemu_io(image.source, format, "read -P 0 2M 64k")
    assert world.bases() == []
    world.on(s.RemoveDisk(disk, str(world.store)))
    assert not os.path.lexists(disk.path)
    assert not clone.exists()
    qemu_io(image.source, format, "read -P 0xa1 1M 64k")


def test_clone_that_is_not_published_whole_leaves_no_layer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Stored(world.image().source)
    clone = stored.clone(5, 1)
    dir_image.make_link(stored)

    flush, seen = files.fsync, list[list[str]]()

    def fails(path: str) -> None:
        if not os.path.isdir(path):
            return flush(path)
        seen.append(os.listdir(path))
        raise OSError(errno.EIO, "it does not reach the disk")

    monkeypatch.setattr(files, "fsync", fails)
    with pytest.raises(OSError, match="does not reach"), clones.made(stored, "raw", clone, 0) as publish:
        publish()
    assert seen == [["0"]], "its only layer was there by then"
    assert os.listdir(os.path.dirname(clone)) == []


@pytest.mark.parametrize(
    ("format", "fs", "kind"),
    [
        ("raw", "", ""),
        ("qcow2", "", ""),
        ("raw", "ext4", "ext4"),
        ("qcow2", "ext4", "ext4"),
        ("raw", "xfs", "XFS"),
        ("raw", "swap", "swap"),
    ],
)
def test_volatile_disk_has_its_format_size_and_file_system(
    world: World, format: str, fs: str, kind: str
) -> None:
    disk = world.disk()
    size = (320 if fs == "xfs" else 32) * MiB
    world.on(s.PrepareVm(5, disk.vm_dir), s.CreateVolatile(disk, size, format, fs))
    assert qemu_img.virtual_size(disk.path, format) == size
    raw = world.top / "raw"
    qemu_img.convert(disk.path, format, str(raw), "raw")
    assert kind in subprocess.check_output(["file", "-b", str(raw)], text=True)
    world.on(s.RemoveDisk(disk, f"{world.location}/101"))
    assert not os.path.lexists(disk.path)


def test_unknown_file_system_is_refused_and_nothing_is_left(world: World) -> None:
    disk = world.disk()
    with pytest.raises(NotSupported, match="'btrfs; reboot' of disk 1"):
        world.on(s.PrepareVm(5, disk.vm_dir), s.CreateVolatile(disk, MiB, "raw", "btrfs; reboot"))
    assert not os.path.lexists(disk.path)
    assert world.leftovers() == []


def test_save_as_is_independent_of_base_and_overlay(world: World) -> None:
    image, disk = world.image(), world.disk()
    top = world.clone(image, disk)
    qemu_io(top, "qcow2", "write -P 0x44 2M 64k")
    saved = world.store / "saved"
    world.on(s.SaveDisk(disk, str(saved), "raw", ""))
    world.on(s.RemoveVm(5, disk.vm_dir))
    for command in ("read -P 0x44 2M 64k", "read -P 0xa1 1M 64k", "read -P 0 3M 64k"):
        qemu_io(saved, "raw", command)
    assert world.moved == {} or "store_written" in world.moved


def test_save_as_of_a_disk_that_is_not_there(world: World) -> None:
    with pytest.raises(MissingImage):
        world.on(s.SaveDisk(world.disk(), str(world.store / "saved"), "raw", ""))
    assert not (world.store / "saved").exists()


def test_removing_a_disk_or_vm_twice_or_when_nothing_is_there(world: World) -> None:
    disk = world.disk()
    world.clone(world.image(), disk)
    for _ in range(2):
        world.on(s.RemoveDisk(disk, str(world.store)))
        world.on(s.RemoveVm(5, disk.vm_dir))
    assert world.leases() == []
    assert not os.path.lexists(disk.vm_dir)


def test_removing_a_vm_leaves_others_and_what_its_links_lead_to(world: World) -> None:
    image = world.image()
    world.clone(image, world.disk(5))
    world.clone(image, world.disk(55))
    world.link(world.image("other"), world.disk(5, 2))
    world.on(s.RemoveVm(5, world.disk(5).vm_dir))
    assert [lease.split("/")[1] for lease in world.leases()] == ["55-1"]
    qemu_io(world.disk(55).path, "qcow2", "read -P 0xa1 1M 64k")
    qemu_io(world.store / "other", "raw", "read -P 0xa1 1M 64k")


STEPS = {
    "overlay": lambda world, image, disk: s.CreateOverlay(disk, image, 0, ""),
    "copy": lambda world, image, disk: s.CopyImage(disk, image, 0),
    "clone on the store": lambda world, image, disk: s.CloneOnStore(disk, image, 0),
    "in place": lambda world, image, disk: s.LinkInPlace(disk, image, False, True),
    "volatile": lambda world, image, disk: s.CreateVolatile(disk, MiB, "raw", ""),
    "kernel": lambda world, image, disk: s.CopyFile(image.source, f"{disk.vm_dir}/kernel", disk.vm),
}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("directory", ["gone", "made again"])
def test_a_disk_begun_before_the_delete_of_its_vm_is_not_published(
    world: World, how: str, directory: str
) -> None:
    image, disk = world.image(), world.disk()
    with world.begun(disk) as late:
        world.on(s.RemoveVm(5, disk.vm_dir))
        if directory == "made again":
            world.on(s.PrepareVm(5, disk.vm_dir))
        with pytest.raises(VmGone, match="VM 5 was deleted"):
            late(STEPS[how](world, image, disk))
    names = sorted(os.listdir(disk.vm_dir)) if os.path.isdir(disk.vm_dir) else []
    assert names == ([".semishared"] if directory == "made again" else [])
    assert world.leases() == []
    assert not (world.store / ".semishared/image/clones/5-1").exists()
    assert world.leftovers() == []
    qemu_io(image.source, "raw", "read -P 0xa1 1M 64k")


def test_a_disk_begun_before_its_own_delete_is_not_published_and_others_are(world: World) -> None:
    image = world.image()
    world.on(s.PrepareVm(5, world.disk().vm_dir))
    with world.begun(world.disk()) as late:
        world.on(s.RemoveDisk(world.disk(5, 1), ""))
        with pytest.raises(VmGone):
            late(s.CreateOverlay(world.disk(5, 1), image, 0, ""))
        late(s.CreateOverlay(world.disk(5, 2), image, 0, ""))
    qemu_io(world.disk(5, 2).path, "qcow2", "read -P 0xa1 1M 64k")
    # Detached and attached again: the next plan is another one, also within the same SEQ.
    world.on(s.RemoveDisk(world.disk(5, 2), ""), seq=3)
    world.on(s.CreateOverlay(world.disk(5, 2), image, 0, ""), seq=3)


@pytest.mark.fault(13, "a deletion is told of also after the file that counts them was old, and removed")
@pytest.mark.parametrize("key", ["disk", "vm"])
def test_a_disk_begun_before_its_delete_is_not_published_though_the_count_began_anew(
    world: World, key: str
) -> None:
    image, disk = world.image(), world.disk(5, 2)
    delete = s.RemoveDisk(disk, "") if key == "disk" else s.RemoveVm(5, disk.vm_dir)
    world.on(s.PrepareVm(5, disk.vm_dir), delete)
    with world.begun(disk) as late:
        (world.root / "locks" / "vm-5").unlink()
        world.on(delete)
        world.on(s.PrepareVm(5, disk.vm_dir))
        with pytest.raises(VmGone):
            late(s.CreateOverlay(disk, image, 0, ""))
    with world.begun(disk) as current:
        (world.root / "locks" / "vm-5").unlink()
        current(s.CreateOverlay(disk, image, 0, ""))


def test_the_late_action_does_not_make_the_vm_directory_again(world: World) -> None:
    disk = world.disk()
    with world.begun(disk) as late:
        world.on(s.RemoveVm(5, disk.vm_dir))
        with pytest.raises(VmGone):
            late(*world.cloning(world.image(), disk))
    assert not os.path.lexists(disk.vm_dir)


def test_an_action_of_an_older_seq_than_a_deletion_is_late_whenever_it_arrives(world: World) -> None:
    image, disk = world.image(), world.disk()
    world.on(s.RemoveVm(5, disk.vm_dir), seq=7)
    with pytest.raises(LateAction, match="at SEQ 7 of its history, and this is of SEQ 6"):
        world.on(*world.cloning(image, disk), seq=6)
    assert not os.path.lexists(disk.vm_dir)
    for seq in (7, 8, -1):
        world.on(*world.cloning(image, disk), seq=seq)
    qemu_io(disk.path, "qcow2", "read -P 0xa1 1M 64k")


def test_lock_files_of_0_1_0_hold_times_and_stop_nothing(world: World) -> None:
    lock = world.root / "locks" / "vm-5"
    lock.parent.mkdir(parents=True)
    lock.write_text(json.dumps({"": time.time() + 86400, "1": time.time() + 86400}))
    disk = world.disk()
    with world.begun(disk) as late:
        world.clone(world.image(), disk)
        world.on(s.RemoveDisk(disk, ""))
        with pytest.raises(VmGone):
            late(s.CreateVolatile(disk, MiB, "raw", ""))


def test_a_redeployed_vm_gets_its_disk_after_an_older_delete(world: World) -> None:
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    qemu_io(world.clone(world.image(), world.disk()), "qcow2", "read -P 0xa1 1M 64k")


def test_received_file_is_whole_or_not_there(world: World) -> None:
    directory = world.disk().vm_dir
    data = os.urandom(3 * MiB)
    digest = hashlib.sha256(data).hexdigest()
    step = s.ReceiveFile(f"{directory}/disk.4", 5, len(data), digest)
    chunks = [data[at : at + MiB] for at in range(0, len(data), MiB)]
    world.on(s.PrepareVm(5, directory))
    with pytest.raises(TransferCorrupt, match=r"disk\.4"):
        world.on(step, data=chunks[:2], sha256=digest)
    assert not os.path.lexists(f"{directory}/disk.4")
    world.on(step, data=chunks, sha256=digest)
    assert Path(directory, "disk.4").read_bytes() == data
    assert world.leftovers() == []


def test_kernel_is_a_plain_copy(world: World) -> None:
    (world.store / "kernel").write_bytes(b"MZ" + bytes(100000) + b"end")
    directory = world.disk().vm_dir
    world.on(s.PrepareVm(5, directory), s.CopyFile(str(world.store / "kernel"), f"{directory}/kernel", 5))
    assert Path(directory, "kernel").read_bytes() == (world.store / "kernel").read_bytes()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"disk": 1}'])
def test_record_that_cannot_be_understood_is_an_error(world: World, text: str) -> None:
    disk = world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir))
    Path(disk.vm_dir, ".semishared", "disk.1.json").write_text(text)
    with pytest.raises(BadRecord, match=r"disk\.1\.json"):
        world.on(s.DescribeVm(5, disk.vm_dir))


def test_probe_of_a_store_passes_only_where_both_see_the_same(world: World) -> None:
    store = str(world.store)
    (world.store / ".semishared").mkdir()
    (found,) = world.on(s.WriteProbe(store, "ask"))
    name = found["name"]  # type: ignore[index]
    world.on(s.AnswerProbe(store, name, "ask", "answer"), s.CheckProbe(store, name, "answer"))
    assert os.listdir(world.store / ".semishared") == []
    (found,) = world.on(s.WriteProbe(store, "ask"))
    name = found["name"]  # type: ignore[index]
    with pytest.raises(StoreUnavailable, match="not the same"):
        world.on(s.AnswerProbe(store, name, "other", "answer"))
    with pytest.raises(StoreUnavailable, match="not the same"):
        world.on(s.CheckProbe(store, name, "answer"))
    assert os.listdir(world.store / ".semishared") == []


def test_error_of_the_host_keeps_its_kind_and_the_session_goes_on(world: World) -> None:
    from semishared.config import Config
    from semishared.wire.session import Session

    with Session("localhost", "test", Config()) as session:
        with pytest.raises(MissingImage):
            session.run([s.SaveDisk(world.disk(), str(world.store / "copy"), "raw", "")])
        assert session.run([s.DescribeVm(5, world.disk().vm_dir)]) == [s.DescribedVm(False, [])]


def test_plan_of_another_version_is_refused(world: World) -> None:
    from semishared.config import Config
    from semishared.errors import HostOutdated
    from semishared.wire.session import Session

    with Session("localhost", "test", Config()) as session:
        session.send(plan={"version": "0.0.1", "seq": 0, "steps": []})
        with pytest.raises(HostOutdated, match=r"0\.0\.1"):
            session.finish()


def test_plan_that_is_none_is_a_clear_error() -> None:
    from semishared.config import Config
    from semishared.wire.session import Session

    late, unknown = {"seq": "1", "steps": []}, {"seq": 1, "steps": [{"step": "Reboot"}]}
    for plan in (
        None,
        3,
        {"version": "0.1.0"},
        {"version": "0.1.0", **late},
        {"version": "0.1.0", **unknown},
    ):
        with Session("localhost", "test", Config()) as session:
            session.send(plan=plan)
            with pytest.raises(SemisharedError):
                session.finish()


@pytest.mark.fault(44, "an image that is attached read-only is not grown, whatever oned says of it by now")
def test_what_is_attached_read_only_is_not_grown(world: World) -> None:
    image, disk = world.image(), world.disk()
    world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.LinkInPlace(disk, image, True, session=False))
    for step in (s.GrowDisk(disk, 128 * MiB), s.AllowGrowth(disk, 128 * MiB)):
        with pytest.raises(NotSupported, match="disk 1 of VM 5 is read-only"):
            world.on(step)
    assert os.path.getsize(image.source) == 64 * MiB


@pytest.mark.fault(
    49,
    "a copy of an image that was replaced meanwhile says so, and nobody is looked for who has written to it",
)
def test_an_image_that_is_replaced_while_it_is_copied(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    image, disk = world.image(size=4 * MiB), world.disk()
    world.on(s.PrepareVm(disk.vm, disk.vm_dir))
    real = extents.copy

    def copy(source: str, *words: Any, **more: Any) -> extents.Manifest:
        found = real(source, *words, **more)
        if os.path.samefile(source, image.source):
            Path(f"{image.source}.new").write_bytes(Path(image.source).read_bytes())
            os.rename(f"{image.source}.new", image.source)
        return found

    monkeypatch.setattr(extents, "copy", copy)
    with pytest.raises(ImageChanged, match="was replaced by another file while"):
        create.copy_image(s.CopyImage(disk, image, 0), Planned(), None)


@pytest.mark.fault(
    49, "a host's file system that takes no writes is called that, and has a remedy of its own"
)
def test_a_host_whose_datastores_are_read_only(world: World) -> None:
    disk = world.disk()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "broken", str(world.system)], check=True)
    try:
        with pytest.raises(ReadOnly, match=str(world.system)):
            world.on(s.PrepareVm(disk.vm, disk.vm_dir))
    finally:
        subprocess.run(["umount", str(world.system)], check=True)
