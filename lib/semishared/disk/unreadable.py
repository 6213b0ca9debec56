# SPDX-License-Identifier: Apache-2.0
"""What of a VM's directory cannot be read, for `semishared doctor`: whoever removes something refuses by it,
or keeps what it is of.
"""

from __future__ import annotations

import os
from typing import Callable, Iterator

from ..errors import SemisharedError
from ..model import layout
from ..tools import files
from . import history, kept, on_devices, records, uncommitted


def listed(vm_dir: str) -> list[str]:
    """Say of each record, note and layer of a VM what is wrong with it; nothing of those that are on a device
    which is away.
    """
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
        names = sorted(os.listdir(layout.records(vm_dir)))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as e:
        wrong = e

        def refuse() -> None:
            raise wrong

        yield refuse
        return
    for name in names:
        number = layout.recorded(name)
        if number is not None:
            yield lambda number=number: _look_at(vm_dir, number)  # type: ignore[misc]
        elif layout.is_unsettled(name):
            yield lambda name=name: files.read_json(f"{layout.records(vm_dir)}/{name}")  # type: ignore[misc]
    for number in kept.lost(vm_dir):
        yield lambda number=number: records.must_be_there(vm_dir, number)  # type: ignore[misc]


def _look_at(vm_dir: str, number: int) -> None:
    record = records.as_found(vm_dir, number)
    if record and record.place.commits and not on_devices.is_away(layout.disk(vm_dir, number)):
        uncommitted.waiting(record._replace(path=record.active(layout.disk(vm_dir, number))))
