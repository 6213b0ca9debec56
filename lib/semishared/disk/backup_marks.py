# SPDX-License-Identifier: Apache-2.0
"""The note of a VM's marks (model/disk/marks.py), and marks in the layers of disks that no guest has open.

The note is written before a mark is made, and read before one is gone by: a mark that it does not have is
none. Bitmaps that it does not have are stray, and go with the next backup.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Collection, Iterator

from ..errors import SemisharedError
from ..model.disk import marks as model
from ..model.disk import names as disk_names
from ..model.disk.marks import Marks
from ..model.disk.record import Record
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from . import records


def read(vm_dir: str) -> Marks:
    """Return a VM's marks, none without a note that is understood."""
    return model.from_data(files.hint(disk_names.marks(vm_dir)))


def write(vm_dir: str, marks: Marks) -> None:
    """Replace the note."""
    path = disk_names.marks(vm_dir)
    files.remove_staged(*os.path.split(path))
    if marks:
        files.write_json(path, {"version": model.VERSION, "marks": model.to_data(marks)})
    else:
        files.unlink(path)
    point("marks noted")


def lose(vm_dir: str, disk: int | None, why: str) -> None:
    """Note, before a disk changes otherwise than through its QEMU, that its marks hold no longer.

    `disk`: None for all of the VM. The next increment of it is whole, for that reason.
    """
    if files.is_absent(disk_names.marks(vm_dir)):
        return
    marks = read(vm_dir)
    without = tuple(mark.without(disk, why) for mark in marks)
    if without != marks:
        write(vm_dir, without)


def refused(record: Record) -> str:
    """Return why a disk cannot have a mark, '' if it can."""
    if record.readonly:
        return "it is read-only"
    if record.network:
        from . import snapshot_marks

        return snapshot_marks.refused(record)
    if record.format == "raw":
        return ""
    head = files.read(os.path.realpath(record.path), 8)
    version = int.from_bytes(head[4:8], "big")
    return "" if version >= 3 else f"it is qcow2 of version {version}, which has no marks"


def leave(vm: int, vm_dir: str, record: Record) -> None:
    """Leave no mark in an image that its VM lets go of: a guest that has it later would write to it.

    An image that cannot be written to keeps it: that stops no removal.
    """
    if files.is_absent(disk_names.marks(vm_dir)) or not record.place.is_image:
        return
    try:
        # Its store may be away, for which no removal waits. Ceph has its limits of time.
        if record.network:
            from . import snapshot_marks

            snapshot_marks.drop(vm, record)
        else:
            from ..tools import hung_store

            hung_store.unless_its_process_hangs(lambda: drop(record), None, hung_store.LIMIT_S)
    except (SemisharedError, OSError):
        pass


def tidy(vm_dir: str) -> None:
    """Remove what a killed QEMU has left of marks: QEMU refuses to resize an image that has such a bitmap."""
    if files.is_absent(disk_names.marks(vm_dir)):
        return
    for record in records.records(vm_dir):
        _remove(record, lambda found: "in-use" in found.get("flags", ()))


# -- while no guest has them open -------------------------------------------------------------------


def own_layers(record: Record) -> Iterator[str]:
    """Yield the files that are a disk's own, the active one first."""
    top = os.path.realpath(record.path)
    yield top
    if not disk_names.layer_of(top):
        return
    for path, format in layers.below(top, record.format, over_network=bool(record.over)):
        if os.path.dirname(path) != os.path.dirname(top) or format != "qcow2":
            return
        yield path


def bitmaps(path: str) -> list[dict[str, Any]]:
    """Return QEMU's description of the bitmaps in a qcow2 file: `name`, `flags`, `granularity`."""
    data: Any = qemu_img.info(path, "qcow2").get("format-specific", {})
    found = data.get("data", {}).get("bitmaps", []) if isinstance(data, dict) else []
    return [one for one in found if isinstance(one, dict) and isinstance(one.get("name"), str)]


def drop(record: Record, keep: Collection[str] = ()) -> None:
    """Remove all marks but some from a disk's layers; also those that a killed QEMU has left unusable."""
    _remove(record, lambda found: found["name"] not in keep)


def _remove(record: Record, which: Callable[[dict[str, Any]], bool]) -> None:
    if record.network or record.format != "qcow2" or not files.exists(record.path):
        return
    for path in own_layers(record):
        for found in bitmaps(path):
            if model.is_name(found["name"]) and which(found):
                qemu_img.remove_bitmap(path, found["name"])
                point("mark dropped")


def is_whole(record: Record, name: str) -> bool:
    """Tell whether a mark is in a disk's active layer, and in those below it that are from its time.

    A layer without it between two that have it, or one with a bitmap that QEMU could not write out when it
    was killed, makes the mark one of unknown writes.
    """
    found = []
    for path in own_layers(record):
        flags = [one.get("flags", []) for one in bitmaps(path) if one["name"] == name]
        found.append(bool(flags))
        if flags and "in-use" in flags[0]:
            return False
    return found[0] and found == sorted(found, reverse=True)


def add(record: Record, name: str) -> None:
    """Mark a disk from now on."""
    path = os.path.realpath(record.path)
    qemu_img.add_bitmap(path, name)
    files.fsync(path)
    point("disk marked")
