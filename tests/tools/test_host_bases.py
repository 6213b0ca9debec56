# SPDX-License-Identifier: Apache-2.0
"""The base store of a host, through the real host side: staged once, verified, leased, never a wrong
generation.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rot import dated
from semishared.cli.base import reference as of_base
from semishared.config import Config
from semishared.errors import ImageChanged, MissingImage, StoreUnavailable
from semishared.model import steps as s
from semishared.model.exchange import On
from semishared.opennebula.args import FromImage
from semishared.opennebula.xml import Datastore, Disk, Image, parse
from semishared.plan.disk import disks
from semishared.plan.image.images import image_ref
from semishared.store.dir.content import DirContent
from semishared.tools import extents, qemu_img
from semishared.wire.session import Session
from tools.world import OVERLAY_OPTIONS, MiB, World, allocated, qemu_io


@pytest.mark.parametrize("format", ["raw", "qcow2"])
def test_overlay_reads_the_base_and_writes_stay_on_the_host(world: World, format: str) -> None:
    image = world.image(format=format)
    before = Path(image.source).read_bytes()
    top = world.clone(image, world.disk())
    qemu_io(top, "qcow2", "read -P 0xa1 1M 64k", "read -P 0 2M 64k", "write -P 0x55 1028k 4k")
    qemu_io(top, "qcow2", "read -P 0x55 1028k 4k")
    qemu_io(top, "qcow2", "read -P 0xa1 1M 4k")
    os.unlink(image.source)
    qemu_io(top, "qcow2", f"read -P 0xa1 {64 * MiB - 65536} 64k")
    (base,) = world.bases()
    assert (base / "image").read_bytes() == before
    assert (base / "image").stat().st_mode & 0o777 == 0o440
    assert world.leases() == [f"{base.name}/5-1"]
    assert world.leftovers() == []


def test_record_says_what_the_disk_is(world: World) -> None:
    image, disk = world.image(), world.disk()
    top = world.clone(image, disk)
    record = json.loads(Path(disk.vm_dir, ".semishared", "disk.1.json").read_text())
    (base,) = world.bases()
    assert record == {
        "version": 1,
        "disk": 1,
        "place": "local",
        "how": "overlay",
        "format": "qcow2",
        "path": f"{top}.snap/0",
        "readonly": False,
        "image": {
            "store": 100,
            "id": 7,
            "format": "raw",
            "source": image.source,
            "generation": base.name.split("-")[2],
        },
    }
    assert (world.system / ".monitor").read_text() == "semishared\n"


def test_size_of_a_grown_disk_and_of_one_that_is_not(world: World) -> None:
    image = world.image()
    assert qemu_img.virtual_size(str(world.clone(image, world.disk(1), 100 * MiB)), "qcow2") == 100 * MiB
    assert qemu_img.virtual_size(str(world.clone(image, world.disk(2), 10 * MiB)), "qcow2") == 64 * MiB


def test_thirty_concurrent_clones_stage_the_base_once(world: World) -> None:
    image = world.image(size=256 * MiB)
    qemu_io(image.source, "raw", "write -P 0x77 16M 32M")
    sessions = [Session("localhost", "clone", Config()) for _ in range(30)]
    errors: list[BaseException] = []

    def work(vm: int, session: Session) -> None:
        disk = world.disk(vm)
        try:
            with session:
                session.run(
                    [
                        s.StageBase(str(world.root), image),
                        s.PrepareVm(vm, disk.vm_dir),
                        s.CreateOverlay(disk, image, 0, ""),
                    ]
                )
        except BaseException as e:
            errors.append(e)
            raise

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    read = sum(session.moved.get("store_read", 0) for session in sessions)
    assert 32 * MiB < read < 60 * MiB, "one copy of 40 MiB in extents, not thirty"
    (base,) = world.bases()
    assert len(world.leases()) == 30
    assert (base / "image").stat().st_nlink == 31
    for vm in (0, 29):
        qemu_io(world.disk(vm).path, "qcow2", "read -P 0x77 16M 1M")
    assert world.leftovers() == []


def test_second_clone_reads_nothing_from_the_store(world: World) -> None:
    image = world.image()
    world.clone(image, world.disk(1))
    assert world.moved["store_read"] > 0
    world.clone(image, world.disk(2))
    assert world.moved.get("store_read", 0) == 0


def test_changed_image_is_a_new_generation_and_the_old_overlay_keeps_its_own(world: World) -> None:
    image = world.image(pattern=0xA1)
    old = world.clone(image, world.disk(1))
    qemu_io(image.source, "raw", "write -P 0xb2 1M 64k")
    new = world.clone(image, world.disk(2))
    qemu_io(old, "qcow2", "read -P 0xa1 1M 64k")
    qemu_io(new, "qcow2", "read -P 0xb2 1M 64k")
    assert len(world.bases()) == 2


def test_change_that_keeps_size_and_time_is_caught_by_a_session(world: World) -> None:
    image = world.image()
    world.clone(image, world.disk(1))
    stat = os.stat(image.source)
    world.link(image, world.disk(9))
    qemu_io(image.source, "raw", "write -P 0xc3 1M 64k")
    os.utime(image.source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new = world.clone(image, world.disk(2))
    qemu_io(new, "qcow2", "read -P 0xc3 1M 64k")
    assert len(world.bases()) == 2


def test_session_that_changed_nothing_comes_back_to_the_same_generation(world: World) -> None:
    image = world.image()
    first = world.on(s.StageBase(str(world.root), image))
    world.link(image, world.disk(9))
    world.on(s.EndSession(world.disk(9)))
    assert world.on(s.StageBase(str(world.root), image)) == first
    assert len(world.bases()) == 1
    assert world.moved["store_read"] > 0, "the content was unknown and had to be read"
    world.on(s.StageBase(str(world.root), image))
    assert world.moved == {}


def test_read_only_disk_in_place_keeps_the_generation(world: World) -> None:
    image = world.image()
    world.on(s.StageBase(str(world.root), image))
    world.link(image, world.disk(9), readonly=True)
    world.on(s.StageBase(str(world.root), image))
    assert world.moved == {}


def test_lease_keeps_the_data_of_an_evicted_base_and_brings_it_back(world: World) -> None:
    image = world.image()
    top = world.clone(image, world.disk(1))
    (base,) = world.bases()
    inode = (base / "image").stat().st_ino
    os.unlink(base / "image")
    qemu_io(top, "qcow2", "read -P 0xa1 1M 64k")
    other = world.clone(image, world.disk(2))
    assert world.moved.get("store_read", 0) == 0, "linked from the lease, not copied"
    assert (base / "image").stat().st_ino == inode
    qemu_io(other, "qcow2", "read -P 0xa1 1M 64k")


def test_evicted_base_without_leases_is_staged_again(world: World) -> None:
    image = world.image()
    world.clone(image, world.disk(1))
    world.on(s.RemoveDisk(world.disk(1), ""))
    (base,) = world.bases()
    os.unlink(base / "image")
    world.clone(image, world.disk(2))
    assert world.moved["store_read"] > 0
    qemu_io(world.disk(2).path, "qcow2", "read -P 0xa1 1M 64k")
    assert world.bases() == [base]


def corrupt(image: s.ImageRef, at: int = 1 << 20) -> None:
    """Flip a byte as failing storage does: neither size nor time change."""
    stat = os.stat(image.source)
    with open(image.source, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    dated(Path(image.source), stat)


def forget_bases(world: World) -> None:
    """Make this host a new one, to which the store's generation is known but not its data."""
    for base in world.bases():
        os.unlink(base / "image")
        for lease in (base / "leases").iterdir():
            os.unlink(lease)
        os.unlink(base / "manifest")
        os.rmdir(base / "leases")
        os.rmdir(base)


def test_corrupted_store_content_is_noticed_and_nothing_is_published(world: World) -> None:
    image = world.image(size=64 * MiB)
    world.on(s.StageBase(str(world.root), image))
    forget_bases(world)
    corrupt(image, at=64 * MiB - 100)
    with pytest.raises(ImageChanged, match=f"first at byte {60 * MiB}"):
        world.clone(image, world.disk(1))
    assert world.bases() == []
    assert not os.path.lexists(world.disk(1).vm_dir)
    with pytest.raises(ImageChanged):
        world.on(s.PrepareVm(1, world.disk(1).vm_dir), s.CopyImage(world.disk(1), image, 0))
    assert not os.path.lexists(world.disk(1).path)


def test_corrupted_store_does_not_hurt_a_host_that_has_the_base(world: World) -> None:
    image = world.image()
    world.on(s.StageBase(str(world.root), image))
    corrupt(image)
    qemu_io(world.clone(image, world.disk(1)), "qcow2", "read -P 0xa1 1M 64k")
    world.on(s.PrepareVm(2, world.disk(2).vm_dir), s.CopyImage(world.disk(2), image, 0))
    qemu_io(world.disk(2).path, "raw", "read -P 0xa1 1M 64k")
    assert world.moved.get("store_read", 0) == 0


def test_generation_that_is_asked_for_is_never_replaced_by_another(world: World) -> None:
    image = world.image()
    (staged,) = world.on(s.StageBase(str(world.root), image))
    wanted = s.ImageRef(100, 7, "raw", image.source, staged["generation"])  # type: ignore[index]
    forget_bases(world)
    qemu_io(image.source, "raw", "write -P 0xb2 1M 64k")
    with pytest.raises(ImageChanged):
        world.on(s.StageBase(str(world.root), wanted))
    assert world.bases() == []


def test_content_without_format_has_one_generation_whoever_asks(world: World) -> None:
    image = world.image(format="qcow2")
    store = Datastore.parse("<DATASTORE><ID>100</ID><TEMPLATE><DRIVER>qcow2</DRIVER></TEMPLATE></DATASTORE>")
    told = Image.parse(
        f"<IMAGE><ID>7</ID><DATASTORE_ID>100</DATASTORE_ID><SOURCE>{image.source}</SOURCE><FORMAT/></IMAGE>"
    )
    command = SimpleNamespace(images={(100, 7): told}, oned=SimpleNamespace(datastore=lambda _: store))
    (staged,) = world.on(s.StageBase(str(world.root), image_ref(told, store)))
    generation = staged["generation"]  # type: ignore[index]
    request = FromImage.parse([f"fe:{image.source}", f"localhost:{world.disk().path}", "5", "100"])
    clone = disks.clone(
        request, Disk(parse("<DISK><DISK_ID>1</DISK_ID></DISK>", "DISK")), told, store, OVERLAY_OPTIONS
    )
    asked = next(clone)
    assert isinstance(asked, On)
    world.on(*asked.steps)
    qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k")
    assert world.leases() == [f"100-7-{generation}/5-1"]
    forget_bases(world)
    world.on(s.StageBase(str(world.root), of_base(command, f"100-7-{generation}")))  # type: ignore[arg-type]
    assert [base.name for base in world.bases()] == [f"100-7-{generation}"]


@pytest.mark.parametrize("first", ["raw", "qcow2"])
def test_generation_of_another_format_is_not_taken_for_the_content(world: World, first: str) -> None:
    image = world.image(format="qcow2")
    world.on(s.StageBase(str(world.root), image._replace(format=first)))
    second = {"raw": "qcow2", "qcow2": "raw"}[first]
    top = world.clone(image._replace(format=second), world.disk(1))
    if second == "qcow2":
        qemu_io(top, "qcow2", "read -P 0xa1 1M 64k")
    else:
        assert qemu_img.virtual_size(str(top), "qcow2") == os.stat(image.source).st_size
    # Whoever still needs the other one, by its name, has it, from here or from the store.
    old = next(base for base in world.bases() if not list((base / "leases").iterdir()))
    named = image._replace(format=first, generation=old.name.rpartition("-")[2])
    world.clone(named, world.disk(2))
    shutil.rmtree(old)
    world.clone(named, world.disk(3))
    assert sorted(lease.rpartition("/")[2] for lease in world.leases()) == ["1-1", "3-1"]


def test_clone_again_over_a_new_generation_gives_up_the_old_lease(world: World) -> None:
    image = world.image()
    world.clone(image, world.disk())
    qemu_io(image.source, "raw", "write -P 0xb2 1M 64k")
    top = world.clone(image, world.disk())
    assert len(world.leases()) == 1
    qemu_io(top, "qcow2", "read -P 0xb2 1M 64k")


def test_full_copy_is_its_own_and_sparse(world: World) -> None:
    image = world.image(format="qcow2")
    disk = world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, image, 100 * MiB))
    qemu_io(disk.path, "qcow2", "write -P 0x66 2M 64k", "read -P 0xa1 1M 64k")
    qemu_io(image.source, "qcow2", "read -P 0 2M 64k")
    assert qemu_img.virtual_size(disk.path, "qcow2") == 100 * MiB
    assert allocated(disk.path) < 4 * MiB


def test_missing_image_and_missing_mount_are_told_apart(world: World) -> None:
    image = world.image()
    with pytest.raises(MissingImage, match="is not there on"):
        world.clone(s.ImageRef(100, 8, "raw", image.source + "x"), world.disk())
    with pytest.raises(StoreUnavailable, match="is not mounted on"):
        world.clone(s.ImageRef(104, 8, "raw", str(world.location / "104" / "x")), world.disk())
    assert world.leftovers() == []
    assert world.leases() == []


def test_crashed_stage_is_cleared_by_the_next(world: World) -> None:
    image = world.image()
    staging = world.root / "staging" / "100-7"
    (staging / "leases").mkdir(parents=True)
    (staging / "image").write_bytes(b"half")
    world.clone(image, world.disk())
    assert world.leftovers() == []
    qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k")


@pytest.mark.parametrize("size", [0, 1, 4095, 4097, 4 * MiB, 4 * MiB + 1, 9 * MiB + 12345])
def test_image_read_past_the_page_cache_is_the_same_whatever_its_size(tmp_path: Path, size: int) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(size))
    found = extents.copy(str(source), str(tmp_path / "copy"), "raw", "x", direct=True)
    assert found == extents.copy(str(source), None, "raw", "x")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_a_store_that_answers_with_an_error_is_one_that_is_not_there(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the peers that have the base are never asked."""
    image = world.image()

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(extents, "read_at", broken)
    with pytest.raises(StoreUnavailable, match=f"{image.source} on .*: Input/output error"):
        list(DirContent(image.source).read([0]))
