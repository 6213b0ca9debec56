# SPDX-License-Identifier: Apache-2.0
"""Diffs: an overlay of a persistent image on a host, and how its content comes into the image.

plan/disk/commits.py decides when. A diff's layers are a redo log: they stay until the image has their content
durably, so the next action repeats a killed commit from the start, with the same result. The record says
which layers the image has (`committed`); it is written after the store has confirmed them. The store knows
for which disk the image is reserved, and the generation below that disk's diff (model/refs.py).
"""

from __future__ import annotations

import os

from .. import store
from ..base import cache, room
from ..errors import AnotherWriter, BadRecord, NoSpace, NotSupported, ToolFailed
from ..guest import domain, job_lock
from ..model.disk import names as disk_names
from ..model.disk.commit_steps import (
    CommitDisk,
    CommittedDisk,
    CreateDiff,
    Due,
    FinishDisk,
    MadeDiff,
    TakeTurn,
    Turn,
)
from ..model.disk.place import DIFF
from ..model.disk.record import Record
from ..model.disk.snapshot_steps import ActivateLayer, AddLayer
from ..model.refs import Owner
from ..model.steps import DiskRef, ImageRef
from ..stage.ensure import borrowed, ensure
from ..store import writers
from ..store.commit.claims import Diff
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from ..tools.rate_limit import standing_back
from . import (
    backup_marks,
    create,
    history,
    layering,
    on_devices,
    records,
    recovery,
    retained_diffs,
    vm_dir,
    vm_dir_siblings,
)
from .epochs import Planned


def image_of(record: Record) -> ImageRef:
    """Return the image of a disk, with the Ceph keys of this machine."""
    image = record.of_image._replace(generation="")
    return image._replace(access=store.of(image.access).keyed())


COMMITTED = "it was committed to its image"
"""Why a disk has no mark any more (disk/backup_marks.py): its layers are made anew after that."""


def due_before_commit(record: Record) -> dict[str, object] | None:
    """Return the image, as JSON data, if the machine of the store has to settle it first.

    Where that is the bridge, this machine only reads and writes images; only the bridge can `settle` one:
    after each commit, and before one if the last was killed. A step then answers with what is due, and the
    front-end repeats the step after it (plan/store/commit_turns.py).
    """
    image = image_of(record)
    is_settled = store.of(image.access).is_settled(image)
    return None if is_settled else record.of_image._replace(generation="").to_data()


def make(step: CreateDiff, planned: Planned, ask: room.Ask | None) -> MadeDiff:
    """Publish an overlay over the image's leased base and reserve the image for this disk."""
    disk, image, at = step.disk, step.image, store.of(step.image.access)
    vm_dir.check_wanted(disk, planned)
    # Refuse while a VM writes to the image in place; it is not reserved for this disk yet.
    at.claimable(image)
    put_aside = _put_aside(disk, planned)
    root = cache.root_of(disk.vm_dir)
    base, lease = ensure(root, image, ask, (disk.vm, disk.disk))
    record = Record(
        disk.disk, DIFF, "qcow2", create.first_layer(disk), image=image._replace(generation=base.generation)
    )
    # The base took time to arrive: a late plan must not take the image from a newer disk.
    vm_dir.check_wanted(disk, planned)
    before = at.claim(image, owner_of(disk, image, planned.seq, base.generation))
    point("image claimed")
    growth = create.growth(lease, step.min_size)
    with create.publishing(
        disk, planned, record, growth, base.directory, lambda: create.have_lease(base, disk)
    ) as staged:
        size = create.grown(lease, image, step.min_size)
        qemu_img.create_overlay(staged, lease, image.format, size, step.options)
    vm_dir.release(disk, planned, but=base.directory)
    return MadeDiff(before, retained_diffs.said(put_aside))


def _put_aside(disk: DiskRef, planned: Planned) -> str:
    """Keep an older diff that is in the way: its guest's data must survive a disk made anew."""
    record = records.as_found(disk.vm_dir, disk.disk)
    if record and not record.place.commits:
        return ""
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        return (
            retained_diffs.keep(disk, record, is_last=False) if record else retained_diffs.keep_unknown(disk)
        )


def owner_of(disk: DiskRef, image: ImageRef, seq: int, generation: str) -> Owner:
    """Return a disk as the owner of an image; `generation`: the content below its diff."""
    return Owner(disk.vm, disk.disk, seq, generation, os.uname().nodename, image.access.cloud)


def _diff(disk: DiskRef) -> Record:
    record = records.record_of(disk)
    if not record.place.commits:
        raise NotSupported(
            f"disk {disk.disk} of VM {disk.vm} is {record.how}: it has nothing to commit to an image"
        )
    return record


def take_turn(step: TakeTurn) -> Turn:
    """Take the turn on a VM's disks; return whether its guest `runs`. Raise VmBusy if an action has it."""
    job_lock.take_unless_busy(step.vm, step.vm_dir)
    state = domain.state(step.domain) if step.domain else "absent"
    if state == "unknown":
        raise ToolFailed(
            f"libvirtd on {os.uname().nodename} does not say whether {step.domain} runs: nothing "
            f"was committed"
        )
    return Turn(state in ("running", "paused"))


def check(disk: DiskRef) -> Due:
    """Return what is due before a commit; raise what a commit would.

    That is StoreUnavailable, NotOwner, StaleDiff, CommitRefused or AnotherWriter.
    """
    record = _diff(disk)
    due = due_before_commit(record)
    if not due:
        image = image_of(record)
        at = store.of(image.access)
        at.reached(image)
        owner = owner_of(disk, image, history.seq_of(disk.vm_dir), record.of_image.generation)
        _claim_again(at, image, owner)
        at.may_commit(image, owner)
    return Due(due)


def commit(step: CommitDisk, planned: Planned, ask: room.Ask | None) -> CommittedDisk:
    """Commit the layers up to `top` that the image does not have; return their bytes."""
    disk = step.disk
    job_lock.take(disk.vm, disk.vm_dir)
    record = _diff(disk)
    path = disk_names.layer(disk_names.plain(record.path), step.top)
    if files.is_absent(path) or path == record.path:
        raise BadRecord(
            f"disk {disk.disk} of VM {disk.vm} has no layer {step.top} to which nobody writes on "
            f"{os.uname().nodename}"
        )
    due = due_before_commit(record)
    if due:
        return CommittedDisk(0, due)
    backup_marks.lose(disk.vm_dir, disk.disk, COMMITTED)
    done = _write(disk, record._replace(path=path), ask, step.rate)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        # A guest started meanwhile may write to what was the active layer then.
        writers.check_file(path)
        # The present record: the guest may write to another layer than when the commit began.
        records.write_record(disk.vm_dir, _diff(disk)._replace(committed=step.top))
    point("commit recorded")
    return done._replace(settle=due_before_commit(record))


def _write(disk: DiskRef, record: Record, ask: room.Ask | None, rate: int = 0) -> CommittedDisk:
    """Commit the layers of `record`; return the bytes that waited, and what the store did.

    `rate`: bytes per second to the store, 0 for no limit.
    """
    image = image_of(record)
    at, held = store.of(image.access), retained_diffs.waiting_bytes(record)
    if not retained_diffs.waiting_layers(record) and not _has_grown(
        at, image, qemu_img.virtual_size(record.path, "qcow2")
    ):
        return CommittedDisk(0)
    at.reached(image)
    root = cache.root_of(disk.vm_dir)
    with borrowed(
        root,
        record._replace(image=image._replace(generation=record.of_image.generation)),
        (disk.vm, disk.disk),
        ask,
    ):
        base = cache.named(root, record.of_image, record.of_image.generation)
        lease, last = base.lease(disk.vm, disk.disk), disk_names.last_commit(disk.vm_dir, disk.disk)
        owner = owner_of(disk, image, history.seq_of(disk.vm_dir), base.generation)
        _claim_again(at, image, owner)
        with standing_back():
            done = at.commit(
                image,
                owner,
                Diff(tuple(retained_diffs.chain_of(record)), lease, image.format, base.manifest, last, rate),
            )
    point("image committed")
    return CommittedDisk(held, **done._asdict())


def _claim_again(at: store.Store, image: ImageRef, owner: Owner) -> None:
    """Repeat the claim with the diff's generation, if a killed rebase (disk/diff_rebase.py) did not.

    The store refuses it if the image has another content.
    """
    claimed = at.owner(image)
    if claimed and claimed.is_same(owner) and claimed.generation != owner.generation:
        at.claim(image, owner)


def _has_grown(at: store.Store, image: ImageRef, size: int) -> bool:
    with at.opened(image) as path:
        return qemu_img.virtual_size(path, image.format) < size


def written(
    disk: DiskRef, record: Record, planned: Planned, ask: room.Ask | None, rate: int = 0
) -> tuple[CommittedDisk, Record]:
    """Commit all that a disk holds, at most `rate` bytes per second (0: no limit); return result and record.

    An empty layer is put above the layers first. If a later step fails and the guest is started, it writes to
    a layer that no record calls committed.
    """
    if not retained_diffs.waiting_layers(record):
        return _write(disk, record, ask, rate), record
    backup_marks.lose(disk.vm_dir, disk.disk, COMMITTED)
    writers.check_file(record.path)
    if len(retained_diffs.chain_of(record)) > 1 and layers.is_empty(record.path):
        # A refused commit has left the empty layer.
        top = int(disk_names.layer_of(retained_diffs.chain_of(record)[-2]))
    else:
        top = int(record.layer)
        # The diff may itself be what fills the disk, and can go only after its commit.
        room.require(disk.vm_dir, room.LITTLE, ask, where=layering.folder_of(record))
        layering.add_layer(AddLayer(disk, top + 1, top, record.format), planned)
        layering.activate_layer(ActivateLayer(disk, top + 1, "qcow2"), planned)
    done = _write(disk, record, ask, rate)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        # A guest started meanwhile may write to what was the active layer then.
        writers.check_file(disk_names.layer(disk_names.plain(record.path), top))
        after = _diff(disk)._replace(committed=top)
        records.write_record(disk.vm_dir, after)
    point("commit recorded")
    return done, after


def finish(step: FinishDisk, planned: Planned, ask: room.Ask | None) -> CommittedDisk:
    """Commit all that a disk holds and remove the disk; return the bytes.

    Or return where the diff is `kept`, if another copy of the disk was committed first.
    """
    disk = step.disk
    job_lock.take(disk.vm, disk.vm_dir)
    # The guest may still run with its other disks, with a job of a killed action.
    recovery.recover(disk.vm_dir, step.domain)
    record = _diff(disk)
    due = due_before_commit(record)
    if due:
        return CommittedDisk(0, due)
    image = image_of(record)
    at, own = store.of(image.access), owner_of(disk, image, history.seq_of(disk.vm_dir), "")
    if retained_diffs.waiting_layers(record) or files.is_absent(record.path):
        # An unmounted store does not know the owner.
        at.reached(image)
    if not _is_there(disk, record) and _is_given_up(at.owner(image), own):
        # A killed run had begun to remove it.
        _take_away(disk, planned)
        return CommittedDisk(0)
    if (
        retained_diffs.waiting_layers(record)
        and not retained_diffs.is_kept(disk.vm_dir)
        and _is_over(at.owner(image), own)
    ):
        with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
            place = retained_diffs.keep(disk, record)
        vm_dir.remove_disk(disk, planned, forget=True)
        return CommittedDisk(0, kept=retained_diffs.said(place))
    try:
        done, record = written(disk, record, planned, ask, step.rate)
    except NoSpace:
        if not image.access.can.is_mounted:
            raise  # the settled parts need another turn of the bridge
        return _as_it_is(step, record, planned, ask)
    due = due_before_commit(record)
    if due:
        return done._replace(settle=due)
    at.disown(image, own)
    _take_away(disk, planned)
    return done


def _as_it_is(step: FinishDisk, record: Record, planned: Planned, ask: room.Ask | None) -> CommittedDisk:
    """Commit a disk in place and remove it, on a host too full for an empty layer above it.

    Only the image records progress, so a killed run begins again. A guest started meanwhile has the file
    open, or has changed it.
    """
    disk, image = step.disk, image_of(record)
    writers.check_file(record.path)
    before = os.stat(record.path)
    done = _write(disk, record, ask, step.rate)
    with writers.alone(*os.path.split(record.path), wait_s=0) as fd:
        now = os.fstat(fd)
        if (now.st_ino, now.st_mtime_ns, now.st_size) != (before.st_ino, before.st_mtime_ns, before.st_size):
            raise AnotherWriter(
                f"{record.path} on {os.uname().nodename} was written to while it was committed"
            )
        store.of(image.access).disown(image, owner_of(disk, image, history.seq_of(disk.vm_dir), ""))
        _take_away(disk, planned, is_committed=True)
    return done


def _is_there(disk: DiskRef, record: Record) -> bool:
    """Return True if the disk still has layers; raise DeviceMissing for a kept diff whose device is away."""
    if retained_diffs.is_kept(disk.vm_dir):
        return record.layer in on_devices.listed(disk_names.layers(disk.path))
    return not files.is_absent(record.path)


def _take_away(disk: DiskRef, planned: Planned, *, is_committed: bool = False) -> None:
    vm_dir.remove_disk(disk, planned, forget=True, done=is_committed)
    if retained_diffs.is_kept(disk.vm_dir):
        on_devices.remove_tree(vm_dir_siblings.bury(disk.vm_dir, disk.vm))


def _is_given_up(owner: Owner | None, own: Owner) -> bool:
    """Return True if the image is not reserved for this disk any more."""
    return owner is None or not owner.is_same(own)


def _is_over(owner: Owner | None, own: Owner) -> bool:
    """Return True if this is a remainder: the disk was committed and removed, or has moved."""
    return owner is None or (owner.is_same(own) and owner.epoch > own.epoch)
