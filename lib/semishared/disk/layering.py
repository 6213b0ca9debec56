# SPDX-License-Identifier: Apache-2.0
"""Primitive operations on the layers of a VM's disks. Why, and in which order: plan/disk/snapshots.py.

What each crash leaves: a staged file, removed by the next operation on the disk; a layer nobody lies over and
no record names, replaced by the next snapshot. The record says which layer is active, and is written when
both it and the one before hold the guest's data; the link follows.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Callable

from ..errors import BadRecord, NotSupported
from ..guest import block_jobs, domain
from ..model.disk import names as disk_names
from ..model.disk.record import Record
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
from . import guard, in_memory, records, vm_dir
from .epochs import Planned


def folder_of(record: Record) -> str:
    """Return the directory of a disk's layers; raise NotSupported for a disk that was made without any."""
    folder = os.path.dirname(record.path)
    if not disk_names.layer_of(record.path):
        raise NotSupported(f"disk {record.disk} is a plain file, it cannot have snapshots")
    return folder


def backing_of(record: Record, path: str) -> tuple[str, str]:
    """Return name and format of what a layer of a disk lies over: as its header has it, or the record, of
    what is on the network.
    """
    name, format = layers.backing_of(path)
    if not record.over or not re.match(layers.PROTOCOL, name):
        return name, format
    from . import remote_first

    # A pull by QEMU leaves a name without the user.
    return remote_first.backing_name(record), "raw"


def _layer(disk: DiskRef, number: int) -> str:
    return f"{folder_of(records.record_of(disk))}/{number}"


def _check(disk: DiskRef, planned: Planned) -> Callable[[], None]:
    """Return what looks again, just before something is done to a layer, whether the clone that it is of is
    another host's by now.
    """
    return lambda: guard.refuse_late_clone(disk.vm_dir, disk.disk, planned.seq)


def name_layer(step: NameLayer, planned: Planned) -> None:
    """Give a layer a second name, over an unused layer that may have it."""
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
            in_memory.more(os.path.dirname(path))
        else:
            # A revert replaces what was the active layer: a guest that was started since that was planned
            # would go on without a name.
            writers.check_file(path)
        with files.published(path, _check(step.disk, planned)) as staged:
            # By name and size: what lies further below need not be within reach.
            size = qemu_img.virtual_size(f"{os.path.dirname(path)}/{step.over}", step.over_format)
            qemu_img.create_overlay(staged, str(step.over), step.over_format, size, "", look=False)
            os.chmod(staged, 0o660)
    point("layer added")


def activate_layer(step: ActivateLayer, planned: Planned) -> None:
    """Make a layer the active one."""
    disk = step.disk
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
    """Return the record for the qcow2 layer `path`, with the raw layer that it is put over noted.

    The layers above a raw one say so, until it is being deleted and they have let go of it; its own first
    bytes are its guest's.
    """
    below, format = layers.backing_of(path)
    raw = int(below) if format == "raw" and disk_names.is_number(below) else record.raw_layer
    return record._replace(path=path, format="qcow2", raw_layer=raw)


def link(record: Record, disk: DiskRef, layer: int, check: Callable[[], None] = lambda: None) -> None:
    """Let the link that is a disk lead to a layer, if `check` raises nothing."""
    path = disk_names.disk_of(folder_of(record))
    files.remove_staged(*os.path.split(path))
    files.symlink(disk_names.layer(os.path.basename(path), layer), path, check)
    point("layer active")


def switch_layer(step: SwitchLayer, planned: Planned) -> dict[str, object]:
    """Take the snapshot of a running guest; if it fails, record the layer before as the active one."""
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
            # Both layers hold the guest's data as long as it writes to the lower one; only then it may be
            # named again.
            if block_jobs.find(step.domain, before.path)[1] == f"{folder}/{step.layer}":
                records.write_record(disk.vm_dir, was)
                files.unlink(f"{folder}/{step.to}")
            raise
        link(before, disk, step.to)
    return rested.to_data()


def merge_layer(step: MergeLayer, planned: Planned) -> None:
    """Give a layer the data of the one below."""
    vm_dir.check_wanted(step.disk, planned)
    path, record = _layer(step.disk, step.layer), records.record_of(step.disk)
    folder = os.path.dirname(path)
    if backing_of(record, path)[0] == step.backing:
        return
    named: Callable[[str], str] = str
    if record.place.is_remote:
        from ..guest import active_layer
        from . import remote_first

        remote_first.check(record)
        if disk_names.is_number(step.backing):
            # A file that is opened by a `json:` name takes no name that is relative to it.
            remote_first.name_in_full(record, path, is_open=step.copy)
        else:
            named = partial(active_layer.for_qemu_img, record)
    if qemu_img.info(path, "qcow2").get("snapshots"):
        raise NotSupported(f"{path} holds system snapshots, which count on what it lies over")
    if not step.copy:
        with standing_back():
            qemu_img.rebase(named(path), step.backing, step.backing_format)
        point("layer rebased")
        return
    files.remove_staged(folder, str(step.layer))
    with (
        in_memory.another_layer(folder),
        files.published(path, _check(step.disk, planned)) as staged,
        standing_back(),
    ):
        qemu_img.rebased(path, staged, step.backing, step.backing_format, named)
        os.chmod(staged, 0o660)
    point("layer merged")


def pull_layer(step: PullLayer, planned: Planned) -> None:
    """Let the running guest's QEMU copy into its active layer what that does not share with `backing`."""
    vm_dir.check_wanted(step.disk, planned)
    path, record = _layer(step.disk, step.layer), records.record_of(step.disk)
    if backing_of(record, path)[0] == step.backing:
        return
    _refuse_hot(step, record)
    beside = block_jobs.NOTHING
    if record.place.is_clone:
        from ..store.dir import clones

        # The other note goes with its host.
        beside = block_jobs.Beside(
            partial(clones.note_pull, path), partial(clones.forget_pull, os.path.dirname(path))
        )
    block_jobs.pull(step.disk, step.domain, step.target, step.backing, path, beside)


def _refuse_hot(step: PullLayer, record: Record) -> None:
    """Raise NotSupported if the guest reads its base from memory: QEMU would write that name, which a restart
    ends, into the layer.
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
    """Remove layers of failed snapshots, never one that the guest writes to or that lies below another."""
    with vm_dir.publishing(step.disk.vm, step.disk.vm_dir, planned, step.disk.disk):
        record = records.record_of(step.disk)
        folder = folder_of(record)
        active = record.path
        if step.domain:
            active = block_jobs.find(step.domain, active)[1]
        keep = {*step.known, int(os.path.basename(active)), int(os.path.basename(record.path))}
        if step.domain:
            # libvirt knows a layer that the guest has open by one of its names, which need not be the one in
            # a header.
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
            in_memory.settle(folder)
            point("stray removed")


def drop_layer(step: DropLayer, planned: Planned) -> None:
    """Remove a layer; raise BadRecord if anything still lies over it."""
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
        in_memory.settle(folder)
        point("layer removed")
