# SPDX-License-Identifier: Apache-2.0
"""The system datastores below DATASTORE_LOCATION; image datastores are mounted beside them and may hang.

So what is mounted there, or a link, is not touched before it has said within a limit whose it is
(`.monitor`), and by a program: who is in a hung system call cannot be stopped. A plain directory of the file
system of DATASTORE_LOCATION is as well as that.

One that is not mounted, as it used to be, looks like an empty one: layers on devices, and leases, of all VMs
in it would belong to nobody. So it is noted what is mounted (`<root>/mounted/<system>`), and where that is
missing nobody knows what VMs there are.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Iterator

from .. import NAME
from ..errors import NoSpace, SystemAway, ToolFailed, ToolTimeout
from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..tools import files, mounts
from ..tools.run import run

ANSWER_S = 3
"""What takes longer to answer hangs."""
AGAIN_S = 60.0
"""Seconds for which it is believed that something hangs."""
_silent: dict[str, float] = {}


def systems(location: str, *, whole: bool = False) -> list[str]:
    """Return the numbers of directories in which VMs can be, in order; of what is mounted only the system
    datastores of ours.

    With `whole` raise ToolTimeout where something does not answer, or is not mounted: there may be VMs in it,
    which nobody is to take for gone.
    """
    if whole:
        check_mounted(location)
    place, mounted = os.path.realpath(location), {mount.point for mount in mounts.listed()}
    found = []
    for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
        if not disk_names.is_number(entry.name):
            continue
        path = f"{place}/{entry.name}"
        try:
            if not (path in mounted or entry.is_symlink()) or is_ours(path):
                found.append(entry.name)
        except ToolTimeout:
            if whole:
                raise
    return found


def directories(location: str) -> Iterator[str]:
    """Yield the directories of VMs, and those beside them (disk/vm_dir_siblings.py); raise ToolTimeout where
    something does not answer.
    """
    for parent in [f"{location}/{system}" for system in systems(location, whole=True)]:
        for name in os.listdir(parent) if os.path.isdir(parent) else ():
            if (disk_names.is_number(name) or disk_names.beside_named(name)) and not os.path.islink(
                f"{parent}/{name}"
            ):
                yield f"{parent}/{name}"


def mark(vm_dir: str) -> None:
    """Make the system datastore of a VM, with `.monitor` so that the host's probe asks our driver; raise
    SystemAway.
    """
    system = os.path.dirname(vm_dir)
    where = os.path.split(system)
    check_mounted(*where)
    os.makedirs(system, exist_ok=True)
    files.remove_stale(system)
    try:
        with open(disk_names.monitor(system), encoding="utf-8") as file:
            marked = file.read(100) == f"{NAME}\n"
    except OSError:
        marked = False
    if not marked:
        files.write(disk_names.monitor(system), f"{NAME}\n".encode())
    _note_mounted(*where)


def check_mounted(location: str, system: str = "") -> None:
    """Raise SystemAway if a system datastore (or any) is not mounted that was, ToolTimeout if one does not
    answer.
    """
    root, place = disk_names.base_store(location), os.path.realpath(location)
    noted = [
        number
        for number in _noted(root)
        if system in ("", number) and not files.is_absent(f"{place}/{number}")
    ]
    points = {mount.point for mount in mounts.listed()} if noted else set()
    for number in noted:
        path = f"{place}/{number}"
        if path not in points and not (os.path.islink(path) and is_ours(path)):
            raise SystemAway(
                f"{path} on {os.uname().nodename} is not mounted, and was "
                f"({base_names.mounted(root, number)})"
            )


def _note_mounted(location: str, system: str) -> None:
    """Note that a system datastore, in which a VM is now, is mounted here, or a link to elsewhere, if it
    is.
    """
    root, path = disk_names.base_store(location), f"{os.path.realpath(location)}/{system}"
    note = base_names.mounted(root, system)
    if not files.is_absent(note) or not (
        os.path.islink(path) or any(mount.point == path for mount in mounts.listed())
    ):
        return
    with suppress(OSError, NoSpace):  # Who comes next notes it.
        os.makedirs(base_names.mounted(root), exist_ok=True)
        files.write(note, b"")


def _noted(root: str) -> list[str]:
    try:
        return sorted(filter(disk_names.is_number, os.listdir(base_names.mounted(root))))
    except FileNotFoundError:
        return []


def is_ours(system: str) -> bool:
    """Tell whether something is a system datastore of ours; raise ToolTimeout if it does not answer."""
    if time.monotonic() - _silent.get(system, -AGAIN_S) < AGAIN_S:
        raise ToolTimeout(f"{system} on {os.uname().nodename} does not answer")
    path = disk_names.monitor(system)
    try:
        return bool(run(["grep", "-sx", "semishared", path], timeout_s=ANSWER_S, ok=(0, 1)))
    except ToolTimeout:
        _silent[system] = time.monotonic()
        raise ToolTimeout(f"{system} on {os.uname().nodename} does not answer") from None
    except ToolFailed:
        return _let_read(path)


def _let_read(path: str) -> bool:
    """Return False for what is not there, or is kept from us: raise ToolTimeout where grep failed for any
    other reason.
    """
    try:
        with open(path, "rb") as file:
            file.read(1)
        why = "grep was ended"
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError as e:
        why = str(e.strerror)
    raise ToolTimeout(f"{path} on {os.uname().nodename} cannot be read: {why}")
