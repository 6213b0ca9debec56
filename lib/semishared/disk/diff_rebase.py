# SPDX-License-Identifier: Apache-2.0
"""Rebase the diffs of a VM that is off and about to move: committed, then empty over the image's new content.

plan/vm/moves.py decides when.

Until the move is done, oned may start the VM where it is. So each thing exists before a record names it:

    committed        the image has the disk's content; the disk is as before, under an empty layer
    leased           the host has the base of the image's new generation, and the disk a lease on it
    layer, record    the disk is an empty layer over that base
    claimed          the image is reserved for a diff over it; after a kill the next commit does that
    layers, lease    what no layer lies over any more is removed

A disk that fails on the way moves as it is. If the target keeps no bases, the disk's base travels with it
(stage/ensure.py): the image may never have that content again.
"""

from __future__ import annotations

import os

from .. import store
from ..base import cache, room
from ..errors import AnotherWriter, CommitRefused, MigrationRefused, MissingImage, NotOwner, SemisharedError
from ..guest import job_lock, virsh
from ..model.disk import names as disk_names
from ..model.disk.commit_steps import CommittedDisk, RenewedDisk, RenewedVm, RenewVm, UncommittedDisk
from ..model.disk.record import Record
from ..model.refs import Owner
from ..model.steps import DiskRef, ImageRef
from ..stage import ensure as stage_ensure
from ..stage.ensure import ensure
from ..store import writers
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from . import commits, history, layering, records, recovery, retained_diffs, vm_dir, vm_dir_inventory
from .epochs import Planned


def renew(step: RenewVm, planned: Planned, ask: room.Ask | None) -> RenewedVm:
    """Rebase the diffs of a VM; return the result or failure of each, and the directory's bytes and bases.

    Raise MigrationRefused if its guest runs, or may.
    """
    job_lock.take(step.vm, step.vm_dir)
    why = virsh.why_in_use(step.domain)
    if why:
        raise MigrationRefused(f"{step.vm_dir} on {os.uname().nodename} is not moved: {why}")
    recovery.recover(step.vm_dir, "")
    found: list[RenewedDisk | UncommittedDisk] = []
    for record in records.records(step.vm_dir):
        # A disk whose base travels with it can run anywhere.
        if record.place.commits and (
            step.all or (record.committed is not None and not stage_ensure.is_with(record))
        ):
            found.append(_renewed(DiskRef(step.vm, record.disk, step.vm_dir), step.all, planned, ask))
    size, bases = vm_dir_inventory.allocated(step.vm_dir), vm_dir_inventory.bases(step.vm_dir)
    return RenewedVm(found, size, bases)


def _renewed(
    disk: DiskRef, leaves_bases: bool, planned: Planned, ask: room.Ask | None
) -> RenewedDisk | UncommittedDisk:
    try:
        done = _renew(disk, records.record_of(disk), planned, ask)
        return RenewedDisk(disk.disk, done.bytes, done.settle)
    except SemisharedError as e:
        record = records.record_of(disk)
        with_base = leaves_bases and stage_ensure.put(cache.root_of(disk.vm_dir), disk.vm, record)
        return UncommittedDisk(disk.disk, 0, e.detail, retained_diffs.may_wait(record), with_base)


def _renew(disk: DiskRef, record: Record, planned: Planned, ask: room.Ask | None) -> CommittedDisk:
    due = commits.due_before_commit(record)
    if due:
        return CommittedDisk(0, due)
    done, record = commits.written(disk, record, planned, ask)
    due = commits.due_before_commit(record)
    if due:
        return done._replace(settle=due)
    image, root = commits.image_of(record), cache.root_of(disk.vm_dir)
    at, seq = store.of(image.access), history.seq_of(disk.vm_dir)
    own = commits.owner_of(disk, image, seq, record.of_image.generation)
    _check_left_so(at, image, own)
    base, lease = ensure(root, image, ask, (disk.vm, disk.disk), want=room.FOR_THIS)
    # oned may give the VM back to its host meanwhile; that does not stop this move. The lock keeps the guest
    # from starting on the old layers.
    with writers.alone(*os.path.split(record.path), wait_s=0):
        if base.generation != own.generation:
            _check_left_so(at, image, own)
            record = _laid(disk, record, base.generation, lease, planned)
            at.claim(image, own._replace(generation=base.generation))
            point("image claimed")
        with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
            _drop_others(disk, record)
    stage_ensure.drop(record)
    vm_dir.release(disk, planned, but=base.directory)
    return done


def _check_left_so(at: store.Store, image: ImageRef, own: Owner) -> None:
    """Raise NotOwner, StaleDiff or CommitRefused unless the image is as this disk's commit left it."""
    claimed = at.owner(image)
    if claimed is None or not claimed.is_same(own):
        raise NotOwner(
            f"{image.source} was claimed for another disk than disk {own.disk} of VM {own.vm} "
            f"since, or for none"
        )
    try:
        at.claim(image, own)
    except CommitRefused:
        raise CommitRefused(f"{image.source} was written to by somebody else after it was claimed") from None


def _laid(disk: DiskRef, record: Record, generation: str, lease: str, planned: Planned) -> Record:
    """Put an empty layer over a leased base and record it as the disk; return the record."""
    path = disk_names.layer(disk_names.plain(record.path), int(record.layer) + 1)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        if retained_diffs.waiting_layers(record):
            raise AnotherWriter(
                f"disk {disk.disk} of VM {disk.vm} on {os.uname().nodename} was written to while "
                f"it was committed"
            )
        files.remove_staged(os.path.dirname(path))
        with files.published(path) as staged:
            size = qemu_img.virtual_size(record.path, "qcow2")
            qemu_img.create_overlay(staged, lease, record.of_image.format, size, "", look=False)
            os.chmod(staged, 0o660)
        point("empty layer made")
        laid = record._replace(
            path=path, image=record.of_image._replace(generation=generation), committed=None
        )
        records.write_record(disk.vm_dir, laid)
        point("layer recorded")
    return laid


def _drop_others(disk: DiskRef, record: Record) -> None:
    """Link the disk to its active layer, and remove the layers outside its backing chain."""
    layering.link(record, disk, int(record.layer))
    folder, chain = os.path.dirname(record.path), retained_diffs.chain_of(record)
    if not chain:
        # Another process has set the device aside (device/offline.py); it may be back soon.
        raise MissingImage(f"{record.path} is not there on {os.uname().nodename}")
    for number in layers.numbered(folder):
        if f"{folder}/{number}" not in chain:
            files.unlink(f"{folder}/{number}")
            point("committed layer removed")
