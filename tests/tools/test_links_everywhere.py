# SPDX-License-Identifier: Apache-2.0
"""A link in the place of anything below a datastore, to what looks just like it: whatever works there
refuses, or passes it by.

The kernel says (inotify) whether anything was opened, read or changed where the link leads.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Set

import pytest

from semishared.errors import SemisharedError
from semishared.install import preflight
from semishared.model import steps as s
from semishared.model.disk import commit_steps as c
from semishared.model.leftover_steps import LookAround
from semishared.model.store import datastore_steps as d
from semishared.model.store import image_steps as i
from semishared.model.store.access import Access
from semishared.store import writers
from semishared.store.dir import content, epochs, marker, snapshots
from tools.world import World

NAME, STORE_ID = "0123456789abcdef" * 2, "a" * 32
TOUCHED = 0x1 | 0x2 | 0x4 | 0x20 | 0x40 | 0x80 | 0x100 | 0x200
"""IN_ACCESS, MODIFY, ATTRIB, OPEN, MOVED_FROM, MOVED_TO, CREATE, DELETE"""
HEADER = struct.Struct("iIII")


@contextmanager
def watched(top: Path) -> Iterator[Callable[[], Set[str]]]:
    """Yield what returns the names of all at and below `top` that were touched since it was asked last."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd, names = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), dict[int, str]()
    for path in [top, *top.rglob("*")]:
        if not path.is_symlink():
            names[libc.inotify_add_watch(fd, os.fsencode(path), TOUCHED)] = str(path)
    assert fd >= 0 and -1 not in names

    def touched() -> Set[str]:
        found: Set[str] = set()
        while True:
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:
                return found
            at = 0
            while at < len(data):
                watch, _, _, length = HEADER.unpack_from(data, at)
                at += HEADER.size + length
                found.add(names.get(watch, ""))

    try:
        yield touched
    finally:
        os.close(fd)


class Site:
    """A marked store with an image that has a snapshot, a manifest, clones, an owner, an epoch; and what
    reads it.
    """

    def __init__(self, world: World) -> None:
        self.world, self.outside = world, world.top / "outside"
        marker.write(str(world.store), STORE_ID)
        made, access = world.image(NAME, size=8 << 20), Access(marker=STORE_ID)
        self.image = made._replace(access=access)
        clone = self.clone = world.disk(5)
        world.on(s.PrepareVm(5, clone.vm_dir), s.CloneOnStore(clone, self.image, 0))
        world.on(
            i.KeepSnapshot(self.image, 1),
            i.NoteEpoch(self.image, 9, 3),
            s.StageBase(str(world.root), self.image),
        )
        diff = self.diff = world.disk(6)
        world.on(s.PrepareVm(6, diff.vm_dir), c.CreateDiff(diff, self.image, 0, ""))
        in_place = self.in_place = world.disk(7)
        world.link(self.image, in_place, readonly=True)
        self.on_store = os.path.realpath(clone.path).rpartition(".snap/")[0]
        world.on(s.PrepareVm(8, f"{world.system}/8"))
        self.saved = world.top / "saved"
        shutil.copytree(world.store, self.saved, symlinks=True)

    def restored(self) -> None:
        """Have the store as it was, and nothing outside."""
        shutil.rmtree(self.world.store)
        shutil.copytree(self.saved, self.world.store, symlinks=True)
        shutil.rmtree(self.outside, ignore_errors=True)
        self.outside.mkdir()

    def places(self) -> List[str]:
        """Return all below the datastore that is no link itself: those of ours are read, and not followed."""
        return sorted(
            str(path.relative_to(self.saved)) for path in self.saved.rglob("*") if not path.is_symlink()
        )

    def planted(self, place: str) -> None:
        """Put a link in the place of something, to itself elsewhere."""
        there, elsewhere = self.world.store / place, self.outside / "it"
        os.rename(there, elsewhere)
        there.symlink_to(elsewhere)

    def readers(self) -> Dict[str, Callable[[], object]]:
        """Return what the front-end reads of a datastore: by host sides of its own, and by itself."""
        world, image, store = self.world, self.image, str(self.world.store)
        new = lambda: f"{store}/{os.urandom(16).hex()}"  # noqa: E731
        steps: Dict[str, Callable[[], s.Step]] = {
            "stage a base": lambda: s.StageBase(str(world.root / "other"), image),
            "copy a kernel": lambda: s.CopyFile(image.source, f"{world.system}/8/kernel", 8),
            "clone": lambda: d.CopyStored(image._replace(source=new()), image.source),
            "clone a snapshot": lambda: d.CopyStored(image._replace(source=new()), image.source, 1),
            "digest": lambda: d.DigestImage(image, "md5"),
            "writers": lambda: i.CheckWriters(image),
            "find a clone": lambda: i.FindClone(image, 5, 1),
            "settle": lambda: i.SettleImage(image),
            "save a clone": lambda: s.SaveDisk(self.clone, new(), "raw", ""),
            "save in place": lambda: s.SaveDisk(self.in_place, new(), "raw", ""),
            "describe a clone": lambda: s.DescribeDisk(self.clone, ""),
            "look around": lambda: LookAround(str(world.location), (), (store,), False, (STORE_ID,)),
            "measure": lambda: d.MeasureStore(image.access, store),
            "check the store": lambda: d.CheckStore(image.access, store),
            # What changes something, from the least to the most.
            "note an epoch": lambda: i.NoteEpoch(image, 9, 4),
            "begin a session": lambda: i.BeginSession(image, readonly=False),
            "keep a snapshot": lambda: i.KeepSnapshot(image, 2),
            "revert": lambda: d.RevertImage(image, 1),
            "grow": lambda: i.GrowImage(image, 9 << 20),
            "forget a snapshot": lambda: d.ForgetSnapshot(image, 2),
            "flatten": lambda: d.FlattenImage(image, 1),
            "remove a clone": lambda: s.RemoveDisk(self.clone, store),
            "remove": lambda: d.RemoveImage(image),
        }
        found: Dict[str, Callable[[], object]] = {
            "marker": lambda: marker.read(store),
            "doctor's marker": lambda: preflight.marker(store),
            "stock layout": lambda: snapshots.is_layered(image.source, "qcow2"),
            "epochs": lambda: epochs.read(image, 9),
            "owner": lambda: content.DirDiffs().owner(image),
            "setup": lambda: marker.is_there(image.source),
            "fence": lambda: writers.of_disk(image.source),
            "fence of a clone": lambda: writers.of_disk(self.on_store),
        }
        return {
            **{name: (lambda step: lambda: world.on(step()))(step) for name, step in steps.items()},
            **found,
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(World(tmp_path_factory.mktemp("site")))


PLACES = (
    ".semishared",
    ".semishared/.epochs",
    ".semishared/.epochs/9-3",
    ".semishared/NAME",
    ".semishared/NAME/clones",
    ".semishared/NAME/clones/5-1.snap",
    ".semishared/NAME/clones/5-1.snap/0",
    ".semishared/NAME/generation.json",
    ".semishared/NAME/manifest",
    ".semishared/NAME/owner.json",
    ".semishared/store",
    "NAME",
    "NAME.snap",
    "NAME.snap/1",
)
USUAL = (
    ".semishared",
    ".semishared/.epochs",
    ".semishared/NAME",
    ".semishared/NAME/clones",
    "NAME",
    "NAME.snap",
)
"""Those of which others are parts, or are read as they are."""


def test_the_places_are_all_that_there_are(site: Site) -> None:
    assert site.places() == sorted(place.replace("NAME", NAME) for place in PLACES)
    site.restored()
    for read in site.readers().values():
        read()  # without a link each does its work
    assert not (site.world.store / NAME).exists()


@pytest.mark.fault(
    33,
    "nothing that works on a datastore, on the front-end either, follows a link in the place of "
    "anything below it",
)
@pytest.mark.parametrize(
    "place", [place if place in USUAL else pytest.param(place, marks=pytest.mark.long) for place in PLACES]
)
def test_no_link_below_a_datastore_is_followed(site: Site, place: str) -> None:
    site.restored()
    site.planted(place.replace("NAME", NAME))
    followed: Dict[str, Set[str]] = {}
    with watched(site.outside / "it") as touched:
        for name, read in site.readers().items():
            with suppress(SemisharedError, OSError):
                read()
            found = touched()
            if found:
                followed[name] = found
    assert followed == {}
