# SPDX-License-Identifier: Apache-2.0
"""What fails late takes nothing away but what it has made: steps that are held in their midst while their VM
is made anew.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import List

import pytest

from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.model.disk import names as disk_names
from tools.world import OVERLAY_OPTIONS, World, qemu_io


def descendants() -> List[int]:
    """Return the processes that this one and those that it has started have started."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def stopped(but: int = -1) -> int:
    """Wait for the process that has stopped itself at a point, other than `but`, and return it."""
    for _ in range(1000):
        for pid in set(descendants()) - {but}:
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    return pid
            except OSError:
                continue
        time.sleep(0.02)
    raise AssertionError("nobody has stopped")


def points(world: World, disk: s.DiskRef, step: s.Step, monkeypatch: pytest.MonkeyPatch) -> List[str]:
    """Return the points that a step passes on another disk."""
    trace = world.top / "trace"
    with monkeypatch.context() as env:
        env.setenv("SEMISHARED_TRACE", str(trace))
        world.on(step)
    return [line.partition(" ")[2] for line in trace.read_text().splitlines()]


@pytest.mark.fault(
    47, "a clone that comes too late, or ends too late, leaves the lease of the one that a VM made anew has"
)
@pytest.mark.parametrize("at", ["leased", "disk.1 staged", "disk.1 published"])
def test_overlay_that_hangs_while_its_vm_is_made_anew(
    world: World, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, disk, other = world.image(), world.disk(), world.disk(number=2)
    anew = world.image("anew", pattern=0xC3)
    world.on(
        s.StageBase(str(world.root), image),
        s.StageBase(str(world.root), anew),
        s.PrepareVm(disk.vm, disk.vm_dir),
        seq=0,
    )
    passed = points(world, other, s.CreateOverlay(other, image, 0, OVERLAY_OPTIONS), monkeypatch)
    number = next(number for number, name in enumerate(passed, 1) if name == at.replace("disk.1", "disk.2"))
    again = anew if at == "disk.1 published" else image
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as env:
            env.setenv("SEMISHARED_STOP_AT", str(number))
            hangs = pool.submit(world.on, s.CreateOverlay(disk, image, 0, OVERLAY_OPTIONS), seq=0)
            pid = stopped()
        world.on(s.RemoveVm(disk.vm, disk.vm_dir), seq=0)
        world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CreateOverlay(disk, again, 0, OVERLAY_OPTIONS), seq=1)
        leases = world.leases()
        os.kill(pid, signal.SIGCONT)
        if at != "disk.1 published":
            with pytest.raises(SemisharedError):
                hangs.result(60)
        hangs.exception(60)
    assert leases and world.leases() == leases
    qemu_io(disk.path, "qcow2", f"read -P {0xC3 if again is anew else 0xA1} 1M 64k")


@pytest.mark.fault(
    47,
    "a lease that a late clone has given up by its name is there again when the disk of the VM made anew is",
)
def test_overlay_whose_lease_a_late_one_gives_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    image, disk, other = world.image(), world.disk(), world.disk(number=2)
    world.on(s.StageBase(str(world.root), image), s.PrepareVm(disk.vm, disk.vm_dir), seq=0)
    passed = points(world, other, s.CreateOverlay(other, image, 0, OVERLAY_OPTIONS), monkeypatch)

    def hang(at: str, seq: int, but: int = -1) -> tuple[Future[list[object]], int]:
        with monkeypatch.context() as env:
            env.setenv("SEMISHARED_STOP_AT", str(passed.index(at) + 1))
            return pool.submit(world.on, s.CreateOverlay(disk, image, 0, OVERLAY_OPTIONS), seq=seq), stopped(
                but
            )

    with ThreadPoolExecutor(2) as pool:
        late, pid = hang("disk.2 staged", 0)
        world.on(s.RemoveVm(disk.vm, disk.vm_dir), s.PrepareVm(disk.vm, disk.vm_dir), seq=1)
        newer, newer_pid = hang("disk.2 staged", 1, pid)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(SemisharedError):
            late.result(60)
        os.kill(newer_pid, signal.SIGCONT)
        newer.result(60)
    assert [lease.rpartition("/")[2] for lease in world.leases()] == ["5-1"]
    qemu_io(disk.path, "qcow2", "read -P 0xa1 1M 64k")


@pytest.mark.fault(47, "a clone that comes too late leaves the one that a VM made anew has at its name")
@pytest.mark.parametrize("at", ["store clone staged", "disk.1 staged"])
def test_clone_that_hangs_while_its_vm_is_made_anew(
    world: World, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, disk, other = world.image(), world.disk(), world.disk(number=2)
    # What the first clone of an image makes beside it is a point of its own.
    world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CloneOnStore(world.disk(number=3), image, 0), seq=0)
    passed = points(world, other, s.CloneOnStore(other, image, 0), monkeypatch)
    number = next(number for number, name in enumerate(passed, 1) if name == at.replace("disk.1", "disk.2"))
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as env:
            env.setenv("SEMISHARED_STOP_AT", str(number))
            hangs = pool.submit(world.on, s.CloneOnStore(disk, image, 0), seq=0)
            pid = stopped()
        world.on(s.RemoveVm(disk.vm, disk.vm_dir), seq=0)
        world.on(s.PrepareVm(disk.vm, disk.vm_dir), s.CloneOnStore(disk, image, 0), seq=1)
        clone = os.path.realpath(disk.path)
        qemu_io(clone, "qcow2", "write -P 0x5a 2M 64k")
        inode, link = os.stat(clone).st_ino, os.readlink(disk.path)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(SemisharedError):
            hangs.result(60)
    assert (os.path.realpath(disk.path), os.stat(clone).st_ino, os.readlink(disk.path)) == (
        clone,
        inode,
        link,
    )
    qemu_io(clone, "qcow2", "read -P 0x5a 2M 64k")
    assert not [name for name in os.listdir(Path(clone).parents[1]) if disk_names.is_staged(name)]
    world.on(s.RemoveDisk(disk, str(world.store)), seq=1)
    assert not os.path.exists(clone)
