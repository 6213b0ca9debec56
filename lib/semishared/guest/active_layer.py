# SPDX-License-Identifier: Apache-2.0
"""The layer that a running guest writes to, kept in its records while a delta comes or goes (deltas.py).

.semishared/deltas.json     {"version": 1, "disks": [each disk's record without its delta]}
                            "from": in a copy for a guest that changes its datastore, the VM directory
                                    that it comes from (relocation.py)
                            "remote": records of disks before they go over to bases (base_switch.py)
                            "moves": true for a disk that moves to another device (device_switch.py)

libvirt alone knows whether a delta is in use, and its caller may die before libvirt has answered. So a
guest that was stopped for that decision is resumed only after `settle`: else it would write to a layer
that no record names.
"""

from __future__ import annotations

import os
from typing import Dict, List, Sequence

from ..errors import BadRecord
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from . import domain, job_events


def noted(vm_dir: str) -> List[Record]:
    """Return the records, without deltas, of the disks that have or get one; paths are in this directory."""
    return _noted(vm_dir, "disks")


def leaving(vm_dir: str) -> List[Record]:
    """Return the former records, without deltas, of disks that are about to lie over a base of the host."""
    return _noted(vm_dir, "remote")


def _noted(vm_dir: str, which: str) -> List[Record]:
    data = files.read_json(disk_names.delta_note(vm_dir))
    if data is None:
        return []
    disks = data.get(which, [])
    if data.get("version") != 1 or not isinstance(disks, list):
        raise BadRecord(f"{disk_names.delta_note(vm_dir)} on {os.uname().nodename} cannot be understood")
    # A disk that was removed meanwhile has no record any more.
    found = [
        record
        for record in map(Record.from_data, disks)
        if not files.is_absent(disk_names.record(vm_dir, record.disk))
    ]
    return [record._replace(path=record.active(disk_names.disk(vm_dir, record.disk))) for record in found]


def origin(vm_dir: str) -> str:
    """Return the VM directory that this one is a copy of, while the guest has not switched; '' for any other.

    Raise BadRecord.
    """
    found = (files.read_json(disk_names.delta_note(vm_dir)) or {}).get("from", "")
    location, vm = disk_names.location_of(vm_dir), os.path.basename(vm_dir)
    system = os.path.basename(os.path.dirname(str(found)))
    if found and not (disk_names.is_number(system) and found == f"{location}/{system}/{vm}" != vm_dir):
        raise BadRecord(
            f"{disk_names.delta_note(vm_dir)} on {os.uname().nodename} names {found!r}, which is no "
            f"directory of VM {vm}"
        )
    return str(found)


def moves(vm_dir: str) -> bool:
    """Return True if the deltas serve a move to another device, of which oned does not know."""
    return (files.read_json(disk_names.delta_note(vm_dir)) or {}).get("moves") is True


def note(
    vm_dir: str,
    without: List[Record],
    origin: str = "",
    remote: Sequence[Record] = (),
    *,
    moves: bool = False,
) -> None:
    """Note the disks that get deltas, with their records `without`; `origin`: a copy's original directory.

    `remote`: the present records of those that go over to bases; `moves`: the disk moves to another device.
    """
    path = disk_names.delta_note(vm_dir)
    files.remove_staged(*os.path.split(path))
    data: Dict[str, object] = {"version": 1, "disks": [record.to_data() for record in without]}
    if origin:
        data["from"] = origin
    if remote:
        data["remote"] = [record.to_data() for record in remote]
    if moves:
        data["moves"] = True
    files.write_json(path, data)


def forget(vm_dir: str, disk: int) -> None:
    """Remove a disk from the note, and the note with the last disk."""
    without, remote = (
        [record for record in records if record.disk != disk] for records in (noted(vm_dir), leaving(vm_dir))
    )
    if without or origin(vm_dir):
        note(vm_dir, without, origin(vm_dir), remote)
    else:
        files.unlink(disk_names.delta_note(vm_dir))
    point("disk has no delta any more")


def delta_of(record: Record) -> str:
    """Return the path of a disk's delta, which need not exist."""
    return disk_names.layer(disk_names.plain(record.path), disk_names.DELTA_NUMBER)


def create(record: Record) -> None:
    """Create a disk's empty delta over its present layer."""
    path = delta_of(record)
    files.remove_staged(*os.path.split(path))
    # By name and size only: the layers below need not be there yet.
    size = qemu_img.virtual_size(record.path, record.format)
    with files.published(path) as staged:
        qemu_img.create_overlay(staged, os.path.basename(record.path), record.format, size, "", look=False)
        os.chmod(staged, 0o660)


def arrived(vm_dir: str, record: Record) -> Record:
    """Return a disk's record without its delta if the delta has stayed with the guest, else as it is."""
    without = {below.disk: below for below in noted(vm_dir) if files.is_absent(delta_of(below))}
    return without.get(record.disk, record)


def for_qemu_img(record: Record, path: str) -> str:
    """Return the name by which qemu-img opens the layer `path` of a disk with its backing chain."""
    return layers.explicit(path, "qcow2", record.over.node) if record.over else path


def with_delta(record: Record) -> Record:
    """Return the record of a disk with its delta as active layer."""
    raw = int(os.path.basename(record.path)) if record.format == "raw" else record.raw_layer
    return record._replace(path=delta_of(record), format="qcow2", raw_layer=raw)


def opened(vm_dir: str, name: str) -> Dict[str, str]:
    """Return the target of each local disk of a running guest, by the file that it writes to."""
    here = _plain(vm_dir)
    # Links of disks on a store are not followed: a hung store would keep the guest from being woken.
    local = ((_plain(path), target) for target, path in domain.disks(name).items())
    return {os.path.realpath(path): target for path, target in local if path.startswith(f"{here}/")}


def _plain(path: str) -> str:
    return "/" + os.path.normpath(path).lstrip("/")


def settle(vm_dir: str, name: str) -> None:
    """Make the records of disks with deltas name the layer that the running guest writes to."""
    without = noted(vm_dir)
    if not without:
        return
    for target in opened(vm_dir, name).values():
        # libvirt may be at a pivot for a dead caller; it answers this when that is over.
        job_events.block_job(name, target)
    active = opened(vm_dir, name)
    for record in without:
        for known in (record, with_delta(record)):
            if os.path.realpath(known.path) in active:
                write(vm_dir, known)


def write(vm_dir: str, record: Record) -> None:
    """Write the record of a disk, unless it is up to date."""
    file = disk_names.record(vm_dir, record.disk)
    if files.hint(file) != record.to_data():
        files.remove_staged(*os.path.split(file))
        files.write_json(file, record.to_data())
        point("layer recorded")
