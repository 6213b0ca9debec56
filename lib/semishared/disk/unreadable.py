# SPDX-License-Identifier: Apache-2.0
"""What of a VM's directory cannot be read, for `semishared doctor`; a removal keeps it, or is refused."""

from __future__ import annotations

import os
from typing import Callable, Iterator

from ..errors import SemisharedError
from ..model.disk import names as disk_names
from ..tools import files
from . import history, on_devices, records, retained_diffs


def listed(vm_dir: str) -> list[str]:
    """Say what is wrong with each record, note and layer of a VM, but for devices that are away."""
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
