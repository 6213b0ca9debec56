# SPDX-License-Identifier: Apache-2.0
"""Disks in memory (class ram) through the real host side: only what fits at its largest, nothing after a
restart. Real zram: tests/nfs.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from semishared.device import devices
from semishared.device import memory as of_memory
from semishared.disk import device_move, records
from semishared.errors import (
    BadPool,
    CannotMove,
    LostWithMemory,
    MemoryPromised,
    NoDeviceOfClass,
    SemisharedError,
)
from semishared.guest import active_layer, domain
from semishared.host import probe, watch
from semishared.model import steps as s
from semishared.model.device import names as device_names
from semishared.model.device import steps as device_steps
from semishared.tools import qemu_img
from semishared.vmm import records as started
from tools.test_pool import Pool, device_of
from tools.test_pool import carry as carried
from tools.world import MiB, World, qemu_io

SIZE = 64 * MiB
FIT = 3
"""Disks of that size in the memory of these tests: 256 MiB, of which a twentieth is for tables."""


@pytest.fixture
def pool(pool: Pool) -> Pool:
    pool.set(*map(str, pool.paths[:2]), f"{pool.paths[2]}=ram")
    return pool


def memory(pool: Pool) -> str:
    return str(pool.paths[2])


def clone(
    world: World,
    disk: s.DiskRef,
    classes: tuple[str, ...] = ("ram",),
    size: int = SIZE,
    image: s.ImageRef | None = None,
) -> None:
    """Clone as `tm/clone` plans it for an image with SEMISHARED_CLASS, of which oned says that it is of
    `size`.
    """
    image = image or s.ImageRef(100, 7, "raw", str(world.store / "image"))
    image = image if os.path.exists(image.source) else world.image()
    world.on(s.PrepareVm(disk.vm, disk.vm_dir), device_steps.PlaceLayers(disk, classes, size, size // 10))
    world.on(*world.cloning(image, disk), device_steps.NoteClasses(disk, classes))


def where(disk: s.DiskRef) -> str:
    return device_of(f"{disk.path}.snap")


def promised(pool: Pool) -> int:
    found = pool.rows()[memory(pool)]["promised"]
    assert isinstance(found, int)
    return found


def test_memory_takes_what_is_to_lie_there_and_nothing_else(world: World, pool: Pool) -> None:
    for number in range(4):
        world.clone(world.image(), world.disk(6, number))
        assert where(world.disk(6, number)) != memory(pool)
    clone(world, world.disk())
    assert where(world.disk()) == memory(pool) and promised(pool) == SIZE
    qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k")
    (answer,) = world.on(s.LookAtVm(5, world.disk().vm_dir))
    assert isinstance(answer, dict) and answer["classes"] == {"1": ["ram"]}
    clone(world, world.disk())
    assert promised(pool) == SIZE and len(pool.layers()) == 5, "once more is as good as once"
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    assert promised(pool) == 0 and not pool.leftovers()


def test_what_would_not_fit_at_its_largest_is_refused_or_goes_elsewhere(world: World, pool: Pool) -> None:
    for number in range(FIT):
        clone(world, world.disk(5, number))
    why = (
        rf"no device of class ram on \S+ for a disk of up to 64.0 MiB: {memory(pool)} has 51.2 MiB "
        rf"that are not promised"
    )
    with pytest.raises(NoDeviceOfClass, match=why):
        clone(world, world.disk(6, 0))
    assert os.listdir(world.disk(6).vm_dir) == [".semishared"]
    clone(world, world.disk(6, 0), ("ram", "any"))
    assert where(world.disk(6, 0)) in map(str, pool.paths[:2])
    clone(world, world.disk(6, 1), size=SIZE // 2, image=world.image("small", size=SIZE // 2)._replace(id=8))
    assert where(world.disk(6, 1)) == memory(pool), "a smaller one fits"
    world.on(s.RemoveDisk(world.disk(5, 0), ""))
    clone(world, world.disk(6, 2))
    assert where(world.disk(6, 2)) == memory(pool), "where one has gone another fits"


def test_each_layer_counts_and_so_does_what_a_disk_grows_by(world: World, pool: Pool) -> None:
    disk = world.disk()
    clone(world, disk)
    for layer in (1, 2):
        world.on(s.AddLayer(disk, layer, layer - 1, "qcow2"), s.ActivateLayer(disk, layer, "qcow2"))
    assert promised(pool) == FIT * SIZE
    with pytest.raises(
        MemoryPromised, match=r"disk.1: 4 layers of up to 64.0 MiB each are more than the 243.2 MiB"
    ):
        world.on(s.AddLayer(disk, 3, 2, "qcow2"))
    for growing in (s.GrowDisk, s.AllowGrowth):
        with pytest.raises(MemoryPromised):
            world.on(growing(disk, 2 * SIZE))
    assert sorted(os.listdir(f"{disk.path}.snap")) == ["0", "1", "2"] and promised(pool) == FIT * SIZE
    world.on(s.MergeLayer(disk, 2, "0", "qcow2", False), s.DropLayer(disk, 1))
    assert promised(pool) == 2 * SIZE
    world.on(s.GrowDisk(disk, SIZE + 4 * MiB))
    assert promised(pool) == 2 * (SIZE + 4 * MiB)
    world.on(s.AllowGrowth(disk, SIZE + 8 * MiB))
    assert promised(pool) == 2 * (SIZE + 8 * MiB)
    assert qemu_img.virtual_size(f"{disk.path}.snap/2", "qcow2") == SIZE + 4 * MiB, "that is its hypervisor's"
    qemu_io(f"{disk.path}.snap/2", "qcow2", "read -P 0xa1 1M 64k")


def test_memory_that_is_drained_has_room_for_the_layer_of_a_disk_that_leaves_it(
    world: World, pool: Pool
) -> None:
    for number in range(2):
        clone(world, world.disk(5, number))
    folders = [f"{world.disk(5, number).path}.snap" for number in range(2)]
    world.on(device_steps.CloseDevice(str(world.root), str(pool.rows()[memory(pool)]["uuid"])))
    with of_memory.another_layer(folders[0]):
        assert promised(pool) == 3 * SIZE
        with pytest.raises(MemoryPromised):
            of_memory.more(folders[1])
    assert promised(pool) == 2 * SIZE
    # All that a VM needs, or nothing.
    with pytest.raises(MemoryPromised):
        of_memory.more_each(folders)
    assert promised(pool) == 2 * SIZE


def test_a_disk_that_is_larger_than_oned_says_is_counted_as_it_is(world: World, pool: Pool) -> None:
    for number in range(2):
        clone(world, world.disk(5, number), size=MiB)
    assert promised(pool) == 2 * SIZE
    clone(world, world.disk(6, 0), size=MiB)
    with pytest.raises(
        MemoryPromised, match="disk.1: 1 layers of up to 64.0 MiB each are more than the 51.2 MiB that"
    ):
        clone(world, world.disk(6, 1), size=MiB)
    with pytest.raises(NoDeviceOfClass):
        clone(world, world.disk(6, 2), size=0)


def test_a_host_without_memory_refuses_or_does_as_without_the_word(world: World) -> None:
    with pytest.raises(NoDeviceOfClass, match="no device of class ram on .* it has none"):
        clone(world, world.disk())
    assert os.listdir(world.disk().vm_dir) == [".semishared"]
    clone(world, world.disk(), ("ram", "any"))
    assert not os.path.islink(f"{world.disk().path}.snap")


def test_a_pool_of_memory_alone_leaves_all_else_where_it_would_be_without_one(world: World) -> None:
    alone = Pool(world, (256,))
    try:
        alone.set(f"{alone.paths[0]}=ram")
        for memory_is_there in (True, False):
            if not memory_is_there:
                subprocess.run(["umount", "-l", str(alone.paths[0])], check=True)
            world.clone(world.image(), world.disk(6))
            clone(world, world.disk(), ("ram", "any"))
            assert not os.path.islink(f"{world.disk(6).path}.snap") and not any(
                base.is_symlink() for base in world.bases()
            )
            assert os.path.islink(f"{world.disk().path}.snap") == memory_is_there
            told = probe.report(str(world.location))
            assert (
                ("RAM_TOTAL_MB" in told) == memory_is_there
                and "POOL" not in told
                and probe.capacity(str(world.location)) == []
            )
            world.on(s.RemoveVm(5, world.disk().vm_dir), s.RemoveVm(6, world.disk(6).vm_dir))
    finally:
        alone.close()


def test_memory_is_nothing_to_which_the_last_device_could_be_drained(world: World, pool: Pool) -> None:
    root, uuids = str(world.root), [str(pool.rows()[str(path)]["uuid"]) for path in pool.paths]
    world.on(device_steps.CloseDevice(root, uuids[0]))
    with pytest.raises(
        BadPool,
        match=f"{pool.paths[1]} on .* cannot be drained: no other device of its pool takes what is "
        f"not for memory",
    ):
        world.on(device_steps.CloseDevice(root, uuids[1]))
    world.clone(world.image(), world.disk())
    assert where(world.disk()) == str(pool.paths[1])
    world.on(device_steps.CloseDevice(root, uuids[2]))
    assert [row["weight"] for row in pool.rows().values()].count(0) == 2


def test_memory_that_is_all_of_a_pool_can_be_drained(world: World) -> None:
    alone = Pool(world, (256,))
    try:
        alone.set(f"{alone.paths[0]}=ram")
        clone(world, world.disk(), ("ram", "any"))
        world.on(device_steps.CloseDevice(str(world.root), str(alone.rows()[str(alone.paths[0])]["uuid"])))
        clone(world, world.disk(6), ("ram", "any"))
        assert os.path.islink(f"{world.disk().path}.snap") and not os.path.islink(
            f"{world.disk(6).path}.snap"
        )
    finally:
        alone.close()


# -- moves ------------------------------------------------------------------------------------------


def moved(world: World, vm: int, want: dict[str, object]) -> s.DiskRef:
    """Move a VM to the other datastore as `tm/mv` does between two hosts, which this machine is both of."""
    source, target = world.disk(vm), world.disk(vm, system=103)
    carried(source.vm_dir, target.vm_dir, vm, (1,), {"1": want})
    return target


def test_a_vm_whose_records_are_damaged_hides_no_other_from_who_looks_after_memory(
    world: World, pool: Pool
) -> None:
    """Whatever the order in which the file system lists them."""
    clone(world, world.disk())
    there = Path(world.disk().vm_dir)
    for number in (1, 2, 3, 4, 6, 7, 8, 9):
        record = there.parent / str(number) / ".semishared/disk.0.json"
        record.parent.mkdir(parents=True)
        record.write_text("{")
    assert watch.Round(str(world.root), 0)._in_memory() == [(5, str(there))]


def test_a_disk_in_memory_is_in_memory_where_it_goes_or_stays(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    there = moved(world, 5, {"classes": ["ram"], "size": SIZE, "layers": 1})
    assert where(there) == memory(pool) and promised(pool) == SIZE
    qemu_io(there.path, "qcow2", "read -P 0xa1 1M 64k")
    clone(world, world.disk(6))
    with pytest.raises(NoDeviceOfClass):
        moved(world, 6, {"classes": ["ram"], "size": 2 * SIZE, "layers": 1})
    assert not os.path.exists(world.disk(6, system=103).vm_dir) and where(world.disk(6)) == memory(pool)
    there = moved(world, 6, {"classes": ["ram", "any"], "size": 2 * SIZE, "layers": 1})
    assert where(there) != memory(pool) and promised(pool) == SIZE
    assert not pool.leftovers()


def test_a_copy_in_another_datastore_wants_the_same(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    target = world.disk(system=103)
    world.on(s.RenameVm(5, world.disk().vm_dir, target.vm_dir, True, "", (1,)))
    assert where(target) == memory(pool) and promised(pool) == 2 * SIZE
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    assert promised(pool) == SIZE
    qemu_io(target.path, "qcow2", "read -P 0xa1 1M 64k")


# -- a restart, and what is said of all that ----------------------------------------------------------


def restart(pool: Pool) -> None:
    """Let memory be as after a restart of its host: another file system, with the same label."""
    path = pool.paths[2]
    label = (path / ".semishared" / "device.json").read_bytes()
    subprocess.run(["umount", "-l", str(path)], check=True)
    pool.mount(path, pool.sizes[2])
    (path / ".semishared").mkdir()
    (path / ".semishared" / "device.json").write_bytes(label)


def test_after_a_restart_its_vms_are_refused_and_others_run(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    world.clone(world.image(), world.disk(6))
    restart(pool)
    with pytest.raises(
        LostWithMemory,
        match=f"disk.1 lay in memory of .*, {memory(pool)}, which is empty since the host was started",
    ):
        started.check_disk(world.disk().vm_dir, records.record_of(world.disk()))
    started.check_disk(world.disk(6).vm_dir, records.record_of(world.disk(6)))
    with pytest.raises(LostWithMemory):
        world.on(s.SendVm(5, world.disk().vm_dir, ""))
    row = pool.rows()[memory(pool)]
    assert (row["state"], row["lost"], row["promised"]) == ("", ["5-1"], 0)
    clone(world, world.disk(7))
    assert where(world.disk(7)) == memory(pool), "it takes new ones"
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    assert pool.rows()[memory(pool)]["lost"] == [] and not os.path.exists(world.disk().vm_dir)


def test_memory_that_was_drained_takes_nothing_after_a_restart_until_it_is_added_again(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at every point of that, too."""
    file, declared = (
        pool.paths[2] / ".semishared" / "device.json",
        (*map(str, pool.paths[:2]), f"{memory(pool)}=ram"),
    )
    label, close = (
        file.read_bytes(),
        device_steps.CloseDevice(str(world.root), str(pool.rows()[memory(pool)]["uuid"])),
    )
    for number in range(1, 30):
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        with contextlib.suppress(SemisharedError):
            world.on(close)
            break
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        world.on(close)
        restart(pool)
        # As semishared-ram.sh writes it at each boot, by its settings.
        file.write_bytes(label)
        assert pool.rows()[memory(pool)]["weight"] == 0, f"killed at {number}"
        pool.set(*declared)
    monkeypatch.delenv("SEMISHARED_KILL_AT")
    assert 3 < number < 29
    restart(pool)
    file.write_bytes(label)
    with pytest.raises(NoDeviceOfClass):
        clone(world, world.disk())
    pool.set(*declared)
    clone(world, world.disk())
    assert where(world.disk()) == memory(pool)


def test_before_memory_is_mounted_again_it_is_a_device_that_is_not_there(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    subprocess.run(["umount", "-l", memory(pool)], check=True)
    with pytest.raises(NoDeviceOfClass, match="it has none"):
        clone(world, world.disk(6))
    assert pool.rows()[memory(pool)]["state"] == "not there" and os.listdir(memory(pool)) == []


def test_the_hosts_monitoring_tells_of_its_memory_apart(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    told = dict(re.findall(r'([A-Z_]+) = "([^"]*)"', probe.report(str(world.location))))
    assert (told["POOL"], told["POOL_TOTAL_MB"]) == ("2", "192"), "none of it is capacity of the datastore"
    assert (told["RAM_TOTAL_MB"], told["RAM_LARGEST_MB"]) == ("256", "179")
    assert int(told["RAM_RESERVED_KB"]) == (256 + 16 + 64) * 1024


def test_memory_that_was_promised_more_than_once_is_watched_while_it_is_drained(
    world: World, pool: Pool
) -> None:
    words = [*map(str, pool.paths[:2])]
    pool.set(*words, f"{memory(pool)}=ram:2")
    for number in range(FIT + 1):
        clone(world, world.disk(5, number), ("ram", "any"))
        assert where(world.disk(5, number)) == memory(pool)
    unwatched = f"memory {memory(pool)} is promised more than once and not watched"
    root, uuid = str(world.root), str(pool.rows()[memory(pool)]["uuid"])
    assert probe.unwatched(root) == [unwatched]
    world.on(device_steps.CloseDevice(root, uuid))
    assert [device.uuid for device in of_memory.overcommitted(root)] == [uuid] and probe.unwatched(root) == [
        unwatched
    ]
    disk, link = world.disk(5, 0), devices.link_of(f"{world.disk(5, 0).path}.snap")
    assert link
    step = device_steps.MoveLayers(disk, "one-5", link.name, str(pool.rows()[words[0]]["uuid"]), 0)
    # There is no such guest: that is asked last.
    with pytest.raises(SemisharedError, match="one-5|libvirt"):
        device_move._check(step, root, link, link._replace(uuid=step.target))
    Path(memory(pool), "full").write_bytes(bytes(210 * MiB))
    (device,) = of_memory.overcommitted(root)
    (move, *_) = of_memory.leaving(root, uuid, device_move.held(device_steps.ListHeld(root)), {})
    assert of_memory.is_due(device) and move.target in {str(pool.rows()[word]["uuid"]) for word in words}
    world.on(s.RemoveDisk(world.disk(5, FIT), ""))
    assert of_memory.overcommitted(root) == [] and [device.uuid for device in of_memory.memory(root)] == [
        uuid
    ]
    with pytest.raises(CannotMove, match="in memory that is promised once"):
        device_move._check(step, root, link, link._replace(uuid=step.target))


def test_a_device_with_disks_does_not_become_memory_nor_memory_a_device(world: World, pool: Pool) -> None:
    world.clone(world.image(), world.disk())
    device = where(world.disk())
    other = next(str(path) for path in pool.paths[:2] if str(path) != device)
    with pytest.raises(BadPool, match="is of class fast and has disks: without them it can be ram"):
        pool.set(other, f"{device}=ram", f"{memory(pool)}=ram")
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    pool.set(other, f"{device}=ram", f"{memory(pool)}=ram")
    assert pool.rows()[device]["class"] == "ram"


@pytest.mark.parametrize("word", ["", "=fast", "=slow:0.5"])
def test_memory_of_which_its_class_was_not_said_is_refused_though_it_is_empty(
    world: World, pool: Pool, word: str
) -> None:
    """By its label, as semishared-ram.sh writes it before anybody has declared it."""
    label = Path(memory(pool), ".semishared", "device.json")
    said = label.read_bytes()
    assert b"owner" not in said
    why = (
        f"{memory(pool)} on .* has the label of memory, and is declared as (fast|slow): "
        f"{memory(pool)}=ram; or, "
    )
    for words in ((*map(str, pool.paths[:2]), memory(pool) + word), (memory(pool) + word,)):
        with pytest.raises(BadPool, match=why):
            pool.set(*words)
        assert label.read_bytes() == said and len(pool.rows()) == 3
    label.unlink()
    pool.set(*map(str, pool.paths[:2]), memory(pool) + word)
    assert pool.rows()[memory(pool)]["class"] in ("fast", "slow"), "it was none"


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_what_a_restart_empties_is_a_device_of_class_ram_or_none(world: World, pool: Pool, kind: str) -> None:
    path = world.top / "memory"
    path.mkdir()
    subprocess.run(["mount", "-t", kind, "-o", "mode=755", "memory", str(path)], check=True)
    try:
        why = f"{path} on .* is memory, which a restart empties, and declared as (fast|slow): {path}=ram is"
        for word in ("", "=slow"):
            with pytest.raises(BadPool, match=why):
                pool.set(*map(str, pool.paths[:2]), f"{path}{word}")
        assert os.listdir(path) == []
        pool.set(*map(str, pool.paths[:2]), f"{path}=ram")
        assert pool.rows()[str(path)]["class"] == "ram"
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


# -- killed -----------------------------------------------------------------------------------------

OWN = {
    "staged disk.1.snap",
    "published disk.1.snap",
    "memory promised",
    "directory on a device made",
    "class noted",
    "layer added",
    "layer removed",
}


def cloning(world: World, number: int) -> None:
    clone(world, world.disk(number))


def layering(world: World, number: int) -> None:
    disk = world.disk(number)
    world.on(s.AddLayer(disk, 1, 0, "qcow2"))
    world.on(s.DropLayer(disk, 1))


@pytest.mark.parametrize("act", [cloning, layering])
def test_killed_at_every_point_and_done_again(
    world: World, pool: Pool, act: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = world.top / "trace"
    assert callable(act)

    def ready(number: int) -> None:
        if act is layering:
            cloning(world, number)

    ready(999)
    monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
    act(world, 999)
    monkeypatch.delenv("SEMISHARED_TRACE")
    world.on(s.RemoveVm(999, world.disk(999).vm_dir))
    points = {
        int(number): name
        for number, _, name in (line.partition(" ") for line in trace.read_text().splitlines())
        if name in OWN
    }
    assert "memory promised" in points.values(), trace.read_text()
    for number, name in points.items():
        ready(number)
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        with contextlib.suppress(SemisharedError):
            act(world, number)
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        act(world, number)
        disk = world.disk(number)
        qemu_io(disk.path, "qcow2", "read -P 0xa1 1M 64k")
        assert where(disk) == memory(pool) and promised(pool) == SIZE, f"killed at {name}"
        world.on(s.RemoveVm(number, disk.vm_dir))
        assert promised(pool) == 0 and not pool.leftovers() and not pool.layers(), f"killed at {name}"


def test_labelling_killed_at_every_point_and_done_again(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = [*map(str, pool.paths[:2])]
    notes = world.root / "devices"
    for number in range(1, 40):
        pool.set(*usual)
        assert len(list(notes.glob("*.json"))) == 2, "of what is memory no more nothing is known"
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        with contextlib.suppress(SemisharedError):
            pool.set(*usual, f"{memory(pool)}=ram")
            break
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        pool.set(*usual, f"{memory(pool)}=ram")
        assert (
            pool.rows()[memory(pool)]["class"] == "ram"
            and len(list(notes.glob("*.json"))) == 3
            and not pool.leftovers()
        )
    monkeypatch.delenv("SEMISHARED_KILL_AT")
    assert 3 < number < 39


def test_notes_without_layers_count_for_nothing_and_go(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    notes = Path(memory(pool), ".semishared", "promised")
    (own,) = notes.iterdir()
    own.with_name("9-1-" + "0" * 12).write_bytes(own.read_bytes())
    assert promised(pool) == SIZE
    clone(world, world.disk(6), size=SIZE // 2)
    assert len(list(notes.iterdir())) == 2 and own.exists()


# -- a guest that stands still by an error of memory which its disk has left ----------------------------


class Waiting:
    """What libvirt would say of a guest: it stands still by an error of one disk, until it is told to go on.
    Real ones: tests/pool.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        self.state, self.path = "paused", path
        monkeypatch.setattr(domain, "state", lambda _: self.state)
        monkeypatch.setattr(
            domain, "failed_disks", lambda _: {"vdb": False} if self.state == "paused" else {}
        )
        monkeypatch.setattr(domain, "resume_after_error", lambda _: setattr(self, "state", "running"))
        monkeypatch.setattr(active_layer, "opened", lambda *_: {os.path.realpath(self.path): "vdb"})


def test_a_guest_goes_on_though_who_knew_why_it_stands_still_was_killed(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set(*map(str, pool.paths[:2]), f"{memory(pool)}=ram:2")
    disk, root = world.disk(), str(world.root)
    clone(world, disk, ("ram", "any"))
    guest, folder = Waiting(monkeypatch, disk.path), f"{disk.path}.snap"
    place = device_names.Link(
        str(pool.rows()[str(pool.paths[0])]["uuid"]), "layers", device_names.layers_name(5, 1, "0" * 12)
    )
    elsewhere = device_names.directory(root, place)
    # As in a move under the guest: noted, copied, and switched.
    device_move.note_leaving(disk.vm_dir, 1, place)
    assert not device_move.has_left(disk.vm_dir, 1), "it has not, yet"
    os.makedirs(elsewhere)
    subprocess.run(["cp", "-a", "--sparse=always", f"{folder}/.", elsewhere], check=True)
    os.unlink(folder)
    os.symlink(device_names.target_of(place), folder)
    assert watch.Round(root, 0).carry_out() and guest.state == "running"
    assert not os.path.exists(device_names.left_note(disk.vm_dir, 1))
    guest.state = "paused"
    assert not watch.Round(root, 0).carry_out() and guest.state == "paused", "that is another error"
    # One that has run in between is none of it either.
    device_move.note_leaving(disk.vm_dir, 1, place)
    guest.state = "running"
    watch.Round(root, 0).carry_out()
    guest.state = "paused"
    assert not watch.Round(root, 0).carry_out() and guest.state == "paused"
