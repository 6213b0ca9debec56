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
import shutil
from typing import NamedTuple

from ..errors import BadArguments
from ..model import layout
from ..model.refs import BASE, ImageRef
from ..tools import beneath, files, progress
from ..tools.crash_points import point

NAME = layout.SIDE
SOURCE = "source"
"""File in a base from a store that is reached over the network: POOL/IMAGE."""


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
        return layout.lease(self.directory, vm, disk)


def root_of(vm_dir: str) -> str:
    """Return the base store of the host on which `vm_dir` lies: <DATASTORE_LOCATION>/.semishared."""
    return layout.base_store_of(vm_dir)


def named(root: str, image: ImageRef, generation: str) -> Base:
    """Return the base of a generation of an image, which need not be there."""
    return Base(layout.base(root, layout.base_name(image.store, image.id, generation)), generation)


def at(root: str, name: str) -> Base:
    """Return the base called <store>-<image>-<generation>; raise BadArguments if that is no name."""
    if not BASE.match(name):
        raise BadArguments(f"not a base: {name!r}")
    return Base(layout.base(root, name), name.rpartition("-")[2])


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


def _note_source(directory: str, image: ImageRef) -> None:
    """Note where a base is from if its store is mounted nowhere: whoever looks at the host's health need not miss a mount."""
    if not image.access.can.is_mounted:
        files.write(f"{directory}/{SOURCE}", f"{image.source}\n".encode(), 0o440)


def publish(root: str, base: Base, image: ImageRef) -> Base:
    """Make what is staged of an image, and whole, the base, under its lock."""
    staging = layout.staging(root, image.store, image.id)
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
        # What a killed run had half written beside what this one went on with; in a base nobody would look for it.
        files.remove_staged(staging, "manifest")
        _note_source(staging, image)
        os.rename(staging, base.directory)
    files.fsync(f"{root}/bases")
    point("base published")
    return base


def lease(base: Base, vm: int, disk: int) -> str:
    """Return a disk's lease on a base, taken if it has none; '' if the base was evicted meanwhile."""
    path = base.lease(vm, disk)
    beneath.refuse_link(path)
    try:
        if os.path.exists(path):
            return path
        # Fails if the base is gone; its directory must not come back without what belongs into it.
        os.link(base.image, path)
    except FileNotFoundError:
        return ""
    files.fsync(os.path.dirname(path))
    point("leased")
    return path


def release(root: str, vm: int, disk: int | None = None, but: str = "") -> None:
    """Give up the leases of a disk (of all disks of the VM if None), except one in the base directory `but`."""
    try:
        beneath.refuse_link(f"{root}/bases")
        directories = os.listdir(f"{root}/bases")
    except FileNotFoundError:
        return
    for name in directories:
        base = layout.base(root, name)
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
