# SPDX-License-Identifier: Apache-2.0
"""Diffs: an overlay of a persistent image on a host, and how what it holds comes into the image
(plan/commits.py says when).

A diff's layers are a redo log: they stay until what they hold is durable in the image, so a commit that was
killed is done again, from the beginning, with the same result. The record says which layers the image has
(`committed`), and is written after the store has said so. Whether the image still waits for this disk, and is
what the diff lies over, the store knows (model/owner.py).
"""

from __future__ import annotations

import os

from .. import store
from ..base import cache, devices, room
from ..base.ensure import borrowed, ensure
from ..errors import AnotherWriter, BadRecord, NoSpace, NotSupported, ToolFailed
from ..guest import domain, job_lock
from ..model import layout, layout_diff
from ..model.owner import Owner
from ..model.place import DIFF
from ..model.record import Record
from ..model.steps import DiskRef, ImageRef
from ..model.steps_commit import CommitDisk, CreateDiff, FinishDisk, TakeTurn
from ..model.steps_snapshot import ActivateLayer, AddLayer
from ..store import writers
from ..store.diffs import Diff
from ..tools import files, layers, qemu_img
from ..tools.crash_points import point
from ..tools.rate_limit import standing_back
from . import (
    beside,
    bridged,
    create,
    history,
    kept,
    layering,
    on_devices,
    records,
    recovery,
    uncommitted,
    vm_dir,
)
from .epochs import Planned


def make(step: CreateDiff, planned: Planned, ask: room.Ask | None) -> dict[str, object]:
    """Publish an overlay over the leased base of the image's present content, for which alone the image waits
    from now on.
    """
    disk, image, at = step.disk, step.image, store.of(step.image.access)
    vm_dir.check_wanted(disk, planned)
    if not image.access.can.has_bridge:  # which has looked
        at.check(image)
        at.settle(image)
        # Who has it in place goes on undisturbed: nothing says yet that the image waits for this disk.
        at.writers(image)
    put_aside = _put_aside(disk, planned)
    root = cache.root_of(disk.vm_dir)
    base, lease = ensure(root, image, ask, (disk.vm, disk.disk))
    record = Record(
        disk.disk, DIFF, "qcow2", create.first_layer(disk), image=image._replace(generation=base.generation)
    )
    # That took its time: who comes late does not take the image from who waits for it by now.
    vm_dir.check_wanted(disk, planned)
    before = at.claim(image, owner_of(disk, image, planned.seq, base.generation))
    point("image claimed")
    near = devices.device_of(base.directory)
    growth = create.growth(lease, step.min_size)
    with create.publishing(
        disk, planned, record, growth, near, lambda: create.have_lease(base, disk)
    ) as staged:
        size = create.grown(lease, image, step.min_size)
        qemu_img.create_overlay(staged, lease, image.format, size, step.options)
    vm_dir.release(disk, planned, but=base.directory)
    return {"before": before.to_data() if before else None, "kept": kept.said(put_aside)}


def _put_aside(disk: DiskRef, planned: Planned) -> str:
    """Keep a diff that is in the way: a disk made anew must not cost what its guest wrote before."""
    record = records.as_found(disk.vm_dir, disk.disk)
    if record and not record.place.commits:
        return ""
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        return kept.keep(disk, record, is_last=False) if record else kept.keep_unknown(disk)


def owner_of(disk: DiskRef, image: ImageRef, seq: int, generation: str) -> Owner:
    """Return a disk as the owner of an image, over a generation of which its diff lies."""
    return Owner(disk.vm, disk.disk, seq, generation, os.uname().nodename, image.access.cloud)


def _diff(disk: DiskRef) -> Record:
    record = records.record_of(disk)
    if not record.place.commits:
        raise NotSupported(
            f"disk {disk.disk} of VM {disk.vm} is {record.how}: it has nothing to commit to an image"
        )
    return record


def take_turn(step: TakeTurn) -> bool:
    """Be alone at work on a VM's disks, unless somebody is; tell whether its guest runs. Raise VmBusy."""
    job_lock.take_unless_busy(step.vm, step.vm_dir)
    state = domain.state(step.domain) if step.domain else "absent"
    if state == "unknown":
        raise ToolFailed(
            f"libvirtd on {os.uname().nodename} does not say whether {step.domain} runs: nothing "
            f"was committed"
        )
    return state in ("running", "paused")


def check(disk: DiskRef) -> dict[str, object]:
    """Raise what a commit would: StoreUnavailable, NotOwner, StaleDiff, CommitRefused, AnotherWriter; return
    what is due before it.
    """
    record = _diff(disk)
    due = bridged.due(record)
    if not due:
        image = bridged.image_of(record)
        at = store.of(image.access)
        bridged.check(image)
        owner = owner_of(disk, image, history.seq_of(disk.vm_dir), record.of_image.generation)
        _claim_again(at, image, owner)
        at.may_commit(image, owner)
    return due


def commit(step: CommitDisk, planned: Planned, ask: room.Ask | None) -> dict[str, object]:
    """Write the layers up to `top` into the image, as far as it does not have them; return how many bytes
    they hold.
    """
    disk = step.disk
    job_lock.take(disk.vm, disk.vm_dir)
    record = _diff(disk)
    path = layout.layer(layout.plain(record.path), step.top)
    if files.is_absent(path) or path == record.path:
        raise BadRecord(
            f"disk {disk.disk} of VM {disk.vm} has no layer {step.top} to which nobody writes on "
            f"{os.uname().nodename}"
        )
    due = bridged.due(record)
    if due:
        return {"bytes": 0, **due}
    done = _write(disk, record._replace(path=path), ask, step.rate)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        # A guest that was started meanwhile may have been given what was the active layer then.
        writers.check_file(path)
        # As it is now: its guest may write to another layer than when this began.
        records.write_record(disk.vm_dir, _diff(disk)._replace(committed=step.top))
    point("commit recorded")
    return {**done, **bridged.due(record)}


def _write(disk: DiskRef, record: Record, ask: room.Ask | None, rate: int = 0) -> dict[str, object]:
    """Have the image hold what a disk with this record does; return how many bytes were waiting for that, and
    what was done.

    `rate`: bytes per second to the store, 0 for no limit.
    """
    image = bridged.image_of(record)
    at, held = store.of(image.access), uncommitted.size(record)
    if not uncommitted.waiting(record) and not _has_grown(
        at, image, qemu_img.virtual_size(record.path, "qcow2")
    ):
        return {"bytes": 0}
    bridged.check(image)
    root = cache.root_of(disk.vm_dir)
    with borrowed(
        root,
        record._replace(image=image._replace(generation=record.of_image.generation)),
        (disk.vm, disk.disk),
        ask,
    ):
        base = cache.named(root, record.of_image, record.of_image.generation)
        lease, last = base.lease(disk.vm, disk.disk), layout_diff.last(disk.vm_dir, disk.disk)
        owner = owner_of(disk, image, history.seq_of(disk.vm_dir), base.generation)
        _claim_again(at, image, owner)
        with standing_back():
            done = at.commit(
                image,
                owner,
                Diff(tuple(uncommitted.chain(record)), lease, image.format, base.manifest, last, rate),
            )
    point("image committed")
    return {"bytes": held, **done.to_data()}


def _claim_again(at: store.Store, image: ImageRef, owner: Owner) -> None:
    """Claim an image for what a disk lies over now, if who laid it so was killed before (renewal.py); refused
    if it is not that.
    """
    claimed = at.owner(image)
    if claimed and claimed.is_same(owner) and claimed.generation != owner.generation:
        at.claim(image, owner)


def _has_grown(at: store.Store, image: ImageRef, size: int) -> bool:
    with at.opened(image) as path:
        return qemu_img.virtual_size(path, image.format) < size


def written(
    disk: DiskRef, record: Record, planned: Planned, ask: room.Ask | None, rate: int = 0
) -> tuple[dict[str, object], Record]:
    """Commit all that a disk holds, at most `rate` bytes per second, 0 for no limit; return what was done,
    and its record then.

    What is committed lies under an empty layer before it is read: whoever starts the guest after that, since
    what comes next has failed, has it write to a layer of which nobody says that the image has it.
    """
    if not uncommitted.waiting(record):
        return _write(disk, record, ask, rate), record
    writers.check_file(record.path)
    if len(uncommitted.chain(record)) > 1 and layers.is_empty(record.path):
        # There is one, of a commit that was refused.
        top = int(layout.layer_of(uncommitted.chain(record)[-2]))
    else:
        top = int(record.layer)
        # What is to be committed, so that it can go, may be what fills the disk.
        room.require(disk.vm_dir, room.LITTLE, ask, where=layering.folder_of(record))
        layering.add_layer(AddLayer(disk, top + 1, top, record.format), planned)
        layering.activate_layer(ActivateLayer(disk, top + 1, "qcow2"), planned)
    done = _write(disk, record, ask, rate)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        # A guest that was started meanwhile may have been given what was the active layer then.
        writers.check_file(layout.layer(layout.plain(record.path), top))
        after = _diff(disk)._replace(committed=top)
        records.write_record(disk.vm_dir, after)
    point("commit recorded")
    return done, after


def finish(step: FinishDisk, planned: Planned, ask: room.Ask | None) -> dict[str, object]:
    """Commit all that a disk holds and take it away; return the bytes, or where it is `kept` if another copy
    of it has come first.
    """
    disk = step.disk
    job_lock.take(disk.vm, disk.vm_dir)
    # A guest that goes on without this disk has others, with which something may be under way.
    recovery.recover(disk.vm_dir, step.domain)
    record = _diff(disk)
    due = bridged.due(record)
    if due:
        return {"bytes": 0, **due}
    image = bridged.image_of(record)
    at, own = store.of(image.access), owner_of(disk, image, history.seq_of(disk.vm_dir), "")
    if uncommitted.waiting(record) or files.is_absent(record.path):
        # A store that is not there says nothing of its owners.
        bridged.check(image)
    if not _is_there(disk, record) and _is_given_up(at.owner(image), own):
        # Killed while it was taken away.
        _take_away(disk, planned)
        return {"bytes": 0}
    if (
        uncommitted.waiting(record)
        and not uncommitted.is_kept(disk.vm_dir)
        and _is_over(at.owner(image), own)
    ):
        with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
            place = kept.keep(disk, record)
        vm_dir.remove_disk(disk, planned)
        return {"bytes": 0, "kept": kept.said(place)}
    try:
        done, record = written(disk, record, planned, ask, step.rate)
    except NoSpace:
        if image.access.can.has_bridge:
            raise  # what is settled there is asked for again
        return _as_it_is(step, record, planned, ask)
    due = bridged.due(record)
    if due:
        return {**done, **due}
    at.disown(image, own)
    _take_away(disk, planned)
    return done


def _as_it_is(step: FinishDisk, record: Record, planned: Planned, ask: room.Ask | None) -> dict[str, object]:
    """Commit a disk that goes, and take it away, where there is no room for a layer over it: it may be what
    fills its host.

    Nothing is noted but in the image: who is killed begins again. A guest that was started meanwhile has it
    open, or has changed it.
    """
    disk, image = step.disk, bridged.image_of(record)
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
    """Tell whether there is still something of a disk; raise DeviceMissing of a kept one whose device is
    away: it is not gone by that.
    """
    if uncommitted.is_kept(disk.vm_dir):
        return record.layer in on_devices.listed(layout.layers(disk.path))
    return not files.is_absent(record.path)


def _take_away(disk: DiskRef, planned: Planned, *, is_committed: bool = False) -> None:
    vm_dir.remove_disk(disk, planned, done=is_committed)
    if uncommitted.is_kept(disk.vm_dir):
        on_devices.remove_tree(beside.bury(disk.vm_dir, disk.vm))


def _is_given_up(owner: Owner | None, own: Owner) -> bool:
    """Tell whether the image waits for this disk no more."""
    return owner is None or not owner.is_same(own)


def _is_over(owner: Owner | None, own: Owner) -> bool:
    """Tell whether the disk has been committed and taken away already, or has moved on: what is here is left
    from before.
    """
    return owner is None or (owner.is_same(own) and owner.epoch > own.epoch)
