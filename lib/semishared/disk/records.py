# SPDX-License-Identifier: Apache-2.0
"""Records of a VM's disks as files, `<VMDIR>/.semishared/disk.<N>.json`. Content: model/disk/record.py."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import BadRecord
from ..model.disk import names as disk_names
from ..model.disk.place import DIFF, PLACES
from ..model.disk.record import VERSION, Record
from ..model.disk.snapshot_steps import OnStore
from ..model.steps import DiskRef
from ..model.store import dir_names
from ..tools import files

if TYPE_CHECKING:
    from ..model.disk.acquired import Given

given: dict[int, dict[int, Given]] = {}
"""By VM: the disks that oned has given it, as the front-end sent them with this plan, to check records by."""


def write_record(vm_dir: str, record: Record) -> None:
    """Write a disk's record, for vmm/ and for every later action."""
    files.write_json(disk_names.record(vm_dir, record.disk), record.to_data())


def as_found(vm_dir: str, disk: int) -> Record | None:
    """Return the record of a disk, None if it has none; its path is not checked.

    Raise BadRecord if it is unreadable, ForeignImage if oned has another image for the disk.
    """
    data = files.read_json(disk_names.record(vm_dir, disk))
    try:
        found = None if data is None else Record.from_data(data, disk)
    except BadRecord as e:
        raise BadRecord(
            f"{disk_names.record(vm_dir, disk)} on {os.uname().nodename} cannot be understood: {e.detail}"
        ) from None
    if not found or not given or (vm := _vm_of(vm_dir)) not in given:
        return found
    own = disk_names.beside_named(os.path.basename(vm_dir))
    # A kept disk is not oned's any more: another disk may have its number by now.
    if own and own.kind == "kept":
        return found
    from ..model.disk import acquired

    return acquired.records([found], given[vm], vm)[0]


def _vm_of(vm_dir: str) -> int:
    """Return the VM of a directory by its name, also of one in transit (disk/vm_dir_siblings.py), or -1."""
    name = os.path.basename(vm_dir)
    own = disk_names.beside_named(name)
    return own.vm if own else int(name) if disk_names.is_number(name) else -1


def may_commit(vm_dir: str, disk: int) -> bool:
    """Return True if an unintelligible record may be that of a diff.

    It may be if a newer version wrote it, if it says so, or if it is unreadable.
    """
    try:
        data = files.read_json(disk_names.record(vm_dir, disk)) or {}
    except BadRecord:
        return True
    version = data.get("version")
    # A damaged file may have been any record.
    return (
        type(version) is not int
        or version > VERSION
        or data.get("how") not in PLACES
        or data["how"] == DIFF.name
    )


def read_record(vm_dir: str, disk: int) -> Record | None:
    """Return the record of a disk, None if none; raise BadRecord if unreadable or its path is foreign."""
    record = as_found(vm_dir, disk)
    if record is None:
        return None
    check_place(record, _vm_of(vm_dir))
    return record


def record_of(disk: DiskRef) -> Record:
    """Return the record of a disk; raise BadRecord if it has none."""
    record = read_record(disk.vm_dir, disk.disk)
    if record is None:
        raise BadRecord(
            f"disk {disk.disk} of VM {disk.vm} has no record in {disk.vm_dir} on {os.uname().nodename}"
        )
    return record


def numbers(vm_dir: str) -> list[int]:
    """Return the numbers of a VM's disks that have records; raise OSError."""
    try:
        names = os.listdir(disk_names.records(vm_dir))
    except FileNotFoundError:
        return []
    return sorted(number for number in map(disk_names.recorded, names) if number is not None)


def goes_over(vm_dir: str) -> bool:
    """Return True if a go-over of a VM's disks is noted (guest/go_over.py); its action may be dead."""
    return not all(map(files.is_absent, disk_names.go_over_notes(vm_dir)))


def must_be_there(vm_dir: str, disk: int) -> None:
    """Raise BadRecord if a disk has no record."""
    if not os.path.lexists(disk_names.record(vm_dir, disk)):
        raise BadRecord(
            f"{disk_names.record(vm_dir, disk)} on {os.uname().nodename} is not there, and the disk "
            f"that it is of is"
        )


def records(vm_dir: str) -> list[Record]:
    """Return all records of a VM by disk; raise BadRecord."""
    found = [read_record(vm_dir, disk) for disk in numbers(vm_dir)]
    return [record for record in found if record]


def check_place(record: Record, vm: int) -> None:
    """Raise BadRecord unless the path in a disk's record is one that the layout allows."""
    if record.network:
        return
    if record.is_local:
        own = disk_names.disk_file(record.path)
        good = own is not None and own.disk == record.disk
    else:
        source = record.image.source if record.image else ""
        good = (
            source.startswith("/")
            and ".." not in source.split("/")
            and record.path in _on_store(source, vm, record)
        )
    if not good:
        named = f"names {record.path!r}, which is none of its places"
        raise BadRecord(f"the record of disk {record.disk} of VM {vm} on {os.uname().nodename} {named}")


def _on_store(source: str, vm: int, record: Record) -> tuple[str, ...]:
    """Return the paths on a store that a disk from the image `source` can have; of a clone, its record's."""
    directory, name = os.path.split(os.path.normpath(source))
    side, clone = f"{directory}/{dir_names.side(name)}", disk_names.plain(record.path)
    said = dir_names.clone_named(os.path.basename(clone))
    is_own = said is not None and clone == dir_names.clone(side, vm, record.disk, said.cloud)
    return (dir_names.link(side), *((record.path,) if is_own else ()))


def on_store(record: Record) -> OnStore | None:
    """Return the image of a disk on a store with a bridge, for the front-end to go on there."""
    image = record.bridged
    return OnStore(image.to_data(), record.how, record.readonly) if image else None
