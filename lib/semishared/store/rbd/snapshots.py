# SPDX-License-Identifier: Apache-2.0
"""OpenNebula's numbered snapshots of an RBD image, the snapshot of a running guest, and leftovers."""

from __future__ import annotations

import time
from datetime import timezone
from typing import Any, Iterable

from ...errors import MissingImage, Overtaken
from ...model.store import rbd_names
from ...model.store.image_steps import PassingSnapshot, PassingSnapshots
from ...model.store.rbd_names import SAVED, SESSION
from ...tools.effects import point
from ...units import MiB, mib_ceil
from . import ceph, claim
from . import image as rbd_image


def numbers(where: ceph.Pool, name: str) -> list[int]:
    """Return the numbers of the snapshots with stock's names."""
    with ceph.opened(where, name, read_only=True) as image:
        return sorted(int(found.name) for found in rbd_image.snapshots(image) if found.name.isdigit())


def keep(where: ceph.Pool, name: str, snapshot: int) -> None:
    """Make a snapshot of the present content; replace one that a killed action has left."""
    with ceph.opened(where, name) as image:
        found = rbd_image.find(image, str(snapshot))
        if found and not rbd_image.is_unchanged(image, found):
            rbd_image.forget(image, f"{where.name}/{name}", snapshot)
        rbd_image.create(image, str(snapshot), protect=True)


def session(image: Any) -> str:
    """Return the token of an open image's session, '' for none."""
    return str(dict(image.metadata_list()).get(SESSION, ""))


def _refuse_newer(image: Any, shown: str, planned: str) -> None:
    """Raise Overtaken if an open image is in another session than `planned` ('': any)."""
    if planned and session(image) != planned:
        raise Overtaken(f"{shown} was given to a guest since this was planned: it is left as it is")


def forget(where: ceph.Pool, name: str, *snapshots: int, session: str = "") -> None:
    """Remove snapshots that exist; raise Overtaken in another `session`."""
    with ceph.opened(where, name) as image:
        _refuse_newer(image, f"{where.name}/{name}", session)
        for snapshot in snapshots:
            rbd_image.forget(image, f"{where.name}/{name}", snapshot)


def revert(where: ceph.Pool, name: str, snapshot: int, size: int, session: str = "") -> None:
    """Revert the hidden image to its snapshot, with at least `size` bytes; keep all snapshots.

    Raise Overtaken in another `session`.
    """
    with ceph.opened(where, name, read_only=True) as image:
        if rbd_image.find(image, str(snapshot)) is None:
            raise MissingImage(f"snapshot {snapshot} of {where.name}/{name} is not there")
    with claim.changing(where, name) as hidden:
        with ceph.opened(where, hidden) as image:
            # Hidden now: no guest can get it any more.
            _refuse_newer(image, f"{where.name}/{name}", session)
            rbd_image.roll_back(image, str(snapshot))
            # SIZE is in whole MiB, rounded up: the rounding alone makes no image larger.
            is_smaller = mib_ceil(image.size()) * MiB < size
        if is_smaller:
            claim.grow(where, hidden, size)


def hold(where: ceph.Pool, name: str) -> None:
    """Snapshot the image of a running guest, for a copy; the guest's Ceph client flushes its cache first."""
    with ceph.opened(where, name) as image:
        rbd_image.drop(image, SAVED)
        rbd_image.create(image, SAVED)
    point("moment held")


def let_go(where: ceph.Pool, name: str) -> None:
    """Remove the snapshot that `hold` made."""
    with ceph.opened(where, name) as image:
        rbd_image.drop(image, SAVED)


def leftovers_of(where: ceph.Pool, names: Iterable[str]) -> dict[str, PassingSnapshots]:
    """Return watchers and snapshots, by id, of the images with snapshots that are not generations.

    plan/care/gc_stores.py judges them: some are of killed actions, some have no reader any more.
    """
    answer = {}
    for name in names:
        try:
            with ceph.opened(where, name, read_only=True) as image:
                snapshots = {
                    str(it.id): _look(image, it)
                    for it in rbd_image.snapshots(image)
                    if rbd_names.is_passing(it.name)
                }
                if snapshots:
                    watchers = [watcher["addr"] for watcher in image.watchers_list()]
                    answer[name] = PassingSnapshots(watchers, snapshots)
        except MissingImage:
            pass
    return answer


def _look(image: Any, snapshot: rbd_image.Snapshot) -> PassingSnapshot:
    made = image.get_snap_timestamp(snapshot.id).replace(tzinfo=timezone.utc)
    image.set_snap_by_id(snapshot.id)
    try:
        clones = sorted(f"{child['pool']}/{child['image']}" for child in image.list_children2())
    finally:
        image.set_snap(None)
    return PassingSnapshot(snapshot.name, int(time.time() - made.timestamp()), clones)


def drop_leftover(where: ceph.Pool, name: str, snapshot: int) -> bool:
    """Remove a leftover snapshot by its id; return True if it is gone."""
    with ceph.opened(where, name) as image:
        there = next((it for it in rbd_image.snapshots(image) if it.id == snapshot), None)
        return there is None or (rbd_names.is_passing(there.name) and rbd_image.drop(image, there.name))
