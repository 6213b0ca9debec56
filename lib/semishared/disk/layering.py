# SPDX-License-Identifier: Apache-2.0
"""Primitive operations on the layers of a VM's disks. Why, and in which order: plan/disk/snapshots.py.

A crash leaves a staged file, which the next operation on the disk removes, or a layer that no layer lies over
and no record names, which the next snapshot replaces. The record says which layer is active. It is written
when both the new and the old layer hold the guest's data; the link follows.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Callable

from ..device import memory
from ..errors import BadRecord, NotSupported
from ..guest import block_jobs, domain
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.disk.snapshot_steps import Rested
from ..model.steps import (
    ActivateLayer,
    AddLayer,
    DiskRef,
    DropLayer,
    DropStrays,
    MergeLayer,
    NameLayer,
    PullLayer,
    SwitchLayer,
)
from ..store import writers
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from ..tools.rate_limit import standing_back
from ..tools.run import work
from . import backup_marks, guard, records, vm_dir
from .epochs import Planned

OFF = "a snapshot was taken, or gone back to, while the VM was off"
"""Why a disk has no mark any more (disk/backup_marks.py)."""


def folder_of(record: Record) -> str:
    """Return the directory of a disk's layers; raise NotSupported for a disk without any."""
    folder = os.path.dirname(record.path)
    if not disk_names.layer_of(record.path):
        raise NotSupported(f"disk {record.disk} is a plain file, it cannot have snapshots")
    return folder


def backing_of(record: Record, path: str) -> tuple[str, str]:
    """Return name and format of a layer's backing file, from the header, or the record if on the network."""
    name, format = layers.backing_of(path)
    if not record.over or not re.match(layers.PROTOCOL, name):
        return name, format
    from . import remote_first

    # QEMU's pull writes a name without the Ceph user.
    return remote_first.backing_name(record), "raw"


def _layer(disk: DiskRef, number: int) -> str:
    return f"{folder_of(records.record_of(disk))}/{number}"


def _check(disk: DiskRef, planned: Planned) -> Callable[[], None]:
    """Return a check, for the moment before a change, that the disk's clone is not another host's by now."""
    return lambda: guard.refuse_late_clone(disk.vm_dir, disk.disk, planned.seq)


def name_layer(step: NameLayer, planned: Planned) -> None:
    """Give a layer a second name, which may replace an unused layer."""
    path = _layer(step.disk, step.layer)
    target = f"{os.path.dirname(path)}/{step.name}"
    with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, planned, step.disk.disk):
        files.remove_staged(os.path.dirname(path))
        if os.path.exists(target) and os.path.samefile(path, target):
            return
        staged = files.staged_name(target)
        os.link(path, staged)
        point("layer linked")
        _check(step.disk, planned)()
        os.rename(staged, target)
        files.fsync(os.path.dirname(path))
    point("layer named")


def add_layer(step: AddLayer, planned: Planned) -> None:
    """Publish an empty layer over another."""
    path = _layer(step.disk, step.layer)
    with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, planned, step.disk.disk):
        files.remove_staged(os.path.dirname(path))
        if not os.path.exists(path):
            memory.more(os.path.dirname(path))
        else:
            # A revert replaces the former active layer; a guest started since the plan would keep writing
            # to an unlinked file.
            writers.check_file(path)
            backup_marks.lose(step.disk.vm_dir, step.disk.disk, OFF)
        with files.published(path, _check(step.disk, planned)) as staged:
            # By name and size only: the layers below need not be reachable.
            size = qemu_img.virtual_size(f"{os.path.dirname(path)}/{step.over}", step.over_format)
            qemu_img.create_overlay(staged, str(step.over), step.over_format, size, "", look=False)
            os.chmod(staged, 0o660)
    point("layer added")


def activate_layer(step: ActivateLayer, planned: Planned) -> None:
    """Make a layer the active one."""
    disk = step.disk
    backup_marks.lose(disk.vm_dir, disk.disk, OFF)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        _activate(disk, step.layer, step.format, planned)


def _activate(disk: DiskRef, layer: int, format: str, planned: Planned) -> None:
    record = records.record_of(disk)
    path = f"{folder_of(record)}/{layer}"
    files.remove_staged(disk_names.records(disk.vm_dir), disk_names.record_name(disk.disk))
    if (record.path, record.format) != (path, format):
        records.write_record(disk.vm_dir, _over_raw(record, path))
        point("layer recorded")
    link(record, disk, layer, _check(disk, planned))


def _over_raw(record: Record, path: str) -> Record:
    """Return the record for the qcow2 layer `path`, and note the raw layer directly below, if any.

    The first bytes of a raw layer are the guest's and no header. So the layers above name its format, until
    they are rebased before its deletion.
    """
    below, format = layers.backing_of(path)
    raw = int(below) if format == "raw" and disk_names.is_number(below) else record.raw_layer
    return record._replace(path=path, format="qcow2", raw_layer=raw)


def link(record: Record, disk: DiskRef, layer: int, check: Callable[[], None] = lambda: None) -> None:
    """Switch the disk's link to a layer, if `check` raises nothing."""
    path = disk_names.disk_of(folder_of(record))
    files.remove_staged(*os.path.split(path))
    files.symlink(disk_names.layer(os.path.basename(path), layer), path, check)
    point("layer active")


def switch_layer(step: SwitchLayer, planned: Planned) -> Rested:
    """Take a snapshot of a running guest; if it fails, record the previous layer as active again."""
    disk, before = step.disk, records.record_of(step.disk)
    folder = folder_of(before)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        was = before._replace(
            path=f"{folder}/{step.layer}", format=layers.backing_of(f"{folder}/{step.to}")[1] or "qcow2"
        )
        files.remove_staged(disk_names.records(disk.vm_dir), disk_names.record_name(disk.disk))
        records.write_record(disk.vm_dir, _over_raw(before, f"{folder}/{step.to}"))
        point("layer recorded")
        try:
            rested = block_jobs.switch(disk, step.domain, step.target, f"{folder}/{step.to}", step.freeze)
        except Exception:
            # While the guest writes to the lower layer, both hold its data; only then the record may
            # name the lower one again.
            if block_jobs.find(step.domain, before.path)[1] == f"{folder}/{step.layer}":
                records.write_record(disk.vm_dir, was)
                files.unlink(f"{folder}/{step.to}")
            raise
        link(before, disk, step.to)
    return rested.answer


def merge_layer(step: MergeLayer, planned: Planned) -> None:
    """Copy the data of the layer below into a layer, so that this lies over `backing`."""
    vm_dir.check_wanted(step.disk, planned)
    path, record = _layer(step.disk, step.layer), records.record_of(step.disk)
    folder = os.path.dirname(path)
    if backing_of(record, path)[0] == step.backing:
        return
    backup_marks.lose(step.disk.vm_dir, step.disk.disk, "a snapshot was removed")
    named: Callable[[str], str] = str
    if record.place.is_remote:
        from ..guest import active_layer
        from . import remote_first

        remote_first.check(record)
        if disk_names.is_number(step.backing):
            # QEMU resolves no relative name against a file opened by a `json:` name.
            remote_first.name_in_full(record, path, is_open=step.copy)
        else:
            named = partial(active_layer.for_qemu_img, record)
    if qemu_img.info(path, "qcow2").get("snapshots"):
        raise NotSupported(f"{path} holds system snapshots, which count on what it lies over")
    below, below_format = layers.backing_of(path)
    below, size = f"{folder}/{below}", layers.virtual_size(path)
    # It is shorter if the disk has grown since, and QEMU 5.2 then rebases for ever.
    is_shorter = bool(step.backing) and not record.over and layers.virtual_size(below) < size
    if not step.copy:
        if is_shorter:
            qemu_img.grow(below, below_format, size)
            point("layer below grown")
        with standing_back():
            qemu_img.rebase(named(path), step.backing, step.backing_format)
        point("layer rebased")
        return
    files.remove_staged(folder, str(step.layer))
    with (
        memory.another_layer(folder),
        files.published(path, _check(step.disk, planned)) as staged,
        standing_back(),
    ):
        if is_shorter:
            # The guest has the layer below open: a copy of it is grown.
            large = files.staged_name(below)
            work(["cp", "--sparse=always", "--reflink=auto", "--", below, large])
            qemu_img.grow(large, below_format, size)
            qemu_img.rebased(path, staged, step.backing, step.backing_format, over=(large, below_format))
            files.unlink(large)
        else:
            qemu_img.rebased(path, staged, step.backing, step.backing_format, named)
        os.chmod(staged, 0o660)
    point("layer merged")


def pull_layer(step: PullLayer, planned: Planned) -> None:
    """Have the running guest's QEMU pull the data between `backing` and the active layer into the latter."""
    vm_dir.check_wanted(step.disk, planned)
    path, record = _layer(step.disk, step.layer), records.record_of(step.disk)
    if backing_of(record, path)[0] == step.backing:
        return
    _refuse_hot(step, record)
    beside = block_jobs.NOTHING
    if record.place.is_clone:
        from ..store.dir import clones

        # The host's own note would be lost with the host.
        beside = block_jobs.Beside(
            partial(clones.note_pull, path), partial(clones.forget_pull, os.path.dirname(path))
        )
    block_jobs.pull(step.disk, step.domain, step.target, step.backing, path, beside)


def _refuse_hot(step: PullLayer, record: Record) -> None:
    """Raise NotSupported if the guest reads its base from memory.

    QEMU would write the name of that copy, which a restart removes, into the layer.
    """
    if not record.reads_hot or disk_names.is_number(step.backing):
        return
    if any(
        os.path.basename(os.path.dirname(below)) == record.of_image.base_name
        for below in domain.below(step.domain, step.target)
    ):
        why = (
            f"{step.domain} reads the base of disk {record.disk} from memory, and nothing else lies "
            f"below the snapshot"
        )
        raise NotSupported(f"{why}: it can be deleted while the VM is off")


def drop_strays(step: DropStrays, planned: Planned) -> None:
    """Remove layers of failed snapshots, except the one that the guest writes to and those below another."""
    with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, planned, step.disk.disk):
        record = records.record_of(step.disk)
        folder = folder_of(record)
        active = record.path
        if step.domain:
            active = block_jobs.find(step.domain, active)[1]
        keep = {*step.known, int(os.path.basename(active)), int(os.path.basename(record.path))}
        if step.domain:
            # A layer may have several names; libvirt's name of an open one can differ from the header's.
            keep |= block_jobs.opened(step.domain, folder)
        while True:
            names = {int(name) for name in os.listdir(folder) if disk_names.is_number(name)}
            raw = (
                {number for number in names if os.path.samefile(f"{folder}/{number}", active)}
                if record.format == "raw"
                else set()
            )
            below = {layers.backing_of(f"{folder}/{number}")[0] for number in names - raw}
            strays = [number for number in sorted(names - keep, reverse=True) if str(number) not in below]
            if not strays:
                return
            _check(step.disk, planned)()
            files.unlink(f"{folder}/{strays[0]}")
            memory.settle(folder)
            point("stray removed")


def drop_layer(step: DropLayer, planned: Planned) -> None:
    """Remove a layer; raise BadRecord if it is active or below another layer."""
    with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, planned, step.disk.disk):
        record = records.record_of(step.disk)
        folder = folder_of(record)
        if step.layer == int(os.path.basename(record.path)):
            raise BadRecord(f"layer {step.layer} in {folder} is the active one")
        for number in layers.numbered(folder):
            is_raw = number == int(os.path.basename(record.path)) and record.format == "raw"
            if (
                not is_raw
                and number != step.layer
                and layers.backing_of(f"{folder}/{number}")[0] == str(step.layer)
            ):
                raise BadRecord(f"layer {number} in {folder} still lies over {step.layer}")
        files.unlink(f"{folder}/{step.layer}")
        memory.settle(folder)
        point("layer removed")
