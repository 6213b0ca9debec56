# SPDX-License-Identifier: Apache-2.0
"""Links and names in headers, planted by whoever can write the export: nothing outside is read, written or
removed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

import pytest

from semishared.errors import SemisharedError, UnexpectedFile
from semishared.model import steps as s
from semishared.tools import layers
from tools.test_datastore import Store
from tools.world import World, qemu_io

PRIVATE = b"PRIVATE-BYTES-" * 80_000


@pytest.fixture()
def outside(tmp_path: Path) -> Path:
    """A directory of the machine with a private file, and what sweeps look for."""
    top = tmp_path / "outside"
    for folder in (top, top / "keys", top / ("e" * 32)):
        folder.mkdir(parents=True)
        for name in ("0", "1", "lock", "image", "session", "manifest", ".staged-x.0123456789ab"):
            (folder / name).write_bytes(PRIVATE[:100])
            os.utime(folder / name, (1_600_000_000, 1_600_000_000))
    (top / "private").write_bytes(PRIVATE)
    shutil.copytree(top / "keys", top / "homes" / "alice")
    shutil.copytree(top / "keys", top / "homes" / ("e" * 32))
    return top


def state(top: Path) -> Dict[str, Tuple[int, int, int, int]]:
    found = {}
    for path in [top, *top.rglob("*")]:
        info = path.lstat()
        found[str(path)] = (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
    return found


@pytest.fixture()
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.mark.fault(7, "an upload removes nothing where .uploads leads")
@pytest.mark.parametrize("name", [".semishared/.uploads", ".semishared"])
def test_upload_sweeps_nothing_outside(store: Store, outside: Path, name: str) -> None:
    link = store.base / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside / "homes")
    before = state(outside)
    store.run("cp", PATH=store.image())
    assert state(outside) == before


@pytest.fixture()
def nested() -> Iterator[Callable[[Path], None]]:
    """Make directories in one another, deeper than Python's own functions can go, pytest's neither."""
    made: List[Path] = []

    def make(top: Path) -> None:
        made.append(top)
        make_nested(top)

    yield make
    subprocess.run(["rm", "-rf", "--", *made], check=True)


def make_nested(top: Path, depth: int = 1500) -> None:
    top.mkdir(parents=True)
    fd = os.open(top, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


@pytest.mark.fault(7, "no FIFO and no endless directory planted beside images holds up an upload")
@pytest.mark.parametrize("what", ["fifo", "nested"])
def test_what_is_planted_among_uploads_holds_up_none(
    store: Store, nested: Callable[[Path], None], what: str
) -> None:
    store.timeout_s = 20
    planted = store.base / ".semishared" / ".uploads" / ("a" * 32)
    if what == "fifo":
        planted.mkdir(parents=True)
        os.mkfifo(planted / "lock")
    else:
        nested(planted)
    store.cp(store.image())
    assert what == "fifo" or not planted.exists()


def test_fifo_in_the_place_of_a_lock_is_named(store: Store) -> None:
    path = store.image()
    (store.base / ".semishared").mkdir()
    os.mkfifo(store.base / ".semishared" / ".uploads.lock")
    store.fails("cp", "SS071", ".uploads.lock", PATH=path)


def test_image_and_clone_with_endless_directories_are_removed(
    store: Store, world: World, clone: s.DiskRef, nested: Callable[[Path], None]
) -> None:
    source, _ = store.cp(store.image())
    nested(store.base / ".semishared" / source.name / "clones")
    store.ok("rm", SOURCE=source)
    assert store.files() == []
    folder = Path(os.path.realpath(clone.path)).parent
    nested(folder / "planted")
    world.on(s.RemoveDisk(clone, str(world.store)))
    assert not folder.exists()


@pytest.mark.fault(7, "a clone unlinks nothing where disk.N.snap leads")
def test_clone_removes_nothing_outside(world: World, outside: Path) -> None:
    image, disk = world.image(), world.disk()
    os.makedirs(disk.vm_dir)
    os.symlink(outside, f"{disk.path}.snap")
    before = state(outside)
    with pytest.raises(SemisharedError) as refused:
        world.clone(image, disk)
    assert state(outside) == before
    assert refused.value.id == "SS070"


@pytest.mark.fault(7, "an image that is a link is not published")
def test_image_that_is_a_link_is_not_copied(store: Store, outside: Path) -> None:
    source, _ = store.cp(store.image())
    source.unlink()
    source.symlink_to(outside / "private")
    store.fails("clone", "SS070", PATH=source, FORMAT="raw")
    store.fails("export", "SS070", SOURCE=source, FORMAT="raw", SIZE=1)


@pytest.mark.parametrize("how", ["overlay", "copy", "on store", "in place"])
def test_image_that_is_a_link_becomes_no_disk(world: World, outside: Path, how: str) -> None:
    image, disk = world.image(), world.disk()
    os.unlink(image.source)
    os.symlink(outside / "private", image.source)
    make = {
        "overlay": lambda: world.clone(image, disk),
        "copy": lambda: world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CopyImage(disk, image, 0)),
        "on store": lambda: world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CloneOnStore(disk, image, 0)),
        "in place": lambda: world.link(image, disk),
    }
    with pytest.raises(SemisharedError) as refused:
        make[how]()
    assert refused.value.id == "SS070"
    assert not os.path.lexists(disk.path)


@pytest.fixture()
def clone(world: World) -> s.DiskRef:
    """A clone on the store, with a snapshot, and data in each of its layers."""
    image, disk = world.image(format="qcow2"), world.disk()
    world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CloneOnStore(disk, image, 0))
    qemu_io(os.path.realpath(disk.path), "qcow2", "write -P 0x41 4M 64k")
    world.on(s.DescribeDisk(disk, ""), s.AddLayer(disk, 1, 0, "qcow2"), s.ActivateLayer(disk, 1, "qcow2"))
    qemu_io(os.path.realpath(disk.path), "qcow2", "write -P 0x42 5M 64k")
    return disk


def save(world: World, disk: s.DiskRef, format: str = "raw", snapshot: int = -1) -> Path:
    target = world.store / "saved"
    world.on(s.SaveDisk(disk, str(target), format, "", snapshot))
    return target


def test_clone_on_the_store_is_saved_with_all_that_it_lies_over(world: World, clone: s.DiskRef) -> None:
    saved = save(world, clone)
    for at, pattern in ((1, 0xA1), (4, 0x41), (5, 0x42)):
        qemu_io(saved, "raw", f"read -P {pattern} {at}M 64k")
    os.unlink(saved)
    saved = save(world, clone, "qcow2", 0)
    qemu_io(saved, "qcow2", "read -P 0x41 4M 64k", "read -P 0 5M 64k")


@pytest.mark.fault(7, "save-as of a clone on the store follows no name and no link that was planted there")
@pytest.mark.parametrize(
    "where", ["header of the layer", "header of the one below", "link to the image", "layer", "image"]
)
def test_planted_name_below_a_clone_is_not_saved(
    world: World, clone: s.DiskRef, outside: Path, where: str
) -> None:
    folder = Path(os.path.realpath(clone.path)).parent
    side = folder.parents[1]
    private = outside / "private"
    if where.startswith("header"):
        layer = folder / ("1" if where.endswith("layer") else "0")
        subprocess.run(
            ["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", private, "-F", "raw", layer], check=True
        )
    else:
        path = {"link to the image": side / "image", "layer": folder / "0", "image": world.store / "image"}[
            where
        ]
        path.unlink()
        path.symlink_to(private)
    with pytest.raises(SemisharedError) as refused:
        save(world, clone)
    assert refused.value.id in ("SS070", "SS071")
    assert not (world.store / "saved").exists()


@pytest.mark.parametrize("layer", ["0", "1"])
def test_planted_data_file_of_a_clone_is_not_saved(
    world: World, clone: s.DiskRef, outside: Path, layer: str
) -> None:
    """All else in the header is as it was: what the layer lies over, in the format that it has."""
    path = Path(os.path.realpath(clone.path)).with_name(layer)
    over, format = layers.backing_of(str(path))
    path.unlink()
    options = f"data_file={outside}/privatX,backing_file={over},backing_fmt={format}"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-o", options, path, "64M"], check=True)
    qemu_io(path, "qcow2", "write -P 7 0 1M")
    path.write_bytes(path.read_bytes().replace(b"privatX", b"private"))
    with pytest.raises(UnexpectedFile, match="lies over a layer that has a data file of its own"):
        save(world, clone)
    assert not (world.store / "saved").exists()


def test_layers_of_a_clone_that_lie_over_each_other_are_not_read(world: World, clone: s.DiskRef) -> None:
    lowest = Path(os.path.realpath(clone.path)).with_name("0")
    subprocess.run(["qemu-img", "rebase", "-u", "-f", "qcow2", "-b", "1", "-F", "qcow2", lowest], check=True)
    with pytest.raises(UnexpectedFile, match="lies over itself"):
        save(world, clone)


@pytest.mark.fault(7, "save-as of a disk in place follows no other link than its own")
def test_planted_link_of_a_disk_in_place_is_not_saved(world: World, outside: Path) -> None:
    image, disk = world.image(), world.disk()
    world.link(image, disk)
    link = world.store / ".semishared" / "image" / "image"
    link.unlink()
    link.symlink_to(outside / "private")
    with pytest.raises(SemisharedError) as refused:
        save(world, disk)
    assert refused.value.id == "SS070"
    assert not (world.store / "saved").exists()


def test_disk_in_place_is_saved(world: World) -> None:
    image, disk = world.image(), world.disk()
    world.link(image, disk)
    qemu_io(save(world, disk), "raw", "read -P 0xa1 1M 64k")


def test_roots_may_be_links(tmp_path: Path) -> None:
    """/var/lib/one/datastores, and a datastore in it, are where the operator wants them to be."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "export").mkdir()
    (tmp_path / "top").mkdir()
    (tmp_path / "top/datastores").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/100").symlink_to(tmp_path / "export")
    world = object.__new__(World)
    world.top = tmp_path / "top"
    world.location = world.top / "datastores"
    world.store, world.system, world.root = (world.location / name for name in ("100", "101", ".semishared"))
    world.system.mkdir()
    image = world.image()
    for number, make in enumerate(
        (
            lambda disk: world.clone(image, disk),
            lambda disk: world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CloneOnStore(disk, image, 0)),
            lambda disk: world.link(image, disk),
        )
    ):
        disk = world.disk(5, number)
        make(disk)
        qemu_io(save(world, disk), "raw", "read -P 0xa1 1M 64k")
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    assert not os.path.lexists(world.disk().vm_dir)


def test_record_that_names_another_place_is_refused(world: World, outside: Path) -> None:
    import json

    image, disk = world.image(), world.disk()
    world.link(image, disk)
    path = Path(disk.vm_dir, ".semishared", f"disk.{disk.disk}.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "path": str(outside / "private")}))
    os.unlink(disk.path)
    os.symlink(outside / "private", disk.path)
    with pytest.raises(SemisharedError) as refused:
        save(world, disk)
    assert refused.value.id in ("SS042", "SS070")
    assert not (world.store / "saved").exists()


def test_staged_link_of_a_killed_action_is_in_nobodys_way(world: World) -> None:
    from semishared.tools import files

    image, disk = world.image(), world.disk()
    world.link(image, disk)
    os.symlink(os.readlink(disk.path), files.staged_name(disk.path))
    os.symlink(os.readlink(disk.path), f"{disk.vm_dir}/.staged-disk.{disk.disk}.0123456789ab")
    world.link(image, disk)
    assert world.leftovers() == []


def test_disk_of_another_driver_may_lead_to_a_device(world: World) -> None:
    image, disk = world.image(), world.disk()
    world.clone(image, disk)
    foreign = world.disk(number=4)
    os.symlink("/dev/null", foreign.path)
    world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.AddLayer(disk, 1, 0, "qcow2"))
    with pytest.raises(SemisharedError, match="disk.4"):
        world.on(s.SaveDisk(foreign, str(world.store / "saved"), "raw", ""))
    world.on(s.RemoveVm(disk.vm, disk.vm_dir))
    assert os.path.exists("/dev/null")
