# SPDX-License-Identifier: Apache-2.0
"""Copies of bases in memory (SEMISHARED_BASES = ram): had before a boot, let go of for what needs their room;
nothing is lost with them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

from semishared.device import hot
from semishared.disk import records
from semishared.errors import NoDeviceOfClass, SemisharedError
from semishared.host import leftovers
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.device import steps as device_steps
from semishared.model.leftover_steps import Discard, LookAround, Unlinked
from semishared.model.vm import hypervisor_steps as h
from semishared.table import carry_out
from semishared.vmm.on_host import Work
from tools.test_lost_device import about_to_boot
from tools.test_pool import Pool
from tools.test_pool_memory import clone as clone_into_memory
from tools.test_pool_memory import memory, promised, restart, where
from tools.world import MiB, World, qemu_io

SIZE = 64 * MiB
LIB = str(Path(__file__).resolve().parents[2] / "lib")


@pytest.fixture
def pool(pool: Pool) -> Pool:
    pool.set(*map(str, pool.paths[:2]), f"{pool.paths[2]}=ram")
    return pool


def clone(world: World, disk: s.DiskRef, image: s.ImageRef | None = None) -> s.ImageRef:
    """Clone as `tm/clone` plans it for an image with SEMISHARED_BASES = ram."""
    image = image or (
        world.image()
        if not (world.store / "image").exists()
        else s.ImageRef(100, 7, "raw", str(world.store / "image"))
    )
    world.on(*world.cloning(image, disk), device_steps.NoteHot(disk))
    return image


def bottom(disk: s.DiskRef) -> str:
    """Return what `vmm/deploy` tells libvirt that a disk lies over."""
    record = records.record_of(disk)
    lease = str(carry_out(h.ReadChain(record.path, record), Work())[-1][0])
    return str(carry_out(h.SeeHot(disk.vm_dir, record, lease), Work()) or lease)


def copies(pool: Pool) -> list[str]:
    return sorted(path.name for path in Path(memory(pool)).glob(".semishared/hot/*"))


def unlinked(world: World) -> list[Unlinked]:
    """Return what `gc` finds on devices that belongs to nothing."""
    return leftovers.look_around(LookAround(str(world.location), (101,), (), False)).unlinked


def said(world: World, disk: s.DiskRef) -> dict[str, str]:
    (found,) = world.on(base_steps.ReportDisks(str(world.location), (101,)))
    assert isinstance(found, dict)
    rows = {(vm["vm"], row["disk"]): row for vm in found["vms"] for row in vm["disks"]}
    return dict(rows[disk.vm, disk.disk]["hot"])


@contextlib.contextmanager
def booting(world: World, name: str) -> Iterator[None]:
    """Hold a copy as `vmm/deploy` does, in a process that then becomes another program."""
    code = (
        "import os, sys; from semishared.device import hot; print(hot.hold(*sys.argv[1:]), flush=True); "
        "os.execvp('sleep', ['sleep', '9'])"
    )
    words, env = [sys.executable, "-c", code, str(world.root), name], {**os.environ, "PYTHONPATH": LIB}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline().strip()
        try:
            yield
        finally:
            process.kill()


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Have a file open as a guest's QEMU has what its disk lies over."""
    words = ["stdbuf", "-oL", "qemu-io", "-r", "-f", "raw", path]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(b"read 0 4k\n")
        process.stdin.flush()
        assert b"read 4096" in process.stdout.readline()
        yield


def test_a_guest_reads_from_memory_and_after_a_restart_from_what_there_is(world: World, pool: Pool) -> None:
    disk = world.disk()
    clone(world, disk)
    (base,) = world.bases()
    assert bottom(disk) == f"{base}/leases/5-1" and promised(pool) == 0
    assert said(world, disk) == {"path": "", "why": "from the next boot on"}
    assert about_to_boot(world) == []
    copy = f"{memory(pool)}/.semishared/hot/{base.name}/image"
    assert (
        bottom(disk) == copy
        and os.stat(copy).st_mode & 0o777 == 0o440
        and said(world, disk) == {"path": copy, "why": ""}
    )
    assert world.content(copy) == world.content(base / "image") and os.stat(copy).st_blocks * 512 < MiB
    assert promised(pool) == SIZE and pool.rows()[memory(pool)]["bases"] == 1
    assert about_to_boot(world) == [] and promised(pool) == SIZE, "once more is as good as once"
    clone(world, world.disk(6))
    assert about_to_boot(world, 6) == [] and bottom(world.disk(6)) == copy and promised(pool) == SIZE, (
        "one copy for all"
    )
    restart(pool)
    assert bottom(disk) == f"{base}/leases/5-1" and promised(pool) == 0
    qemu_io(disk.path, "qcow2", "read -P 0xa1 1M 64k")
    assert about_to_boot(world) == [] and bottom(disk) == copy
    subprocess.run(["umount", "-l", memory(pool)], check=True)
    assert about_to_boot(world) == [
        "the base of disk 1 is read from disk, not from memory: no device of class ram takes it"
    ]
    assert bottom(disk) == f"{base}/leases/5-1" and os.listdir(memory(pool)) == []


def test_disks_that_do_not_say_so_and_diffs_read_from_disk(world: World, pool: Pool) -> None:
    from semishared.model.disk.commit_steps import CreateDiff

    world.clone(world.image(), world.disk())
    image = world.image("mine")._replace(id=8)
    diff = world.disk(6)
    world.on(
        s.StageBase(str(world.root), image),
        s.PrepareVm(6, diff.vm_dir),
        CreateDiff(diff, image, 0, ""),
        device_steps.NoteHot(diff),
    )
    assert about_to_boot(world) == about_to_boot(world, 6) == [] and copies(pool) == []
    assert not records.record_of(diff).reads_hot


def test_a_copy_that_nobody_reads_from_goes_for_what_needs_its_room(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    about_to_boot(world)
    (name,) = copies(pool)
    copy = hot.found(str(world.root), name)
    for number in range(2):
        clone_into_memory(world, world.disk(7, number))
    with booting(world, name), pytest.raises(NoDeviceOfClass):
        clone_into_memory(world, world.disk(8))
    with reading(copy), pytest.raises(NoDeviceOfClass):
        clone_into_memory(world, world.disk(8))
    assert copies(pool) == [name] and bottom(world.disk()) == copy
    clone_into_memory(world, world.disk(8))
    assert where(world.disk(8)) == memory(pool) and copies(pool) == [] and promised(pool) == 3 * SIZE
    why = (
        "the base of disk 1 is read from disk, not from memory: it has 64.0 MiB, and memory 51.2 MiB "
        "that are not promised"
    )
    assert about_to_boot(world) == [why] and said(world, world.disk())["why"] in why
    world.on(s.RemoveVm(8, world.disk(8).vm_dir))
    assert about_to_boot(world) == [] and copies(pool) == [name]
    # A snapshot of a disk in memory is another layer there.
    world.on(s.AddLayer(world.disk(7, 0), 1, 0, "qcow2"))
    assert copies(pool) == []


def test_the_copy_that_was_used_longest_ago_goes_first(world: World, pool: Pool) -> None:
    images = [
        world.image(f"image{number}", pattern=number + 1)._replace(id=20 + number) for number in range(4)
    ]
    for number, image in enumerate(images[:3]):
        clone(world, world.disk(10 + number), image)
        about_to_boot(world, 10 + number)
    assert len(copies(pool)) == 3
    first = next(name for name in copies(pool) if name.startswith("100-20-"))
    with booting(world, first):
        pass
    clone(world, world.disk(13), images[3])
    assert about_to_boot(world, 13) == []
    assert [name.split("-")[1] for name in copies(pool)] == ["20", "22", "23"]


def test_a_copy_goes_with_its_base_and_one_without_is_left_over(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    about_to_boot(world)
    (base,) = world.bases()
    world.on(s.RemoveVm(5, world.disk().vm_dir), base_steps.EvictBase(str(world.root), base.name))
    assert copies(pool) == [] and promised(pool) == 0 and world.bases() == []
    clone(world, world.disk())
    about_to_boot(world)
    assert unlinked(world) == []
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    aside = base.with_name("aside")
    base.rename(aside)
    (left,) = [item for item in unlinked(world) if item.path.startswith(memory(pool))]
    assert left.path == f"{memory(pool)}/.semishared/hot/{base.name}"
    (done,) = world.on(Discard("unlinked", left.path, str(world.location), -1, left.seen))
    assert done == {"removed": True} and copies(pool) == []


def test_a_copy_that_is_not_what_it_was_is_removed_and_the_base_stays(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    about_to_boot(world)
    (name,) = copies(pool)
    (found,) = world.on(base_steps.VerifyBase(str(world.root), name, 0))
    assert isinstance(found, dict) and not found["damaged"] and not found.get("wrong_in_memory")
    path = hot.found(str(world.root), name)
    os.chmod(path, 0o640)
    with open(path, "r+b") as file:
        file.seek(MiB)
        file.write(b"x")
    (found,) = world.on(base_steps.VerifyBase(str(world.root), name, 0))
    assert isinstance(found, dict) and (found["damaged"], found["wrong_in_memory"]) == (False, True)
    assert copies(pool) == [] and about_to_boot(world) == [] and copies(pool) == [name]
    (found,) = world.on(base_steps.VerifyBase(str(world.root), name, 0))
    assert isinstance(found, dict) and not found.get("wrong_in_memory")


def test_a_base_that_is_damaged_on_disk_is_not_copied(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    (base,) = world.bases()
    os.chmod(base / "image", 0o640)
    with (base / "image").open("r+b") as file:
        file.seek(MiB)
        file.write(b"x")
    (warned,) = about_to_boot(world)
    assert (
        "is not what it was: semishared base verify" in warned and copies(pool) == [] and promised(pool) == 0
    )


def test_a_device_that_is_drained_lets_its_copies_go(world: World, pool: Pool) -> None:
    clone(world, world.disk())
    about_to_boot(world)
    uuid = str(pool.rows()[memory(pool)]["uuid"])
    world.on(device_steps.CloseDevice(str(world.root), uuid))
    assert copies(pool) == []
    (warned,) = about_to_boot(world)
    assert warned.endswith("no device of class ram takes it")


def test_killed_at_every_point_and_done_again(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = world.top / "trace"
    disk = world.disk()
    clone(world, disk)
    monkeypatch.setenv("SEMISHARED_TRACE", str(trace))
    about_to_boot(world)
    monkeypatch.delenv("SEMISHARED_TRACE")
    own = {"hot base begun", "memory promised", "staged image", "published image"}
    points = {
        int(number): name
        for number, _, name in (line.partition(" ") for line in trace.read_text().splitlines())
        if name in own
    }
    assert set(points.values()) == own
    for number, name in points.items():
        hot.drop(str(world.root), copies(pool)[0])
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        with contextlib.suppress(SemisharedError):
            about_to_boot(world)
        monkeypatch.delenv("SEMISHARED_KILL_AT")
        assert promised(pool) in (0, SIZE), f"killed at {name}"
        assert bottom(disk).endswith("/leases/5-1" if name != "published image" else "/image"), (
            f"killed at {name}"
        )
        assert about_to_boot(world) == [] and bottom(disk) == hot.found(str(world.root), copies(pool)[0]), (
            f"killed at {name}"
        )
        assert promised(pool) == SIZE and not pool.leftovers(), f"killed at {name}"


def test_memory_that_was_closed_meanwhile_takes_no_copy(world: World, pool: Pool) -> None:
    name = f"100-7-{'a' * 32}"
    world.on(device_steps.CloseDevice(str(world.root), str(pool.rows()[memory(pool)]["uuid"])))
    assert hot._begin(str(world.root), name, SIZE) is None and copies(pool) == []
