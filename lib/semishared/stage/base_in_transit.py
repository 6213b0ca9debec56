# SPDX-License-Identifier: Apache-2.0
"""A base that goes along with the one disk that still needs it: that of a diff which could not be committed.

Nobody may have that content any more: not the store, whose image has changed, nor any host, once the last
that had it has let go of it. So the file is put beside the layers, and goes where they go: to the front-end,
which has no bases, and into `kept`.

    disk.N.snap/base     the base's own file under one more name, or a copy of it

Where the VM is to run it becomes a base of the host again, if it is what its generation says.
"""

from __future__ import annotations

import os

from ..base import cache
from ..device import devices
from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.refs import ImageRef
from ..tools import beneath, extents, files, inspection, locks
from ..tools.effects import point
from ..tools.rate_limit import standing_back


def put(root: str, vm: int, record: Record) -> bool:
    """Put the base of a diff beside its layers, if this machine has it; tell whether it is there."""
    path, image = _path(record), record.of_image
    lease = cache.named(root, image, image.generation).lease(vm, record.disk)
    beneath.refuse_link(lease)
    if not os.path.exists(lease) or (is_with(record) and os.path.samefile(lease, path)):
        return is_with(record)
    files.remove_staged(*os.path.split(path))
    with files.published(path) as staged:
        _linked(lease, staged)
    return True


def is_with(record: Record) -> bool:
    """Tell whether a base goes along with a disk."""
    return os.path.exists(_path(record))


def _path(record: Record) -> str:
    return disk_names.base_in_transit(disk_names.plain(record.path))


def _linked(source: str, target: str) -> None:
    """Give a file one more name, or, where that is on another file system, make a copy of it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        extents.copy(source, target, "raw", "copied")


def drop(record: Record) -> None:
    """Remove what travels with a disk that needs it no more: it has another base, or a lease here."""
    if files.unlink(_path(record)):
        point("carried base removed")


def take(root: str, vm: int, record: Record) -> None:
    """Have the host's own base of a diff, with the disk's lease, from what came with that; nothing if nothing
    came, or another content.
    """
    path, image = _path(record), record.of_image
    if not os.path.isfile(path):
        return
    os.makedirs(disk_names.locks(root), exist_ok=True)
    with locks.exclusive(base_names.image_lock(root, image.base_prefix)):
        base = cache.named(root, image, image.generation)
        if cache.is_published(base) or _published(root, image, path):
            cache.lease(base, vm, record.disk)


def _published(root: str, image: ImageRef, path: str) -> bool:
    """Publish what came as a base, under its image's lock; tell whether it was what its generation says."""
    staging = base_names.staging(root, image.base_prefix)
    devices.remove(staging)
    devices.stage(root, image.base_prefix, files.allocated(path))
    with files.enough_space(root):
        os.makedirs(base_names.leases(staging))
        made = base_names.image(staging)
        with standing_back():
            _linked(path, made)
            found = extents.copy(made, None, image.format, "hashed")
        if found.generation != image.generation:
            devices.remove(staging)
            return False
        inspection.check(made, image.format, path)
        os.chmod(made, 0o440)
        files.fsync(made)
        files.write(base_names.manifest(staging), found.text(), 0o440)
        point("carried base staged")
    cache.publish(root, cache.named(root, image, image.generation), image)
    return True
