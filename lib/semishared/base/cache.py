# SPDX-License-Identifier: Apache-2.0
"""The base store of a host: immutable, verified copies of image generations, and leases on them.

    <root>/bases/<store>-<image>-<generation>/
        image           the copy, mode 0440
        manifest        its hashes
        leases/VM-DISK  hard links to image, which overlays name as backing file
        damaged         image, taken out of use because its hash has changed (stage/scrub.py)
    <root>/staging/     copies not yet published
    <root>/locks/       base-<store>-<image>, vm-<id>

A crash leaves a staged copy, which the next stage of that image removes (under its lock), or a lease without
an overlay, which the next clone replaces and the VM's delete removes. A base directory appears by one rename
when its content is durable. Eviction unlinks `image`: an overlay keeps its lease, and the next stage links
`image` anew from any lease (same inode, same content).
"""

from __future__ import annotations

import errno
import os
from typing import Collection, Iterator

from ..device import folders
from ..errors import BadArguments, BadRecord
from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.refs import ImageRef
from ..model.store.access import is_path
from ..named import NamedTuple
from ..tools import beneath, files, progress
from ..tools.effects import point
from ..tools.run import work


class Base(NamedTuple):
    """A published base."""

    directory: str
    generation: str

    @property
    def image(self) -> str:
        return base_names.image(self.directory)

    @property
    def damaged(self) -> str:
        return base_names.damaged(self.directory)

    @property
    def manifest(self) -> str:
        return base_names.manifest(self.directory)

    @property
    def leases(self) -> str:
        return base_names.leases(self.directory)

    def lease(self, vm: int, disk: int) -> str:
        return base_names.lease(self.directory, vm, disk)


def root_of(vm_dir: str) -> str:
    """Return the base store of the host on which `vm_dir` lies: <DATASTORE_LOCATION>/.semishared."""
    return disk_names.base_store_of(vm_dir)


def named(root: str, image: ImageRef, generation: str) -> Base:
    """Return the base of a generation of an image, whether it exists or not."""
    return Base(base_names.base(root, base_names.name(image.store, image.id, generation)), generation)


def at(root: str, name: str) -> Base:
    """Return the base called <store>-<image>-<generation>; raise BadArguments for a malformed name."""
    said = base_names.named(name)
    if said is None:
        raise BadArguments(f"not a base: {name!r}")
    return Base(base_names.base(root, name), said.generation)


def lock_path(root: str, base: Base) -> str:
    """Return the lock of the base's image, held to stage or evict its bases, or to take them out of use."""
    return base_names.image_lock(root, base_names.prefix_of(os.path.basename(base.directory)))


def is_published(base: Base, *, only_look: bool = False) -> bool:
    """Return True if the base can be leased; restore the `image` of an evicted one from a lease.

    `only_look`: one that could be restored counts, and stays as it is. Raise UnexpectedLink if any of it is a
    symbolic link.
    """
    folders.at(base.directory).refuse_link()
    for path in (base.image, base.manifest, base.leases):
        beneath.refuse_link(path)
    if folders.at(base.directory).fails():
        return False
    if os.path.exists(base.image):
        return True
    if os.path.lexists(base.damaged):
        return False
    try:
        leases = os.listdir(base.leases)
    except FileNotFoundError:
        return False
    if only_look:
        return bool(leases)
    for name in leases:
        try:
            with folders.staying(base_names.root_of(base.directory)):
                os.link(f"{base.leases}/{name}", base.image)
            return True
        except FileExistsError:
            return True
        except FileNotFoundError:
            continue
    return False


def _note_source(directory: str, image: ImageRef) -> None:
    """Record the source of a base whose store has no mount, so that health checks do not miss a mount."""
    if not is_path(image.source):
        files.write(base_names.source(directory), f"{image.source}\n".encode(), 0o440)


def _bring(source: str, target: str) -> None:
    """Rename a staged file into a base's directory, or copy it to another device."""
    try:
        os.rename(source, target)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        with files.published(target) as staged:
            work(["cp", "--sparse=always", "--preserve=mode", "--", source, staged])


def publish(root: str, base: Base, image: ImageRef) -> Base:
    """Publish the complete staged base of an image, under its lock."""
    files.refuse()
    staging = base_names.staging(root, image.base_prefix)
    os.makedirs(base_names.bases(root), exist_ok=True)
    if os.path.isdir(base.directory) and not folders.at(base.directory).fails():
        # The content names the base: an earlier session had the same content, or only leases are left.
        if not is_published(base):
            # A killed eviction may have removed these.
            os.makedirs(base.leases, exist_ok=True)
            _note_source(base.directory, image)
            _bring(base_names.manifest(staging), base.manifest)
            _bring(base_names.image(staging), base.image)
        folders.remove(staging)
    else:
        # Half-written files of a killed run: no later action would look for them in a base.
        files.remove_staged(*os.path.split(base_names.manifest(staging)))
        _note_source(staging, image)
        # A killed removal may have removed these, and left the generation's record.
        os.makedirs(base_names.leases(staging), exist_ok=True)
        is_lost = os.path.islink(base.directory)
        folders.at(staging).publish(base.directory)
        if is_lost:
            _lease_again(root, base)
    files.fsync(base_names.bases(root))
    point("base published")
    return base


def _lease_again(root: str, base: Base) -> None:
    """Give this host's disks over a base new leases, after the base was made anew for a lost device."""
    location, name = os.path.dirname(root), os.path.basename(base.directory)
    for system in filter(disk_names.is_number, os.listdir(location)):
        for entry in os.listdir(f"{location}/{system}"):
            own, directory = disk_names.beside_named(entry), f"{location}/{system}/{entry}"
            vm = own.vm if own else int(entry) if disk_names.is_number(entry) else -1
            for disk in (
                [disk for disk, lies_over in lying_over(directory) if lies_over == name] if vm >= 0 else ()
            ):
                if lease(base, vm, disk) and files.is_absent(disk_names.record(directory, disk)):
                    files.unlink(base.lease(vm, disk))


def lying_over(vm_dir: str) -> Iterator[tuple[int, str]]:
    """Yield the disks in a directory that lie over bases, with the base's name ('': unreadable record)."""
    for number in _recorded(vm_dir):
        try:
            data = files.read_json(disk_names.record(vm_dir, number))
            if data is None:
                continue
            record = Record.from_data(data)
        except BadRecord:
            yield number, ""
            continue
        if record.place.leases and record.image is not None:
            yield record.disk, record.image.base_name


def _recorded(vm_dir: str) -> list[int]:
    try:
        found = map(disk_names.recorded, os.listdir(disk_names.records(vm_dir)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [disk for disk in found if disk is not None]


def lease(base: Base, vm: int, disk: int) -> str:
    """Return a disk's lease on a base, taken if missing; '' if the base was evicted or its device failed."""
    path = base.lease(vm, disk)
    beneath.refuse_link(path)
    try:
        with folders.staying(base_names.root_of(base.directory)):
            if os.path.exists(path):
                return path
            # Fails if the base is gone; its directory must not come back incomplete.
            os.link(base.image, path)
    except FileNotFoundError:
        return ""
    except OSError:
        return _died(base)
    try:
        files.fsync(os.path.dirname(path))
    except OSError:
        return _died(base)
    point("leased")
    return path


def _died(base: Base) -> str:
    """Return '' if the base's device cannot be written to; else raise the current error again."""
    if folders.at(base.directory).fails():
        return ""
    raise  # noqa: PLE0704 - called where one is handled


def release(root: str, vm: int, disk: int | None = None, but: str = "", spare: Collection[int] = ()) -> None:
    """Release a disk's leases (None: of all disks of the VM but `spare`), except in the directory `but`."""
    try:
        beneath.refuse_link(base_names.bases(root))
        directories = os.listdir(base_names.bases(root))
    except FileNotFoundError:
        return
    for name in directories:
        base = base_names.base(root, name)
        leases, folder = base_names.leases(base), folders.at(base)
        if (
            base == but
            or not base_names.named(name)
            or beneath.is_link(folder.directory)
            or beneath.is_link(leases)
            or folder.fails()
        ):
            continue  # once the device is back, `gc` releases unused leases
        try:
            found = os.listdir(leases)
        except FileNotFoundError:
            continue
        for held in found:
            if base_names.is_leased_to(held, vm, disk) and not any(
                base_names.is_leased_to(held, vm, other) for other in spare
            ):
                with folders.staying(root):
                    files.unlink(f"{leases}/{held}")
                point("lease released")
                progress.touch()


def forget(base: Base) -> bool:
    """Remove a base under its lock unless a disk has a lease on it; return True if it is gone.

    Once `image` is unlinked, only a stage could give a new lease, and a stage waits for the lock. If a lease
    was taken before that, rmdir fails, and the image is restored from the lease.
    """
    files.refuse()
    leases = base.leases
    folders.at(base.directory).refuse_link()
    beneath.refuse_link(leases)
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
    folders.remove(base.directory)
    from ..device import hot  # here: most steps on a host do not need it

    hot.drop(base_names.root_of(base.directory), os.path.basename(base.directory))
    return True
