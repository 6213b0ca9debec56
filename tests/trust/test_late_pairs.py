# SPDX-License-Identifier: Apache-2.0
"""Each step that changes something, late, by what came first and where the disk lies: what came first stays
as it is.

The pairs come from the vocabulary of steps: one that is added to it is tried, and each has its row in TABLE,
with what it compares.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import pytest

from semishared.errors import LateAction, SemisharedError, VmGone
from semishared.model import leftover_steps
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.device import steps as device_steps
from semishared.model.disk import commit_steps
from semishared.model.disk.network_disk import NetworkDisk
from semishared.model.share import steps as share_steps
from semishared.model.store import image_steps
from semishared.model.vm import live_steps
from tools.world import OVERLAY_OPTIONS, MiB, World

VOCABULARY: Dict[str, Any] = {
    name: cls
    for module in (
        s,
        leftover_steps,
        commit_steps,
        image_steps,
        device_steps,
        base_steps,
        share_steps,
        live_steps,
    )
    for name, cls in vars(module).items()
    if getattr(cls, "__base__", None) is s.Step
}
ACTING = {
    name: cls for name, cls in VOCABULARY.items() if not hasattr(cls, "looks") and not name.startswith("Look")
}
TRIED = sorted(
    name
    for name, cls in ACTING.items()
    if {"disk", "vm_dir"} & set(cls._fields) and cls.__module__ != live_steps.__name__
)


class Compared(NamedTuple):
    """What some steps compare before they change anything, or remove, revert, replace, give up or undo it."""

    what: str
    lock: str
    """Under which lock."""
    elsewhere: str
    """What tells it from what another host has made since."""
    steps: str


GUARD = "the SEQ of the VM directory (disk/guard.py)"
COUNTS = f"{GUARD}, and deletions of the VM and the disk (epochs.check)"
CLONE = "the SEQ on the clone (dir_clones.refuse_late, rbd_pool.refuse_late)"
OWN = "the directory is this host's alone"
TABLE = (
    Compared(COUNTS, "the VM's", CLONE, "AddLayer ActivateLayer SwitchLayer NameLayer DropLayer DropStrays"),
    Compared(
        COUNTS,
        "the VM's, before; the turn (job_lock)",
        CLONE,
        "MergeLayer PullLayer GrowDisk BackUp SaveDisk FillImage",
    ),
    Compared(COUNTS, "the VM's", CLONE, "CloneOnStore AdoptClone AllocateDisk"),
    Compared(COUNTS, "the VM's", "epochs of the image, its writers", "LinkInPlace CreateDiff RestoreImage"),
    Compared(
        COUNTS, "the VM's", "the session of the image (dir_snapshots.refuse_newer)", "RestoreDisk CopyOut"
    ),
    Compared(
        COUNTS,
        "the VM's",
        OWN,
        "PrepareVm CreateOverlay CreateRemote CreateVolatile CopyImage CopyFile ReceiveFile RecordNetwork "
        "ConfirmDisk NoteIoClasses NoteClients NoteClasses NoteHot PlaceLayers AddDeltas RestoreTpm",
    ),
    Compared(
        f"{GUARD}, and whether the disk was made after what its removal was planned for "
        f"(epochs.check_removal)",
        "the VM's",
        CLONE,
        "RemoveDisk EndSession ForgetDisk",
    ),
    Compared(GUARD, "the VM's", OWN, "RemoveVm"),
    Compared(
        "claim: owner, epoch, generation, state (store/commit/claims.py)",
        "the image's",
        "it is on the store",
        "CommitDisk FinishDisk",
    ),
    Compared(
        "the move's number, the SEQ of what it replaces",
        "the VM's",
        "the mark, and the source's fingerprint",
        "ReceiveVm RenameVm",
    ),
    Compared("the fingerprint of what was sent", "the VM's", OWN, "ReleaseVm KeepStale"),
    Compared("the SEQ that the migration has brought", "the VM's", OWN, "ClearVm"),
    Compared("the mark's token", "", OWN, "MarkVm UnmarkVm SendVm"),
    Compared("inode and link of what was copied", "the VM's, the turn", OWN, "MoveLayers"),
    Compared(
        f"{GUARD}, and libvirt: what the guest has open",
        "the turn",
        OWN,
        "MergeDeltas DetachVm RestGuest TakeTurn EndBackup RenewVm ReplaceLostBases",
    ),
    Compared(GUARD, "", OWN, "CheckDiff AllowGrowth AllowMigration DescribeDisk MakeRoom"),
    Compared(
        "what gc has seen of it: inode, times",
        "the VM's",
        "all machines are asked which processes live",
        "Discard",
    ),
    Compared(
        "the manifest's hashes; leases",
        "the image's bases'",
        OWN,
        "StageBase FetchBases StreamBases MendBase EvictBase DescribeBase ServeBase ServeExtents",
    ),
    Compared("the inode of the base", "the image's bases'", OWN, "VerifyBase MoveBase"),
    Compared("the device's label", "the devices'", "whose host the label says", "SetDevices CloseDevice"),
    Compared(
        "names and texts of their own", "", "each name is made once", "WriteProbe AnswerProbe CheckProbe"
    ),
    Compared(
        "names that are made once",
        "",
        "each name is made once",
        "StageImage PublishImage CopyStored CopyAcross MarkStore CopyHeld HoldMoment CreateImage "
        "ReceiveImage",
    ),
    Compared(
        "the id of the image, of the snapshot, of the change",
        "Ceph's on the image",
        "ids of a pool are given once",
        "TakeBackClone DropSnapshot NameGeneration EndChange",
    ),
    Compared(
        "the SEQ on the clone; who has it open",
        "Ceph's on the image",
        CLONE,
        "CloneStored RemoveImage KeepSnapshot GrowImage BeginChange",
    ),
    Compared(
        "the session of the image, the SEQ on the clone; who has it open; oned",
        "Ceph's on the image",
        "it is on the store",
        "ForgetSnapshot RevertImage",
    ),
    Compared(
        "who has it open; oned lets one action at a time act on an image",
        "the image's",
        "on the store",
        "BeginSession FlattenImage FreezeImage LendContent SettleImage",
    ),
    Compared("nothing: they change nothing, or say what is so", "", "", "CheckWriters DigestImage"),
    Compared("an epoch: a lower one is not noted", "", "on the store", "NoteEpoch"),
    Compared(
        "the image's number, which oned gives once; the birth, the SOURCE",
        "the share's",
        "on the file system",
        "MakeShare RemoveShare ResizeShare MakeSnapshot RemoveSnapshot MarkRoot",
    ),
    Compared("the SEQ of the VM's history", "the share's", "in the cluster", "GiveKey TakeKeys ShowKey"),
    Compared("the state of the domain: it never ran", "", "that host's libvirtd is asked", "RemoveArrival"),
    Compared(
        "the guest that runs here",
        "the turn",
        OWN,
        "MigrateDomain CopyDeltas TakeProof SyncTime CompactMemory Wait",
    ),
)
"""A step that is added has no row: say what it compares, so that it loses to what came first."""


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
        "disk": disk,
        "vm": disk.vm,
        "vm_dir": disk.vm_dir,
        "source": disk.vm_dir,
        "image": image,
        "directory": f"{disk.vm_dir}/backup",
        "format": "qcow2",
        "over_format": "qcow2",
        "backing_format": "qcow2",
        "size": 2 * MiB,
        "min_size": 2 * MiB,
        "options": "",
        "to": 1,
        "over": 0,
        "layer": 0,
        "how": "store-clone",
        "network": NetworkDisk("one/one-7", (), "libvirt", "0" * 8 + "-0000-4000-8000-" + "0" * 12),
        "fs": "",
        "path": f"{image.source}-other",
        "store_dir": image.root,
    }
    kinds: Dict[str, Any] = {"int": 0, "str": "", "bool": False}
    values = []
    for name in cls._fields:
        kind = str(cls.__annotations__.get(name, ""))
        values.append(of[name] if name in of else {} if kind.startswith("dict") else kinds.get(kind, ()))
    made: s.Step = cls(*values)
    return made


def seen(*tops: Path) -> Dict[str, object]:
    """Return the files and links below directories, each file by its inode and content; not what all images
    have noted.
    """
    found: Dict[str, object] = {}
    for path in (path for top in tops for path in sorted(top.rglob("*"))):
        if path.is_symlink() and not str(path).endswith("/.semishared/image/image"):
            found[str(path)] = os.readlink(path)
        elif path.is_file() and not path.is_symlink() and path.name not in ("manifest", "generation.json"):
            found[str(path)] = (path.stat().st_ino, path.read_bytes())
    return found


def tried(
    steps: List[str], carry_out: Callable[[s.Step], object], make: Callable[[Any], s.Step]
) -> Dict[str, str]:
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


@pytest.mark.fault(
    46, "of each step it is said what it compares with what came first, under which lock, and on another host"
)
def test_each_step_has_an_answer() -> None:
    said = Counter(name for row in TABLE for name in row.steps.split())
    assert sorted(set(ACTING) - set(said)) == [], "say what these compare when they come late"
    assert sorted(set(said) - set(ACTING)) == []
    assert [name for name, rows in said.items() if rows > 1] == []
    assert [row for row in TABLE if row.steps.count("Remove") and not (row.what and row.elsewhere)] == []


ON_STORE = ("clone on the store", "in place")
"""Places of which two hosts reach the same."""
ALONE = [name for name in TRIED if not name.startswith(("Receive", "Rest"))]
"""Without those that wait for what follows the plan, or for an answer."""


@pytest.mark.fault(
    46,
    "no step that was planned for a host before its VM was made anew on another changes anything "
    "of the newer one",
)
@pytest.mark.parametrize(
    "place", [place if place in ON_STORE else pytest.param(place, marks=pytest.mark.long) for place in PLACES]
)
def test_of_a_vm_that_was_made_anew_on_another_host(world: World, tmp_path: Path, place: str) -> None:
    image, disk, steps = prepared(world, place)
    world.on(*steps, seq=0)
    other = World(tmp_path / "another host")
    newer = other.disk()
    other.on(
        s.StageBase(str(other.root), image),
        s.PrepareVm(newer.vm, newer.vm_dir),
        PLACES[place](newer, image),
        seq=1,
    )
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
    return (
        image,
        disk,
        (s.StageBase(str(world.root), image), s.PrepareVm(disk.vm, disk.vm_dir), PLACES[place](disk, image)),
    )


@pytest.mark.fault(
    46, "no step that was planned before its VM was made anew changes anything of the newer one"
)
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
@pytest.mark.parametrize(
    "make", [lambda disk: s.RemoveDisk(disk, ""), lambda disk: s.EndSession(disk)], ids=["delete", "mvds"]
)
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
@pytest.mark.parametrize(
    "step",
    [lambda disk: s.DropLayer(disk, 0), lambda disk: s.GrowDisk(disk, 8 * MiB)],
    ids=["delete", "resize"],
)
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
