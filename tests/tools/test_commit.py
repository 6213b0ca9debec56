# SPDX-License-Identifier: Apache-2.0
"""Local disks of persistent images, through the real host side: claimed, committed, kept, refused; no guest
runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import pytest

from semishared.errors import (
    AnotherWriter,
    CommitRefused,
    ImageChanged,
    NoSpace,
    NotOwner,
    SemisharedError,
    StaleDiff,
    UnknownClaim,
)
from semishared.model import steps as s
from semishared.model.base.steps import EvictBase
from semishared.model.disk import commit_steps as c
from semishared.model.leftover_steps import Discard
from semishared.model.store.image_steps import GrowImage, NoteEpoch
from semishared.tools import inventory, qemu_img
from tools.test_host_transfer import carry
from tools.test_writers import exported
from tools.world import OVERLAY_OPTIONS, MiB, World, qemu_io

FORMATS = ("raw", "qcow2")


def attach(world: World, image: s.ImageRef, disk: s.DiskRef, seq: int = 0, size: int = 0) -> dict[str, Any]:
    """Attach as `tm/ln` plans it; return what the host says."""
    left = left_behind(world, image, disk, seq)
    if left:
        world.on(NoteEpoch(image, disk.vm, left["epoch"]))
    steps = (
        s.StageBase(str(world.root), image),
        s.PrepareVm(disk.vm, disk.vm_dir),
        c.CreateDiff(disk, image, size, OVERLAY_OPTIONS),
    )
    return world.on(*steps, seq=seq)[-1]  # type: ignore[return-value]


def left_behind(world: World, image: s.ImageRef, disk: s.DiskRef, seq: int) -> dict[str, Any]:
    return world.on(c.LookForDiff(disk, image), seq=seq)[0]  # type: ignore[return-value]


def active(disk: s.DiskRef) -> str:
    """Return the layer that a guest would write to."""
    return os.path.realpath(disk.path)


def ended(world: World, disk: s.DiskRef, seq: int = 0) -> Any:
    """End a disk as `tm/mvds` plans it; return what the host says."""
    (found,) = world.on(s.EndSession(disk), seq=seq)
    return world.on(c.FinishDisk(disk), seq=seq)[0] if found == {"commits": True} else found


def kept(world: World, vm: int = 5) -> list[Any]:
    return world.on(c.FindKept(vm, str(world.location), (101, 103)))[0]["kept"]  # type: ignore[index]


def frozen(world: World, disk: s.DiskRef, top: int) -> None:
    """Put an empty layer over what the disk holds, as a commit on request does."""
    world.on(s.AddLayer(disk, top + 1, top, "qcow2"), s.ActivateLayer(disk, top + 1, "qcow2"))


@pytest.mark.parametrize("format", FORMATS)
def test_what_the_guest_wrote_is_in_the_image_when_its_disk_goes(world: World, format: str) -> None:
    image, disk = world.image(format=format), world.disk()
    attach(world, image, disk)
    record = json.loads(Path(disk.vm_dir, ".semishared/disk.1.json").read_text())
    assert (record["how"], record["place"]) == ("diff", "local")
    qemu_io(active(disk), "qcow2", "write -P 0x77 3M 64k")
    qemu_io(image.source, format, "read -P 0 3M 64k")
    assert ended(world, disk)["bytes"] >= 65536
    qemu_io(image.source, format, "read -P 0x77 3M 64k", "read -P 0xa1 1M 64k")
    assert not os.path.lexists(disk.path)
    assert (world.leases(), world.leftovers(), kept(world)) == ([], [], [])
    # A retry of the epilog finds nothing to do.
    assert ended(world, disk) in ({}, None)
    qemu_io(image.source, format, "read -P 0x77 3M 64k")


@pytest.mark.parametrize("format", FORMATS)
def test_commit_on_request_keeps_to_its_rate(world: World, format: str) -> None:
    image, disk = world.image(format=format), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x77 4M 4M")
    frozen(world, disk, 0)
    (done,) = world.on(c.CommitDisk(disk, 0, 4 * MiB))
    assert done["seconds"] > 0.7, done  # type: ignore[index]
    qemu_io(image.source, format, "read -P 0x77 4M 4M")
    qemu_io(active(disk), "qcow2", "write -P 0x78 8M 4M")
    (done,) = world.on(c.FinishDisk(disk, rate=4 * MiB))
    assert done["seconds"] > 0.7, done  # type: ignore[index]
    qemu_io(image.source, format, "read -P 0x78 8M 4M")


def test_an_empty_disk_changes_nothing_on_the_store(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    before = os.stat(image.source)
    assert ended(world, disk)["bytes"] == 0
    after = os.stat(image.source)
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    attach(world, image, world.disk(6))  # whose image it is was forgotten
    assert ended(world, world.disk(6))["bytes"] == 0


@pytest.mark.parametrize("format", FORMATS)
def test_a_grown_disk_grows_its_image(world: World, format: str) -> None:
    image, disk = world.image(format=format), world.disk()
    attach(world, image, disk)
    world.on(s.GrowDisk(disk, 80 * MiB))
    qemu_io(active(disk), "qcow2", "write -P 0x31 79M 64k")
    ended(world, disk)
    assert qemu_img.virtual_size(image.source, format) == 80 * MiB
    qemu_io(image.source, format, "read -P 0x31 79M 64k")


def test_a_store_without_room_for_what_a_disk_has_grown_by_is_not_begun_on(world: World) -> None:
    """A decided commit that cannot be carried out would be in the way of all who want the image."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "small", str(world.store)], check=True)
    try:
        content = os.urandom(4 * MiB)
        (world.store / "image").write_bytes(content)
        image, disk = s.ImageRef(100, 7, "raw", str(world.store / "image")), world.disk()
        attach(world, image, disk)
        world.on(s.GrowDisk(disk, 18 * MiB))
        qemu_io(active(disk), "qcow2", "write -P 0x55 5M 12M")
        for _ in range(2):
            with pytest.raises(NoSpace, match="beside its journal"):
                ended(world, disk)
        world.on(s.StageBase(str(world.root), image))
        assert (world.store / "image").read_bytes() == content
        subprocess.run(["mount", "-o", "remount,size=60m", str(world.store)], check=True)
        ended(world, disk)
        qemu_io(image.source, "raw", "read -P 0x55 5M 12M")
    finally:
        subprocess.run(["umount", str(world.store)], check=True)


@pytest.mark.fault(
    49, "a disk that fills its host is committed and goes, though there is no byte for a layer over it"
)
def test_a_disk_that_fills_its_host_is_committed(world: World) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m,mode=755", "small", str(world.system)], check=True
    )
    try:
        image, disk = world.image(size=16 * MiB), world.disk()
        attach(world, image, disk)
        qemu_io(active(disk), "qcow2", "write -P 0x77 3M 8M")
        with open(world.system / "fill", "wb") as file, pytest.raises(OSError, match="No space left"):
            while True:
                os.write(file.fileno(), bytes(4096))
        assert ended(world, disk)["bytes"] >= 8 * MiB
        qemu_io(image.source, "raw", "read -P 0x77 3M 8M", "read -P 0xa1 1M 64k")
        assert not os.path.lexists(disk.path)
        assert (world.leases(), world.leftovers(), kept(world)) == ([], [], [])
    finally:
        subprocess.run(["umount", "--lazy", str(world.system)], check=True)


def test_commits_on_request_take_what_is_new(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x11 3M 64k")
    frozen(world, disk, 0)
    (done,) = world.on(c.CommitDisk(disk, 0))
    assert done["bytes"] >= 65536  # type: ignore[index]
    qemu_io(image.source, "raw", "read -P 0x11 3M 64k")
    qemu_io(active(disk), "qcow2", "write -P 0x12 4M 64k", "read -P 0x11 3M 64k")
    frozen(world, disk, 1)
    world.on(c.CommitDisk(disk, 1))
    qemu_io(image.source, "raw", "read -P 0x12 4M 64k")
    (described,) = world.on(s.DescribeDisk(disk, ""))
    assert described["waiting"] == 0  # type: ignore[index]
    qemu_io(active(disk), "qcow2", "write -P 0x13 5M 64k")
    ended(world, disk)
    for pattern, at in ((0x11, 3), (0x12, 4), (0x13, 5), (0xA1, 1)):
        qemu_io(image.source, "raw", f"read -P {pattern} {at}M 64k")


def test_the_layer_that_is_written_is_not_committed_on_request(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x11 3M 64k")
    with pytest.raises(SemisharedError, match="to which nobody writes"):
        world.on(c.CommitDisk(disk, 0))


def test_what_a_guest_writes_to_meanwhile_is_not_said_to_be_committed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = world.top / "trace"
    monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
    at = 0
    for number in (6, 5):
        image, disk = world.image(f"image{number}", size=4 * MiB), world.disk(number)
        attach(world, image._replace(id=number), disk)
        qemu_io(active(disk), "qcow2", "write -P 0x11 3M 64k")
        frozen(world, disk, 0)
        trace.unlink()
        if not at:
            world.on(c.CommitDisk(disk, 0))
            at = [line.partition(" ")[2] for line in trace.read_text().splitlines()].index(
                "image committed"
            ) + 1
    monkeypatch.setenv("SEMISHARED_STOP_AT", str(at))
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(world.on, c.CommitDisk(disk, 0))
        deadline = time.monotonic() + 60
        while not trace.exists() or len(trace.read_text().splitlines()) < at:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with exported(f"{disk.vm_dir}/disk.1.snap/0", "qcow2"):
            os.kill(json.loads((world.root / "locks/vm-5-disks").read_text())["pid"], signal.SIGCONT)
            with pytest.raises(AnotherWriter):
                committing.result(60)
    assert "committed" not in json.loads(Path(disk.vm_dir, ".semishared/disk.1.json").read_text())


@pytest.mark.parametrize("whole", [False, True], ids=["disk", "vm"])
def test_a_deleted_disk_is_kept_and_can_still_be_committed(world: World, whole: bool) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk, seq=2)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    removal = s.RemoveVm(5, disk.vm_dir) if whole else s.RemoveDisk(disk, str(world.store))
    (said,) = world.on(removal, seq=2)
    (found,) = kept(world)
    assert found["path"] in str(said)
    assert (found["vm"], found["disk"], found["size"]) == (5, 1, 64 * MiB)
    if not whole:
        world.on(s.RemoveVm(5, disk.vm_dir), seq=2)
    assert not os.path.lexists(disk.vm_dir)
    assert len(world.leases()) == 1
    qemu_io(image.source, "raw", "read -P 0 3M 64k")
    world.on(s.RemoveVm(5, disk.vm_dir), seq=2)  # whoever deletes again takes nothing of it
    (done,) = world.on(c.FinishDisk(s.DiskRef(5, 1, found["path"])))
    assert done["bytes"] >= 65536  # type: ignore[index]
    qemu_io(image.source, "raw", "read -P 0x55 3M 64k")
    assert (kept(world), world.leases(), world.leftovers()) == ([], [], [])
    assert not os.path.exists(found["path"])


def test_what_holds_nothing_is_not_kept(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    world.on(s.RemoveVm(5, disk.vm_dir))
    assert (kept(world), world.leases(), world.leftovers()) == ([], [], [])


def test_a_disk_made_anew_keeps_what_was_there(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk, seq=1)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    assert "kept-5-" in attach(world, image, disk, seq=2)["kept"]
    qemu_io(active(disk), "qcow2", "read -P 0 3M 64k", "write -P 0x56 4M 64k")
    (found,) = kept(world)
    with pytest.raises(StaleDiff):
        world.on(c.FinishDisk(s.DiskRef(5, 1, found["path"])))
    ended(world, disk, seq=2)
    qemu_io(image.source, "raw", "read -P 0x56 4M 64k", "read -P 0 3M 64k")
    assert [item["path"] for item in kept(world)] == [found["path"]]
    saved = world.store / "saved"
    world.on(s.SaveDisk(s.DiskRef(5, 1, found["path"]), str(saved), "raw", ""))
    qemu_io(saved, "raw", "read -P 0x55 3M 64k", "read -P 0xa1 1M 64k")


def test_an_image_that_somebody_else_claimed_is_left_alone(world: World) -> None:
    image, disk, other = world.image(), world.disk(5), world.disk(6)
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    said = attach(world, image, other)
    assert (said["before"]["vm"], said["before"]["disk"]) == (5, 1)
    with pytest.raises(NotOwner, match="VM 6"):
        ended(world, disk)
    qemu_io(active(disk), "qcow2", "read -P 0x55 3M 64k")
    qemu_io(active(other), "qcow2", "write -P 0x66 3M 64k")
    ended(world, other)
    qemu_io(image.source, "raw", "read -P 0x66 3M 64k")


@pytest.mark.parametrize("how", ["written", "grown", "in place"])
def test_an_image_that_changed_meanwhile_is_left_alone(world: World, how: str) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    if how == "written":
        qemu_io(image.source, "raw", "write -P 0x99 8M 64k")
    elif how == "grown":
        world.on(GrowImage(image, 70 * MiB))
    else:
        world.link(image, world.disk(6))
        world.on(s.EndSession(world.disk(6)))
    with pytest.raises(CommitRefused):
        ended(world, disk)
    qemu_io(active(disk), "qcow2", "read -P 0x55 3M 64k")
    qemu_io(image.source, "raw", "read -P 0 3M 64k")


def test_a_second_copy_of_a_finished_disk_is_kept_and_not_committed(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    copy = world.disk(system=103)
    os.makedirs(os.path.dirname(copy.vm_dir))
    world.on(s.RenameVm(5, disk.vm_dir, copy.vm_dir, True, "", (1,)), seq=1)
    ended(world, copy, seq=1)
    qemu_io(image.source, "raw", "read -P 0x55 3M 64k")
    assert "kept-5-" in ended(world, disk, seq=1)["kept"]
    assert not os.path.lexists(disk.path)


def taken_over(world: World, seq: int) -> tuple[s.ImageRef, s.DiskRef]:
    """Return an image, and a disk with data of a VM that another host has taken over since."""
    image, disk = world.image(), world.disk()
    attach(world, image, disk, seq=1)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    world.on(NoteEpoch(image, 5, seq))
    return image, disk


def test_what_a_lost_host_has_is_not_committed_and_kept_when_it_goes(world: World) -> None:
    image, disk = taken_over(world, 2)
    with pytest.raises(StaleDiff):
        ended(world, disk, seq=2)
    seen = world.on(s.LookAtVm(5, disk.vm_dir))[0]["seen"]  # type: ignore[index]
    (answer,) = world.on(c.KeepStale(5, disk.vm_dir, seen), seq=2)
    assert world.on(s.ReleaseVm(5, disk.vm_dir, "", answer["seen"]), seq=2) == [{"kept": ""}]  # type: ignore[index]
    (found,) = kept(world)
    with pytest.raises(StaleDiff):
        world.on(c.FinishDisk(s.DiskRef(5, 1, found["path"])))
    qemu_io(image.source, "raw", "read -P 0 3M 64k")
    # It can become another image.
    world.on(s.SaveDisk(s.DiskRef(5, 1, found["path"]), f"{world.store}/rescued", "raw", ""))
    qemu_io(f"{world.store}/rescued", "raw", "read -P 0x55 3M 64k")


@pytest.mark.parametrize("is_local", [True, False], ids=["local again", "in place"])
def test_what_a_host_has_that_was_away_while_its_vm_was_made_anew_is_kept_when_it_goes(
    world: World, is_local: bool
) -> None:
    """`onevm recover --recreate` while the host is away: nobody has cleaned up there, and nobody has taken
    anything over.
    """
    image, disk, anew = world.image(), world.disk(), world.disk(system=103)
    attach(world, image, disk, seq=1)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    os.makedirs(os.path.dirname(anew.vm_dir))
    if is_local:
        assert left_behind(world, image, anew, 2)["epoch"] == 2
        attach(world, image, anew, seq=2)
        assert left_behind(world, image, anew, 2) is None, "its own claim, repeated"
    else:
        world.on(s.PrepareVm(5, anew.vm_dir), s.LinkInPlace(anew, image, False, True, False), seq=2)
    seen = world.on(s.LookAtVm(5, disk.vm_dir))[0]["seen"]  # type: ignore[index]
    (answer,) = world.on(c.KeepStale(5, disk.vm_dir, seen), seq=2)
    world.on(s.ReleaseVm(5, disk.vm_dir, "", answer["seen"]), seq=2)  # type: ignore[index]
    (found,) = kept(world)
    qemu_io(anew.path, "qcow2" if is_local else "raw", "write -P 0x56 4M 64k")
    ended(world, anew, seq=2)
    qemu_io(image.source, "raw", "read -P 0x56 4M 64k")
    world.on(s.SaveDisk(s.DiskRef(5, 1, found["path"]), f"{world.store}/rescued", "raw", ""))
    qemu_io(f"{world.store}/rescued", "raw", "read -P 0x55 3M 64k")


def test_the_base_of_what_was_kept_stays_whatever_the_next_disk_of_that_number_is(world: World) -> None:
    image, disk, other = world.image(), world.disk(), world.image("other", size=4 * MiB)._replace(id=8)
    attach(world, image, disk, seq=1)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    world.on(s.RemoveVm(5, disk.vm_dir), seq=1)
    (found,) = kept(world)
    (base,) = world.bases()
    attach(world, image, disk, seq=2)
    qemu_io(active(disk), "qcow2", "write -P 0x56 4M 64k")
    ended(world, disk, seq=2)
    world.clone(other, disk)
    assert f"{base.name}/5-1" in world.leases()
    assert world.on(EvictBase(str(world.root), base.name))[0]["evicted"] is False  # type: ignore[index]
    world.on(s.RemoveDisk(disk, str(world.store)), seq=2)
    assert f"{base.name}/5-1" in world.leases()
    world.on(s.SaveDisk(s.DiskRef(5, 1, found["path"]), f"{world.store}/rescued", "raw", ""))
    qemu_io(f"{world.store}/rescued", "raw", "read -P 0x55 3M 64k")


def test_what_was_only_moved_away_leaves_nothing(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk, seq=1)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    seen = world.on(s.LookAtVm(5, disk.vm_dir))[0]["seen"]  # type: ignore[index]
    assert world.on(c.KeepStale(5, disk.vm_dir, seen)) == [{"kept": [], "seen": seen}]
    world.on(s.ReleaseVm(5, disk.vm_dir, "", seen))
    assert kept(world) == []


def test_a_vm_that_comes_back_to_the_lost_host_leaves_what_that_had(world: World) -> None:
    image, disk = taken_over(world, 2)
    other = world.disk(system=103)
    os.makedirs(os.path.dirname(other.vm_dir))
    attach(world, image, other, seq=2)
    carry(other.vm_dir, disk.vm_dir, 5, seq=3)
    (found,) = kept(world)
    assert os.path.dirname(found["path"]) == os.path.dirname(disk.vm_dir)
    qemu_io(active(disk), "qcow2", "read -P 0 3M 64k")


def test_a_restored_disk_is_what_the_backup_was_and_no_more(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    backup = world.top / "backup"
    qemu_img.create(str(backup), "qcow2", 64 * MiB)
    qemu_io(backup, "qcow2", "write -P 0x66 4M 64k")
    data = backup.read_bytes()
    world.on(s.RestoreDisk(disk, 64 * MiB), data=[data], sha256=hashlib.sha256(data).hexdigest())
    ended(world, disk)
    for pattern, at in ((0x66, 4), (0, 3), (0, 1)):
        qemu_io(image.source, "raw", f"read -P {pattern} {at}M 64k")


# -- VMs that are moved ----------------------------------------------------------------------------


def moved(world: World, source: str, target: str, *, keep_bases: bool = True) -> list[Any]:
    """Renew and carry as `tm/mv` plans it; return what was said of the disks."""
    (answer,) = world.on(c.RenewVm(5, source, not keep_bases))
    carry(source, target, 5, keep_bases=keep_bases)
    return list(answer["disks"])  # type: ignore[index]


def gone(world: World) -> None:
    """Let all bases go that nobody has a lease on, as the room for others would."""
    for base in world.bases():
        world.on(EvictBase(str(world.root), base.name))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("written", [True, False], ids=["written", "empty"])
def test_a_disk_that_cannot_be_committed_takes_its_base_along(
    world: World, format: str, written: bool
) -> None:
    image, disk = world.image(format=format), world.disk()
    attach(world, image, disk)
    if written:
        qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    qemu_io(image.source, format, "write -P 0x99 8M 64k")
    rest, far = str(world.top / "fe" / "101" / "5"), str(world.top / "far" / "101" / "5")
    (said,) = moved(world, disk.vm_dir, rest, keep_bases=False)
    assert (said["waiting"], said["with_base"]) == (written, True)
    gone(world)
    assert world.bases() == []
    saved = world.store / "saved"
    world.on(s.SaveDisk(s.DiskRef(5, 1, rest), str(saved), "raw", ""))
    for place in (far, disk.vm_dir):
        carry(rest, place, 5)
        for path in (os.path.realpath(f"{place}/disk.1"), saved):
            reads = (f"read -P {0x55 if written else 0} 3M 64k", "read -P 0xa1 1M 64k", "read -P 0 8M 64k")
            qemu_io(path, "raw" if path is saved else "qcow2", *reads)
        assert sorted(os.listdir(f"{place}/disk.1.snap")) == (["0", "1"] if written else ["0"])
        (said,) = moved(world, place, rest, keep_bases=False)
        assert said["why"]
    world.on(s.RemoveVm(5, rest))
    found: list[Path | None] = [
        path for path in (world.top / "fe" / "101").iterdir() if path.name.startswith(".kept-")
    ]
    (left,) = found or [None]
    assert (left is not None) == written
    if left:
        world.on(s.SaveDisk(s.DiskRef(5, 1, str(left)), str(saved), "raw", ""))
        qemu_io(saved, "raw", "read -P 0x55 3M 64k")


@pytest.mark.parametrize("there", [True, False], ids=["unchanged", "changed"])
def test_a_base_that_changed_on_its_way_is_no_base(world: World, there: bool) -> None:
    """The store's is fetched if it is the one; else the disk stays where it is."""
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    os.rename(image.source, f"{image.source}.away")
    rest = str(world.top / "fe" / "101" / "5")
    (said,) = moved(world, disk.vm_dir, rest, keep_bases=False)
    assert said["with_base"]
    os.rename(f"{image.source}.away", image.source)
    gone(world)
    carried = Path(rest, "disk.1.snap/base")
    with carried.open("r+b") as file:
        file.seek(MiB)
        file.write(b"rot")
    if there:
        carry(rest, disk.vm_dir, 5)
        reads = ("read -P 0x55 3M 64k", "read -P 0xa1 1M 64k")
        qemu_io(active(disk), "qcow2", *reads)
        return
    qemu_io(image.source, "raw", "write -P 0x99 8M 64k")
    with pytest.raises(ImageChanged):
        carry(rest, disk.vm_dir, 5)
    assert world.bases() == []
    assert Path(rest, ".semishared/disk.1.json").exists()


def rewritten(path: Path, **changes: object) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("whole", [False, True], ids=["disk", "vm"])
@pytest.mark.parametrize("damage", [{"version": 2}, {"image": {"id": "?"}}], ids=["newer", "damaged"])
def test_what_may_be_a_diff_is_kept_as_it_is(world: World, damage: dict[str, object], whole: bool) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk, seq=2)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    record = Path(disk.vm_dir, ".semishared/disk.1.json")
    before = json.loads(record.read_text())
    rewritten(record, **damage)
    with pytest.raises(SemisharedError, match="disk 1"):
        ended(world, disk, seq=2)
    if not whole:
        world.on(s.RemoveDisk(disk, str(world.store)), seq=2)
    world.on(s.RemoveVm(5, disk.vm_dir), seq=2)
    world.on(s.RemoveVm(5, disk.vm_dir), seq=2)
    (found,) = kept(world)
    assert (found["vm"], found["disk"], found["image"]) == (5, 1, None) and found["bytes"] >= 65536
    assert (len(world.leases()), world.leftovers()) == (1, [])
    at = s.DiskRef(5, 1, found["path"])
    with pytest.raises(SemisharedError, match="disk 1"):
        world.on(c.FinishDisk(at))
    # What the version does that has written it.
    rewritten(Path(found["path"], ".semishared/disk.1.json"), **{name: before[name] for name in damage})
    world.on(c.FinishDisk(at))
    qemu_io(image.source, "raw", "read -P 0x55 3M 64k")
    assert (kept(world), world.leases(), world.leftovers()) == ([], [], [])


@pytest.mark.parametrize("text", ["", "{}", '{"version": 2}', "\x00" * 100])
def test_a_claim_that_nobody_understands_is_nobodys(world: World, text: str) -> None:
    image, disk, other = world.image(), world.disk(5), world.disk(6)
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    record = Path(f"{world.store}/.semishared/image/owner.json")
    whole = record.read_text()
    record.write_text(text)
    for act in (lambda: ended(world, disk), lambda: attach(world, image, other)):
        with pytest.raises(UnknownClaim, match="owner.json"):
            act()
        assert record.read_text() == text
    qemu_io(active(disk), "qcow2", "read -P 0x55 3M 64k")
    record.write_text(whole)
    assert ended(world, disk)["bytes"] >= 65536
    qemu_io(image.source, "raw", "read -P 0x55 3M 64k")


def test_what_a_killed_move_has_set_aside_is_kept_when_gc_takes_it(world: World) -> None:
    image, disk = world.image(), world.disk()
    attach(world, image, disk, seq=1)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    aside = f"{os.path.dirname(disk.vm_dir)}/.outgoing-5-ab12ab12ab12"
    os.rename(disk.vm_dir, aside)
    seen = str(inventory.newest(aside)[0])
    world.on(Discard("outgoing", aside, str(world.location), 5, seen))
    assert not os.path.exists(aside)
    (found,) = kept(world)
    world.on(c.FinishDisk(s.DiskRef(5, 1, found["path"])))
    qemu_io(image.source, "raw", "read -P 0x55 3M 64k")


def test_a_base_that_came_along_before_is_not_taken_for_another(world: World) -> None:
    """Of an undeploy that failed, after which the disk was committed and got another base."""
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    os.rename(image.source, f"{image.source}.away")
    (answer,) = world.on(c.RenewVm(5, disk.vm_dir, True))
    carried = Path(f"{disk.path}.snap/base")
    assert answer["disks"][0]["with_base"]  # type: ignore[index]
    assert carried.exists()
    os.rename(f"{image.source}.away", image.source)
    (answer,) = world.on(c.RenewVm(5, disk.vm_dir, True))
    assert answer["disks"][0]["bytes"] >= 65536  # type: ignore[index]
    assert not carried.exists()
    qemu_io(image.source, "raw", "read -P 0x55 3M 64k")
    carried.write_bytes(b"of another generation")
    qemu_io(active(disk), "qcow2", "write -P 0x56 4M 64k")
    qemu_io(image.source, "raw", "write -P 0x99 8M 64k")
    rest = str(world.top / "fe" / "101" / "5")
    moved(world, disk.vm_dir, rest, keep_bases=False)
    gone(world)
    carry(rest, disk.vm_dir, 5)
    qemu_io(
        active(disk),
        "qcow2",
        *(f"read -P {value} {at}M 64k" for value, at in ((0x55, 3), (0x56, 4), (0xA1, 1), (0, 8))),
    )


def test_what_is_left_elsewhere_is_not_put_under_a_guest(world: World) -> None:
    """An image that is not what this disk has left, though nothing waits to be committed: nor is it taken
    from whom it waits for now.
    """
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", "write -P 0x55 3M 64k")
    frozen(world, disk, 0)
    world.on(c.CommitDisk(disk, 0))
    qemu_io(image.source, "raw", "write -P 0x99 3M 64k")
    (answer,) = world.on(c.RenewVm(5, disk.vm_dir, False))
    assert "written to by somebody else" in answer["disks"][0]["why"]  # type: ignore[index]
    qemu_io(active(disk), "qcow2", "read -P 0x55 3M 64k")
    attach(world, image, world.disk(6))
    (answer,) = world.on(c.RenewVm(5, disk.vm_dir, False))
    assert "claimed for another disk" in answer["disks"][0]["why"]  # type: ignore[index]
    qemu_io(active(world.disk(6)), "qcow2", "write -P 0x66 4M 64k")
    ended(world, world.disk(6))
    qemu_io(image.source, "raw", "read -P 0x66 4M 64k")


# -- killed at every point ----------------------------------------------------------------------------


def attaching(world: World, image: s.ImageRef, disk: s.DiskRef) -> None:
    attach(world, image, disk)


def finishing(world: World, image: s.ImageRef, disk: s.DiskRef) -> None:
    ended(world, disk)


def on_request(world: World, image: s.ImageRef, disk: s.DiskRef) -> None:
    world.on(c.CommitDisk(disk, 0))


def renewing(world: World, image: s.ImageRef, disk: s.DiskRef) -> None:
    world.on(c.RenewVm(disk.vm, disk.vm_dir, True))


def deleting(world: World, image: s.ImageRef, disk: s.DiskRef) -> None:
    world.on(s.RemoveDisk(disk, str(world.store)), s.RemoveVm(disk.vm, disk.vm_dir))


def deleting_all(world: World, image: s.ImageRef, disk: s.DiskRef) -> None:
    world.on(s.RemoveVm(disk.vm, disk.vm_dir))


KILLED: dict[str, Callable[[World, s.ImageRef, s.DiskRef], None]] = {
    function.__name__: function
    for function in (attaching, finishing, on_request, renewing, deleting, deleting_all)
}


OWN = {
    "claim written",
    "image claimed",
    "disk.1 layer renamed",
    "kept directory made",
    "diff kept",
    "disk unlinked",
    "disk removed",
    "commit decided",
    "image committed",
    "commit recorded",
    "empty layer made",
    "layer recorded",
    "committed layer removed",
    "record removed",
}
"""Points between which something else may be true; what the store does to an image is killed in tests/store
and test_commits.py.
"""


def ready(world: World, number: int, what: str) -> tuple[s.ImageRef, s.DiskRef]:
    """Return an image and a disk of a VM of this number, as the action finds it: written to, frozen for a
    commit on request.
    """
    image, disk = world.image(f"image{number}", size=4 * MiB), world.disk(number)
    image = image._replace(id=number)
    if what != "attaching":
        attach(world, image, disk)
        qemu_io(active(disk), "qcow2", "write -P 0x71 2M 64k")
        if what == "on_request":
            frozen(world, disk, 0)
    return image, disk


def pattern(path: str, at: int) -> int:
    """Return the byte that 64 KiB of a raw image hold; fail if they hold more than one."""
    with open(path, "rb") as file:
        (found,) = set(os.pread(file.fileno(), 64 << 10, at))
    return found


@pytest.mark.parametrize("what", KILLED)
def test_killed_at_every_point_and_done_again(
    world: World, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    act, trace = KILLED[what], world.top / "trace"
    image, disk = ready(world, 1000, what)
    monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
    act(world, image, disk)
    monkeypatch.delenv("SEMISHARED_TRACE")
    passed = [line.partition(" ")[2] for line in trace.read_text().splitlines()]
    points = {number: name for number, name in enumerate(passed, 1) if name in OWN}
    assert len(points) >= 2, passed
    for number, name in points.items():
        image, disk = ready(world, number, what)
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        with pytest.raises(SemisharedError):
            act(world, image, disk)
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        act(world, image, disk)
        is_committed = what in ("finishing", "on_request", "renewing")
        wanted = 0x71 if is_committed else 0
        assert pattern(image.source, 2 * MiB) == wanted, f"killed at {name}"
        assert pattern(image.source, 1 * MiB) == 0xA1
        if what in ("on_request", "renewing"):
            qemu_io(active(disk), "qcow2", "read -P 0x71 2M 64k")
            (described,) = world.on(s.DescribeDisk(disk, ""))
            assert described["waiting"] == 0  # type: ignore[index]
            ended(world, disk)
        elif what == "attaching":
            qemu_io(active(disk), "qcow2", "write -P 0x71 2M 64k")
            ended(world, disk)
            assert pattern(image.source, 2 * MiB) == 0x71
        elif "deleting" in what:
            (found,) = kept(world, number)
            world.on(c.FinishDisk(s.DiskRef(number, 1, found["path"])))
            assert pattern(image.source, 2 * MiB) == 0x71, f"killed at {name}"
        world.on(s.RemoveVm(number, disk.vm_dir))
        assert kept(world, number) == []
        assert not [lease for lease in world.leases() if lease.endswith(f"/{number}-1")], name


def passed(
    world: World, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], among: set[str]
) -> dict[str, int]:
    """Return the numbers of these points, which one process of an action passes, if it does more than once
    the last.
    """
    trace = world.top / "trace"
    monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
    act()
    monkeypatch.delenv("SEMISHARED_TRACE")
    found = {
        name: int(number)
        for number, _, name in (line.partition(" ") for line in trace.read_text().splitlines())
    }
    return {name: found[name] for name in sorted(among)}


def killed(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
    with pytest.raises(SemisharedError):
        act()
    monkeypatch.delenv("SEMISHARED_KILL_AT")


RENEWED = {
    "commit recorded",
    "leased",
    "layer recorded",
    "image claimed",
    "committed layer removed",
    "lease released",
}


def test_a_vm_starts_where_it_was_after_a_renewal_that_was_killed_anywhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move that it was for failed: the guest goes on there, and what it writes then is committed too."""
    renewing(
        world, *ready(world, 1000, "renewing")
    )  # from now on their content is on the host, under another name
    it = ready(world, 1001, "renewing")
    numbers = passed(world, monkeypatch, lambda: renewing(world, *it), RENEWED)
    for at, number in numbers.items():
        image, disk = ready(world, 2000 + number, "renewing")
        killed(monkeypatch, number, lambda image=image, disk=disk: renewing(world, image, disk))  # type: ignore[misc]
        gone(world)
        # What libvirt opens.
        path = json.loads(Path(disk.vm_dir, f".semishared/disk.{disk.disk}.json").read_text())["path"]
        qemu_io(path, "qcow2", "read -P 0x71 2M 64k", "write -P 0x72 3M 64k")
        ended(world, disk)
        assert (pattern(image.source, 2 * MiB), pattern(image.source, 1 * MiB)) == (0x71, 0xA1), at
        qemu_io(image.source, "raw", "read -P 0x72 3M 64k")
        assert not os.path.lexists(disk.path)
        world.on(s.RemoveVm(disk.vm, disk.vm_dir))
        assert kept(world, disk.vm) == []
        assert not [lease for lease in world.leases() if lease.endswith(f"/{disk.vm}-1")], at


def test_killed_while_a_base_is_put_beside_its_disk(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(number: int) -> tuple[s.ImageRef, s.DiskRef]:
        image, disk = ready(world, number, "renewing")
        qemu_io(image.source, "raw", "write -P 0x99 3M 64k")
        return image, disk

    it = refused(1000)
    numbers = passed(world, monkeypatch, lambda: renewing(world, *it), {"staged base", "published base"})
    for number in numbers.values():
        image, disk = refused(2000 + number)
        killed(monkeypatch, number, lambda image=image, disk=disk: renewing(world, image, disk))  # type: ignore[misc]
        (answer,) = world.on(c.RenewVm(disk.vm, disk.vm_dir, True))
        assert answer["disks"][0]["with_base"]  # type: ignore[index]
        assert os.path.samefile(f"{disk.path}.snap/base", world.root / "bases" / answer["bases"][0] / "image")  # type: ignore[index]
        assert world.leftovers() == []


COMES = {"carried base staged", "base published", "leased", "carried base removed", "vm directory renamed"}


def test_killed_anywhere_while_a_base_comes_along(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def rests(number: int) -> tuple[s.DiskRef, str]:
        """Leave the only base of a disk in the directory of its VM at rest."""
        image, disk = ready(world, number, "renewing")
        qemu_io(image.source, "raw", "write -P 0x99 3M 64k")
        rest = str(world.top / "fe" / "101" / str(number))
        world.on(c.RenewVm(number, disk.vm_dir, True))
        carry(disk.vm_dir, rest, number, keep_bases=False)
        gone(world)
        return disk, rest

    disk, rest = rests(1000)
    numbers = passed(world, monkeypatch, lambda: carry(rest, disk.vm_dir, 1000), COMES)
    for at, number in numbers.items():
        disk, rest = rests(2000 + number)
        killed(monkeypatch, number, lambda disk=disk, rest=rest: carry(rest, disk.vm_dir, disk.vm))  # type: ignore[misc]
        carry(rest, disk.vm_dir, disk.vm)
        qemu_io(active(disk), "qcow2", "read -P 0x71 2M 64k", "read -P 0xA1 1M 64k", "read -P 0 3M 64k")
        assert [name for name in world.leases() if name.endswith(f"/{disk.vm}-1")], at
        assert not os.path.lexists(f"{disk.path}.snap/base")
        assert world.leftovers() == []
