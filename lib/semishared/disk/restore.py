# SPDX-License-Identifier: Apache-2.0
"""Disks restored from what OpenNebula's backup drivers send: a standalone qcow2 image.

A crash leaves the old disk or the restored one, and perhaps a staged file, which the next restore removes.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Callable, Iterator

from .. import store
from ..base import room
from ..device import memory
from ..errors import NotSupported, TransferCorrupt, UnsafeImage
from ..model.disk import names as disk_names
from ..model.disk.place import COPY
from ..model.disk.record import Record
from ..model.steps import DiskRef, ImageRef, RestoreDisk
from ..model.store import dir_names
from ..tools import files, inspection, layers, progress, qemu_img
from ..tools.effects import point
from ..tools.rate_limit import standing_back
from . import backup_marks, guard, records, recovery, vm_dir
from .epochs import Planned

if TYPE_CHECKING:
    from ..model.store.image_steps import RestoreImage

AHEAD = 8 << 20
"""Bytes of a backup for which the host makes room before it writes them."""


@contextmanager
def _received(disk: DiskRef, chunks: Iterator[bytes], sha256: Callable[[], str]) -> Iterator[str]:
    """Yield the received file; raise unless it is whole and a standalone qcow2 image."""
    path = disk_names.arriving_backup(disk.vm_dir, disk.disk)
    files.remove_staged(*os.path.split(path))
    path = files.staged_name(path)
    try:
        digest = hashlib.sha256()
        with files.enough_space(disk.vm_dir), open(path, "xb") as file:
            sure = 0
            for chunk in chunks:
                if sure < len(chunk):
                    # The size is unknown, and the front-end is busy sending: it cannot be asked.
                    room.require(disk.vm_dir, AHEAD, None)
                    sure = AHEAD
                sure -= len(chunk)
                digest.update(chunk)
                file.write(chunk)
                progress.count("received", len(chunk))
        point("backup received")
        if digest.hexdigest() != sha256():
            raise TransferCorrupt(
                f"the backup of disk {disk.disk} did not arrive whole on {os.uname().nodename}"
            )
        with open(path, "rb") as file:
            head = file.read(inspection.HEAD)
        format = inspection.detect(head)
        if format != "qcow2":
            raise NotSupported(f"the backup of disk {disk.disk} is no qcow2 image but {format}")
        danger = inspection.names_other_files(head, format)
        if danger:
            raise UnsafeImage(f"the backup of disk {disk.disk} has {danger}")
        yield path
    finally:
        files.unlink(path)


def _session(disk: DiskRef) -> str:
    """Return the session of an in-place disk's image before a restore; '' for any other disk."""
    record = records.read_record(disk.vm_dir, disk.disk)
    image = record.stored if record else None
    return store.of(image.access).session(image) if image else ""


def restore(
    step: RestoreDisk,
    planned: Planned,
    ask: room.Ask | None,
    chunks: Iterator[bytes],
    sha256: Callable[[], str],
) -> None:
    """Replace a disk's content by what arrives.

    The content of an in-place disk is replaced on the store, unless another session of the image has begun. A
    crash leaves the old disk or the restored one, and perhaps a staged file, which the next restore removes.
    """
    disk = step.disk
    recovery.settle(disk.vm, disk.vm_dir)
    backup_marks.lose(disk.vm_dir, disk.disk, "it was restored from a backup")
    session = _session(disk)
    with _received(disk, chunks, sha256) as backup:
        record = records.record_of(disk)
        if record.readonly:
            raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is read-only and cannot be restored")
        image = record.stored
        if image:
            _restore_image(step, image, backup, planned, session)
        else:
            _restore_own(step, record, backup, planned, ask)


def restore_bridged(
    step: RestoreImage, planned: Planned, chunks: Iterator[bytes], sha256: Callable[[], str]
) -> None:
    """Write what arrives to an image that the bridge has hidden and emptied."""
    disk = step.disk
    with _received(disk, chunks, sha256) as backup:
        vm_dir.check_wanted(disk, planned)
        with standing_back():
            store.bridged(step.image.access).draft(step.image).fill(backup, "qcow2")


def _write(backup: str, target: str, record: Record, active: str, min_size: int) -> None:
    """Write the new content to `target`, ready to be renamed."""
    format = record.format
    with standing_back():
        if record.place.commits:
            # Over the base, with explicit zeros where the backup has none: a commit then writes all of it
            # to the image.
            base = layers.below(active, format)[-1]
            qemu_img.convert_over(backup, "qcow2", target, *base)
        else:
            qemu_img.convert(backup, "qcow2", target, format, direct=True)
    if qemu_img.virtual_size(target, format) < min_size:
        qemu_img.resize(target, format, min_size)
    point("content made")


def _restore_image(step: RestoreDisk, image: ImageRef, backup: str, planned: Planned, session: str) -> None:
    """Replace the content of a persistent image: a new session begins, after its old generation has ended."""
    disk = step.disk
    # CheckNotRunning has looked at this host only; the store sees writers of other hosts. The VM's lock is
    # held while the image is replaced.
    with ExitStack() as held, store.of(image.access).replaced(image, step.min_size, session) as draft:
        with standing_back():
            draft.fill(backup, "qcow2")
        held.enter_context(vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk))


def _restore_own(
    step: RestoreDisk, record: Record, backup: str, planned: Planned, ask: room.Ask | None
) -> None:
    """Replace one of the VM's own disks by a standalone disk of the same format.

    Its snapshots go, as oned forgets those of non-persistent disks. A crash leaves the old disk or the new
    one.
    """
    disk = step.disk
    path = record.path
    active = os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else path
    # A killed restore may have left these.
    files.remove_staged(*os.path.split(active))
    files.remove_staged(disk_names.records(disk.vm_dir), disk_names.record_name(disk.disk))
    room.require(disk.vm_dir, qemu_img.measure(backup, "qcow2"), ask, where=os.path.dirname(active))
    staged, size = files.staged_name(active), max(step.min_size, qemu_img.virtual_size(backup, "qcow2"))
    try:
        with (
            memory.another_layer(os.path.dirname(active), size),
            files.enough_space(os.path.dirname(active)),
        ):
            with files.made(staged) as made:
                _write(backup, made, record, active, step.min_size)
            with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
                guard.refuse_late_clone(disk.vm_dir, disk.disk, planned.seq)
                os.rename(staged, active)
                point("disk replaced")
                files.fsync(os.path.dirname(active))
                first = _only_layer(active)
                # The restored layer is the only one, in the record's format: there is no raw layer below.
                record = record._replace(path=first if path == active else path, raw_layer=None)
                record = record._replace(committed=None)
                if not record.place.commits and (record.place.leases or record.place.is_remote):
                    # After the content: a record may name a lease too many, never one too few.
                    record = record._replace(place=COPY, over=None)
                records.write_record(disk.vm_dir, record)
                guard.refuse_late_clone(disk.vm_dir, disk.disk, planned.seq)
                _drop_other_layers(active, first)
    finally:
        files.unlink(staged)
    if record.is_local and not record.place.commits:
        vm_dir.release(disk, planned)


def _only_layer(active: str) -> str:
    """Make the active layer the disk's first layer; return its path."""
    directory, name = os.path.split(active)
    if not disk_names.are_layers(directory) or name == "0":
        return active
    link = disk_names.disk_of(directory)
    first = disk_names.layer(link, 0)
    files.unlink(first)
    os.link(active, first)
    files.symlink(disk_names.layer(os.path.basename(link), 0), link)
    return first


def _drop_other_layers(active: str, first: str) -> None:
    """Remove the layers of the snapshots that the restore dropped."""
    directory = os.path.dirname(active)
    if not disk_names.are_layers(directory):
        return
    stay = (os.path.basename(first), os.path.basename(dir_names.seq_note(directory)))
    for name in os.listdir(directory):
        if name not in stay and not os.path.isdir(f"{directory}/{name}"):
            files.unlink(f"{directory}/{name}")
            point("snapshot removed")
