# SPDX-License-Identifier: Apache-2.0
"""The layer that a running guest writes to, kept in its records while its disks go over (go_over.py).

.semishared/go-over.json    {"version": 1, "disks": [{"how", "before": Record, "after": Record}]}
                            "from": in a copy for a guest that changes its datastore, the VM directory that
                                    it comes from

libvirt alone knows whether a delta is in use, and its caller may die before libvirt has answered. So a
guest that was stopped for that decision is resumed only after `follow`: else it would write to a layer
that no record names.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Sequence

from ..errors import BadRecord
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..named import NamedTuple
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from . import domain, job_events

VERSION = 1
DELTA, BASE, DEVICE = "delta", "base", "device"
"""How a disk goes over: back into the layer below its delta, from its store to a base of the host, or to the
copy of its layers on another device.
"""


class Switch(NamedTuple):
    """One disk that goes over: its records without a delta; paths are in the directory of the note."""

    before: Record
    after: Record
    """As `before` until that side is there."""
    how: str = DELTA

    @property
    def begun(self) -> bool:
        """Tell whether the files of a disk over a base may have their names."""
        return self.how == BASE and self.after != self.before


# -- the note ---------------------------------------------------------------------------------------


def noted(vm_dir: str) -> List[Switch]:
    """Return the disks that go over, but for those removed meanwhile; raise BadRecord."""
    found = []
    for row in (_read(vm_dir) or {}).get("disks", []):
        before, after = (Record.from_data(row.get(side)) for side in ("before", "after"))
        if not files.is_absent(disk_names.record(vm_dir, after.disk)):
            path = after.active(disk_names.disk(vm_dir, after.disk))
            before = before._replace(path=before.active(disk_names.disk(vm_dir, before.disk)))
            found.append(Switch(before, after._replace(path=path), str(row.get("how"))))
    return found


def origin(vm_dir: str) -> str:
    """Return the VM directory that this one is a copy of, while the guest has not switched; '' for any other.

    Raise BadRecord.
    """
    found = (_read(vm_dir) or {}).get("from", "")
    location, vm = disk_names.location_of(vm_dir), os.path.basename(vm_dir)
    system = os.path.basename(os.path.dirname(str(found)))
    if found and not (disk_names.is_number(system) and found == f"{location}/{system}/{vm}" != vm_dir):
        raise BadRecord(
            f"{disk_names.go_over_note(vm_dir)} on {os.uname().nodename} names {found!r}, which is no "
            f"directory of VM {vm}"
        )
    return str(found)


def _read(vm_dir: str) -> Optional[Dict[str, Any]]:
    path = disk_names.go_over_note(vm_dir)
    data = files.read_json(path)
    if data is None:
        path = disk_names.delta_note(vm_dir)
        data = files.read_json(path)
        data = data and _of_older(data)
    if data is not None and (data.get("version") != VERSION or not _are_rows(data.get("disks"))):
        raise BadRecord(f"{path} on {os.uname().nodename} cannot be understood")
    return data


def _are_rows(rows: object) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def _of_older(data: Dict[str, Any]) -> Dict[str, Any]:
    """Return the note deltas.json of versions before go-over.json as one of these.

    It has the records after in "disks", those before of disks that go over to bases in "remote", and "moves"
    for a disk that moves to another device.
    """
    rows, remote = data.get("disks", []), data.get("remote", [])
    if not _are_rows(rows) or not _are_rows(remote):
        return {}
    left = {row.get("disk"): row for row in remote}
    how = DEVICE if data.get("moves") is True else DELTA
    disks = [{"how": how, "before": row, "after": row} for row in rows]
    for switch in disks:
        before = left.get(switch["after"].get("disk"))
        switch.update({"how": BASE, "before": before} if before else {})
    return {**data, "disks": disks}


def note(vm_dir: str, switches: Sequence[Switch], origin: str = "") -> None:
    """Note disks that go over; `origin`: the directory that a copy comes from."""
    path = disk_names.go_over_note(vm_dir)
    files.remove_staged(*os.path.split(path))
    disks = [
        {"how": switch.how, "before": switch.before.to_data(), "after": switch.after.to_data()}
        for switch in switches
    ]
    files.write_json(path, {"version": VERSION, "disks": disks, **({"from": origin} if origin else {})})
    files.unlink(disk_names.delta_note(vm_dir))


def forget(vm_dir: str, disk: Optional[int] = None) -> None:
    """Remove a disk from the note, and the note with the last disk, or without `disk`."""
    left = [] if disk is None else [switch for switch in noted(vm_dir) if switch.after.disk != disk]
    if disk is not None and (left or origin(vm_dir)):
        note(vm_dir, left, origin(vm_dir))
    else:
        for path in disk_names.go_over_notes(vm_dir):
            files.unlink(path)
    point("deltas gone" if disk is None else "disk has no delta any more")


def arrived(vm_dir: str, record: Record) -> Record:
    """Return a disk's record without its delta if the delta has stayed with the guest, else as it is."""
    without = {found.disk: found for _, found, _ in noted(vm_dir) if files.is_absent(delta_of(found))}
    return without.get(record.disk, record)


# -- deltas -----------------------------------------------------------------------------------------


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


def with_delta(record: Record) -> Record:
    """Return the record of a disk with its delta as active layer."""
    raw = int(os.path.basename(record.path)) if record.format == "raw" else record.raw_layer
    return record._replace(path=delta_of(record), format="qcow2", raw_layer=raw)


def names_delta(vm_dir: str, record: Record) -> bool:
    """Return True if the disk's record names its delta; raise BadRecord."""
    return (files.read_json(disk_names.record(vm_dir, record.disk)) or {}).get("path") == delta_of(record)


def for_qemu_img(record: Record, path: str) -> str:
    """Return the name by which qemu-img opens the layer `path` of a disk with its backing chain."""
    return layers.explicit(path, "qcow2", record.over.node) if record.over else path


# -- what the guest writes to -----------------------------------------------------------------------


def opened(vm_dir: str, name: str) -> Dict[str, str]:
    """Return the target of each local disk of a running guest, by the file that it writes to."""
    here = _plain(vm_dir)
    # Links of disks on a store are not followed: a hung store would keep the guest from being woken.
    local = ((_plain(path), target) for target, path in domain.disks(name).items())
    return {os.path.realpath(path): target for path, target in local if path.startswith(f"{here}/")}


def _plain(path: str) -> str:
    return "/" + os.path.normpath(path).lstrip("/")


def follow(vm_dir: str, name: str) -> None:
    """Make the records of disks that go over name the layer that the running guest writes to."""
    switches = noted(vm_dir)
    if not switches:
        return
    for target in opened(vm_dir, name).values():
        # libvirt may be at a pivot for a dead caller; it answers this when that is over.
        job_events.block_job(name, target)
    active = opened(vm_dir, name)
    for switch in switches:
        for known in (switch.after, with_delta(switch.after)):
            if os.path.realpath(known.path) in active:
                write(vm_dir, known)


def write(vm_dir: str, record: Record) -> None:
    """Write the record of a disk, unless it is up to date."""
    file = disk_names.record(vm_dir, record.disk)
    if files.hint(file) != record.to_data():
        files.remove_staged(*os.path.split(file))
        files.write_json(file, record.to_data())
        point("layer recorded")
