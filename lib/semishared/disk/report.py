# SPDX-License-Identifier: Apache-2.0
"""The disks on a machine, from their records, for `semishared status`.

And the unreadable records, for `semishared doctor`.
"""

from __future__ import annotations

import os
from typing import Callable, Iterator

from ..errors import SemisharedError
from ..model.base.steps import ReportDisks, Reported, ReportedDisk, ReportedVm
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..tools import files, layers, progress
from ..tools.files import allocated
from . import history, hot_bases, on_devices, records, retained_diffs


def report(step: ReportDisks) -> Reported:
    """Return the VM directories of the system datastores: their disks' records, and bytes on this host."""
    found, put_aside, errors = [], [], []
    for system in step.systems:
        directory = f"{step.location}/{system}"
        try:
            put_aside += retained_diffs.found(directory)
            names = sorted(os.listdir(directory)) if os.path.lexists(directory) else []
        except OSError as e:
            errors.append(f"{directory} on {os.uname().nodename} cannot be read: {e.strerror}")
            continue
        for name in names:
            if not disk_names.is_number(name):
                continue
            progress.touch()
            path = f"{directory}/{name}"
            try:
                numbers = records.numbers(path)
            except NotADirectoryError:
                continue  # a file of another program, not a VM directory
            except OSError as e:
                found.append(ReportedVm(int(name), system, [], str(e)))
                continue
            found.append(_of_vm(path, system, numbers))
    return Reported(found, put_aside, errors)


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
    size, snapshots = 0, 0
    if record.is_local:
        plain = disk_names.disk(vm_path, disk)
        folder = disk_names.layers(plain)
        numbers = layers.numbered(folder) if os.path.isdir(folder) else []
        files = [f"{folder}/{number}" for number in numbers] or [plain]
        size, snapshots = sum(map(allocated, files)), max(len(numbers) - 1, 0)
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
        hot_bases.said(vm_path, record),
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
