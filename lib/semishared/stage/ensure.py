# SPDX-License-Identifier: Apache-2.0
"""Make a base available on this host: the one way, for deploy, migration, resume, saveas and mending.

The host takes a missing base from other hosts, else from the store, extent by extent (stage/fetch.py). If
the content has no generation yet, the host reads the whole image and names the base by its hash. It evicts
idle bases if there is no room (base/room.py). The front-end answers which sources to use and which bases to
evict; where no front-end answers, the host decides.

Also here: a base that travels with the one disk that still needs it.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any, Iterator, Optional, Tuple

from .. import store
from ..base import cache, room
from ..device import folders
from ..errors import SemisharedError, ToolFailed
from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.steps import ImageRef, StagedBase
from ..named import NamedTuple
from ..tools import beneath, extents, files, inspection, locks
from ..tools.effects import Undo, point
from ..tools.rate_limit import standing_back

# A base that travels with a diff which could not be committed.
#
# That diff may be the last user of the content: the image in the store has changed, and the last host with
# the base may have evicted it. So the base's file lies beside the layers and goes where they go: to the
# front-end, which has no bases, and into `kept`.
#
#     disk.N.snap/base     a hard link to the base's file, or a copy of it
#
# The host that runs the VM makes it a base again, after its hash has matched the generation.


def put(root: str, vm: int, record: Record) -> bool:
    """Link or copy the base of a diff beside its layers, if it is here; return True if a base is there."""
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
    """Return True if a base travels with the disk."""
    return os.path.exists(_path(record))


def _path(record: Record) -> str:
    return disk_names.base_in_transit(disk_names.plain(record.path))


def _linked(source: str, target: str) -> None:
    """Hard-link a file; copy it if the target is on another file system."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        extents.copy(source, target, "raw", "copied")


def drop(record: Record) -> None:
    """Remove the travelling base of a disk that has another base now, or a lease here."""
    if files.unlink(_path(record)):
        point("carried base removed")


def take(root: str, vm: int, record: Record) -> None:
    """Publish the base that came with a diff, and lease it for the disk.

    Do nothing if no base came, or if its content is not that of the generation.
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
    """Publish a travelling base, under its image's lock; return False if its hash is not the generation."""
    staging = base_names.staging(root, image.base_prefix)
    folders.remove(staging)
    folders.stage(root, image.base_prefix, files.allocated(path))
    with files.enough_space(root):
        os.makedirs(base_names.leases(staging))
        made = base_names.image(staging)
        with standing_back():
            _linked(path, made)
            found = extents.copy(made, None, image.format, "hashed")
        if found.generation != image.generation:
            folders.remove(staging)
            return False
        inspection.check(made, image.format, path)
        os.chmod(made, 0o440)
        files.fsync(made)
        files.write(base_names.manifest(staging), found.text(), 0o440)
        point("carried base staged")
    cache.publish(root, cache.named(root, image, image.generation), image)
    return True


EVICTIONS = 10
"""How often a base may be evicted between its arrival and its lease, before `ensure` gives up."""
Disk = Tuple[int, int]
"""VM and number of a disk."""


class Leased(NamedTuple):
    """A base of this host, and the path to open."""

    base: cache.Base
    path: str
    """The disk's lease; without a disk the base's own image, which the host may evict at any time."""


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

    `ask` asks the front-end. Raise ImageChanged if no source has that generation, MissingImage,
    StoreUnavailable, NoSpace.
    """
    for _ in range(EVICTIONS):
        base = _have(root, image, ask, want, content)
        if disk is None:
            return Leased(base, base.image)
        path = cache.lease(base, *disk)
        if path:
            return Leased(base, path)
        # Evicted between its arrival and the lease.
    raise ToolFailed(
        f"the base {os.path.basename(base.directory)} came and was gone again {EVICTIONS} times "
        f"on {os.uname().nodename}"
    )


def stage(root: str, image: ImageRef, ask: room.Ask | None) -> StagedBase:
    """Ensure the base of an image; return its generation, and what `NameGeneration` publishes."""
    content = store.content(image)
    base, _ = ensure(root, image, ask, content=content)
    return StagedBase(base.generation, content.unnamed())


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
    """Return what the store has of the image, and its generation; ('' if not hashed yet).

    Return (None, '') if the store fails and the generation is known: another host may have the base.
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
    """Read an image without a generation as a whole; publish the base, and the generation in the store."""
    from .manifests import check_unchanged

    staging = base_names.staging(root, image.base_prefix)
    folders.remove(staging)
    folders.stage(root, image.base_prefix, content.allocated(seen))
    room.for_base(root, image, content.allocated(seen), ask, want)
    with Undo() as undo, files.enough_space(root):
        # A failed copy would take space that the host lacks.
        undo.add(lambda: folders.remove(staging))
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
        # The front-end may name this host as a source from now on.
        ask(question="has", name=os.path.basename(base.directory))
    return base


@contextmanager
def borrowed(root: str, record: Record | None, disk: Disk, ask: room.Ask | None) -> Iterator[None]:
    """Lease the base of an overlay within the block, where the overlay has no lease (the front-end).

    It forgets the base afterwards, unless the base was there before.
    """
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
