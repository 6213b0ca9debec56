# SPDX-License-Identifier: Apache-2.0
"""The base store of a host: immutable, verified copies of image generations, and leases on them.

    <root>/bases/<store>-<image>-<generation>/image           the copy, mode 0440
                                             /manifest        its hashes
                                             /leases/VM-DISK  hard links to image: what overlays name as backing file
                                             /damaged         image, taken out of use because it is not what it was (scrub.py)
    <root>/staging/                                           copies not yet published
    <root>/locks/                                             base-<store>-<image>, vm-<id>

What each crash leaves: a staged copy, removed by the next stage of that image (under its lock); a lease without an
overlay, replaced by the next run of the clone and removed by the VM's delete. A base directory appears by one rename
when everything in it is on disk. Eviction unlinks `image`: an overlay keeps its lease, and the next stage links
`image` anew from any lease (same inode, same content).
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from typing import Callable, Iterator, NamedTuple

from .. import store
from ..errors import BadArguments, ImageChanged
from ..model.steps import ImageRef
from ..tools import beneath, extents, files, inspection, locks, progress
from ..tools.crash_points import point
from ..tools.undo import Undo

NAME = ".semishared"
SOURCE = "source"
"""File in a base from a store that is reached over the network: POOL/IMAGE."""
BASE = re.compile(r"[0-9]+-[0-9]+-[0-9a-f]{32}\Z")


class Base(NamedTuple):
    """A published base."""

    directory: str
    generation: str

    @property
    def image(self) -> str:
        return f"{self.directory}/image"

    @property
    def damaged(self) -> str:
        return f"{self.directory}/damaged"

    def lease(self, vm: int, disk: int) -> str:
        return f"{self.directory}/leases/{vm}-{disk}"


def root_of(vm_dir: str) -> str:
    """Return the base store of the host on which `vm_dir` lies: <DATASTORE_LOCATION>/.semishared."""
    return f"{os.path.dirname(os.path.dirname(vm_dir))}/{NAME}"


def _named(root: str, image: ImageRef, generation: str) -> Base:
    return Base(f"{root}/bases/{image.store}-{image.id}-{generation}", generation)


def at(root: str, name: str) -> Base:
    """Return the base called <store>-<image>-<generation>; raise BadArguments if that is no name."""
    if not BASE.match(name):
        raise BadArguments(f"not a base: {name!r}")
    return Base(f"{root}/bases/{name}", name.rpartition("-")[2])


def lock_path(root: str, base: Base) -> str:
    """Return the lock of the base's image: whoever stages, evicts or takes bases of it out of use holds it."""
    return f"{root}/locks/base-{os.path.basename(base.directory).rpartition('-')[0]}"


def is_published(base: Base) -> bool:
    """Tell whether the base is there to be leased; an evicted one comes back from a lease, unless they are damaged.

    Raise UnexpectedLink if any of it is a symbolic link.
    """
    for path in (base.directory, base.image, f"{base.directory}/manifest", f"{base.directory}/leases"):
        beneath.refuse_link(path)
    if os.path.exists(base.image):
        return True
    if os.path.lexists(base.damaged):
        return False
    try:
        leases = os.listdir(f"{base.directory}/leases")
    except FileNotFoundError:
        return False
    for name in leases:
        try:
            os.link(f"{base.directory}/leases/{name}", base.image)
            return True
        except FileExistsError:
            return True
        except FileNotFoundError:
            continue
    return False


def stage(
    root: str, image: ImageRef, content: store.Content | None = None, ask: Callable[..., dict[str, object]] | None = None
) -> Base:
    """Return the base of the image's current generation (or of `image.generation`), staged from the store if need be.

    With `ask`, the front-end is asked first from where a base is to come that is not here (reception.py).
    Raise ImageChanged if the store's content is not that generation, MissingImage, StoreUnavailable, NoSpace.
    """
    if image.generation:
        base = _named(root, image, image.generation)
        if is_published(base):
            return base
    content = content or store.content(image)
    seen = content.see()
    current = content.generation(seen)
    if current and not image.generation and is_published(_named(root, image, current)):
        return _named(root, image, current)
    with locks.exclusive(f"{root}/locks/base-{image.store}-{image.id}"):
        return _stage_locked(root, image, content, ask)


def _stage_locked(
    root: str, image: ImageRef, content: store.Content, ask: Callable[..., dict[str, object]] | None
) -> Base:
    seen = content.see()
    current = content.generation(seen)
    wanted = image.generation or current
    if wanted and is_published(_named(root, image, wanted)):
        return _named(root, image, wanted)
    if wanted and ask:
        from . import fetch

        base = _named(root, image, wanted)
        fetch.clone(root, image._replace(generation=wanted), content, ask)
        return publish(root, base, image)
    staging = f"{root}/staging/{image.store}-{image.id}"
    shutil.rmtree(staging, ignore_errors=True)
    content.tidy()
    with Undo() as undo, files.enough_space(root):
        # What a failed copy has written is space that the host lacks.
        undo.add(lambda: shutil.rmtree(staging, ignore_errors=True))
        os.makedirs(f"{staging}/leases")
        point("staging made")
        found = content.copy(seen, f"{staging}/image", image.format)
        point("base copied")
        if content.see() != seen:
            raise ImageChanged(f"{image.source} was written to while it was copied")
        inspection.check(f"{staging}/image", image.format, image.source)
        if wanted and found.generation != wanted:
            _explain(image, found, content.expected(wanted) if current == wanted else None)
        os.chmod(f"{staging}/image", 0o440)
        files.write(f"{staging}/manifest", found.text(), 0o440)
        undo.keep()
        point("base staged")
    if not current:
        content.publish(found, seen)
    return publish(root, _named(root, image, found.generation), image)


def _note_source(directory: str, image: ImageRef) -> None:
    """Note where a base is from if its store is mounted nowhere: whoever looks at the host's health need not miss a mount."""
    if not image.access.can.is_mounted:
        files.write(f"{directory}/{SOURCE}", f"{image.source}\n".encode(), 0o440)


def publish(root: str, base: Base, image: ImageRef) -> Base:
    """Make what is staged of an image, and whole, the base, under its lock."""
    staging = f"{root}/staging/{image.store}-{image.id}"
    os.makedirs(f"{root}/bases", exist_ok=True)
    if os.path.isdir(base.directory):
        # Known by content: another session of the image came back to what is here already, or only leases are left.
        if not is_published(base):
            # An eviction that was killed may have taken these already.
            os.makedirs(f"{base.directory}/leases", exist_ok=True)
            _note_source(base.directory, image)
            os.rename(f"{staging}/manifest", f"{base.directory}/manifest")
            os.rename(f"{staging}/image", base.image)
        shutil.rmtree(staging, ignore_errors=True)
    else:
        _note_source(staging, image)
        os.rename(staging, base.directory)
    files.fsync(f"{root}/bases")
    point("base published")
    return base


def _explain(image: ImageRef, found: extents.Manifest, expected: extents.Manifest | None) -> None:
    where = ""
    if expected is not None:
        bad = sorted(i for i in found.extents.keys() | expected.extents.keys() if found.extents.get(i) != expected.extents.get(i))
        where = f", first at byte {bad[0] * extents.EXTENT}" if bad else ", in size or format"
    raise ImageChanged(f"{image.source} does not have the content of its generation{where}")


def lease(root: str, image: ImageRef, vm: int, disk: int) -> tuple[Base, str]:
    """Return a base and a lease on it for a disk, staging again if the base was evicted in between."""
    while True:
        base = stage(root, image)
        path = base.lease(vm, disk)
        beneath.refuse_link(path)
        try:
            if os.path.exists(path):
                return base, path
            # Fails if the base was evicted meanwhile; its directory must not come back without what belongs into it.
            os.link(base.image, path)
        except FileNotFoundError:
            continue
        files.fsync(os.path.dirname(path))
        point("leased")
        return base, path


def release(root: str, vm: int, disk: int | None = None, but: str = "") -> None:
    """Give up the leases of a disk (of all disks of the VM if None), except one in the base directory `but`."""
    try:
        beneath.refuse_link(f"{root}/bases")
        directories = os.listdir(f"{root}/bases")
    except FileNotFoundError:
        return
    for name in directories:
        base = f"{root}/bases/{name}"
        if base == but or beneath.is_link(base) or beneath.is_link(f"{base}/leases"):
            continue
        try:
            leases = os.listdir(f"{base}/leases")
        except FileNotFoundError:
            continue
        for held in leases:
            if held == f"{vm}-{disk}" or (disk is None and held.startswith(f"{vm}-")):
                files.unlink(f"{base}/leases/{held}")
                point("lease released")
                progress.touch()


@contextmanager
def borrowed(root: str, record: dict[str, object] | None, vm: int, disk: int) -> Iterator[None]:
    """Have, within the block, the base that an overlay lacks where it lies without a lease: on the front-end."""
    image = record.get("image") if record and record.get("how") == "overlay" else None
    if not isinstance(image, dict):
        yield
        return
    ref = ImageRef.from_data(image)
    wanted = _named(root, ref, ref.generation)
    if os.path.exists(wanted.lease(vm, disk)):
        yield
        return
    was_there = os.path.isdir(wanted.directory)
    base, _ = lease(root, ref, vm, disk)
    try:
        yield
    finally:
        files.unlink(base.lease(vm, disk))
        if not was_there:
            with locks.exclusive(f"{root}/locks/base-{ref.store}-{ref.id}"):
                forget(base)


def forget(base: Base) -> bool:
    """Remove a base under its lock unless somebody holds a lease on it; tell whether it is gone.

    Without the image's own name nobody takes a new lease but by staging, which waits for the lock. A lease that was taken
    before that is seen by rmdir, and then the base is whole again: its image comes back from the lease.
    """
    leases = f"{base.directory}/leases"
    for path in (base.directory, leases):
        beneath.refuse_link(path)
    try:
        if os.listdir(leases):
            return False
    except FileNotFoundError:
        pass
    files.unlink(base.image)
    point("base unlinked")
    try:
        os.rmdir(leases)
    except FileNotFoundError:
        pass
    except OSError:
        is_published(base)
        return False
    point("base forgotten")
    shutil.rmtree(base.directory, ignore_errors=True)
    return True
