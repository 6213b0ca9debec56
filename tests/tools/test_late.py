# SPDX-License-Identifier: Apache-2.0
"""What was planned before a VM was made anew comes after it: whatever it removes, reverts or replaces, the
newer one stays as it is.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Dict, Iterator

import pytest

from semishared.errors import AnotherWriter, BadRecord, LateAction
from semishared.model import steps as s
from semishared.model.disk import commit_steps as c
from semishared.store import writers
from tools.world import OVERLAY_OPTIONS, MiB, World

LATE: Dict[str, Callable[[World, s.DiskRef, s.ImageRef], s.Step]] = {
    "delete of the VM": lambda world, disk, image: s.RemoveVm(disk.vm, disk.vm_dir),
    "delete of a disk": lambda world, disk, image: s.RemoveDisk(disk, str(world.store)),
    "mvds": lambda world, disk, image: s.EndSession(disk),
    "clone": lambda world, disk, image: s.CreateOverlay(disk, image, 0, OVERLAY_OPTIONS),
    "volatile": lambda world, disk, image: s.CreateVolatile(disk, MiB, "qcow2", ""),
    "snapshot": lambda world, disk, image: s.AddLayer(disk, 1, 0, "qcow2"),
    "revert": lambda world, disk, image: s.ActivateLayer(disk, 0, "qcow2"),
    "delete of a snapshot": lambda world, disk, image: s.DropLayer(disk, 0),
    "resize": lambda world, disk, image: s.GrowDisk(disk, 128 * MiB),
    "commit": lambda world, disk, image: c.FinishDisk(disk),
}


def seen(top: Path) -> Dict[str, object]:
    """Return what there is below a directory, each file by its inode and content."""
    found: Dict[str, object] = {}
    for path in sorted(top.rglob("*")):
        name = str(path.relative_to(top))
        found[name] = (
            os.readlink(path)
            if path.is_symlink()
            else (path.stat().st_ino, path.read_bytes())
            if path.is_file()
            else None
        )
    return found


@pytest.mark.fault(
    46, "what an action of an earlier SEQ removes, reverts or makes is none of the VM that was made anew"
)
@pytest.mark.parametrize("late", LATE)
def test_of_a_vm_that_was_made_anew(world: World, late: str) -> None:
    image, disk = world.image(), world.disk()
    steps = (
        s.StageBase(str(world.root), image),
        s.PrepareVm(disk.vm, disk.vm_dir),
        s.CreateOverlay(disk, image, 0, OVERLAY_OPTIONS),
    )
    world.on(*steps, seq=1)
    before, leases = seen(Path(disk.vm_dir)), world.leases()
    with pytest.raises(LateAction, match="SEQ 1"):
        world.on(LATE[late](world, disk, image), seq=0)
    assert (seen(Path(disk.vm_dir)), world.leases()) == (before, leases)
    assert not [
        name for name in os.listdir(os.path.dirname(disk.vm_dir)) if name.startswith(f".removed-{disk.vm}-")
    ]


@contextmanager
def guest(path: str) -> Iterator[None]:
    """Have a QEMU write to an image."""
    with subprocess.Popen(
        ["qemu-io", "-f", "qcow2", path], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(500):
                try:
                    writers.check_file(path)
                except AnotherWriter:
                    break
                time.sleep(0.01)
            yield
        finally:
            assert process.stdin
            process.stdin.close()


@pytest.mark.fault(46, "a revert leaves the layer that a guest writes to by now")
def test_revert_under_a_guest(world: World) -> None:
    image, disk = world.image(), world.disk()
    world.clone(image, disk)
    world.on(s.AddLayer(disk, 1, 0, "qcow2"), s.ActivateLayer(disk, 1, "qcow2"))
    revert = (s.AddLayer(disk, 1, 0, "qcow2"), s.ActivateLayer(disk, 1, "qcow2"))
    with guest(f"{disk.path}.snap/1"):
        before = seen(Path(disk.vm_dir))
        with pytest.raises(AnotherWriter, match="is written to by process"):
            world.on(*revert)
        assert seen(Path(disk.vm_dir)) == before
    world.on(*revert)


@pytest.mark.fault(46, "a late deletion of a snapshot leaves the layer that is active")
def test_active_layer_is_not_dropped(world: World) -> None:
    image, disk = world.image(), world.disk()
    world.clone(image, disk)
    with pytest.raises(BadRecord, match="layer 0 in .* is the active one"):
        world.on(s.DropLayer(disk, 0))
    assert os.path.exists(f"{disk.path}.snap/0")
