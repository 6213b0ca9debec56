# SPDX-License-Identifier: Apache-2.0
"""Each step that changes something, late, by what came first and where the disk lies: what came first stays as it is.

The pairs come from the vocabulary of steps: one that is added to it is tried, or is to be named in ELSEWHERE, with why nothing of a VM
directory can be late there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest

from semishared.errors import LateAction, SemisharedError, VmGone
from semishared.model import steps as s
from semishared.model import steps_base, steps_commit, steps_device, steps_image
from semishared.model.network_disk import NetworkDisk
from tools.world import OVERLAY_OPTIONS, MiB, World

VOCABULARY: Dict[str, Any] = {
    name: cls
    for module in (s, steps_commit, steps_image, steps_device, steps_base)
    for name, cls in vars(module).items()
    if hasattr(cls, "_fields") and name not in ("ImageRef", "DiskRef", "Access", "NetworkDisk", "Part")
}
ACTING = {name: cls for name, cls in VOCABULARY.items() if name not in s.LOOKS and not name.startswith("Look")}
TRIED = sorted(name for name, cls in ACTING.items() if {"disk", "vm_dir"} & set(cls._fields))
ELSEWHERE = {
    "a file of a VM, by its path": "CopyFile ReceiveFile SendFile",
    "gc: only what is as it was seen": "Discard",
    "bases: verified, leased, never a VM's": "StageBase VerifyBase MendBase EvictBase ServeBase ServeExtents SendManifest FetchBases "
    "StreamBases DescribeBase MoveBase CloseDevice SetDevices",
    "probes of stores: names of their own": "WriteProbe AnswerProbe CheckProbe",
    "on a store, by an image: writers are asked, claims and epochs compared": "BeginChange BeginSession CheckWriters CloneStored "
    "CopyHeld CopyStored CreateImage DigestImage DropSnapshot EndChange FlattenImage ForgetSnapshot FreezeImage GrowImage HoldMoment "
    "KeepSnapshot LendContent NameGeneration NoteEpoch PublishImage ReceiveImage RemoveImage RevertImage SettleImage StageImage TakeBackClone",
}
PLACES: Dict[str, Callable[[s.DiskRef, s.ImageRef], s.Step]] = {
    "overlay": lambda disk, image: s.CreateOverlay(disk, image, 0, OVERLAY_OPTIONS),
    "copy": lambda disk, image: s.CopyImage(disk, image, 0),
    "clone on the store": lambda disk, image: s.CloneOnStore(disk, image, 0),
    "in place": lambda disk, image: s.LinkInPlace(disk, image, False, True),
    "volatile": lambda disk, image: s.CreateVolatile(disk, MiB, "qcow2", ""),
}


def any_of(cls: Any, disk: s.DiskRef, image: s.ImageRef) -> s.Step:
    """Return a step with plausible words: it is to be refused before they count."""
    of: Dict[str, Any] = {
        "disk": disk, "vm": disk.vm, "vm_dir": disk.vm_dir, "source": disk.vm_dir, "image": image, "directory": f"{disk.vm_dir}/backup",
        "format": "qcow2", "over_format": "qcow2", "backing_format": "qcow2", "size": 2 * MiB, "min_size": 2 * MiB, "options": "",
        "to": 1, "over": 0, "layer": 0, "how": "store-clone",
        "network": NetworkDisk("one/one-7", (), "libvirt", "0" * 8 + "-0000-4000-8000-" + "0" * 12),
        "fs": "", "path": f"{image.source}-other", "store_dir": image.root,
    }  # fmt: skip
    kinds: Dict[str, Any] = {"int": 0, "str": "", "bool": False}
    values = []
    for name in cls._fields:
        kind = str(cls.__annotations__.get(name, ""))
        values.append(of[name] if name in of else {} if kind.startswith("dict") else kinds.get(kind, ()))
    made: s.Step = cls(*values)
    return made


def seen(*tops: Path) -> Dict[str, object]:
    """Return the files and links below directories, each file by its inode and content; not what all images have noted."""
    found: Dict[str, object] = {}
    for path in (path for top in tops for path in sorted(top.rglob("*"))):
        if path.is_symlink() and not str(path).endswith("/.semishared/image/image"):
            found[str(path)] = os.readlink(path)
        elif path.is_file() and not path.is_symlink() and path.name not in ("manifest", "generation.json"):
            found[str(path)] = (path.stat().st_ino, path.read_bytes())
    return found


def tried(steps: List[str], carry_out: Callable[[s.Step], object], make: Callable[[Any], s.Step]) -> Dict[str, str]:
    """Carry out each; return how each ended."""
    found = {}
    for name in steps:
        try:
            carry_out(make(ACTING[name]))
            found[name] = "done"
        except SemisharedError as e:
            found[name] = type(e).__name__
    return found


def on_disk(name: str) -> bool:
    return "disk" in ACTING[name]._fields


def test_each_step_has_an_answer() -> None:
    said = set(" ".join(ELSEWHERE.values()).split())
    assert sorted(set(ACTING) - set(TRIED) - said) == [], "say what these do when they come late"
    assert said <= set(ACTING)


ON_STORE = ("clone on the store", "in place")
"""Places of which two hosts reach the same."""
ALONE = [name for name in TRIED if not name.startswith(("Receive", "Rest"))]
"""Without those that wait for what follows the plan, or for an answer."""


@pytest.mark.fault(46, "no step that was planned for a host before its VM was made anew on another changes anything of the newer one")
@pytest.mark.parametrize("place", [
    place if place in ON_STORE else pytest.param(place, marks=pytest.mark.long) for place in PLACES
])  # fmt: skip
def test_of_a_vm_that_was_made_anew_on_another_host(world: World, tmp_path: Path, place: str) -> None:
    image, disk, steps = prepared(world, place)
    world.on(*steps, seq=0)
    other = World(tmp_path / "another host")
    newer = other.disk()
    other.on(s.StageBase(str(other.root), image), s.PrepareVm(newer.vm, newer.vm_dir), PLACES[place](newer, image), seq=1)
    as_it_was = tmp_path / "as it was"
    shutil.copytree(world.system, as_it_was, symlinks=True)
    before = seen(Path(newer.vm_dir), world.store)
    for name in ALONE:
        shutil.rmtree(world.system)
        shutil.copytree(as_it_was, world.system, symlinks=True)
        shutil.rmtree(world.root / "locks", ignore_errors=True)
        ends = tried([name], lambda step: world.on(step, seq=0), lambda cls: any_of(cls, disk, image))
        after = seen(Path(newer.vm_dir), world.store)
        # What it makes beside that, of a VM that this host has no more, is gc's.
        changed = {path for path in before if before[path] != after.get(path)}
        assert changed == set(), f"{name}: {ends}"


def prepared(world: World, place: str) -> Tuple[s.ImageRef, s.DiskRef, Tuple[s.Step, ...]]:
    image, disk = world.image(size=4 * MiB), world.disk()
    return image, disk, (s.StageBase(str(world.root), image), s.PrepareVm(disk.vm, disk.vm_dir), PLACES[place](disk, image))


@pytest.mark.fault(46, "no step that was planned before its VM was made anew changes anything of the newer one")
@pytest.mark.parametrize("place", PLACES)
def test_of_a_vm_that_was_made_anew(world: World, place: str) -> None:
    image, disk, steps = prepared(world, place)
    world.on(*steps, seq=1)
    before = seen(Path(disk.vm_dir), world.store)
    ends = tried(TRIED, lambda step: world.on(step, seq=0), lambda cls: any_of(cls, disk, image))
    assert {name: end for name, end in ends.items() if end != "LateAction"} == {}
    assert seen(Path(disk.vm_dir), world.store) == before


# Without those that wait for what follows the plan.
WITHIN = [name for name in TRIED if on_disk(name) and not name.startswith("Restore")]


@pytest.mark.fault(46, "no step that was planned for a disk changes another one that has its number by now")
@pytest.mark.parametrize("place", PLACES)
def test_of_a_disk_that_was_made_anew(world: World, place: str) -> None:
    image, disk, steps = prepared(world, place)
    world.on(*steps, seq=1)
    gone = (s.RemoveDisk(disk, str(world.store)), PLACES[place](disk, image))
    for name in WITHIN:
        with world.begun(disk) as late:
            world.on(*gone, seq=1)
            before = seen(Path(disk.vm_dir), world.store)
            ends = tried([name], late, lambda cls: any_of(cls, disk, image))
            after = seen(Path(disk.vm_dir), world.store)
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        assert changed == set(), f"{name}: {ends}"


@pytest.mark.fault(46, "a late removal is refused, and one that is only the second is not")
@pytest.mark.parametrize("make", [lambda disk: s.RemoveDisk(disk, ""), lambda disk: s.EndSession(disk)], ids=["delete", "mvds"])
@pytest.mark.parametrize("place", ["clone on the store", "in place"])
def test_late_removal_of_a_disk(world: World, place: str, make: Callable[[s.DiskRef], s.Step]) -> None:
    image, disk, steps = prepared(world, place)
    world.on(*steps, seq=1)
    with world.begun(disk) as late:
        world.on(s.RemoveDisk(disk, str(world.store)), seq=1)
        late(make(disk))
    world.on(*steps, seq=1)
    with world.begun(disk) as late:
        world.on(s.RemoveDisk(disk, str(world.store)), PLACES[place](disk, image), seq=1)
        with pytest.raises(LateAction, match="was removed on .* since this was planned, and made anew"):
            late(make(disk))
    world.on(make(disk), seq=1)
    assert not os.path.lexists(disk.path)


@pytest.mark.fault(46, "a late deletion of a snapshot is none of the disk that has its number by now")
@pytest.mark.parametrize("step", [lambda disk: s.DropLayer(disk, 0), lambda disk: s.GrowDisk(disk, 8 * MiB)], ids=["delete", "resize"])
def test_late_change_of_layers(world: World, step: Callable[[s.DiskRef], s.Step]) -> None:
    image, disk, steps = prepared(world, "overlay")
    world.on(*steps, seq=1)
    more = (s.AddLayer(disk, 1, 0, "qcow2"), s.ActivateLayer(disk, 1, "qcow2"))
    with world.begun(disk) as late:
        world.on(s.RemoveDisk(disk, ""), PLACES["overlay"](disk, image), *more, seq=1)
        before = seen(Path(disk.vm_dir))
        with pytest.raises(VmGone):
            late(step(disk))
        assert seen(Path(disk.vm_dir)) == before
