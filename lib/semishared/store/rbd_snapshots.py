# SPDX-License-Identifier: Apache-2.0
"""The numbered snapshots of an RBD image, as OpenNebula counts them, and the one that holds a moment of a
running guest.
"""

from __future__ import annotations

from typing import Any

from ..errors import MissingImage, Overtaken
from ..model.layout_pool import SAVED, SESSION
from ..tools.crash_points import point
from ..units import MiB, mib_ceil
from . import ceph, rbd_change, rbd_image


def numbers(where: ceph.Pool, name: str) -> list[int]:
    """Return the numbers of the snapshots with stock's names."""
    with ceph.opened(where, name, read_only=True) as image:
        return sorted(int(found.name) for found in rbd_image.snapshots(image) if found.name.isdigit())


def keep(where: ceph.Pool, name: str, snapshot: int) -> None:
    """Make a snapshot of the present content, in place of one that a killed action has left."""
    with ceph.opened(where, name) as image:
        found = rbd_image.find(image, str(snapshot))
        if found and not rbd_image.is_unchanged(image, found):
            rbd_image.forget(image, f"{where.name}/{name}", snapshot)
        rbd_image.create(image, str(snapshot), protect=True)


def session(image: Any) -> str:
    """Return what names the session that an open image is in, '' if none is noted."""
    return str(dict(image.metadata_list()).get(SESSION, ""))


def _refuse_newer(image: Any, shown: str, planned: str) -> None:
    """Raise Overtaken if an open image is in another session than that ('' for any): it was given to a guest
    since.
    """
    if planned and session(image) != planned:
        raise Overtaken(f"{shown} was given to a guest since this was planned: it is left as it is")


def forget(where: ceph.Pool, name: str, *snapshots: int, session: str = "") -> None:
    """Remove snapshots; one that is not there is removed already. Raise Overtaken in another `session`."""
    with ceph.opened(where, name) as image:
        _refuse_newer(image, f"{where.name}/{name}", session)
        for snapshot in snapshots:
            rbd_image.forget(image, f"{where.name}/{name}", snapshot)


def revert(where: ceph.Pool, name: str, snapshot: int, size: int, session: str = "") -> None:
    """Give an image the content of its snapshot, and at least `size` bytes, while nobody sees it; all
    snapshots stay.

    Raise Overtaken in another `session`.
    """
    with ceph.opened(where, name, read_only=True) as image:
        if rbd_image.find(image, str(snapshot)) is None:
            raise MissingImage(f"snapshot {snapshot} of {where.name}/{name} is not there")
    with rbd_change.changing(where, name) as hidden:
        with ceph.opened(where, hidden) as image:
            # Now, when it is given to nobody any more.
            _refuse_newer(image, f"{where.name}/{name}", session)
            rbd_image.roll_back(image, str(snapshot))
            # SIZE is in MiB, rounded up: that alone makes no image larger.
            is_smaller = mib_ceil(image.size()) * MiB < size
        if is_smaller:
            rbd_change.grow(where, hidden, size)


def hold(where: ceph.Pool, name: str) -> None:
    """Hold this moment: the guest's own Ceph client writes out what it has before."""
    with ceph.opened(where, name) as image:
        rbd_image.drop(image, SAVED)
        rbd_image.create(image, SAVED)
    point("moment held")


def let_go(where: ceph.Pool, name: str) -> None:
    """Forget the moment that was held."""
    with ceph.opened(where, name) as image:
        rbd_image.drop(image, SAVED)
