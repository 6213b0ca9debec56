# SPDX-License-Identifier: Apache-2.0
"""Uncommitted diffs that were to be deleted: kept beside the VM directory until committed or discarded.

    <system>/.kept-VM-RANDOM/
        disk.N.snap/                        the layers, moved by one rename
        .semishared/disk.N.json  vm.json    the disk's record, and the SEQ of the VM's history

A record that this version does not understand is kept as it is: a newer version may have written it for a
diff.

A kill before the rename leaves a directory without layers, which is worthless; after it, a complete one. The
disk keeps its lease on the base (vm_dir.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Iterable

from ..base import cache
from ..errors import BadRecord, DamagedLayer, DeviceMissing, LostWithMemory, StaleDirectory, ToolFailed
from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.steps import DiskRef
from ..tools import beneath, files, layers, qemu_img
from ..tools.effects import point
from . import on_devices, records, vm_dir_siblings

if TYPE_CHECKING:
    from ..model.base.steps import KeptDisk
    from ..model.disk.commit_steps import Kept


def chain_of(record: Record) -> list[str]:
    """Return the layers of a diff, the lowest first; none if they are missing or on a device that is away.

    Raise DamagedLayer if a layer is missing that the record or the layer above names, or if a header is
    damaged.
    """
    folder, number = os.path.dirname(record.path), disk_names.layer_of(record.path)
    found: list[str] = []
    here = os.uname().nodename
    try:
        # An open directory stays complete, even if its device is set aside meanwhile (device/offline.py).
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        while number:
            below = layers.backing_of(f"{beneath.path_of(fd)}/{number}")[0]
            if not (disk_names.is_number(below) or below.startswith(("/", "json:"))):
                # It names no file, or one that our layers never lie over.
                raise DamagedLayer(f"{folder}/{number} on {here} does not say any more what it lies over")
            found.insert(0, number)
            number = below if disk_names.is_number(below) else ""
            if number in found:
                raise DamagedLayer(
                    f"{folder}/{found[0]} on {here} says that it lies over {number}, which lies over it"
                )
    except FileNotFoundError:
        if _is_expected(record, found):
            return []
        named = f"layer {found[0]}" if found else "its record"
        raise DamagedLayer(f"{folder}/{number} on {here} is not there, though {named} names it") from None
    except OSError as e:
        raise DamagedLayer(f"{folder}/{number} on {here} cannot be read: {e.strerror}") from None
    finally:
        os.close(fd)
    return [f"{folder}/{number}" for number in found]


def _is_expected(record: Record, found: list[str]) -> bool:
    """Return True if the active layer is missing for a known reason.

    Its disk is being removed (the link goes first), or it is a delta, which stayed with its guest.
    """
    plain = disk_names.plain(record.path)
    is_removed = not is_kept(os.path.dirname(plain)) and files.is_absent(plain)
    return not found and (
        is_removed or disk_names.is_delta(record.path) or not layers.numbered(disk_names.layers(plain))
    )


def waiting_layers(record: Record) -> list[str]:
    """Return the layers of a diff, the lowest first, whose content the image does not have.

    The record and the layers' headers tell; each header confirms the layer below.
    """
    return among(record, chain_of(record))


def among(record: Record, found: list[str]) -> list[str]:
    """Return those of the layers `found` in the chain whose content the image does not have."""
    done = [number for number, path in enumerate(found) if disk_names.layer_of(path) == str(record.committed)]
    return [path for path in found[done[0] + 1 if done else 0 :] if not layers.is_empty(path)]


def is_kept(vm_dir: str) -> bool:
    """Return True if a directory holds kept diffs."""
    own = disk_names.beside_named(os.path.basename(vm_dir))
    return own is not None and own.kind == "kept"


def may_wait(record: Record) -> bool:
    """Return True if a diff holds uncommitted content, or that is unknown."""
    try:
        return bool(waiting_layers(record))
    except DamagedLayer:
        return True


def waiting_bytes(record: Record) -> int:
    """Return the uncommitted bytes of a diff."""
    return sum(map(files.allocated, waiting_layers(record)))


def keep(disk: DiskRef, record: Record, *, is_last: bool = True) -> str:
    """Move an uncommitted diff out of the VM directory; return its directory, '' if all is committed.

    The caller holds the VM. Without `is_last` a newer diff takes its place, so it is older than any claim on
    the image.
    """
    if not record.place.commits:
        return ""
    if not _may_wait(disk, record):
        return ""
    if is_kept(disk.vm_dir):
        return disk.vm_dir
    place = _new_place(disk)
    target = disk_names.disk(place, disk.disk)
    records.write_record(
        place, record._replace(path=disk_names.layer(target, disk_names.layer_of(record.path)))
    )
    if is_last:
        _keep_history(disk, place)
    _move(disk, place, disk_names.layers(disk.path))
    return place


def _may_wait(disk: DiskRef, record: Record) -> bool:
    try:
        found = chain_of(record)
        return bool(among(record, found)) if found else _is_unseen(disk, record)
    except DamagedLayer:
        return True


def _is_unseen(disk: DiskRef, record: Record) -> bool:
    """Return True if the content of a diff without visible layers is unknown: its device is, or was, away."""
    try:
        return record.layer in on_devices.listed(disk_names.layers(disk.path))
    except (DeviceMissing, LostWithMemory):
        return True


def keep_unknown(disk: DiskRef) -> str:
    """Move a disk out of the VM directory if its record is unintelligible and may be a diff's.

    Return its directory, '' if it stays.
    """
    if disk.disk not in _unknown(disk.vm_dir):
        return ""
    found = [
        path
        for path in (disk_names.layers(disk.path), disk.path)
        if not files.is_absent(path, follow=True) or on_devices.is_away(path)
    ]
    if is_kept(disk.vm_dir) or not found:
        return disk.vm_dir if found else ""
    place = _new_place(disk)
    data = files.hint(disk_names.record(disk.vm_dir, disk.disk))
    # Only the path is adapted: every version so far has that field. An unreadable record has not even that.
    path = str(data.get("path", "")).replace(f"{disk.vm_dir}/", f"{place}/", 1)
    files.write_json(disk_names.record(place, disk.disk), {**data, "path": path})
    _keep_history(disk, place)
    _move(disk, place, found[0])
    return place


def _new_place(disk: DiskRef) -> str:
    place = vm_dir_siblings.new_name("kept", f"{os.path.dirname(disk.vm_dir)}/{disk.vm}")
    os.makedirs(disk_names.records(place))
    return place


def _keep_history(disk: DiskRef, place: str) -> None:
    if not files.is_absent(disk_names.history_note(disk.vm_dir)):
        os.link(disk_names.history_note(disk.vm_dir), disk_names.history_note(place))


def _move(disk: DiskRef, place: str, path: str) -> None:
    files.fsync(disk_names.records(place))
    point("kept directory made")
    os.rename(path, f"{place}/{os.path.basename(path)}")
    for directory in (place, disk.vm_dir, os.path.dirname(place)):
        files.fsync(directory)
    point("diff kept")


def said(place: str) -> str:
    """Return for messages where a diff is kept, '' if it is not."""
    return f"{place} on {os.uname().nodename}" if place else ""


def keep_all(vm: int, vm_dir: str) -> list[str]:
    """Keep the uncommitted diffs of a VM that is to be removed, also of its killed moves; return where."""
    found = []
    for directory in (vm_dir, *vm_dir_siblings.listed(vm_dir, "outgoing")):
        found += _keep_all_of(vm, directory)
    return [said(place) for place in found if place]


def _keep_all_of(vm: int, directory: str) -> list[str]:
    """Keep the uncommitted diffs of one directory, whose VM does not run; return where, '' for none."""
    if any(device_names.left_named(name) is not None for name in on_devices.links(directory)):
        from ..guest import go_over_files  # not for every removal

        # Layers of an unfinished move between devices are where the record says, not where the link leads.
        go_over_files.put_all_back(directory)
    found = [keep(DiskRef(vm, record.disk, directory), record) for record in _readable(directory)]
    return found + [keep_unknown(DiskRef(vm, number, directory)) for number in _unknown(directory)]


def keep_stale(vm: int, vm_dir: str) -> list[str]:
    """Keep the uncommitted diffs of a directory whose VM another host has taken over; return where.

    A directory that was moved away needs nothing kept: the VM has its content elsewhere.
    """
    from . import epoch_check

    if not _unknown(vm_dir) and not any(record.place.commits for record in _readable(vm_dir)):
        return []
    try:
        if not epoch_check.check(vm, vm_dir):
            return []
    except StaleDirectory:
        pass
    return [said(place) for place in _keep_all_of(vm, vm_dir) if place]


def keep_set_aside(vm: int, directory: str) -> list[str]:
    """Keep the uncommitted diffs of a directory that a killed move has set aside; return where.

    If the VM is on this host, its directory has them as well.
    """
    if os.path.isdir(f"{os.path.dirname(directory)}/{vm}"):
        return keep_stale(vm, directory)
    return [said(place) for place in _keep_all_of(vm, directory) if place]


def _unknown(vm_dir: str) -> list[int]:
    """Return the disks of a directory whose records are unintelligible and may be diffs'."""
    found = []
    for number in records.numbers(vm_dir):
        try:
            records.as_found(vm_dir, number)
        except BadRecord:
            if records.may_commit(vm_dir, number):
                found.append(number)
    return found + lost(vm_dir)


def lost(vm_dir: str) -> list[int]:
    """Return the disks of a directory that have data over a base, but no record.

    A removal leaves no such disk: the record comes before the disk and goes after it.
    """
    try:
        names = [name for name in os.listdir(vm_dir) if disk_names.are_layers(name)]
    except FileNotFoundError:
        return []
    numbers = [
        number for number in map(disk_names.disk_named, map(disk_names.disk_of, names)) if number is not None
    ]
    return sorted(
        number
        for number in numbers
        if files.is_absent(disk_names.record(vm_dir, number)) and _holds_something(vm_dir, number)
    )


def _holds_something(vm_dir: str, disk: int) -> bool:
    plain = disk_names.disk(vm_dir, disk)
    if not os.path.islink(plain):
        return False
    found = _files_of(vm_dir, disk)
    is_ours = any(
        layers.backing_of(path)[0].startswith(f"{disk_names.base_store_of(vm_dir)}/") for path in found
    )
    return is_ours and any(map(_may_hold, found))


def _may_hold(path: str) -> bool:
    try:
        return not layers.is_empty(path)
    except DamagedLayer:
        return True


def _readable(vm_dir: str) -> Iterable[Record]:
    """Yield the readable records of local disks in a directory."""
    for number in records.numbers(vm_dir):
        try:
            record = records.as_found(vm_dir, number)
        except BadRecord:
            continue
        if record and record.is_local:
            # With its present path: a directory that was set aside has another name.
            yield record._replace(path=record.active(disk_names.disk(vm_dir, number)))


def others(vm: int, vm_dir: str) -> set[int]:
    """Return the disks of a VM whose leases another directory than `vm_dir` in its system datastore needs."""
    own = f"{os.path.dirname(vm_dir)}/{vm}"
    directories = [path for path in (own, *vm_dir_siblings.listed(own, "kept")) if path != vm_dir]
    readable = [record for path in directories for record in _readable(path)]
    found = {
        record.disk
        for record in readable
        if _is_there(record) or on_devices.is_away(disk_names.plain(record.path))
    }
    return found | {number for path in directories for number in _unknown(path) if _files_of(path, number)}


def release(disk: DiskRef, but: str = "") -> None:
    """Free a disk's leases, except on the base `but`; none if another directory of its VM needs them."""
    if disk.disk not in others(disk.vm, disk.vm_dir):
        cache.release(cache.root_of(disk.vm_dir), disk.vm, disk.disk, but=but)


def _files_of(directory: str, disk: int) -> list[str]:
    """Return the files of a disk, whatever its record says."""
    plain = disk_names.disk(directory, disk)
    try:
        numbers = layers.numbered(disk_names.layers(plain))
    except OSError:  # an unreadable layer counts as well
        numbers = sorted(
            int(name) for name in os.listdir(disk_names.layers(plain)) if disk_names.is_number(name)
        )
    found = [f"{disk_names.layers(plain)}/{number}" for number in numbers]
    return found if found or files.is_absent(plain, follow=True) else [plain]


def find_kept(vm: int, location: str, systems: tuple[int, ...]) -> Kept:
    """Return what is `kept` of a VM in the system datastores of this host, as `found` does."""
    from ..model.disk.commit_steps import Kept

    return Kept([one for system in systems for one in found(f"{location}/{system}", vm)])


def found(system: str, vm: int = -1) -> list[KeptDisk]:
    """Return the kept diffs (of one VM) in a system datastore: path, VM, disk, image, uncommitted bytes."""
    from ..model.base.steps import KeptDisk

    answer = []
    for name in sorted(os.listdir(system)) if os.path.isdir(system) else ():
        own = disk_names.beside_named(name)
        if own is None or own.kind != "kept" or vm not in (-1, own.vm):
            continue
        for record in _readable(f"{system}/{name}"):
            answer += _said_of(f"{system}/{name}", own.vm, record)
        for number in _unknown(f"{system}/{name}"):
            held = _files_of(f"{system}/{name}", number)
            size = sum(map(files.allocated, held))
            answer += [KeptDisk(f"{system}/{name}", own.vm, number, None, size, 0)] if held else []
    return answer


def _said_of(place: str, vm: int, record: Record) -> list[KeptDisk]:
    """Return a kept diff's row; a damaged one has an `error`, and counts the bytes of all its files."""
    from ..model.base.steps import KeptDisk

    held = _files_of(place, record.disk)
    image = record.image.to_data() if record.image else None
    it = KeptDisk(place, vm, record.disk, image, 0, 0)
    try:
        if not held and not _is_there(record):
            return []
        size = qemu_img.virtual_size(record.path, "qcow2")
        return [it._replace(bytes=waiting_bytes(record), size=size)]
    except (DamagedLayer, ToolFailed) as e:
        return [it._replace(bytes=sum(map(files.allocated, held)), error=e.detail)]


def _is_there(record: Record) -> bool:
    return not files.is_absent(record.path, follow=True)
