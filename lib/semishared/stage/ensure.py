# SPDX-License-Identifier: Apache-2.0
"""Have a base: the one way, for a deploy, an arrival, a resume, a disk that is saved, a base that is mended.

A base that is not here comes from other hosts that have it, or else from the store, extent by extent
(stage/fetch.py). Of a content that nobody has hashed yet the image is read whole, and named by what was
found. Either way idle bases go first if there is no room (base/room.py). The front-end says from where and
which, if the plan's action answers; else this host decides.

And a base that arrives with the one disk that still needs it.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any, Iterator, Optional, Tuple

from .. import store
from ..base import cache, room
from ..device import devices
from ..errors import SemisharedError, ToolFailed
from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.steps import ImageRef
from ..named import NamedTuple
from ..tools import beneath, extents, files, inspection, locks
from ..tools.effects import Undo, point
from ..tools.rate_limit import standing_back

# A base that goes along with the one disk that still needs it: that of a diff which could not be committed.
#
# Nobody may have that content any more: not the store, whose image has changed, nor any host, once the last
# that had it has let go of it. So the file is put beside the layers, and goes where they go: to the
# front-end, which has no bases, and into `kept`.
#
#     disk.N.snap/base     the base's own file under one more name, or a copy of it
#
# Where the VM is to run it becomes a base of the host again, if it is what its generation says.


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
        if cache.is_published(base) or _published_in_transit(root, image, path):
            cache.lease(base, vm, record.disk)


def _published_in_transit(root: str, image: ImageRef, path: str) -> bool:
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


EVICTIONS = 10
"""So often a base may be evicted between its arrival and its lease: one that cannot be leased would be made
for ever.
"""
Disk = Tuple[int, int]
"""VM and number of a disk."""


class Leased(NamedTuple):
    """A base that is here, and what is to be opened of it."""

    base: cache.Base
    path: str
    """The lease of the disk that wants the base; else the base's own image, which may go at any time."""


def ensure(
    root: str,
    image: ImageRef,
    ask: room.Ask | None,
    disk: Disk | None = None,
    *,
    want: room.Want = room.FOR_ALL,
    content: Optional[store.Content] = None,
) -> Leased:
    """Return the base of the image's current generation (or `image.generation`), leased for `disk` if any.

    `ask` asks the front-end. Raise ImageChanged if nobody has that generation (any more), MissingImage,
    StoreUnavailable, NoSpace.
    """
    for _ in range(EVICTIONS):
        base = _have(root, image, ask, want, content)
        if disk is None:
            return Leased(base, base.image)
        path = cache.lease(base, *disk)
        if path:
            return Leased(base, path)
        # It was evicted in between.
    raise ToolFailed(
        f"the base {os.path.basename(base.directory)} came and was gone again {EVICTIONS} times "
        f"on {os.uname().nodename}"
    )


def stage(root: str, image: ImageRef, ask: room.Ask | None) -> dict[str, object]:
    """Have the base of an image; return its `generation`, and what `NameGeneration` is to make known."""
    content = store.content(image)
    base, _ = ensure(root, image, ask, content=content)
    return {"generation": base.generation, **content.unnamed()}


def _have(
    root: str, image: ImageRef, ask: room.Ask | None, want: room.Want, content: Optional[store.Content]
) -> cache.Base:
    found = _published(root, image, image.generation)
    if found:
        return found
    content = content or store.content(image)
    _, current = _look(image, content)
    found = _published(root, image, image.generation or current)
    if found:
        return found
    with locks.exclusive(base_names.image_lock(root, image.base_prefix)):
        seen, current = _look(image, content)
        wanted = image.generation or current
        found = _published(root, image, wanted)
        if found:
            return found
        content.tidy()
        if not wanted:
            return _read_whole(root, image, content, seen, ask, want)
        from . import fetch

        fetch.fetch(root, image._replace(generation=wanted), content, seen, current, ask, want)
        return cache.named(root, image, wanted)


def _published(root: str, image: ImageRef, generation: str) -> cache.Base | None:
    base = cache.named(root, image, generation)
    return base if generation and cache.is_published(base) else None


def _look(image: ImageRef, content: store.Content) -> tuple[Any, str]:
    """Return what the store has of the image, and of which generation that is; (None, '') if another host may
    have what it has not.
    """
    try:
        seen = content.see()
        return seen, content.generation(seen)
    except SemisharedError:
        if not image.generation:
            raise
        return None, ""


def _read_whole(
    root: str, image: ImageRef, content: store.Content, seen: Any, ask: room.Ask | None, want: room.Want
) -> cache.Base:
    """Make the base of a content that nobody has hashed yet, and make known what it is."""
    from .manifests import check_unchanged

    staging = base_names.staging(root, image.base_prefix)
    devices.remove(staging)
    devices.stage(root, image.base_prefix, content.allocated(seen))
    room.for_base(root, image, content.allocated(seen), ask, want)
    with Undo() as undo, files.enough_space(root):
        # What a failed copy has written is space that the host lacks.
        undo.add(lambda: devices.remove(staging))
        os.makedirs(base_names.leases(staging))
        point("staging made")
        made = base_names.image(staging)
        with standing_back():
            found = content.copy(seen, made, image.format)
        point("base copied")
        check_unchanged(image, content, seen)
        inspection.check(made, image.format, image.source)
        os.chmod(made, 0o440)
        files.write(base_names.manifest(staging), found.text(), 0o440)
        undo.keep()
        point("base staged")
    content.publish(found, seen)
    base = cache.publish(root, cache.named(root, image, found.generation), image)
    if ask:
        # From now on others can have it from here.
        ask(question="has", name=os.path.basename(base.directory))
    return base


@contextmanager
def borrowed(root: str, record: Record | None, disk: Disk, ask: room.Ask | None) -> Iterator[None]:
    """Make the base of an overlay without a lease, on the front-end, within the block."""
    if record is None or not record.place.leases:
        yield
        return
    ref = record.of_image
    wanted = cache.named(root, ref, ref.generation)
    if os.path.exists(wanted.lease(*disk)):
        yield
        return
    was_there = os.path.isdir(wanted.directory)
    if record.place.commits:
        take(root, disk[0], record)
    base, lease = ensure(root, ref, ask, disk, want=room.BORROWED)
    try:
        yield
    finally:
        files.unlink(lease)
        if not was_there:
            with locks.exclusive(cache.lock_path(root, base)):
                cache.forget(base)
