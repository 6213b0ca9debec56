# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a VM's disks on a host, and their growth.

plan/disk/snapshots.py decides by what `describe` returns. layering.py changes the layers; this module copies
a whole disk, and finds a snapshot's file.
"""

from __future__ import annotations

import os
from typing import Callable

from .. import store
from ..device import memory
from ..errors import BadRecord, MissingImage, NotSupported
from ..guest import block_jobs, domain, freeze, job_lock
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.disk.snapshot_steps import DescribedDisk, OnStore, Rested, SeenLayer, UnsettledDisk
from ..model.steps import (
    AllowGrowth,
    CopyOut,
    DescribeDisk,
    DiskRef,
    GrowDisk,
    ImageRef,
    LookAtDisk,
    RestGuest,
)
from ..tools import beneath, files, layers, qemu_img
from ..tools.effects import point
from . import backup_marks, layering, records, recovery, retained_diffs, vm_dir
from .epochs import Planned


def describe(step: DescribeDisk) -> OnStore | DescribedDisk:
    """Take the turn, recover the disk, and return what plan/disk/snapshots.py decides by."""
    disk = step.disk
    job_lock.take(disk.vm, disk.vm_dir)
    record = records.record_of(disk)
    if _is_recovered(record, step.domain):
        recovery.recover(disk.vm_dir, step.domain)
        record = records.record_of(disk)
    return _described(record, step.domain)


def look_at(step: LookAtDisk) -> OnStore | DescribedDisk | UnsettledDisk:
    """Return the same without a change; UnsettledDisk if `describe` would have to recover first."""
    record = records.record_of(step.disk)
    if _is_recovered(record, step.domain) and recovery.left(step.disk.vm_dir):
        return UnsettledDisk(True)
    return _described(record, step.domain)


def _is_recovered(record: Record, guest: str) -> bool:
    """Return True if notes can concern the disk: QEMU's jobs are on files here, or in a running guest."""
    return bool(guest) if record.bridged else record.place.snapshots != "none"


def _described(record: Record, name: str) -> OnStore | DescribedDisk:
    on_store = records.on_store(record)
    if on_store:
        return on_store
    image = record.stored
    said = image.to_data() if image else None
    answer = DescribedDisk(record.how, record.format, said, {}, layers.NONE, (), (), "", 0)
    if record.place.snapshots == "none":
        return answer
    if record.place.commits:
        uncommitted = tuple(map(disk_names.layer_of, retained_diffs.waiting_layers(record)))
        answer = answer._replace(waiting=retained_diffs.waiting_bytes(record), uncommitted=uncommitted)
    path = record.path
    if name:
        target, path = block_jobs.find(name, path)
        answer = answer._replace(target=target, system_snapshots=len(domain.snapshots(name)))
    if image:
        at = store.of(image.access)
        at.check(image)
        return answer._replace(snapshots=tuple(at.snapshots(image)), session=at.session(image))
    return _with_layers(answer, record, path)


def _with_layers(answer: DescribedDisk, record: Record, path: str) -> DescribedDisk:
    """Add the layers of a disk whose guest writes to `path`, and which of their names are second ones."""
    folder, active = layering.folder_of(record), int(os.path.basename(path))
    format = record.format
    if path != record.path:
        # A live snapshot failed half-way: its empty layer lies over the one that the guest writes to.
        format = layers.backing_of(record.path)[1] or "qcow2"
    if not files.exists(f"{folder}/{active}"):
        raise MissingImage(f"{folder}/{active} is not there on {os.uname().nodename}")
    names = [int(name) for name in os.listdir(folder) if disk_names.is_number(name)]
    tree = layers.tree(folder, active, format, record.raw_layer)
    for number, found in tree.items() if record.over else ():
        found["backing"], found["backing_format"] = layering.backing_of(record, f"{folder}/{number}")
    return answer._replace(
        aliases=tuple(sorted(set(names) - set(layers.numbered(folder)))),
        layers={str(number): SeenLayer(**found) for number, found in tree.items()},
        active=active,
    )


def rest_for(step: RestGuest, question: Callable[..., object]) -> Rested:
    """Freeze or suspend a running guest while the front-end does something elsewhere."""
    job_lock.take(step.vm, step.vm_dir)
    recovery.recover(step.vm_dir, step.domain)
    with freeze.resting(step.vm_dir, step.domain, step.freeze) as rested:
        question(rests=step.domain)
        point("moment over")
    return rested.answer


def copy_out(step: CopyOut, planned: Planned) -> Rested:
    """Publish a snapshot of a disk that is an image; a running guest's QEMU copies it."""
    disk, rested = step.disk, Rested()
    image = records.record_of(disk).stored
    if image is None:
        raise BadRecord(f"disk {disk.disk} of VM {disk.vm} is no image of a store")
    format = image.format

    def from_guest(path: str) -> None:
        nonlocal rested
        rested = block_jobs.copy(disk, step.domain, step.target, path, format, step.freeze).answer

    def check() -> None:
        with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
            pass

    store.of(image.access).keep(image, step.snapshot, from_guest if step.domain else None, check)
    return rested


def snapshot_file(record: Record, snapshot: int) -> tuple[str, str]:
    """Return path and format of a snapshot (of an in-place disk the image's); raise MissingImage."""
    missing = f"snapshot {snapshot} of disk {record.disk}: "
    image = record.stored
    if image:
        if snapshot not in store.of(image.access).snapshots(image):
            raise MissingImage(
                f"{missing}{image.source} has none of that number, seen from {os.uname().nodename}"
            )
        return image.source, image.format
    folder = layering.folder_of(record)
    path = f"{folder}/{snapshot}"
    active = int(os.path.basename(record.path))
    found = layers.tree(folder, active, record.format, record.raw_layer)
    if not files.exists(path):
        raise MissingImage(f"{missing}{path} is not there on {os.uname().nodename}")
    return path, str(found.get(snapshot, {}).get("format", "qcow2"))


def grow(step: GrowDisk, planned: Planned) -> OnStore | None:
    """Grow a disk without a guest: its active layer, image or clone; return a bridged image to grow there.

    For a disk that a guest has open, the hypervisor's action grows it, if there is room.
    """
    vm_dir.check_wanted(step.disk, planned)
    recovery.settle(step.disk.vm, step.disk.vm_dir)
    record = records.record_of(step.disk)
    if record.bridged:
        return records.on_store(record)
    _check_writable(step.disk, record)
    backup_marks.tidy(step.disk.vm_dir)
    image, path = record.stored, record.path
    if image:
        # Not by the guest's link: the store checks what it leads to.
        store.of(image.access).grow(image, step.size)
    elif not files.exists(path):
        raise MissingImage(f"{path} is not there on {os.uname().nodename}")
    elif not record.is_local:
        _grow_clone(record.of_image, path, step.size)
    else:
        memory.more(os.path.dirname(path), size=step.size, layers=0)
        qemu_img.grow(path, record.format, step.size)
    point("disk grown")
    return None


def _check_writable(disk: DiskRef, record: Record) -> None:
    """Raise NotSupported for a read-only disk by its record: oned's own flag may have changed since."""
    if record.readonly:
        raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is read-only, and is not grown")


def allow_growth(step: AllowGrowth) -> None:
    """Promise memory for the growth of a disk in memory; raise MemoryPromised, NotSupported if read-only."""
    record = records.read_record(step.disk.vm_dir, step.disk.disk)
    if record:
        _check_writable(step.disk, record)
    if record and record.is_local:
        memory.more(os.path.dirname(record.path), size=step.size, layers=0)


def _grow_clone(image: ImageRef, path: str, size: int) -> None:
    """Grow a layer of a clone on a store, opened beneath the store's root."""
    store.of(image.access).check(image)
    fd = beneath.open_file(image.root, path[len(image.root) + 1 :], os.O_RDWR)
    try:
        qemu_img.grow(beneath.path_of(fd), "qcow2", size)
    finally:
        os.close(fd)
