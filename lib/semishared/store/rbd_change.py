# SPDX-License-Identifier: Apache-2.0
"""Changes of an RBD image's content that are whole or undone: meanwhile nobody can open half of it.

one-35@semishared-undo        what the image was before the change that is under way
one-35.semishared-changing    the image, out of everybody's sight
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from ..errors import MissingImage, SemisharedError
from ..model import layout_pool
from ..model.layout_pool import UNDO
from ..tools.crash_points import point
from . import ceph, rbd_claim
from .rbd_image import create, drop, end_generations, find, roll_back, wait_unused


def exists(where: ceph.Pool, name: str) -> bool:
    """Tell whether an image is there."""
    try:
        with ceph.opened(where, name, read_only=True):
            return True
    except MissingImage:
        return False


def begin(where: ceph.Pool, name: str) -> str:
    """Take an image out of everybody's sight, so that its content can be replaced; return its name
    meanwhile.
    """
    settle(where, name)
    hidden = layout_pool.changing(name)
    with ceph.opened(where, name) as image:
        wait_unused(image, f"{where.name}/{name}")
        end_generations(image)
        drop(image, UNDO)
        create(image, UNDO)
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.rename(where.ioctx, name, hidden)
    point("image hidden")
    return hidden


def under_way(where: ceph.Pool, name: str) -> str:
    """Return what names the change of an image that is under way, '' for none: no other snapshot of the pool
    has ever had that id.
    """
    try:
        with ceph.opened(where, layout_pool.changing(name), read_only=True) as image:
            found = find(image, UNDO)
    except MissingImage:
        return ""
    return str(found.id) if found else ""


def end(where: ceph.Pool, name: str) -> None:
    """Give an image whose content was replaced its name back."""
    with ceph.understood(f"image {where.name}/{name}", where.user):
        where.rbd.rename(where.ioctx, layout_pool.changing(name), name)
    point("image shown")
    with ceph.opened(where, name) as image:
        drop(image, UNDO)


def settle(where: ceph.Pool, name: str) -> None:
    """Undo a change of an image that was killed half-way, or a commit to it."""
    hidden = layout_pool.changing(name)
    if not exists(where, hidden):
        return rbd_claim.settle(where, name)
    if exists(where, name):
        raise SemisharedError(
            f"both {where.name}/{name} and {hidden} are there: look at them, and remove one by hand"
        )
    with ceph.opened(where, hidden) as image:
        wait_unused(image, f"{where.name}/{hidden}")
        if find(image, UNDO):
            roll_back(image, UNDO)
    end(where, name)


@contextmanager
def changing(where: ceph.Pool, name: str) -> Iterator[str]:
    """Yield the name under which an image may be changed; it is the new content when the block ends well,
    else the old.
    """
    hidden = begin(where, name)
    try:
        yield hidden
    except Exception:
        settle(where, name)
        raise
    end(where, name)


def grow(where: ceph.Pool, name: str, size: int) -> None:
    """Grow an image to `size` bytes, unless it is that large."""
    with ceph.opened(where, name) as image:
        if image.size() < size:
            image.resize(size)
    point("image grown")
