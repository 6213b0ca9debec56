# SPDX-License-Identifier: Apache-2.0
"""The content of a VM's disk becomes an image: in a mounted store, or one that a store's bridge has made."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator

from .. import store
from ..base import cache, room
from ..errors import MissingImage
from ..guest import block_jobs, job_lock
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.disk.snapshot_steps import Rested
from ..model.steps import DiskRef, ImageRef, SaveDisk
from ..stage.ensure import borrowed
from ..store.dir import clones
from ..store.dir import image as dir_image
from ..tools import files, layers, progress, qemu_img
from ..tools.rate_limit import standing_back
from . import records, recovery, snapshots, vm_dir
from .epochs import Planned

if TYPE_CHECKING:
    from ..model.store.image_steps import FillImage


@contextmanager
def opened(record: Record | None, path: str, format: str, snapshot: int = -1) -> Iterator[str]:
    """Yield what qemu-img opens to read a disk, or its snapshot.

    A disk on a store is opened and checked there first: no header and no link on the store then decides what
    is read.
    """
    stored = record.stored if record else None
    if stored:
        with store.of(stored.access).opened(stored, snapshot) as found:
            yield found
    elif record and record.place.is_remote:
        from . import remote_first

        with remote_first.opened(record, path) as found:
            yield found
    elif record and record.place.is_clone:
        image = record.of_image
        with clones.opened_chain(
            dir_image.Stored(image.source), path, format, image.format, record.raw_layer
        ) as chain:
            yield chain
    else:
        # Layers of our own name one another by relative names; `below` checks the chain.
        if record and record.layer and disk_names.layer_of(path):
            layers.below(path, format)
        yield path


def save_disk(step: SaveDisk, planned: Planned, ask: room.Ask | None) -> Rested:
    """Publish an independent copy of a disk at `step.path` on the store (cpds)."""
    disk = step.disk
    vm_dir.check_wanted(disk, planned)
    found = records.read_record(disk.vm_dir, disk.disk)
    with borrowed(cache.root_of(disk.vm_dir), found, (disk.vm, disk.disk), ask):
        return _save(step)


def _save(step: SaveDisk) -> Rested:
    disk = step.disk
    if step.domain:
        job_lock.take(disk.vm, disk.vm_dir)
    if step.domain or step.snapshot == -1:
        # For a snapshot the front-end does not say whether a guest runs; no unfinished job concerns it.
        recovery.recover(disk.vm_dir, step.domain)
    record = records.read_record(disk.vm_dir, disk.disk)
    source_format = record.format if record else step.format
    path = record.path if record else disk.path
    if step.snapshot != -1:
        path, source_format = snapshots.snapshot_file(records.record_of(disk), step.snapshot)
    elif not files.exists(path):
        raise MissingImage(f"{path} is not there on {os.uname().nodename}")
    rested = Rested()
    target = ImageRef(-1, -1, step.format, step.path)
    with store.of(target.access).made(target, 0) as draft:
        if step.domain:
            device, _ = block_jobs.find(step.domain, path)
            # libvirt opens the target by name, as another user: an open file of ours is of no use.
            rested = block_jobs.copy(disk, step.domain, device, draft.path, step.format, step.freeze).answer
            files.set_mode(draft.path, 0o660)
            progress.count("store_written", files.allocated(draft.path))
        else:
            # A running guest may have layers above the snapshot; the snapshot itself has no writer.
            with opened(record, path, source_format, step.snapshot) as source, standing_back():
                draft.fill(source, source_format, share=step.snapshot != -1)
    return rested


def fill_image(step: FillImage, planned: Planned, ask: room.Ask | None) -> Rested:
    """Write the content of a disk to an image that the bridge has created."""
    rested = Rested()
    disk = step.disk
    vm_dir.check_wanted(disk, planned)
    if step.domain:
        job_lock.take(disk.vm, disk.vm_dir)
        recovery.recover(disk.vm_dir, step.domain)
    elif step.snapshot == -1:
        recovery.settle(disk.vm, disk.vm_dir)
    record = records.record_of(disk)
    if record.image:
        # On the front-end (undeployed) the disk is read with the front-end's own keys.
        access = step.image.access
        over = record.over and record.over._replace(user=access.remote or access.user)
        record = record._replace(image=record.image._replace(access=access), over=over)
    path, format = record.path, record.format
    with borrowed(cache.root_of(disk.vm_dir), record, (disk.vm, disk.disk), ask):
        if step.snapshot != -1:
            path, format = snapshots.snapshot_file(record, step.snapshot)
        elif not os.path.exists(path):
            raise MissingImage(f"{path} is not there on {os.uname().nodename}")
        if step.domain:
            files.unlink(disk_names.saved(disk.vm_dir, disk.disk))  # of a killed run
            with opened(record, path, format, step.snapshot) as source:
                room.require(disk.vm_dir, qemu_img.measure(source, format), ask, where=disk.vm_dir)
            path, rested = _copied(disk, step.domain, path, step.freeze)
            format = "raw"
        try:
            with (
                opened(None if step.domain else record, path, format, step.snapshot) as source,
                standing_back(),
            ):
                store.bridged(step.image.access).draft(step.image).fill(
                    source, format, share=step.snapshot != -1
                )
        finally:
            if step.domain:
                os.unlink(path)
    return rested


def _copied(disk: DiskRef, domain: str, path: str, freeze: str) -> tuple[str, Rested]:
    """Return a local copy of a running guest's disk at one moment, and how the guest rested."""
    copy = disk_names.saved(disk.vm_dir, disk.disk)
    target, _ = block_jobs.find(domain, path)
    try:
        rested = block_jobs.copy(disk, domain, target, copy, "raw", freeze)
    except BaseException:
        if os.path.lexists(copy):
            os.unlink(copy)
        raise
    return copy, rested.answer
