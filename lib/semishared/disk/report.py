# SPDX-License-Identifier: Apache-2.0
"""The disks on a machine, from their records, for `semishared status` and `semishared publish`.

And the unreadable records, for `semishared doctor`; and the bases in memory that guests need to boot: a lost
one is made again.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Callable, Iterable, Iterator

from ..base import cache
from ..device import hot
from ..errors import BadRecord, SemisharedError
from ..model.base.steps import HotBase, ReportDisks, Reported, ReportedDisk, ReportedVm, ReportVms
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..tools import files, layers, progress
from ..tools.files import allocated
from . import history, on_devices, records, retained_diffs

if TYPE_CHECKING:
    from ..base import room


def report(step: ReportDisks) -> Reported:
    """Return the VM directories of the system datastores: their disks' records, and bytes on this host."""
    found: list[ReportedVm] = []
    put_aside, errors = [], []
    for system in step.systems:
        directory = f"{step.location}/{system}"
        try:
            put_aside += retained_diffs.found(directory)
            names = sorted(os.listdir(directory)) if os.path.lexists(directory) else []
        except OSError as e:
            errors.append(f"{directory} on {os.uname().nodename} cannot be read: {e.strerror}")
            continue
        found += _of_vms(directory, system, filter(disk_names.is_number, names))
    return Reported(found, put_aside, errors)


def report_some(step: ReportVms) -> Reported:
    """Return the same of some VMs, each in the system datastores in which it has a directory."""
    found: list[ReportedVm] = []
    for system in step.systems:
        directory = f"{step.location}/{system}"
        names = (str(vm) for vm in step.vms)
        found += _of_vms(directory, system, (n for n in names if not files.is_absent(f"{directory}/{n}")))
    return Reported(found, [], [])


def _of_vms(directory: str, system: int, names: Iterable[str]) -> Iterator[ReportedVm]:
    for name in names:
        progress.touch()
        path = f"{directory}/{name}"
        try:
            numbers = records.numbers(path)
        except NotADirectoryError:
            continue  # a file of another program, not a VM directory
        except OSError as e:
            yield ReportedVm(int(name), system, [], str(e))
            continue
        yield _of_vm(path, system, numbers)


def _of_vm(vm_path: str, system: int, numbers: list[int]) -> ReportedVm:
    """Return the disks of a VM with readable records, and what is wrong with the others, by number."""
    disks, wrong = [], {}
    for number in numbers:
        try:
            record = records.read_record(vm_path, number)
            disks += [_disk(vm_path, record)] if record else []
        except (SemisharedError, OSError) as e:
            wrong[str(number)] = getattr(e, "detail", str(e))
    return ReportedVm(int(os.path.basename(vm_path)), system, disks, "; ".join(wrong.values()), wrong)


def _disk(vm_path: str, record: Record) -> ReportedDisk:
    disk = record.disk
    size, snapshots, virtual = 0, 0, 0
    numbers: list[int] = []
    if record.is_local:
        plain = disk_names.disk(vm_path, disk)
        folder = disk_names.layers(plain)
        numbers = layers.numbered(folder) if os.path.isdir(folder) else []
        files = [f"{folder}/{number}" for number in numbers] or [plain]
        below = [number for number in numbers if number != disk_names.DELTA_NUMBER]
        size, snapshots = sum(map(allocated, files)), max(len(below) - 1, 0)
        virtual = layers.virtual_size(plain)
    path = record.network.name if record.network else record.path
    return ReportedDisk(
        disk,
        record.how,
        record.place.where,
        record.format,
        path,
        size,
        0 if record.place.commits else snapshots,
        record.image.to_data() if record.image else None,
        record.io_class,
        retained_diffs.waiting_bytes(record) if record.place.commits else None,
        on_devices.of_disk(vm_path, disk).mount(),
        said(vm_path, record),
        disk_names.DELTA_NUMBER in numbers,
        virtual,
    )


# What is unreadable in a VM directory, for `semishared doctor`; a removal keeps it, or is refused.


def listed(vm_dir: str) -> list[str]:
    """Return what is wrong with a VM's records, notes and layers; devices that are away are left out."""
    found = []
    for look in _looks(vm_dir):
        try:
            look()
        except SemisharedError as e:
            found.append(e.detail)
        except OSError as e:
            found.append(f"{e.filename or vm_dir} on {os.uname().nodename} cannot be read: {e.strerror}")
    return list(dict.fromkeys(found))


def _looks(vm_dir: str) -> Iterator[Callable[[], object]]:
    yield lambda: history.check(vm_dir)
    try:
        names = sorted(os.listdir(disk_names.records(vm_dir)))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        wrong = e

        def refuse() -> None:
            raise wrong

        yield refuse
        return
    for name in names:
        number = disk_names.recorded(name)
        if number is not None:
            yield lambda number=number: _look_at(vm_dir, number)  # type: ignore[misc]
        elif disk_names.is_unsettled(name):
            yield lambda name=name: files.read_json(f"{disk_names.records(vm_dir)}/{name}")  # type: ignore[misc]
    for number in retained_diffs.lost(vm_dir):
        yield lambda number=number: records.must_be_there(vm_dir, number)  # type: ignore[misc]


def _look_at(vm_dir: str, number: int) -> None:
    record = records.as_found(vm_dir, number)
    if record and record.place.commits and not on_devices.is_away(disk_names.disk(vm_dir, number)):
        retained_diffs.waiting_layers(record._replace(path=record.active(disk_names.disk(vm_dir, number))))


def before_boot(vm: int, vm_dir: str, ask: room.Ask | None, warn: Callable[[str], None]) -> None:
    """Fetch lost bases of a VM's disks again, and copy into memory those that its guest reads there."""
    from . import create

    create.replace_lost_bases(vm, vm_dir, ask, warn)
    provide(vm, vm_dir, warn)


def provide(vm: int, vm_dir: str, warn: Callable[[str], None]) -> None:
    """Copy the bases that the VM's disks want into memory; call `warn` with why one is read from disk."""
    try:
        found = [record for record in records.records(vm_dir) if record.reads_hot]
    except BadRecord:
        return  # deploy reports it
    for record in found:
        base = _base(vm_dir, record)
        lease = base.lease(vm, record.disk)
        if os.path.exists(lease):
            try:
                why = hot.provide(
                    cache.root_of(vm_dir), os.path.basename(base.directory), lease, record.of_image.format
                )
            except (SemisharedError, OSError) as e:
                # The base on disk is good: the VM boots in any case.
                why = e.detail if isinstance(e, SemisharedError) else str(e)
            if why:
                warn(f"the base of disk {record.disk} is read from disk, not from memory: {why}")


def _base(vm_dir: str, record: Record) -> cache.Base:
    return cache.named(cache.root_of(vm_dir), record.of_image, record.of_image.generation)


def see(vm_dir: str, record: Record, lease: str) -> str:
    """Return the copy in memory of the base with the lease `lease`; '' if there is none."""
    return _copy(vm_dir, record, lease, hot.found)


def hold(vm_dir: str, record: Record, lease: str) -> str:
    """Return the same copy, which is kept until this process ends."""
    return _copy(vm_dir, record, lease, hot.hold)


def _copy(vm_dir: str, record: Record, lease: str, find: Callable[[str, str], str]) -> str:
    base, vm = _base(vm_dir, record), os.path.basename(vm_dir)
    # oned writes paths with a double slash.
    if not vm.isdigit() or os.path.normpath(lease) != os.path.normpath(base.lease(int(vm), record.disk)):
        return ""
    return find(cache.root_of(vm_dir), os.path.basename(base.directory))


def said(vm_dir: str, record: Record) -> HotBase | None:
    """Return where the copy is, or why there is none; None for a disk that wants no copy."""
    if not record.reads_hot:
        return None
    root, base = cache.root_of(vm_dir), _base(vm_dir, record)
    path = hot.found(root, os.path.basename(base.directory))
    try:
        size = os.stat(base.lease(int(os.path.basename(vm_dir)), record.disk)).st_size
    except OSError:
        return HotBase(path, "" if path else "the base is not here")
    return HotBase(path, "" if path else hot.why_not(root, size) or "from the next boot on")
