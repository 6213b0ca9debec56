# SPDX-License-Identifier: Apache-2.0
"""One open RBD image: its snapshots, and the generations among them.

    one-35                        the image; SOURCE is one/one-35
          @7                      snapshot 7 as OpenNebula counts them: stock's name, protected as stock has
          it
          @semishared-<hash>      a generation: the content that has this manifest
          @semishared-new         a content whose hash nobody knows yet
          @semishared-lent-<id>   the same content, under a name that stays: guests read it (remote-first)
          @semishared-old-<x>     what was a generation and has clones still
          @semishared-undo        what the image was before the change that is under way
    one-35.semishared-changing    the image while its content is replaced (store/rbd/claim.py)
    one-35-23-1                   its clone for disk 1 of VM 23

Stock scripts find snapshots by names that begin with a digit: ours never do. A generation is current while
nobody has written since: Ceph itself says so (`diff_iterate`), whatever was told to whom.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from typing import Any

from ...errors import ImageInUse
from ...model.store import rbd_names
from ...model.store.rbd_names import NEW, OLD, OURS
from ...named import NamedTuple
from ...tools import extents, progress
from ...tools.effects import point
from . import ceph

STOCK_BASE = "snap"
"""What the stock driver clones from, and leaves behind: after a persistent session it is somebody's stale
base.
"""
WATCH_S = 40
"""A client that was killed lets go of its images after 30 s."""


class Snapshot(NamedTuple):
    """A snapshot that a user (not Ceph's trash) sees."""

    id: int
    name: str
    size: int

    @property
    def generation(self) -> str:
        return rbd_names.generation(self.name)


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
        image.diff_iterate(
            0, snapshot.size, snapshot.name, lambda offset, *_: changed.append(offset), whole_object=True
        )
    return not changed


def content(image: Any) -> Snapshot | None:
    """Return the newest snapshot of ours with an open image's present content, None if it has none."""
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


def end_generations(image: Any, keep: int = -1) -> None:
    """Forget all generations of an open image, but the snapshot `keep`: who writes to it now must leave
    nobody a stale base.
    """
    for found in snapshots(image):
        if found.id == keep or found.name.startswith(OLD) or not found.name.startswith(OURS):
            continue
        if not drop(image, found.name):
            image.rename_snap(found.name, rbd_names.set_aside(os.urandom(4).hex()))
            point("generation set aside")
    for found in snapshots(image):
        if found.name.startswith(OLD):
            drop(image, found.name)


def check_unused(image: Any, name: str) -> None:
    """Raise ImageInUse if another client has the open image open."""
    with_us = list(image.watchers_list())
    if len(with_us) > 1:
        raise ImageInUse(
            f"{name} is open on {', '.join(sorted({watcher['addr'].split(':')[0] for watcher in with_us}))}"
        )


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


def roll_back(image: Any, snapshot: str) -> None:
    """Give an open image the content and the size of a snapshot."""
    with ceph.long():
        image.rollback_to_snap(snapshot)
    point("rolled back")


def name_snapshot(image: Any, snapshot: int, generation: str) -> None:
    """Say that the snapshot with that id has this content; one that is not there any more needs no name."""
    final = rbd_names.frozen(generation)
    frozen = next((found for found in snapshots(image) if found.id == snapshot), None)
    if frozen is None or frozen.name != NEW:
        return
    # The image came back to a content it had before; its newest snapshot is the one that is compared with.
    if not drop(image, final):
        image.rename_snap(final, rbd_names.set_aside(os.urandom(4).hex()))
    image.rename_snap(NEW, final)
    named = find(image, final)
    if named and named.id != snapshot:
        drop(image, final)
        return
    point("generation named")


def forget(image: Any, shown: str, snapshot: int) -> None:
    """Remove a numbered snapshot; clones that depend on it (a stock revert's) take its data over first."""
    if drop(image, str(snapshot)):
        return
    raise ImageInUse(
        f"snapshot {snapshot} of {shown} has clones; flatten those first (rbd children {shown}@{snapshot})"
    )


def digest(where: ceph.Pool, name: str, kind: str) -> tuple[str, int]:
    """Return the hex digest of an image, and its size."""
    found = hashlib.new(kind)
    with ceph.opened(where, name, read_only=True) as image:
        size: int = image.size()
        for offset in range(0, size, extents.EXTENT):
            found.update(image.read(offset, min(extents.EXTENT, size - offset)))
            progress.touch()
    return found.hexdigest(), size


def names(where: ceph.Pool, name: str) -> list[str]:
    """Return the names of the snapshots of an image, read as who may only read."""
    with ceph.opened(where, name, read_only=True) as image:
        return [found.name for found in snapshots(image)]


def lend(where: ceph.Pool, name: str) -> dict[str, str]:
    """Return a snapshot of the image's present content whose name stays while nobody writes: at each start a
    VM finds it by that.
    """
    frozen = freeze(where, name)
    lent = frozen.name if frozen.generation else rbd_names.lent(frozen.id)
    with ceph.opened(where, name) as image:
        create(image, lent, protect=True)
        found = find(image, lent)
        if found is None or not is_unchanged(image, found):
            raise ImageInUse(f"somebody writes to {where.name}/{name} while a guest is to read it")
        return {"snapshot": found.name, "generation": found.generation}


def freeze(where: ceph.Pool, name: str) -> Snapshot:
    """Return a snapshot of ours that is the image's present content, made now if there is none."""
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
