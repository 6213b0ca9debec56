# SPDX-License-Identifier: Apache-2.0
"""Diffs that were to be deleted before they were committed: kept beside the VM directory, until somebody
commits or discards them.

    <system>/.kept-VM-RANDOM/disk.N.snap/     the layers, by one rename
                            /.semishared/disk.N.json  vm.json     the disk's record there, and the SEQ of the
                            VM's history

A record that this version does not understand goes along as it is: a newer one may have written it, of a
diff.

Killed before the rename there is a directory without layers, which holds nothing; after it, one that holds
all. The lease on the base stays with the disk (vm_dir.py).
"""

from __future__ import annotations

import os
from typing import Iterable

from ..base import cache
from ..errors import BadRecord, DamagedLayer, DeviceMissing, LostWithMemory, StaleDirectory, ToolFailed
from ..model import layout, layout_devices
from ..model.record import Record
from ..model.steps import DiskRef
from ..tools import files, layers, qemu_img
from ..tools.crash_points import point
from . import beside, on_devices, records, uncommitted


def keep(disk: DiskRef, record: Record, *, is_last: bool = True) -> str:
    """Move a diff out of the VM's directory if it holds what is not committed; return where it is now, '' if
    it holds no such.

    The caller holds the VM. Not `is_last`: another diff takes its place, so it is older than anything that
    claims the image.
    """
    if not record.place.commits:
        return ""
    if not _may_wait(disk, record):
        return ""
    if uncommitted.is_kept(disk.vm_dir):
        return disk.vm_dir
    place = _new_place(disk)
    target = layout.disk(place, disk.disk)
    records.write_record(place, record._replace(path=layout.layer(target, layout.layer_of(record.path))))
    if is_last:
        _keep_history(disk, place)
    _move(disk, place, layout.layers(disk.path))
    return place


def _may_wait(disk: DiskRef, record: Record) -> bool:
    try:
        found = uncommitted.chain(record)
        return bool(uncommitted.among(record, found)) if found else _is_unseen(disk, record)
    except DamagedLayer:
        return True


def _is_unseen(disk: DiskRef, record: Record) -> bool:
    """Tell whether nobody knows what waits in a diff of which no layer was seen: its device is away, or was
    then and is back.
    """
    try:
        return record.layer in on_devices.listed(layout.layers(disk.path))
    except (DeviceMissing, LostWithMemory):
        return True


def keep_unknown(disk: DiskRef) -> str:
    """Move a disk out of the VM's directory if its record is not understood, and may be that of a diff;
    return where it is, '' else.
    """
    if disk.disk not in _unknown(disk.vm_dir):
        return ""
    found = [
        path
        for path in (layout.layers(disk.path), disk.path)
        if not files.is_absent(path, follow=True) or on_devices.is_away(path)
    ]
    if uncommitted.is_kept(disk.vm_dir) or not found:
        return disk.vm_dir if found else ""
    place = _new_place(disk)
    data = files.hint(layout.record(disk.vm_dir, disk.disk))
    # All that is known of it: where the disk is, as in all versions until now. Of one that cannot be read not
    # even that.
    path = str(data.get("path", "")).replace(f"{disk.vm_dir}/", f"{place}/", 1)
    files.write_json(layout.record(place, disk.disk), {**data, "path": path})
    _keep_history(disk, place)
    _move(disk, place, found[0])
    return place


def _new_place(disk: DiskRef) -> str:
    place = beside.new_name("kept", f"{os.path.dirname(disk.vm_dir)}/{disk.vm}")
    os.makedirs(layout.records(place))
    return place


def _keep_history(disk: DiskRef, place: str) -> None:
    if not files.is_absent(layout.history_note(disk.vm_dir)):
        os.link(layout.history_note(disk.vm_dir), layout.history_note(place))


def _move(disk: DiskRef, place: str, path: str) -> None:
    files.fsync(layout.records(place))
    point("kept directory made")
    os.rename(path, f"{place}/{os.path.basename(path)}")
    for directory in (place, disk.vm_dir, os.path.dirname(place)):
        files.fsync(directory)
    point("diff kept")


def said(place: str) -> str:
    """Return for people where a diff is kept, '' if it is not."""
    return f"{place} on {os.uname().nodename}" if place else ""


def keep_all(vm: int, vm_dir: str) -> list[str]:
    """Keep whatever is not committed of a VM that is to be removed, and of what killed moves have left of it;
    say where.
    """
    found = []
    for directory in (vm_dir, *beside.listed(vm_dir, "outgoing")):
        found += _keep_all_of(vm, directory)
    return [said(place) for place in found if place]


def _keep_all_of(vm: int, directory: str) -> list[str]:
    """Keep what is not committed of one directory, whose VM does not run; return where, '' for a disk that
    holds no such.
    """
    if any(layout_devices.left_named(name) is not None for name in on_devices.links(directory)):
        from ..guest import device_switch  # not for every removal

        # Layers that were about to leave their device are where the record says, and not yet where the link
        # leads.
        device_switch.end(directory, "")
    found = [keep(DiskRef(vm, record.disk, directory), record) for record in _readable(directory)]
    return found + [keep_unknown(DiskRef(vm, number, directory)) for number in _unknown(directory)]


def keep_stale(vm: int, vm_dir: str) -> list[str]:
    """Keep the same of a directory that goes since its VM was taken over by another host, which never had it;
    say where.

    A directory that was moved away has left nothing: what it held is where the VM is.
    """
    from . import overtaken

    if not _unknown(vm_dir) and not any(record.place.commits for record in _readable(vm_dir)):
        return []
    try:
        if not overtaken.check(vm, vm_dir):
            return []
    except StaleDirectory:
        pass
    return [said(place) for place in _keep_all_of(vm, vm_dir) if place]


def keep_set_aside(vm: int, directory: str) -> list[str]:
    """Keep the same of what a killed move has set aside and not removed; say where. If the VM is here, what
    it has is there as well.
    """
    if os.path.isdir(f"{os.path.dirname(directory)}/{vm}"):
        return keep_stale(vm, directory)
    return [said(place) for place in _keep_all_of(vm, directory) if place]


def _unknown(vm_dir: str) -> list[int]:
    """Return the disks of a directory whose records are not understood, and may be those of diffs."""
    found = []
    for number in records.numbers(vm_dir):
        try:
            records.as_found(vm_dir, number)
        except BadRecord:
            if records.may_commit(vm_dir, number):
                found.append(number)
    return found + lost(vm_dir)


def lost(vm_dir: str) -> list[int]:
    """Return the disks of a directory that have no record any more, though they lie over bases of ours, and
    what they hold.

    No removal leaves such: the record goes last, and comes before the disk.
    """
    try:
        names = [name for name in os.listdir(vm_dir) if layout.are_layers(name)]
    except FileNotFoundError:
        return []
    numbers = [number for number in map(layout.disk_named, map(layout.disk_of, names)) if number is not None]
    return sorted(
        number
        for number in numbers
        if files.is_absent(layout.record(vm_dir, number)) and _holds_something(vm_dir, number)
    )


def _holds_something(vm_dir: str, disk: int) -> bool:
    plain = layout.disk(vm_dir, disk)
    if not os.path.islink(plain):
        return False
    found = _files_of(vm_dir, disk)
    is_ours = any(layers.backing_of(path)[0].startswith(f"{layout.base_store_of(vm_dir)}/") for path in found)
    return is_ours and any(map(_may_hold, found))


def _may_hold(path: str) -> bool:
    try:
        return not layers.is_empty(path)
    except DamagedLayer:
        return True


def _readable(vm_dir: str) -> Iterable[Record]:
    """Yield the records of a directory that are understood."""
    for number in records.numbers(vm_dir):
        try:
            record = records.as_found(vm_dir, number)
        except BadRecord:
            continue
        if record and record.is_local:
            # Where it lies now: a directory that was set aside has another name.
            yield record._replace(path=record.active(layout.disk(vm_dir, number)))


def others(vm: int, vm_dir: str) -> set[int]:
    """Return the disks of a VM whose leases another directory in its system datastore needs than `vm_dir`."""
    own = f"{os.path.dirname(vm_dir)}/{vm}"
    directories = [path for path in (own, *beside.listed(own, "kept")) if path != vm_dir]
    readable = [record for path in directories for record in _readable(path)]
    found = {
        record.disk
        for record in readable
        if _is_there(record) or on_devices.is_away(layout.plain(record.path))
    }
    return found | {number for path in directories for number in _unknown(path) if _files_of(path, number)}


def release(disk: DiskRef, but: str = "") -> None:
    """Give up the leases of a disk, but the one in the base directory `but`; none if another directory of its
    VM needs them.
    """
    if disk.disk not in others(disk.vm, disk.vm_dir):
        cache.release(cache.root_of(disk.vm_dir), disk.vm, disk.disk, but=but)


def _files_of(directory: str, disk: int) -> list[str]:
    """Return the files of a disk, whatever its record says."""
    plain = layout.disk(directory, disk)
    try:
        numbers = layers.numbered(layout.layers(plain))
    except OSError:  # one that cannot be looked at is there as well
        numbers = sorted(int(name) for name in os.listdir(layout.layers(plain)) if layout.is_number(name))
    found = [f"{layout.layers(plain)}/{number}" for number in numbers]
    return found if found or files.is_absent(plain, follow=True) else [plain]


def found(system: str, vm: int = -1) -> list[dict[str, object]]:
    """Return the kept diffs (of one VM) in a system datastore: where, of which disk and image, and the bytes
    that are not committed.
    """
    answer: list[dict[str, object]] = []
    for name in sorted(os.listdir(system)) if os.path.isdir(system) else ():
        own = layout.beside_named(name)
        if own is None or own.kind != "kept" or vm not in (-1, own.vm):
            continue
        for record in _readable(f"{system}/{name}"):
            answer += _said_of(f"{system}/{name}", own.vm, record)
        for number in _unknown(f"{system}/{name}"):
            held = _files_of(f"{system}/{name}", number)
            unknown = {"path": f"{system}/{name}", "vm": own.vm, "disk": number, "image": None, "size": 0}
            answer += [{**unknown, "bytes": sum(map(files.allocated, held))}] if held else []
    return answer


def _said_of(place: str, vm: int, record: Record) -> list[dict[str, object]]:
    """Say what a kept diff holds; of one that is damaged what is wrong with it, and that it may hold what all
    of its files have.
    """
    held = _files_of(place, record.disk)
    image = record.image.to_data() if record.image else None
    it: dict[str, object] = {"path": place, "vm": vm, "disk": record.disk, "image": image}
    try:
        if not held and not _is_there(record):
            return []
        return [
            {**it, "bytes": uncommitted.size(record), "size": qemu_img.virtual_size(record.path, "qcow2")}
        ]
    except (DamagedLayer, ToolFailed) as e:
        return [{**it, "bytes": sum(map(files.allocated, held)), "size": 0, "error": e.detail}]


def _is_there(record: Record) -> bool:
    return not files.is_absent(record.path, follow=True)
