# SPDX-License-Identifier: Apache-2.0
"""Deltas: what a guest writes while its local disks move to another host.

libvirt mirrors what a disk's active layer holds, in units of 64 KiB. So before the move every local disk of
the guest gets an empty layer on top, its delta. The guest then only reads the layers below, which cross as
files; libvirt mirrors deltas alone. Afterwards, on either host, each delta is merged into the layer below.

    add       K           ->   K <- delta
    merge     K <- delta  ->   K

`.semishared/deltas.json` (active_layer.py) exists throughout. An action that finds it merges: a delta that no
guest has open is a redo log, which can be committed repeatedly.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Iterable, List

from ..errors import BadRecord, DeviceMissing, MissingImage, ToolFailed
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..tools import files, qemu_img
from ..tools.effects import point
from . import active_layer, block_jobs, domain, job_events, libvirtd, mirror
from .active_layer import delta_of, noted, with_delta

CALL_S = 60


def add(vm_dir: str, name: str, records: Iterable[Record], *, moves: bool = False) -> None:
    """Put deltas on these disks of a running guest, at one moment; the caller has merged earlier ones.

    `merge` ends it. `moves`: one disk, which moves to another device.
    """
    asked = list(records)
    opened = active_layer.opened(vm_dir, name)
    domain.check_plain(
        name, [opened[path] for path in (os.path.realpath(record.path) for record in asked) if path in opened]
    )
    without = [_layered(vm_dir, record) for record in asked]
    # Again, as a plain file has just become a layer, with another name.
    opened = active_layer.opened(vm_dir, name)
    missing = [record.path for record in without if os.path.realpath(record.path) not in opened]
    if missing:
        raise MissingImage(f"domain {name} on {os.uname().nodename} has no disk {missing[0]}")
    active_layer.note(vm_dir, without, moves=moves)
    point("deltas noted")
    for record in without:
        active_layer.create(record)
    targets = {opened[os.path.realpath(record.path)]: delta_of(record) for record in without}
    for record in without:
        # Before the guest writes both hold its data; from then on records must not name the lower layer.
        active_layer.write(vm_dir, with_delta(record))
    block_jobs.put_over(name, targets)
    point("guest writes to deltas")


def _layered(vm_dir: str, record: Record) -> Record:
    """Give a disk that is a plain file the layout with layers; QEMU keeps it open under its old name."""
    if record.layer:
        return record
    path = disk_names.disk(vm_dir, record.disk)
    first = disk_names.layer(path, 0)
    if not os.path.islink(path):
        os.makedirs(disk_names.layers(path), mode=0o755, exist_ok=True)
        files.remove_staged(*os.path.split(first))
        staged = files.staged_name(first)
        os.link(path, staged)
        os.rename(staged, first)
        files.fsync(disk_names.layers(path))
        point("plain disk has a layer")
    layered = record._replace(path=first)
    active_layer.write(vm_dir, layered)
    files.remove_staged(*os.path.split(path))
    files.symlink(disk_names.layer(os.path.basename(path), 0), path)
    point("plain disk has a link")
    return layered


def merge(vm_dir: str, name: str) -> None:
    """Merge the deltas of a VM; `name`: the domain that may run here, '' for none."""
    without, origin = noted(vm_dir), active_layer.origin(vm_dir)
    if not without and not origin:
        return
    state = domain.state(name) if name else "absent"
    if state == "unknown":
        raise ToolFailed(
            f"libvirtd on {os.uname().nodename} does not say whether {name} runs: its deltas are not merged"
        )
    runs = state in ("running", "paused")
    if runs:
        block_jobs.wait_for_snapshot(name)
    if origin:
        from . import relocation

        relocation.enter(vm_dir, origin, name if runs else "")
    if active_layer.leaving(vm_dir):
        from . import base_switch

        base_switch.end(vm_dir, name if runs else "")
        without = noted(vm_dir)
    from . import device_switch

    device_switch.end(vm_dir, name if runs else "")
    if runs:
        active_layer.settle(vm_dir, name)
        _commit(vm_dir, name, without)
    else:
        for record in without:
            _redo(vm_dir, record)
    _drop(vm_dir, without)


def keep(vm_dir: str, name: str) -> bool:
    """End a killed move to another device, except its delta; return True if the guest writes to that."""
    block_jobs.wait_for_snapshot(name)
    from . import device_switch

    device_switch.end(vm_dir, name)
    active_layer.settle(vm_dir, name)
    opened = active_layer.opened(vm_dir, name)
    return all(os.path.realpath(delta_of(record)) in opened for record in noted(vm_dir))


def _commit(vm_dir: str, name: str, without: List[Record]) -> None:
    """Have QEMU commit the deltas of a running guest into the layers below, and pivot to those."""
    opened = active_layer.opened(vm_dir, name)
    targets = [
        opened[path] for path in (os.path.realpath(delta_of(record)) for record in without) if path in opened
    ]
    if not targets:
        return
    for target in targets:
        block_jobs.end_job(name, target)
        with job_events.listening(name, target) as job:
            domain.ask(name, f"blockcommit {target}", partial(_begin, target), timeout_s=CALL_S)
            job.wait_until_ready()
    point("deltas mirrored")
    mirror.go_over(vm_dir, name, targets, "its deltas are merged when it runs")


def _begin(target: str, guest: Any) -> None:
    libvirt = libvirtd.binding()
    guest.blockCommit(
        target,
        None,
        None,
        0,
        libvirt.VIR_DOMAIN_BLOCK_COMMIT_ACTIVE | libvirt.VIR_DOMAIN_BLOCK_COMMIT_SHALLOW,
    )


def _redo(vm_dir: str, record: Record) -> None:
    """Merge the delta of a disk that no guest has open."""
    if _names_delta(vm_dir, record) and _is_there(record):
        qemu_img.commit(active_layer.for_qemu_img(record, delta_of(record)))
        files.fsync(record.path)
        point("delta committed")
    active_layer.write(vm_dir, record)


def _is_there(record: Record) -> bool:
    """Return True if the delta that a record names is there; raise DeviceMissing if its device is not.

    Also if the device is only set aside at this moment. A record without its delta is otherwise that of a
    disk being removed.
    """
    path = delta_of(record)
    if files.exists(path):
        return True
    if os.path.islink(os.path.dirname(path)):
        raise DeviceMissing(
            f"{path} on {os.uname().nodename}, which has what its guest has written last: on a "
            f"device that is not there"
        )
    return False


def _drop(vm_dir: str, without: List[Record]) -> None:
    """Remove deltas that no record names, then the note."""
    for record in without:
        if _names_delta(vm_dir, record):
            raise BadRecord(f"disk {record.disk} of {vm_dir} on {os.uname().nodename} still has its delta")
        files.unlink(delta_of(record))
        files.remove_staged(disk_names.layers(disk_names.plain(record.path)))
    files.unlink(disk_names.delta_note(vm_dir))
    point("deltas gone")


def _names_delta(vm_dir: str, record: Record) -> bool:
    return (files.read_json(disk_names.record(vm_dir, record.disk)) or {}).get("path") == delta_of(record)
