# SPDX-License-Identifier: Apache-2.0
"""Snapshots of ours that killed actions have left on RBD images, and those that nobody reads any more: for
plan/gc_pools.py.
"""

from __future__ import annotations

import time
from datetime import timezone
from typing import Any, Iterable

from ..errors import MissingImage
from ..model import layout_pool
from . import ceph, rbd_image


def found(where: ceph.Pool, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return watchers and snapshots, by id, of the images that have some which are not what the image is, or
    was.
    """
    answer: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            with ceph.opened(where, name, read_only=True) as image:
                snapshots = {
                    str(it.id): _look(image, it)
                    for it in rbd_image.snapshots(image)
                    if layout_pool.is_passing(it.name)
                }
                if snapshots:
                    answer[name] = {
                        "watchers": [watcher["addr"] for watcher in image.watchers_list()],
                        "snapshots": snapshots,
                    }
        except MissingImage:
            pass
    return answer


def _look(image: Any, snapshot: rbd_image.Snapshot) -> dict[str, object]:
    made = image.get_snap_timestamp(snapshot.id).replace(tzinfo=timezone.utc)
    image.set_snap_by_id(snapshot.id)
    try:
        clones = sorted(f"{child['pool']}/{child['image']}" for child in image.list_children2())
    finally:
        image.set_snap(None)
    return {"name": snapshot.name, "age": int(time.time() - made.timestamp()), "clones": clones}


def drop(where: ceph.Pool, name: str, snapshot: int) -> bool:
    """Remove the snapshot with that id; tell whether it could be."""
    with ceph.opened(where, name) as image:
        there = next((it for it in rbd_image.snapshots(image) if it.id == snapshot), None)
        return there is None or (layout_pool.is_passing(there.name) and rbd_image.drop(image, there.name))
