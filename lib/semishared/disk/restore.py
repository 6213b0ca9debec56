# SPDX-License-Identifier: Apache-2.0
"""The way back from a backup: a disk gets the content of the qcow2 image that arrives.

What each crash leaves: what arrived or was made so far, staged, removed by the next restore; the disk is the
old one or the restored one.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterator

from .. import store
from ..base import room
from ..errors import NotSupported, TransferCorrupt, UnsafeImage
from ..model import layout, layout_store
from ..model.place import COPY
from ..model.record import Record
from ..model.steps import DiskRef, ImageRef, RestoreDisk
from ..tools import files, inspection, layers, progress, qemu_img
from ..tools.crash_points import point
from ..tools.rate_limit import standing_back
from . import guard, in_memory, records, vm_dir
from .epochs import Planned

AHEAD = 8 << 20
"""Bytes of a backup for which there is room before they are written."""


@contextmanager
def received(disk: DiskRef, chunks: Iterator[bytes], sha256: Callable[[], str]) -> Iterator[str]:
    """Yield the file that arrived, which is a standalone qcow2 image."""
    path = layout.arriving_backup(disk.vm_dir, disk.disk)
    files.remove_staged(*os.path.split(path))
    path = files.staged_name(path)
    try:
        digest = hashlib.sha256()
        with files.enough_space(disk.vm_dir), open(path, "xb") as file:
            sure = 0
            for chunk in chunks:
                if sure < len(chunk):
                    # Nobody knows how much it will be. Who could be asked is busy sending.
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


def session(disk: DiskRef) -> str:
    """Return the session of the image that a disk is, before anything is received for it; '' of any other
    disk.
    """
    record = records.read_record(disk.vm_dir, disk.disk)
    image = record.stored if record else None
    return store.of(image.access).session(image) if image else ""


def restore(
    step: RestoreDisk, backup: str, planned: Planned, ask: room.Ask | None, session: str = ""
) -> None:
    """Replace a disk's content; an in-place disk's where it lies, on the store, if that is in the `session`
    still: the link stays.
    """
    disk = step.disk
    record = records.record_of(disk)
    if record.readonly:
        raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is read-only and cannot be restored")
    image = record.stored
    if image:
        _restore_image(step, image, backup, planned, session)
    else:
        _restore_own(step, record, backup, planned, ask)


def _write(backup: str, target: str, record: Record, active: str, min_size: int) -> None:
    """Make the new content, ready to be renamed into its place."""
    format = record.format
    with standing_back():
        if record.place.commits:
            # Over the base still, and with zeros where the backup has nothing: a commit then brings all of it
            # to the image.
            base = layers.below(active, format)[-1]
            qemu_img.convert_over(backup, "qcow2", target, *base)
        else:
            qemu_img.convert(backup, "qcow2", target, format, direct=True)
    if qemu_img.virtual_size(target, format) < min_size:
        qemu_img.resize(target, format, min_size)
    point("content made")


def _restore_image(step: RestoreDisk, image: ImageRef, backup: str, planned: Planned, session: str) -> None:
    """Write a persistent image anew: another content, so another session; its old generation ends before."""
    disk = step.disk
    # CheckNotRunning has seen this host alone: the store sees who writes from another. The VM is held while
    # the image is replaced.
    with ExitStack() as held, store.of(image.access).replaced(image, step.min_size, session) as draft:
        with standing_back():
            draft.fill(backup, "qcow2")
        held.enter_context(vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk))


def _restore_own(
    step: RestoreDisk, record: Record, backup: str, planned: Planned, ask: room.Ask | None
) -> None:
    """Replace a disk of the VM's own by a standalone one of the same format.

    Its snapshots go: oned forgets those of non-persistent disks. Killed in between, the disk is the old one
    or the new.
    """
    disk = step.disk
    path = record.path
    active = os.path.join(os.path.dirname(path), os.readlink(path)) if os.path.islink(path) else path
    # What a killed restore left.
    files.remove_staged(*os.path.split(active))
    files.remove_staged(layout.records(disk.vm_dir), layout.record_name(disk.disk))
    room.require(disk.vm_dir, qemu_img.measure(backup, "qcow2"), ask, where=os.path.dirname(active))
    staged, size = files.staged_name(active), max(step.min_size, qemu_img.virtual_size(backup, "qcow2"))
    try:
        with (
            in_memory.another_layer(os.path.dirname(active), size),
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
                # Its only layer is what was restored, in the format of the record: a raw one below is no
                # more.
                record = record._replace(path=first if path == active else path, raw_layer=None)
                record = record._replace(committed=None)
                if not record.place.commits and (record.place.leases or record.place.is_remote):
                    # After the content: the record may claim a lease that is not needed, never miss one that
                    # is.
                    record = record._replace(place=COPY, over=None)
                records.write_record(disk.vm_dir, record)
                guard.refuse_late_clone(disk.vm_dir, disk.disk, planned.seq)
                _drop_other_layers(active, first)
    finally:
        files.unlink(staged)
    if record.is_local and not record.place.commits:
        vm_dir.release(disk, planned)


def _only_layer(active: str) -> str:
    """Make the active layer of a disk with snapshots its first one; return its path."""
    directory, name = os.path.split(active)
    if not layout.are_layers(directory) or name == "0":
        return active
    link = layout.disk_of(directory)
    first = layout.layer(link, 0)
    files.unlink(first)
    os.link(active, first)
    files.symlink(layout.layer(os.path.basename(link), 0), link)
    return first


def _drop_other_layers(active: str, first: str) -> None:
    """Remove the snapshots that the restored disk does not have."""
    directory = os.path.dirname(active)
    if not layout.are_layers(directory):
        return
    stay = (os.path.basename(first), os.path.basename(layout_store.seq_note(directory)))
    for name in os.listdir(directory):
        if name not in stay and not os.path.isdir(f"{directory}/{name}"):
            files.unlink(f"{directory}/{name}")
            point("snapshot removed")
