# SPDX-License-Identifier: Apache-2.0
"""The system datastores below DATASTORE_LOCATION; image datastores are mounted beside them and may hang.

So a mount or a link there is not touched before it has answered, within a limit, whether it is a system
datastore of semishared (`.monitor`). A program asks, as a process in a hung system call cannot be stopped. A
plain directory answers as long as DATASTORE_LOCATION's own file system does.

A system datastore that lost its mount looks empty: the layers on devices, and the leases, of all its VMs
would seem unused. So the host records its mounts (`<root>/mounted/<system>`); if one is missing, the list of
VMs is unknown.
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
"""Seconds after which an access counts as hung."""
AGAIN_S = 60.0
"""Seconds for which a hung datastore is not asked again."""
_silent: dict[str, float] = {}


def systems(location: str, *, whole: bool = False) -> list[str]:
    """Return the numbers of the datastores that can hold VMs, in order; of mounts only semishared's own.

    With `whole` raise ToolTimeout if one does not answer, SystemAway if one is not mounted: its VMs must not
    count as gone.
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
    """Yield the directories of VMs, and those beside them (disk/vm_dir_siblings.py).

    Raise ToolTimeout if a datastore does not answer, SystemAway.
    """
    for parent in [f"{location}/{system}" for system in systems(location, whole=True)]:
        for name in os.listdir(parent) if os.path.isdir(parent) else ():
            if (disk_names.is_number(name) or disk_names.beside_named(name)) and not os.path.islink(
                f"{parent}/{name}"
            ):
                yield f"{parent}/{name}"


def mark(vm_dir: str) -> None:
    """Make a VM's system datastore, with `.monitor` so that the probe asks our driver; raise SystemAway."""
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
    """Raise SystemAway if a system datastore (or any) lost its mount, ToolTimeout if one does not answer."""
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
    """Record that a VM's system datastore is a mount here, or a link, if it is one."""
    root, path = disk_names.base_store(location), f"{os.path.realpath(location)}/{system}"
    note = base_names.mounted(root, system)
    if not files.is_absent(note) or not (
        os.path.islink(path) or any(mount.point == path for mount in mounts.listed())
    ):
        return
    with suppress(OSError, NoSpace):  # the next action records it
        os.makedirs(base_names.mounted(root), exist_ok=True)
        files.write(note, b"")


def _noted(root: str) -> list[str]:
    try:
        return sorted(filter(disk_names.is_number, os.listdir(base_names.mounted(root))))
    except FileNotFoundError:
        return []


def is_ours(system: str) -> bool:
    """Return True for a system datastore of semishared; raise ToolTimeout if it does not answer."""
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
    """Return False if `path` is absent or not readable for us; else raise ToolTimeout, as grep failed."""
    try:
        with open(path, "rb") as file:
            file.read(1)
        why = "grep was ended"
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    except OSError as e:
        why = str(e.strerror)
    raise ToolTimeout(f"{path} on {os.uname().nodename} cannot be read: {why}")
