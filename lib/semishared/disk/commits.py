# SPDX-License-Identifier: Apache-2.0
"""Diffs: an overlay of a persistent image on a host, and how what it holds comes into the image (plan/commits.py says when).

A diff's layers are a redo log: they stay until what they hold is durable in the image, so a commit that was killed is done
again, from the beginning, with the same result. The record says which layers the image has (`committed`), and is written after
the store has said so. Whether the image still waits for this disk, and is what the diff lies over, the store knows (model/owner.py).
"""

from __future__ import annotations

import os

from .. import store
from ..base import cache, room
from ..base.ensure import ensure
from ..errors import BadRecord, CommitRefused, ImageChanged, NotOwner, NotSupported, StaleDirectory
from ..guest import job_lock
from ..model import layout
from ..model.owner import Owner
from ..model.place import DIFF
from ..model.record import Record
from ..model.steps import DiskRef, ImageRef
from ..model.steps_commit import CommitDisk, CreateDiff
from ..tools import files, qemu_img
from ..tools.crash_points import point
from . import beside, create, history, kept, overtaken, records, recovery, vm_dir
from .epochs import Planned


def make(step: CreateDiff, planned: Planned, ask: room.Ask | None) -> dict[str, object]:
    """Publish an overlay over the leased base of the image's present content, for which alone the image waits from now on."""
    disk, image, at = step.disk, step.image, store.of(step.image.access)
    at.check(image)
    at.settle(image)
    # Who has it in place goes on undisturbed: nothing says yet that the image waits for this disk.
    at.writers(image)
    put_aside = _put_aside(disk, planned)
    root = cache.root_of(disk.vm_dir)
    base, lease = ensure(root, image, ask, (disk.vm, disk.disk))
    record = Record(disk.disk, DIFF, "qcow2", create.first_layer(disk), image=image._replace(generation=base.generation))
    before = at.claim(image, _owner(disk, image, planned.seq, base.generation))
    point("image claimed")
    with create.publishing(disk, planned, record) as staged:
        size = create.grown(lease, image, step.min_size)
        qemu_img.create_overlay(staged, lease, image.format, size, step.options)
    if disk.disk not in kept.others(disk.vm, disk.vm_dir):
        cache.release(root, disk.vm, disk.disk, but=base.directory)
    return {"before": before.to_data() if before else None, "kept": kept.said(put_aside)}


def _put_aside(disk: DiskRef, planned: Planned) -> str:
    """Keep a diff that is in the way: a disk made anew must not cost what its guest wrote before."""
    record = records.as_found(disk.vm_dir, disk.disk)
    if not record or not record.place.commits:
        return ""
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        return kept.keep(disk, record)


def _owner(disk: DiskRef, image: ImageRef, seq: int, generation: str) -> Owner:
    return Owner(disk.vm, disk.disk, seq, generation, os.uname().nodename, image.access.cloud)


def _diff(disk: DiskRef) -> Record:
    record = records.record_of(disk)
    if not record.place.commits:
        raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is {record.how}: it has nothing to commit to an image")
    return record


def commit(step: CommitDisk, planned: Planned) -> dict[str, object]:
    """Write the layers up to `top` into the image, as far as it does not have them; return how many bytes they hold."""
    disk = step.disk
    job_lock.take(disk.vm, disk.vm_dir)
    record = _diff(disk)
    path = layout.layer(layout.plain(record.path), step.top)
    if not os.path.exists(path):
        raise BadRecord(f"disk {disk.disk} of VM {disk.vm} has no layer {step.top} on {os.uname().nodename}")
    written = _write(disk, record._replace(path=path))
    if written is None:
        return {"bytes": 0}
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        # As it is now: its guest may write to another layer than when this began.
        records.write_record(disk.vm_dir, _diff(disk)._replace(committed=step.top))
    point("commit recorded")
    return {"bytes": written}


def _write(disk: DiskRef, record: Record) -> int | None:
    """Have the image hold what a disk with this record does; return the bytes that were waiting, None if nothing was."""
    image = record.of_image._replace(generation="")
    at, waiting = store.of(image.access), kept.waiting(record)
    size = qemu_img.virtual_size(record.path, "qcow2")
    if not waiting and (record.committed is not None or not _has_grown(at, image, size)):
        return None
    held = kept.size(record)
    at.check(image)
    overtaken.check(disk.vm, disk.vm_dir)
    owner = _owner(disk, image, history.seq_of(disk.vm_dir), record.of_image.generation)
    try:
        at.commit(image, owner, waiting, size)
    except (ImageChanged, NotOwner, StaleDirectory) as e:
        raise CommitRefused(f"disk {disk.disk} of VM {disk.vm} is not committed to image {image.id}: {e.detail}") from None
    point("image committed")
    return held


def _has_grown(at: store.Store, image: ImageRef, size: int) -> bool:
    with at.opened(image) as path:
        return qemu_img.virtual_size(path, image.format) < size


def finish(disk: DiskRef, planned: Planned) -> dict[str, object]:
    """Commit all that a disk holds and take it away; return the bytes, or where it is `kept` if another copy of it has come first."""
    job_lock.take(disk.vm, disk.vm_dir)
    recovery.recover(disk.vm_dir, "")
    record = _diff(disk)
    image = record.of_image._replace(generation="")
    at, own = store.of(image.access), _owner(disk, image, history.seq_of(disk.vm_dir), "")
    if kept.waiting(record) and not kept.is_kept(disk.vm_dir) and _is_over(at.owner(image), own):
        with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
            place = kept.keep(disk, record)
        vm_dir.remove_disk(disk, planned)
        return {"bytes": 0, "kept": kept.said(place)}
    written = _write(disk, record)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        records.write_record(disk.vm_dir, record._replace(committed=int(record.layer)))
    point("commit recorded")
    at.disown(image, own)
    vm_dir.remove_disk(disk, planned)
    if kept.is_kept(disk.vm_dir):
        files.remove_tree(beside.bury(disk.vm_dir, disk.vm))
    return {"bytes": written or 0}


def _is_over(owner: Owner | None, own: Owner) -> bool:
    """Tell whether the disk has been committed and taken away already, or has moved on: what is here is left from before."""
    return owner is None or (owner.is_same(own) and owner.epoch > own.epoch)
