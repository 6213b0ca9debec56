# SPDX-License-Identifier: Apache-2.0
"""The records of a VM's disks as files: `<VMDIR>/.semishared/disk.<N>.json`. What is in them: model/record.py."""

from __future__ import annotations

import os
import re

from ..errors import BadRecord
from ..model import layout
from ..model.record import Record
from ..model.steps import DiskRef
from ..tools import files

RECORDS = layout.SIDE
OWN = re.compile(r"(?P<vm_dir>/.+)(?P<tail>/disk\.(?P<disk>[0-9]{1,9})(?P<layer>\.snap/[0-9]+)?)\Z")


def record_path(vm_dir: str, disk: int) -> str:
    return layout.record(vm_dir, disk)


def write_record(vm_dir: str, record: Record) -> None:
    """Write what a disk is, for vmm/ and for every later action."""
    files.write_json(record_path(vm_dir, record.disk), record.to_data())


def as_found(vm_dir: str, disk: int) -> Record | None:
    """Return the record of a disk, None if there is no JSON object; raise BadRecord if that is no record. Where is not looked at."""
    data = files.read_json(record_path(vm_dir, disk))
    return None if data is None else Record.from_data(data, disk)


def read_record(vm_dir: str, disk: int) -> Record | None:
    """Return the record of a disk, None if it has none; raise BadRecord if it cannot be understood, or names a strange place."""
    path, here = record_path(vm_dir, disk), os.uname().nodename
    if not os.path.lexists(path):
        return None
    try:
        record = as_found(vm_dir, disk)
    except BadRecord as e:
        raise BadRecord(f"{path} on {here} cannot be understood: {e.detail}") from None
    if record is None:
        raise BadRecord(f"{path} on {here} cannot be understood")
    # Also of a directory on its way (beside.py).
    owner = re.search(r"(?:\A|-)([0-9]+)(?:-[0-9a-f]+)?\Z", os.path.basename(vm_dir))
    check_place(record, int(owner.group(1)) if owner else -1)
    return record


def record_of(disk: DiskRef) -> Record:
    """Return the record of a disk; raise BadRecord if it has none."""
    record = read_record(disk.vm_dir, disk.disk)
    if record is None:
        raise BadRecord(f"disk {disk.disk} of VM {disk.vm} has no record in {disk.vm_dir} on {os.uname().nodename}")
    return record


def records(vm_dir: str) -> list[Record]:
    """Return all records of a VM by disk; raise BadRecord."""
    try:
        names = os.listdir(f"{vm_dir}/{RECORDS}")
    except FileNotFoundError:
        return []
    ids = sorted(int(name[5:-5]) for name in names if name.startswith("disk.") and name[5:-5].isdigit())
    found = [read_record(vm_dir, disk) for disk in ids]
    return [record for record in found if record]


def check_place(record: Record, vm: int) -> None:
    """Raise BadRecord unless the path in a disk's record is one that the layout has for the disk."""
    if record.network:
        return
    if record.is_local:
        own = OWN.match(record.path)
        good = bool(own) and own.group("disk") == str(record.disk) if own else False
    else:
        source = record.image.source if record.image else ""
        good = source.startswith("/") and ".." not in source.split("/") and record.path in _on_store(source, vm, record)
    if not good:
        named = f"names {record.path!r}, which is none of its places"
        raise BadRecord(f"the record of disk {record.disk} of VM {vm} on {os.uname().nodename} {named}")


def _on_store(source: str, vm: int, record: Record) -> tuple[str, ...]:
    """Return the places on a store that a disk from the image `source` can have; of a clone's layers the one of the record."""
    directory, name = os.path.split(os.path.normpath(source))
    side, path = f"{directory}/{RECORDS}/{name}", record.path
    clone = f"{side}/clones/{vm}-{record.disk}"
    own = re.match(rf"{re.escape(clone)}(?:-[0-9a-f]{{32}})?(?=\.snap/|\Z)", path)
    clone, layer = own.group() if own else clone, path.rpartition("/")[2]
    return (f"{side}/image", clone, *((f"{clone}.snap/{layer}",) if layer.isdigit() and layer.isascii() else ()))


def on_store(record: Record) -> dict[str, object]:
    """Return which image of a store that has a bridge a disk is, for the front-end to go on with there; {} for any other disk."""
    image = record.stored
    if image is None or not image.access.can.has_bridge:
        return {}
    return {"on_store": image.to_data(), "how": record.how, "readonly": record.readonly}
