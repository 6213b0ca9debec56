# SPDX-License-Identifier: Apache-2.0
"""One RBD image: its snapshots, the generations among them, and changes of its content that are whole or undone.

    one-35                        the image; SOURCE is one/one-35
          @7                      snapshot 7 as OpenNebula counts them: stock's name, protected as stock has it
          @semishared-<hash>      a generation: the content that has this manifest
          @semishared-new         a content whose hash nobody knows yet
          @semishared-old-<x>     what was a generation and has clones still
          @semishared-undo        what the image was before the change that is under way
    one-35.semishared-changing    the image while its content is replaced (restore, revert): nobody can open half of it
    one-35-23-1                   its clone for disk 1 of VM 23

Stock scripts find snapshots by names that begin with a digit: ours never do. A generation is current while nobody has
written since: Ceph itself says so (`diff_iterate`), whatever was told to whom.
"""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple

from ..errors import ImageInUse, MissingImage, SemisharedError
from ..tools import progress
from ..tools.crash_points import point
from . import ceph, writers

NEW = "semishared-new"
UNDO = "semishared-undo"
OLD = "semishared-old-"
GENERATION = re.compile(r"semishared-([0-9a-f]{32})\Z")
OURS = "semishared-"
STOCK_BASE = "snap"
"""What the stock driver clones from, and leaves behind: after a persistent session it is somebody's stale base."""
CHANGING = ".semishared-changing"
WATCH_S = 40
"""A client that was killed lets go of its images after 30 s."""


class Snapshot(NamedTuple):
    """A snapshot that a user (not Ceph's trash) sees."""

    id: int
    name: str
    size: int

    @property
    def generation(self) -> str:
        match = GENERATION.match(self.name)
        return match.group(1) if match else ""


def snapshots(image: Any) -> list[Snapshot]:
    """Return the snapshots of an open image, newest first."""
    found = [Snapshot(s["id"], s["name"], s["size"]) for s in image.list_snaps() if not s.get("namespace")]
    return sorted(found, reverse=True)


def find(image: Any, name: str) -> Snapshot | None:
    """Return the snapshot called `name`."""
    return next((found for found in snapshots(image) if found.name == name), None)


def is_unchanged(image: Any, snapshot: Snapshot) -> bool:
    """Tell whether nobody has written to an open image since the snapshot; reads no data."""
    if image.size() != snapshot.size:
        return False
    changed: list[int] = []
    with ceph.long():
        image.diff_iterate(0, snapshot.size, snapshot.name, lambda offset, *_: changed.append(offset), whole_object=True)
    return not changed


def content(image: Any) -> Snapshot | None:
    """Return the newest snapshot of ours that still is what an open image holds, None if its content is not frozen."""
    for found in snapshots(image):
        if (found.generation or found.name == NEW) and is_unchanged(image, found):
            return found
    return None


# -- snapshots --------------------------------------------------------------------------------------


def create(image: Any, name: str, *, protect: bool = False) -> None:
    """Make the snapshot `name` unless it is there."""
    if find(image, name) is None:
        try:
            image.create_snap(name)
        except Exception as e:
            if abs(getattr(e, "errno", 0) or 0) != errno.EEXIST:
                raise
        point("snapshot made")
    if protect and not image.is_protected_snap(name):
        image.protect_snap(name)
        point("snapshot protected")


def drop(image: Any, name: str) -> bool:
    """Remove the snapshot `name`; return False if clones of the old kind (protected) depend on it."""
    if find(image, name) is None:
        return True
    if image.is_protected_snap(name):
        try:
            image.unprotect_snap(name)
        except Exception as e:
            if abs(getattr(e, "errno", 0) or 0) != errno.EBUSY:
                raise
            return False
        point("snapshot unprotected")
    image.remove_snap(name)
    point("snapshot removed")
    return True


def freeze(where: ceph.Pool, name: str) -> Snapshot:
    """Return a snapshot of ours that is the image's present content, made now if there is none."""
    settle(where, name)
    with ceph.opened(where, name) as image:
        found = content(image)
        if found:
            return found
        end_generations(image)
        create(image, NEW)
        frozen = content(image)
        if frozen is None:
            raise ImageInUse(f"somebody writes to {where.name}/{name} while it is to be copied")
        return frozen


def name_generation(where: ceph.Pool, name: str, snapshot: int, generation: str) -> None:
    """Say that the snapshot with that id has this content; one that is not there any more needs no name."""
    final = f"{OURS}{generation}"
    with ceph.opened(where, name) as image:
        frozen = next((found for found in snapshots(image) if found.id == snapshot), None)
        if frozen is None or frozen.name != NEW:
            return
        # The image came back to a content it had before; its newest snapshot is the one that is compared with.
        if not drop(image, final):
            image.rename_snap(final, f"{OLD}{os.urandom(4).hex()}")
        image.rename_snap(NEW, final)
        named = find(image, final)
        if named and named.id != snapshot:
            drop(image, final)
            return
    point("generation named")


def end_generations(image: Any) -> None:
    """Forget all generations of an open image: who writes to it now must leave nobody a stale base."""
    for found in snapshots(image):
        if found.name.startswith(OLD) or not found.name.startswith(OURS):
            continue
        if not drop(image, found.name):
            image.rename_snap(found.name, f"{OLD}{os.urandom(4).hex()}")
            point("generation set aside")
    for found in snapshots(image):
        if found.name.startswith(OLD):
            drop(image, found.name)


def check_not_written(where: ceph.Pool, name: str) -> list[str]:
    """Return who has an image open without being seen to write; raise AnotherWriter if somebody writes to it."""
    settle(where, name)
    # Read-only: this way we are no watcher ourselves, and take nobody's lock.
    with ceph.opened(where, name, read_only=True) as image:
        return writers.check_image(where.ioctx, image, f"{where.name}/{name}")


def begin_session(where: ceph.Pool, name: str) -> None:
    """End all generations of an image before its guest can write, also the stock driver's."""
    settle(where, name)
    with ceph.opened(where, name) as image:
        end_generations(image)
        drop(image, STOCK_BASE)
    point("session begun")


# -- content that is replaced -----------------------------------------------------------------------


def exists(where: ceph.Pool, name: str) -> bool:
    """Tell whether an image is there."""
    try:
        with ceph.opened(where, name, read_only=True):
            return True
    except MissingImage:
        return False


def check_unused(image: Any, name: str) -> None:
    """Raise ImageInUse if another client has the open image open."""
    with_us = list(image.watchers_list())
    if len(with_us) > 1:
        raise ImageInUse(f"{name} is open on {', '.join(sorted({watcher['addr'].split(':')[0] for watcher in with_us}))}")


def wait_unused(image: Any, name: str) -> None:
    """As check_unused, after the time that a client which was killed stays in sight."""
    deadline = time.monotonic() + WATCH_S
    while True:
        try:
            return check_unused(image, name)
        except ImageInUse:
            if time.monotonic() > deadline:
                raise
        time.sleep(1)
        progress.touch()


def begin_change(where: ceph.Pool, name: str) -> str:
    """Take an image out of everybody's sight, so that its content can be replaced; return its name meanwhile."""
    settle(where, name)
    hidden = f"{name}{CHANGING}"
    with ceph.opened(where, name) as image:
        wait_unused(image, f"{where.name}/{name}")
        end_generations(image)
        drop(image, UNDO)
        create(image, UNDO)
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.rename(where.ioctx, name, hidden)
    point("image hidden")
    return hidden


def end_change(where: ceph.Pool, name: str) -> None:
    """Give an image whose content was replaced its name back."""
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.rename(where.ioctx, f"{name}{CHANGING}", name)
    point("image shown")
    with ceph.opened(where, name) as image:
        drop(image, UNDO)


def settle(where: ceph.Pool, name: str) -> None:
    """Undo a change of an image that was killed half-way."""
    hidden = f"{name}{CHANGING}"
    if not exists(where, hidden):
        return
    if exists(where, name):
        raise SemisharedError(f"both {where.name}/{name} and {hidden} are there: look at them, and remove one by hand")
    with ceph.opened(where, hidden) as image:
        wait_unused(image, f"{where.name}/{hidden}")
        if find(image, UNDO):
            roll_back(image, UNDO)
    end_change(where, name)


def roll_back(image: Any, snapshot: str) -> None:
    """Give an open image the content and the size of a snapshot."""
    with ceph.long():
        image.rollback_to_snap(snapshot)
    point("rolled back")


@contextmanager
def changing(where: ceph.Pool, name: str) -> Iterator[str]:
    """Yield the name under which an image may be changed; it is the new content when the block ends well, else the old."""
    hidden = begin_change(where, name)
    try:
        yield hidden
    except Exception:
        settle(where, name)
        raise
    end_change(where, name)


def revert(where: ceph.Pool, name: str, snapshot: int) -> None:
    """Give an image the content of its snapshot; all snapshots stay."""
    settle(where, name)
    with ceph.opened(where, name, read_only=True) as image:
        if find(image, str(snapshot)) is None:
            raise MissingImage(f"snapshot {snapshot} of {where.name}/{name} is not there")
    with changing(where, name) as hidden, ceph.opened(where, hidden) as image:
        roll_back(image, str(snapshot))


def flatten(where: ceph.Pool, name: str, snapshot: int) -> None:
    """Make a snapshot the image's content and remove all numbered snapshots, that one last: a rerun must find it."""
    settle(where, name)
    with ceph.opened(where, name, read_only=True) as image:
        numbers = [int(found.name) for found in snapshots(image) if found.name.isdigit()]
    if snapshot in numbers:
        revert(where, name, snapshot)
    elif numbers:
        raise MissingImage(f"snapshot {snapshot} of {where.name}/{name} is not there")
    with ceph.opened(where, name) as image:
        for number in sorted(numbers, key=lambda number: number == snapshot):
            forget(image, f"{where.name}/{name}", number)


def keep(where: ceph.Pool, name: str, snapshot: int) -> None:
    """Make snapshot `snapshot` of an image's present content, in place of one that a killed action has left."""
    settle(where, name)
    with ceph.opened(where, name) as image:
        found = find(image, str(snapshot))
        if found and not is_unchanged(image, found):
            forget(image, f"{where.name}/{name}", snapshot)
        create(image, str(snapshot), protect=True)


def forget(image: Any, shown: str, snapshot: int) -> None:
    """Remove a numbered snapshot of an open image; clones that depend on it (a stock revert's) take its data over first."""
    if drop(image, str(snapshot)):
        return
    raise ImageInUse(f"snapshot {snapshot} of {shown} has clones; flatten those first (rbd children {shown}@{snapshot})")


def forget_of(where: ceph.Pool, name: str, snapshot: int) -> None:
    """Remove a numbered snapshot of an image; one that is not there is removed already."""
    settle(where, name)
    with ceph.opened(where, name) as image:
        forget(image, f"{where.name}/{name}", snapshot)


def grow(where: ceph.Pool, name: str, size: int) -> None:
    """Grow an image to `size` bytes, unless it is that large."""
    settle(where, name)
    with ceph.opened(where, name) as image:
        if image.size() < size:
            image.resize(size)
    point("image grown")
