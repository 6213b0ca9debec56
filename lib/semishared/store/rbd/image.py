# SPDX-License-Identifier: Apache-2.0
"""One open RBD image: its snapshots, and the generations among them.

    one-35                        the image; SOURCE is one/one-35
          @7                      OpenNebula's snapshot 7: stock's name, and protected as by stock
          @semishared-<hash>      a generation: the content with this manifest
          @semishared-new         a content whose hash is not known yet
          @semishared-lent-<id>   the same content under a lasting name, which guests read (remote-first)
          @semishared-old-<x>     a former generation that still has clones
          @semishared-undo        the image before the running change
          @semishared-backup-<x>  a mark for the backups of a VM (store/rbd/marks.py)
    one-35.semishared-changing    the image while its content is replaced (store/rbd/claim.py)
    one-35-23-1                   its clone for disk 1 of VM 23

Stock scripts look for snapshot names that begin with a digit; ours never do. A generation is current while no
client has written since. Only Ceph (`diff_iterate`) decides that.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from typing import Any

from ...errors import ImageInUse
from ...model.store import rbd_names
from ...model.store.image_steps import LentContent
from ...model.store.rbd_names import NEW, OLD, OURS
from ...named import NamedTuple
from ...tools import extents, progress
from ...tools.effects import point
from . import ceph

STOCK_BASE = "snap"
"""The snapshot that the stock driver clones from and leaves behind: outdated after a persistent session."""
WATCH_S = 40
"""Seconds; Ceph drops the watches of a dead client after 30 s."""


class Snapshot(NamedTuple):
    """A user snapshot, not one in Ceph's trash."""

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
    return next((found for found in snapshots(image) if found.name == name), None)


def is_unchanged(image: Any, snapshot: Snapshot) -> bool:
    """Return True if an open image has not been written to since the snapshot; reads no data."""
    if image.size() != snapshot.size:
        return False
    changed: list[int] = []
    with ceph.long():
        image.diff_iterate(
            0, snapshot.size, snapshot.name, lambda offset, *_: changed.append(offset), whole_object=True
        )
    return not changed


def content(image: Any) -> Snapshot | None:
    """Return our newest snapshot with the present content of an open image, None for none."""
    for found in snapshots(image):
        if (found.generation or found.name == NEW) and is_unchanged(image, found):
            return found
    return None


# -- snapshots --------------------------------------------------------------------------------------


def create(image: Any, name: str, *, protect: bool = False) -> None:
    """Make the snapshot `name` unless it exists."""
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
    """Remove the snapshot `name`; return False if clones of format 1 depend on it."""
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
    """Remove all generations of an open image but the snapshot `keep`, as a writer makes them outdated.

    A generation with clones is renamed instead.
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
    """Raise as `check_unused`, after waiting until Ceph drops the watch of a dead client."""
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
    """Name the snapshot of that id by its generation; ignore a snapshot that is gone."""
    final = rbd_names.frozen(generation)
    frozen = next((found for found in snapshots(image) if found.id == snapshot), None)
    if frozen is None or frozen.name != NEW:
        return
    # The image came back to a former content: its newest snapshot counts.
    if not drop(image, final):
        image.rename_snap(final, rbd_names.set_aside(os.urandom(4).hex()))
    image.rename_snap(NEW, final)
    named = find(image, final)
    if named and named.id != snapshot:
        drop(image, final)
        return
    point("generation named")


def forget(image: Any, shown: str, snapshot: int) -> None:
    """Remove a numbered snapshot; raise ImageInUse if it has clones."""
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
            progress.reached(offset, size, "the store")
    return found.hexdigest(), size


def names(where: ceph.Pool, name: str) -> list[str]:
    """Return the names of an image's snapshots, with a read-only open."""
    with ceph.opened(where, name, read_only=True) as image:
        return [found.name for found in snapshots(image)]


def lend(where: ceph.Pool, name: str) -> LentContent:
    """Return a snapshot of the present content, whose name lasts while no client writes, and its generation.

    A VM finds the snapshot by that name at each start. Raise ImageInUse if a client writes meanwhile.
    """
    frozen = freeze(where, name)
    lent = frozen.name if frozen.generation else rbd_names.lent(frozen.id)
    with ceph.opened(where, name) as image:
        create(image, lent, protect=True)
        found = find(image, lent)
        if found is None or not is_unchanged(image, found):
            raise ImageInUse(f"somebody writes to {where.name}/{name} while a guest is to read it")
        return LentContent(found.name, found.generation)


def freeze(where: ceph.Pool, name: str) -> Snapshot:
    """Return our snapshot of the image's present content, made if missing; raise ImageInUse."""
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
