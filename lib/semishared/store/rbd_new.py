# SPDX-License-Identifier: Apache-2.0
"""New RBD images: from extents that arrive, empty, or with a file system; frozen before anybody sees them."""

from __future__ import annotations

import os
import tempfile
from typing import Callable, Iterable

from ..errors import TransferCorrupt
from ..model import layout_pool
from ..model.refs import ImageRef
from ..named import NamedTuple
from ..tools import extents, mkfs, qemu_img
from ..tools.crash_points import point
from . import ceph, rbd_image, rbd_manifest, rbd_pool
from .rbd_content import Writing


def made_for(image: ImageRef) -> str:
    """Return what is written on an image that we make: one of the same name that somebody else made has it
    not.
    """
    return layout_pool.made_for(image.store, image.source)


class RbdDraft(NamedTuple):
    """New content for an image that is there, empty, and of the right size."""

    path: str

    def fill(self, source: str, format: str, *, share: bool = False) -> None:
        """Write it."""
        qemu_img.fill(source, format, self.path, share=share)
        point("image filled")


def received(
    where: ceph.Pool,
    name: str,
    made_for: str,
    size: int,
    arriving: Iterable[tuple[int, bytes]],
    said: Callable[[], str] | None,
) -> str:
    """Make an image from extents; return its generation, which is what was `said`, or raise
    TransferCorrupt.
    """
    with rbd_pool.published(where, name, made_for) as staged:
        rbd_pool.create(where, staged, size)
        with ceph.opened(where, staged) as image:
            made, writing = extents.Copy(None, size), Writing(image)
            for index, content in arriving:
                made.add(index, content)
                writing.write(index * extents.EXTENT, content)
            writing.finish()
            generation = made.manifest("raw").generation
            if said and generation != said():
                raise TransferCorrupt(
                    f"{where.name}/{name}: what arrived on {os.uname().nodename} is not what was sent"
                )
            point("image received")
            rbd_manifest.write(image, made.manifest("raw"))
            rbd_image.create(image, layout_pool.frozen(generation))
    return generation


def empty(where: ceph.Pool, name: str, made_for: str, size: int, fs: str) -> None:
    """Make an empty image, with a file system unless `fs` is ''."""
    with rbd_pool.published(where, name, made_for) as staged:
        rbd_pool.create(where, staged, size)
        if fs:
            _make_file_system(where, staged, size, fs)
        _freeze(where, staged)


def copied(
    where: ceph.Pool, name: str, made_for: str, of: ceph.Pool, source: str, snapshot: str, most: int = 0
) -> None:
    """Make an image an independent copy of another one, at a snapshot if one is named; raise UploadTooLarge
    beyond `most` bytes.
    """
    with rbd_pool.published(where, name, made_for) as staged:
        rbd_pool.copy(of, source, snapshot, staged, most)
        _freeze(where, staged)


def _freeze(where: ceph.Pool, name: str) -> None:
    with ceph.opened(where, name) as image:
        rbd_image.create(image, layout_pool.NEW)


def show(where: ceph.Pool, staged: str, name: str, made_for: str) -> None:
    """Publish an image that others have written to."""
    with ceph.opened(where, staged) as image:
        rbd_image.create(image, layout_pool.NEW)
        image.metadata_set(layout_pool.MADE, made_for)
    point("image staged")
    rbd_pool.show(where, staged, name, made_for)


def _make_file_system(where: ceph.Pool, name: str, size: int, fs: str) -> None:
    """Make it in a sparse file here: the tools want one, and it holds no more than the file system's own
    tables.
    """
    with tempfile.TemporaryDirectory(prefix="semishared-mkfs-") as folder:
        path = f"{folder}/image"
        mkfs.make_empty(path, "raw", size, fs)
        point("file system made")
        with open(path, "rb") as file, ceph.opened(where, name) as image:
            writing = Writing(image)
            for index, content in extents.data(file.fileno(), size):
                writing.write(index * extents.EXTENT, content)
            writing.finish()
