# SPDX-License-Identifier: Apache-2.0
"""Images on a real Ceph cluster: bases streamed from them, sessions that end generations, clones, snapshots,
and their ends.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

import pytest

from semishared.errors import (
    CephRefused,
    CephUnavailable,
    ImageChanged,
    ImageInUse,
    LateAction,
    MissingImage,
    NotSupported,
    Overtaken,
    SemisharedError,
    UploadTooLarge,
)
from semishared.model import answers
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.store import datastore_steps as d
from semishared.model.store import image_steps as i
from semishared.stage.partial import Partial
from semishared.tools import extents
from tools.world import MiB, World, allocated, qemu_io

if TYPE_CHECKING:
    from tools.ceph_cluster import LocalCluster
    from tools.ceph_site import Site


@pytest.fixture(params=["v1", "v2"])
def clones(request: pytest.FixtureRequest, site: Site) -> Iterator[str]:
    """Clones of protected snapshots (clients before Mimic are allowed), and of any."""
    site.command(
        "osd set-require-min-compat-client", version="mimic" if request.param == "v2" else "luminous"
    )
    yield request.param


def overlay(site: Site, world: World, image: s.ImageRef, vm: int) -> tuple[str, Path]:
    """Do what tm/clone does for a local disk."""
    generation = site.base(world, image)
    moved, disk, pinned = site.moved, world.disk(vm), image._replace(generation=generation)
    site.on(
        s.StageBase(str(world.root), pinned),
        s.PrepareVm(disk.vm, disk.vm_dir),
        s.CreateOverlay(disk, pinned, 0, ""),
    )
    site.moved = moved
    return generation, Path(disk.path)


# -- bases --------------------------------------------------------------------------------------------


def test_first_use_streams_the_data_once_and_the_next_reads_nothing(site: Site, world: World) -> None:
    image = site.make(size=256 * MiB)
    generation, path = overlay(site, world, image, 5)
    assert site.moved == {"store_read": 8 * MiB}, "two extents hold data"
    qemu_io(path, "qcow2", "read -P 0xa1 1M 64k")
    qemu_io(path, "qcow2", f"read -P 0xa1 {256 * MiB - 65536} 64k")
    qemu_io(path, "qcow2", "read -P 0 2M 64k")
    (base,) = world.bases()
    assert base.name == f"105-7-{generation}"
    assert (base / "image").read_bytes() == site.content("one-7")
    assert allocated(base / "image") < MiB
    assert extents.copy(str(base / "image"), None, "raw", "x").generation == generation
    assert (base / "manifest").read_bytes() == extents.copy(str(base / "image"), None, "raw", "x").text()
    assert site.snapshots("one-7") == [f"semishared-{generation}"]
    again, _ = overlay(site, world, image, 6)
    assert again == generation
    assert site.moved == {}, "a warm clone reads nothing"
    assert site.busy() == {}
    assert world.leftovers() == []


def test_what_lacks_of_a_base_is_read_from_the_frozen_content(site: Site, world: World) -> None:
    image = site.make(size=256 * MiB)
    generation = site.base(world, image)
    (base,) = world.bases()
    manifest, content = (base / "manifest").read_bytes(), (base / "image").read_bytes()
    shutil.rmtree(base)
    pinned = image._replace(generation=generation)
    arrived = Partial(str(world.root), pinned)
    arrived.begin(manifest)
    assert arrived.put(0, content[: extents.EXTENT])
    arrived.close()
    site.on(
        base_steps.FetchBases(
            str(world.root), (base_steps.Part(pinned),), (), "rest", "", "none", 0, 0, (), ()
        )
    )
    assert site.moved == {"store_read": extents.EXTENT}, "one of two"
    assert (base / "image").read_bytes() == content
    assert (base / "source").read_text() == f"{image.source}\n", "no host needs a mount for it"


# -- what guests read (remote-first) --------------------------------------------------------------------


def remote(site: Site, world: World, image: s.ImageRef, vm: int) -> tuple[str, Path]:
    """Do what tm/clone does for a disk over the image; return the snapshot that it lies over."""
    (lent,) = site.on(i.LendContent(image))
    disk, known = world.disk(vm), image._replace(generation=lent["generation"])
    site.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CreateRemote(disk, known, 0, "", lent["snapshot"]))
    return lent["snapshot"], Path(disk.path)


def test_disk_over_a_content_that_nobody_has_hashed_reads_on_when_that_has_a_name(
    site: Site, world: World
) -> None:
    import rbd

    image = site.make()
    lent, path = remote(site, world, image, 5)
    assert site.moved == {} and world.bases() == [], "nothing is copied"
    assert site.protected("one-7", lent)
    assert remote(site, world, image, 6)[0] == lent
    with rbd.Image(site.ioctx, "one-7", snapshot=lent) as guest:
        generation = site.base(world, image)
        assert site.snapshots("one-7") == sorted([f"semishared-{generation}", lent])
        assert guest.read(MiB, 3) == b"\xa1\xa1\xa1"
    qemu_io(path, "qcow2", "read -P 0xa1 1M 64k")
    named, later = remote(site, world, image, 7)
    assert named == f"semishared-{generation}" and site.protected("one-7", named)
    for disk in (path, later):
        qemu_io(disk, "qcow2", "write -P 0x55 2M 64k")
        qemu_io(disk, "qcow2", "read -P 0xa1 1M 64k")
    assert site.read("one-7", 2 * MiB, 3) == bytes(3)


def test_what_was_lent_goes_with_the_session_and_with_the_image(site: Site, world: World) -> None:
    image = site.make()
    lent, _ = remote(site, world, image, 5)
    site.on(i.BeginSession(image, readonly=False))
    assert site.snapshots("one-7") == []
    with pytest.raises(MissingImage, match=f"no snapshot {lent}"):
        site.on(s.CreateRemote(world.disk(6), image, 0, "", lent))
    remote(site, world, image, 5)
    site.on(i.RemoveImage(image))
    assert site.names() == []


def test_disk_as_large_as_is_asked_for(site: Site, world: World) -> None:
    image = site.make()
    (lent,) = site.on(i.LendContent(image))
    disk = world.disk(5)
    site.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CreateRemote(disk, image, 96 * MiB, "", lent["snapshot"]))
    qemu_io(disk.path, "qcow2", f"read -P 0 {80 * MiB} 64k")
    qemu_io(disk.path, "qcow2", f"read -P 0xa1 {64 * MiB - 65536} 64k")


def test_write_by_whatever_way_ends_the_generation(site: Site, world: World) -> None:
    image = site.make()
    first, old = overlay(site, world, image, 5)
    site.write("one-7", 1 * MiB, b"\xb2" * 65536)
    second, new = overlay(site, world, image, 6)
    assert second != first
    qemu_io(old, "qcow2", "read -P 0xa1 1M 64k")
    qemu_io(new, "qcow2", "read -P 0xb2 1M 64k")
    assert site.snapshots("one-7") == [f"semishared-{second}"], "the stale one is gone"


def test_growing_the_image_ends_the_generation(site: Site, world: World) -> None:
    image = site.make()
    first, _ = overlay(site, world, image, 5)
    site.on(i.GrowImage(image, 80 * MiB))
    second, _ = overlay(site, world, image, 6)
    assert second != first


def test_content_that_comes_back_is_the_same_generation_and_the_same_base(site: Site, world: World) -> None:
    image = site.make()
    first, _ = overlay(site, world, image, 5)
    site.write("one-7", 1 * MiB, b"\xb2" * 65536)
    overlay(site, world, image, 6)
    site.write("one-7", 1 * MiB, b"\xa1" * 65536)
    third, _ = overlay(site, world, image, 7)
    assert third == first
    assert len(world.bases()) == 2


def test_flips_never_lose_a_write_and_never_serve_a_stale_base(site: Site, world: World, clones: str) -> None:
    """one#6207: persistent, not persistent, persistent again, with a leftover of the stock driver's as
    well.
    """
    image = site.make()
    for round in range(3):
        pattern = 0xB0 + round
        site.on(i.BeginSession(image, readonly=False))
        assert [name for name in site.snapshots("one-7") if not name.startswith("semishared-old")] == []
        site.write("one-7", 1 * MiB, bytes([pattern]) * 65536)  # the guest of the persistent session
        _, path = overlay(site, world, image, 10 + round)
        qemu_io(path, "qcow2", f"read -P {pattern} 1M 64k")
        clone = f"one/one-7-{20 + round}-0"
        site.on(i.CloneStored(image, clone, 0))
        assert site.read(clone.split("/")[1], MiB, 65536) == bytes([pattern]) * 65536
        assert site.read("one-7", MiB, 65536) == bytes([pattern]) * 65536
        site.on(i.RemoveImage(site.ref(7, clone)))
    assert site.names() == ["one-7"]


def test_stock_snapshot_is_no_base_and_goes_with_the_session(site: Site, world: World) -> None:
    import rbd

    image = site.make()
    with rbd.Image(site.ioctx, "one-7") as opened:
        opened.create_snap("snap")
        opened.protect_snap("snap")
    site.write("one-7", 1 * MiB, b"\xc3" * 65536)
    _, path = overlay(site, world, image, 5)
    qemu_io(path, "qcow2", "read -P 0xc3 1M 64k")
    site.on(i.BeginSession(image, readonly=False))
    assert site.snapshots("one-7") == []


def test_readonly_session_keeps_the_generation(site: Site, world: World) -> None:
    image = site.make()
    generation, _ = overlay(site, world, image, 5)
    site.on(i.BeginSession(image, readonly=True))
    assert site.snapshots("one-7") == [f"semishared-{generation}"]


def test_base_of_a_named_generation_that_is_gone_is_refused(site: Site, world: World) -> None:
    image = site.make()
    with pytest.raises(ImageChanged):
        site.on(s.StageBase(str(world.root), image._replace(generation="0" * 32)))
    assert world.leftovers() == []


def test_base_of_an_older_generation_is_staged_while_its_snapshot_is_there(site: Site, world: World) -> None:
    """An undeployed VM's overlay resumes on a host that has no base yet."""
    image = site.make()
    generation, _ = overlay(site, world, image, 5)
    import shutil

    shutil.rmtree(world.root)
    (staged,) = site.on(s.StageBase(str(world.root), image._replace(generation=generation)))
    assert staged == {"generation": generation}


def test_two_hosts_at_once_agree_on_one_generation(site: Site, world: World, tmp_path: Path) -> None:
    import threading

    image, worlds = site.make(), [world, World(tmp_path / "other")]
    found: list[str] = []
    threads = [threading.Thread(target=lambda w=w: found.append(site.base(w, image))) for w in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert site.snapshots("one-7") == [f"semishared-{found[0]}"]


def test_full_copy_is_verified_and_comes_from_the_base_if_that_is_here(site: Site, world: World) -> None:
    image = site.make()
    site.on(i.FreezeImage(image))
    disk = world.disk(5)
    site.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CopyImage(disk, image, 0))
    assert Path(disk.path).read_bytes() == site.content("one-7")
    assert site.moved["store_read"] == 8 * MiB
    generation = site.base(world, image)
    disk = world.disk(6)
    site.on(
        s.PrepareVm(disk.vm, disk.vm_dir), s.CopyImage(disk, image._replace(generation=generation), 100 * MiB)
    )
    assert "store_read" not in site.moved
    assert Path(disk.path).stat().st_size == 100 * MiB


# -- clones and snapshots -----------------------------------------------------------------------------


def test_clone_on_the_store_is_named_as_stock_names_it_and_leaves_nothing(site: Site, clones: str) -> None:
    image = site.make()
    site.on(i.CloneStored(image, "one/one-7-23-1", 0))
    assert site.names() == ["one-7", "one-7-23-1"]
    assert site.parent("one-7-23-1") == "one/one-7@semishared-new"
    assert site.protected("one-7", "semishared-new") == (clones == "v1")
    site.write("one-7-23-1", MiB, b"\x55" * 4096)
    assert site.read("one-7", MiB, 4096) == b"\xa1" * 4096
    site.on(i.CloneStored(image, "one/one-7-23-1", 128 * MiB))
    assert site.read("one-7-23-1", MiB, 4096) == b"\xa1" * 4096, (
        "made anew: what was there belonged to an action given up"
    )
    assert site.size("one-7-23-1") == 128 * MiB
    site.on(i.RemoveImage(site.ref(7, "one/one-7-23-1")))
    site.on(i.RemoveImage(site.ref(7, "one/one-7-23-1")))
    assert site.names() == ["one-7"]
    site.on(i.BeginSession(image, readonly=False))
    assert (site.snapshots("one-7"), site.trashed("one-7")) == ([], 0)


@pytest.mark.fault(
    46,
    "what was planned before a VM was made anew changes nothing of its clone in a pool, whichever "
    "host it was for",
)
def test_late_steps_leave_the_clone_of_a_vm_that_was_made_anew(site: Site) -> None:
    image, clone = site.make(), "one/one-7-23-1"
    made = site.ref(7, clone)
    site.on(i.CloneStored(image, clone, 0), i.KeepSnapshot(made, 0), seq=1)
    site.write("one-7-23-1", MiB, b"\x55" * 4096)
    late = (
        i.CloneStored(image, clone, 0),
        i.RemoveImage(made),
        i.RevertImage(made, 0),
        i.ForgetSnapshot(made, 0),
        i.KeepSnapshot(made, 1),
        i.GrowImage(made, 128 * MiB),
        i.BeginChange(made, 0),
    )
    for step in late:
        with pytest.raises(LateAction, match="was made at SEQ 1 of its VM's history, and this is of SEQ 0"):
            site.on(step, seq=0)
    assert site.names() == ["one-7", "one-7-23-1"]
    assert (site.read("one-7-23-1", MiB, 4096), site.snapshots("one-7-23-1")) == (b"\x55" * 4096, ["0"])
    site.on(i.RemoveImage(made), seq=1)
    assert site.names() == ["one-7"]


@pytest.mark.fault(
    47, "the undo of a clone in a pool takes back the one that it has made, not what has its name by then"
)
def test_undo_of_a_clone_leaves_the_one_that_has_its_name_by_then(site: Site) -> None:
    image, clone = site.make(), "one/one-7-23-1"
    (first,) = site.on(i.CloneStored(image, clone, 0))
    (second,) = site.on(i.CloneStored(image, clone, 0))
    site.write("one-7-23-1", MiB, b"\x55" * 4096)
    assert first["made"] != second["made"]
    site.on(i.TakeBackClone(site.ref(7, clone), first["made"]))
    assert site.read("one-7-23-1", MiB, 4096) == b"\x55" * 4096
    site.on(i.TakeBackClone(site.ref(7, clone), second["made"]))
    site.on(i.TakeBackClone(site.ref(7, clone), second["made"]))
    assert site.names() == ["one-7"]


def test_session_of_an_image_with_an_orphan_clone_still_ends_its_generations(
    site: Site, world: World, clones: str
) -> None:
    image = site.make()
    site.on(i.CloneStored(image, "one/one-7-23-1", 0))
    generation = site.base(world, image)
    assert site.snapshots("one-7") == [f"semishared-{generation}"]
    site.on(i.BeginSession(image, readonly=False))
    assert not any(name in site.snapshots("one-7") for name in (f"semishared-{generation}", "semishared-new"))
    site.write("one-7", MiB, b"\xee" * 65536)
    assert site.base(world, image) != generation
    assert site.read("one-7-23-1", MiB, 4096) == b"\xa1" * 4096
    site.on(i.RemoveImage(site.ref(7, "one/one-7-23-1")))
    site.on(i.BeginSession(image, readonly=False))
    assert (site.snapshots("one-7"), site.trashed("one-7")) == ([], 0)


def test_image_with_clones_is_not_removed(site: Site, clones: str) -> None:
    image = site.make()
    site.on(i.CloneStored(image, "one/one-7-23-1", 0))
    with pytest.raises(ImageInUse, match="one-7-23-1"):
        site.on(i.RemoveImage(image))
    site.on(i.RemoveImage(site.ref(7, "one/one-7-23-1")))
    site.on(i.RemoveImage(image))
    site.on(i.RemoveImage(image))
    assert site.names() == []


def test_snapshot_that_a_killed_action_has_left_is_made_anew_once_its_guest_has_written(site: Site) -> None:
    image = site.make()
    site.on(i.KeepSnapshot(image, 0))
    (left,) = [found["id"] for found in listed(site)]
    site.on(i.KeepSnapshot(image, 0))
    assert [found["id"] for found in listed(site)] == [left], "of what the image still is"
    site.write("one-7", 8 * MiB, b"\x02" * 4096)
    site.on(i.KeepSnapshot(image, 0))
    assert site.read("one-7", 8 * MiB, 4096, "0") == b"\x02" * 4096 and site.protected("one-7", "0")


def listed(site: Site) -> list[dict[str, Any]]:
    """Return the snapshots of an image as librbd has them."""
    import rbd

    with rbd.Image(site.ioctx, "one-7", read_only=True) as image:
        return list(image.list_snaps())


@pytest.mark.parametrize("source", ["one/one-7", "one/one-7-23-1"])
def test_snapshots_are_kept_reverted_and_forgotten(site: Site, clones: str, source: str) -> None:
    image = site.make()
    if source != image.source:
        site.on(i.CloneStored(image, source, 0))
    disk, name = site.ref(7, source), source.split("/")[1]
    for number in range(3):
        site.write(name, 8 * MiB, bytes([number + 1]) * 4096)
        site.on(i.KeepSnapshot(disk, number))
    assert [found for found in site.snapshots(name) if found.isdigit()] == ["0", "1", "2"]
    assert site.protected(name, "1"), "as stock has it"
    site.on(i.KeepSnapshot(disk, 2))
    site.on(i.RevertImage(disk, 0))
    assert site.read(name, 8 * MiB, 4096) == b"\x01" * 4096
    site.on(i.RevertImage(disk, 2))
    assert site.read(name, 8 * MiB, 4096) == b"\x03" * 4096
    site.on(i.ForgetSnapshot(disk, 1))
    site.on(i.ForgetSnapshot(disk, 1))
    assert [found for found in site.snapshots(name) if found.isdigit()] == ["0", "2"]
    with pytest.raises(MissingImage):
        site.on(i.RevertImage(disk, 1))
    site.on(i.FlattenImage(disk, 0))
    site.on(i.FlattenImage(disk, 0))
    assert [found for found in site.snapshots(name) if found.isdigit()] == []
    assert site.read(name, 8 * MiB, 4096) == b"\x01" * 4096
    assert not [found for found in site.names() if "semishared" in found]
    assert site.busy() == {}


def test_revert_makes_another_generation(site: Site, world: World) -> None:
    image = site.make()
    first = site.base(world, image)
    site.on(i.KeepSnapshot(image, 0))
    site.write("one-7", MiB, b"\xb2" * 65536)
    second = site.base(world, image)
    site.on(i.RevertImage(image, 0))
    third, path = overlay(site, world, image, 5)
    qemu_io(path, "qcow2", "read -P 0xa1 1M 64k")
    assert third == first != second


def test_killed_revert_is_undone_before_anything_else_happens(site: Site) -> None:
    image = site.make()
    site.on(i.KeepSnapshot(image, 0))
    site.write("one-7", MiB, b"\xb2" * 65536)
    site.on(i.BeginChange(image, 0))
    assert site.names() == ["one-7.semishared-changing"], "nobody opens half of it"
    site.write("one-7.semishared-changing", MiB, b"\xff" * 4096)
    site.on(i.GrowImage(image, 0))
    assert site.names() == ["one-7"]
    assert site.read("one-7", MiB, 65536) == b"\xb2" * 65536
    assert site.snapshots("one-7") == ["0"]


@pytest.mark.fault(
    47, "the end, or the undo, of a restore ends its own change of the image, and none that was begun since"
)
def test_restore_that_was_overtaken_ends_no_other_change(site: Site) -> None:
    image = site.make()
    site.write("one-7", MiB, b"\xb2" * 65536)
    (first,) = site.on(i.BeginChange(image, 0))
    (second,) = site.on(i.BeginChange(image, 0))
    site.write("one-7.semishared-changing", MiB, b"\xff" * 4096)
    for whole in (True, False):
        with pytest.raises(Overtaken, match="another action has come to it"):
            site.on(i.EndChange(image, whole, first["change"]))
    assert site.names() == ["one-7.semishared-changing"]
    site.on(i.EndChange(image, True, second["change"]))
    assert site.read("one-7", MiB, 65536) == b"\xff" * 4096 + bytes(61440)
    with pytest.raises(Overtaken):
        site.on(i.EndChange(image, False, second["change"]))


def test_running_image_is_copied_as_of_one_moment(site: Site) -> None:
    import rbd

    site.make()
    with rbd.Image(site.ioctx, "one-7") as guest:
        guest.write(b"\x77" * 4096, 16 * MiB)
        site.on(i.HoldMoment(site.ref()))
        guest.write(b"\x79" * 4096, 16 * MiB)
        site.on(i.CopyHeld(site.ref(60), "one/one-7"))
    assert site.read("one-60", 16 * MiB, 4096) == b"\x77" * 4096
    assert site.snapshots("one-7") == []
    site.on(i.KeepSnapshot(site.ref(7), 4))
    site.write("one-7", 16 * MiB, b"\x78" * 4096)
    site.on(i.CopyStored(site.ref(61), "one/one-7", 4))
    assert site.read("one-61", 16 * MiB, 4096) == b"\x79" * 4096
    with pytest.raises(MissingImage):
        site.on(i.CopyStored(site.ref(62), "one/one-7", 9))
    assert site.names() == ["one-60", "one-61", "one-7"]


def test_moment_of_a_clone_has_what_is_in_its_parent_alone(site: Site) -> None:
    """librbd's copy of a clone's snapshot has zeros for objects that the clone has not."""
    clone = site.ref()._replace(source="one/one-7-23-1")
    site.on(i.CloneStored(site.make(), clone.source, 0), i.KeepSnapshot(clone, 0))
    site.on(i.HoldMoment(clone))
    site.write("one-7-23-1", 16 * MiB, b"\x79" * 4096)
    site.on(i.CopyHeld(site.ref(60), clone.source), i.CopyStored(site.ref(61), clone.source, 0))
    site.on(i.CopyStored(site.ref(62), clone.source, -1))
    for number in (60, 61, 62):
        assert site.read(f"one-{number}", MiB, 65536) == b"\xa1" * 65536
        assert site.read(f"one-{number}", 64 * MiB - 65536, 65536) == b"\xa1" * 65536
        assert site.read(f"one-{number}", 16 * MiB, 4096) == (b"\x79" if number == 62 else b"\0") * 4096
    assert site.snapshots("one-7-23-1") == ["0"]


def test_image_that_is_open_is_neither_reverted_nor_removed_until_it_is_closed(site: Site) -> None:
    import threading

    import rbd

    image = site.make()
    site.on(i.KeepSnapshot(image, 0))
    guest = rbd.Image(site.ioctx, "one-7")
    try:
        with pytest.raises(ImageInUse, match="127.0.0.1"):
            site.on(i.RevertImage(image, 0))
        assert site.names() == ["one-7"]
        timer = threading.Timer(3, guest.close)
        timer.start()
        site.on(i.RemoveImage(image))
        assert site.names() == []
    finally:
        timer.join()


# -- what goes wrong ------------------------------------------------------------------------------------


def test_host_with_the_readers_key_alone_can_stage_and_change_nothing(site: Site, world: World) -> None:
    image = site.make()
    reader = image._replace(access=image.access._replace(bridge_user=image.access.reader))
    with pytest.raises(CephRefused, match="client.bases"):
        site.on(i.FreezeImage(reader))
    with pytest.raises(CephRefused):
        site.on(i.RemoveImage(reader))
    assert site.names() == ["one-7"]
    site.on(i.FreezeImage(image))
    others = Path(site.conf).parent
    hidden = others / "ceph.client.bridge.keyring"
    hidden.rename(others / "hidden")
    try:
        (staged,) = site.on(s.StageBase(str(world.root), image))
        assert staged["generation"]
    finally:
        (others / "hidden").rename(hidden)


def test_missing_image_pool_key_and_configuration_are_said(site: Site, world: World) -> None:
    image = site.make()
    access = image.access
    for changed, error, words in (
        (image._replace(source="one/one-99"), MissingImage, "one/one-99"),
        (image._replace(source="two/one-7"), MissingImage, "pool two"),
        (image._replace(access=access._replace(reader="nobody")), CephRefused, "client.nobody"),
        (
            image._replace(access=access._replace(conf="/nowhere/ceph.conf")),
            CephUnavailable,
            "/nowhere/ceph.conf",
        ),
    ):
        with pytest.raises(error, match=words):
            site.on(i.SeeImage(changed))


def test_wrong_key_is_said(site: Site) -> None:
    image = site.make()
    keyring = Path(site.conf).parent / "ceph.client.bases.keyring"
    was = keyring.read_text()
    keyring.write_text("[client.bases]\n\tkey = AQBRZ2dmAAAAABAAJ5Y1Jv0ZzO1V6oBvFhV0Qw==\n")
    try:
        with pytest.raises(CephRefused):
            site.on(i.SeeImage(image))
    finally:
        keyring.write_text(was)


def test_cluster_that_is_down_is_an_error_in_bounded_time(
    ceph: LocalCluster, site: Site, world: World
) -> None:
    import time

    image = site.make()
    generation = site.base(world, image)
    ceph.stop()
    try:
        began = time.monotonic()
        for steps in ([i.SeeImage(image)], [i.FreezeImage(image)], [i.MeasureStore(image.access, "one")]):
            with pytest.raises(CephUnavailable):
                site.on(*steps)
        assert time.monotonic() - began < 3 * 40
        # A base that is here needs no cluster.
        site.on(s.StageBase(str(world.root), image._replace(generation=generation)))
    finally:
        ceph.start()
        ceph.wait()
    assert site.base(world, image) == generation


@pytest.mark.long  # tests/cephfaults has an OSD that is down, too
def test_osd_that_is_down_is_an_error_in_bounded_time(ceph: LocalCluster, site: Site, world: World) -> None:
    image = site.make()
    ceph.stop("osd")
    try:
        with pytest.raises(CephUnavailable):
            site.on(i.SeeImage(image))
    finally:
        ceph.start("osd")
        ceph.wait()
    assert site.base(world, image)


def test_no_secret_is_on_a_command_line_or_in_what_is_said(site: Site, world: World, tmp_path: Path) -> None:
    image = site.make()
    keys = [
        path.read_text().split("key = ")[1].strip()
        for path in Path(site.conf).parent.glob("ceph.client.*.keyring")
    ]
    assert len(keys) >= 4
    said = ""
    for steps in (
        [i.SeeImage(image._replace(source="one/none"))],
        [i.SeeImage(image._replace(access=image.access._replace(reader="x")))],
    ):
        try:
            site.on(*steps)
        except SemisharedError as e:
            said += e.line()
    assert said
    assert not any(key in said for key in keys)
    written = [path.read_text() for path in world.top.rglob("*.json")]
    assert not any(key in text for key in keys for text in written)


def test_gc_sees_what_is_left_in_the_pool_and_removes_it(site: Site) -> None:
    from semishared.plan.care import gc_stores
    from semishared.plan.care.gc import Known

    image = site.make()
    site.on(i.CloneStored(image, "one/one-7-23-1", 0))
    site.on(i.StageImage(site.ref(60), 4 * MiB))
    site.make(8)
    (names,) = site.on(i.ListPool(image.access, "one"))
    pool = gc_stores.Pool("localhost", 105, "one", image.access, tuple(names))
    known = Known(
        {}, frozenset(), frozenset(), frozenset({"one/one-7"}), past=frozenset({(23, 1, "one/one-7")})
    )
    (looks,) = site.on(i.LookAtImages(image.access, "one", (*gc_stores.suspicious(pool, known), "one-gone")))
    looks = answers.one("localhost", i.LookAtImages, looks)
    found = list(gc_stores.find_in_pool(pool, looks, known))
    assert sorted(item.kind for item in found) == ["clone", "staged"], "what somebody else made stays"
    assert all(0 <= item.age < 600 for item in found)
    for item in found:
        assert item.keep == ""
        site.on(*item.steps())
    assert site.names() == ["one-7", "one-8"]


def test_gc_removes_snapshots_that_nobody_needs(site: Site, world: World) -> None:
    """What a killed save-as or change has left, what guests read once, and what clones depended on; no
    generation.
    """
    import rbd

    from semishared.plan.care import gc_stores
    from semishared.plan.care.gc import Known

    image, used = site.make(), site.make(8)
    generation = site.base(world, image)
    site.on(i.LendContent(image), i.FreezeImage(used), i.LendContent(used))
    (lent,) = [name for name in site.snapshots("one-8") if name != "semishared-new"]
    with rbd.Image(site.ioctx, "one-7") as opened:
        for name in (
            "semishared-undo",
            "semishared-saved",
            "semishared-old-0a1b2c3d",
            "semishared-lent-1",
            "somebody",
        ):
            opened.create_snap(name)
        for name in ("semishared-lent-1", "semishared-old-0a1b2c3d"):
            opened.protect_snap(name)
    site.rbd.clone(site.ioctx, "one-7", "semishared-old-0a1b2c3d", site.ioctx, "depends")
    (names,) = site.on(i.ListPool(image.access, "one"))
    pool = gc_stores.Pool("localhost", 105, "one", image.access, tuple(names))
    known = Known(
        {}, frozenset(), frozenset(), frozenset({"one/one-7", "one/one-8"}), idle=frozenset({"one/one-7"})
    )

    def left() -> dict[str, bool]:
        (found,) = site.on(
            i.FindSnapshots(image.access, "one", (*gc_stores.with_snapshots(pool), "one-gone"))
        )
        found = answers.one("localhost", i.FindSnapshots, found)
        items = list(gc_stores.snapshots(pool, found, {}, known))
        assert all(0 <= item.age < 600 for item in items)
        for item in items:
            if not item.keep:
                assert site.on(*item.steps()) == [{"removed": True}]
                assert site.on(*item.steps()) == [{"removed": True}]
        return {item.path: bool(item.keep) for item in items}

    passing = {
        f"one/one-7@semishared-{name}": name.startswith("old")
        for name in ("undo", "saved", "old-0a1b2c3d", "lent-1")
    }
    assert left() == passing
    assert site.snapshots("one-7") == sorted(
        [f"semishared-{generation}", "semishared-old-0a1b2c3d", "somebody"]
    )
    assert site.snapshots("one-8") == sorted(["semishared-new", lent]), "a VM has the image"
    with rbd.Image(site.ioctx, "depends") as opened:
        opened.flatten()
    assert left() == {"one/one-7@semishared-old-0a1b2c3d": False}
    assert left() == {}
    assert site.snapshots("one-7") == sorted([f"semishared-{generation}", "somebody"])


def test_snapshot_that_a_stock_revert_has_put_aside_is_named_and_goes_with_the_image(site: Site) -> None:
    import rbd

    image = site.make()
    with rbd.Image(site.ioctx, "one-7") as opened:
        for name in ("1", "2"):
            opened.create_snap(name)
            opened.protect_snap(name)
    # As stock's snap_revert does.
    site.rbd.rename(site.ioctx, "one-7", "one-7-1:2")
    site.rbd.clone(site.ioctx, "one-7-1:2", "1", site.ioctx, "one-7")
    for step in (i.RevertImage(image, 2), i.ForgetSnapshot(image, 1), i.FlattenImage(image, 2)):
        with pytest.raises(NotSupported, match="one-7-1:2"):
            site.on(step)
    assert site.read("one-7", MiB, 4096) == b"\xa1" * 4096
    site.on(i.KeepSnapshot(image, 3), i.ForgetSnapshot(image, 3), i.ForgetSnapshot(image, 4))
    site.on(i.RemoveImage(image))
    assert site.names() == []


REPORT = """
import sys
sys.path.insert(0, sys.argv[1])
from semishared.host import vm_sizes
print(vm_sizes.report(sys.argv[2]), end="")
"""


@pytest.mark.fault(57, "the size of a disk on Ceph is what its image has of its own")
def test_sizes_of_disks_on_ceph_are_those_of_their_images(site: Site, world: World) -> None:
    import rbd

    image, disk = site.make(), world.disk(5)
    site.on(
        s.PrepareVm(disk.vm, disk.vm_dir),
        i.RecordNetwork(disk, image, site.network("one/one-7"), "in-place", readonly=False),
    )
    with rbd.Image(site.ioctx, "one-7") as opened:
        opened.create_snap("0")
    site.write("one-7", 32 * MiB, b"x" * MiB)
    with rbd.Image(site.ioctx, "one-7") as opened:
        opened.create_snap("semishared-new")
        opened.create_snap("3")
    # A process of its own, as the probe is: this one has connections to Ceph, which no fork survives.
    argv = [
        "/usr/bin/python3",
        "-I",
        "-c",
        REPORT,
        str(Path(__file__).resolve().parents[2] / "lib"),
        str(world.system),
    ]
    text = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert base64.b64decode(text.split('"')[1]).decode().split("\n") == [
        f"DISK_SIZE = [ ID={disk.disk}, SIZE=12 ]",
        f"SNAPSHOT_SIZE = [ ID=0, DISK_ID={disk.disk}, SIZE=8 ]",
        f"SNAPSHOT_SIZE = [ ID=3, DISK_ID={disk.disk}, SIZE=4 ]",
    ]


@pytest.mark.fault(57, "with CEPH_TRASH removed images are in the pool's trash, whole")
def test_removed_images_go_to_the_trash_where_the_datastore_says_so(
    site: Site, world: World, tmp_path: Path
) -> None:
    import rbd

    site.make()
    with rbd.Image(site.ioctx, "one-7") as opened:
        opened.create_snap("0")
        opened.protect_snap("0")
    content = site.content("one-7")
    assert site.run("rm", tmp_path, template={"CEPH_TRASH": "YES"}, SOURCE="one/one-7", ID=7).returncode == 0
    assert site.names() == []
    (kept,) = [one for one in site.rbd.trash_list(site.ioctx) if one["name"] == "one-7"]
    site.rbd.trash_restore(site.ioctx, kept["id"], "one-7")
    assert site.content("one-7") == content and site.snapshots("one-7") == ["0"]
    assert site.run("rm", tmp_path, template={"CEPH_TRASH": "no"}, SOURCE="one/one-7", ID=7).returncode == 0
    assert site.names() == [] and not [*site.rbd.trash_list(site.ioctx)]


@pytest.mark.fault(
    57, "images are cloned between stores on Ceph and mounted ones, in the format that is wanted"
)
@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_an_image_is_copied_to_another_kind_of_store_and_back(site: Site, world: World, format: str) -> None:
    file, most = world.image("file", format), 64 * MiB
    at_bridge = site.access.by_bridge()
    made = site.ref(8)._replace(access=at_bridge)
    site.on(d.CopyAcross(made, file.source, format, file.access, most))
    assert site.names() == ["one-8"] and site.size("one-8") == 64 * MiB
    assert site.read("one-8", MiB, 3) == b"\xa1\xa1\xa1" and site.read("one-8", 2 * MiB, 3) == bytes(3)
    back = file._replace(source=f"{world.store}/back")
    site.on(d.CopyAcross(back, "one/one-8", "raw", at_bridge, most))
    qemu_io(back.source, format, "read -P 0xa1 1M 64k", "read -P 0 2M 64k")
    assert allocated(back.source) < 2 * MiB
    with pytest.raises(UploadTooLarge, match="a disk of 32.* was approved"):
        site.on(
            d.CopyAcross(site.ref(9)._replace(access=at_bridge), file.source, format, file.access, 32 * MiB)
        )
    assert site.names() == ["one-8"]
    overlay(site, world, site.ref(8), 5)
