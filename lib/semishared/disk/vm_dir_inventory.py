# SPDX-License-Identifier: Apache-2.0
"""What a machine has of a VM, and whether another machine sees the very same directory.

Host names do not tell: many hosts may mount one export, under any path. So this machine writes a token of a
new name into the directory, and the other machine looks for it.
"""

from __future__ import annotations

import hashlib
import os
from typing import Iterable

from ..errors import BadRecord
from ..guest import job_lock
from ..model.disk import names as disk_names
from ..model.vm.move_steps import DescribedVm, FoundVm, MarkedVm, SeenVm
from ..tools import extents, files, locks
from ..tools.effects import point
from . import history, on_devices, records

HERE = "here"
"""Start of a token's name, which is that of a staged file."""


_RECORDS = f"{disk_names.SIDE}/"


def inventory(directory: str) -> set[str]:
    """Return the names of a VM directory's records, disks and layers."""
    found = set()
    for folder, prefix in ((directory, ""), (disk_names.records(directory), _RECORDS)):
        for name in _listed(folder):
            if disk_names.is_of_disks(name):
                found.add(f"{prefix}{name}")
                if disk_names.are_layers(name):
                    found.update(
                        f"{name}/{layer}"
                        for layer in _listed(f"{folder}/{name}")
                        if disk_names.is_number(layer)
                    )
    return found


def names_of(disk: int) -> set[str]:
    """Return the names of a disk; an inventory that has the disk has one of them at least."""
    return {disk_names.disk_name(disk), f"{_RECORDS}{disk_names.record_name(disk)}"}


def _listed(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def fingerprint(directory: str) -> str:
    """Return a hash that changes with every change of a file in the directory, '' if there is no file.

    A travelling base does not count: leases of other disks are links to the same file, and come and go.
    """
    lines = []
    for folder, _, names in on_devices.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            try:
                stat = os.lstat(path)
            except FileNotFoundError:
                continue
            if not disk_names.is_staged(name) and not disk_names.is_base_in_transit(path):
                lines.append(
                    f"{path[len(directory) :]} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} "
                    f"{stat.st_ctime_ns}"
                )
    return (
        hashlib.sha256("\n".join(sorted(lines)).encode("utf-8", "surrogateescape")).hexdigest()
        if lines
        else ""
    )


def allocated(directory: str) -> int:
    """Return the bytes that a copy of a directory's files takes; hard links count once."""
    return _held(
        os.path.join(folder, name) for folder, _, names in on_devices.walk(directory) for name in names
    )


def _held(paths: Iterable[str]) -> int:
    found: dict[tuple[int, int], int] = {}
    for path in paths:
        try:
            file, held = extents.held(path)
        except OSError:
            continue  # gone, or not a plain file
        found[file] = held
    return sum(found.values())


def bases(directory: str) -> tuple[str, ...]:
    """Return the bases below a VM directory's disks; none if a record is unreadable."""
    try:
        found = records.records(directory)
    except BadRecord:
        return ()
    return tuple(
        sorted({record.of_image.base_name for record in found if record.place.leases and record.image})
    )


def has_diffs(directory: str) -> bool:
    """Return True if a disk of a VM directory is a diff; False if a record is unreadable."""
    try:
        return any(record.place.commits for record in records.records(directory))
    except BadRecord:
        return False


def classes(directory: str) -> dict[str, list[str]]:
    """Return the classes of devices that disks want, by number; none if a record is unreadable."""
    try:
        return {
            str(record.disk): list(record.classes) for record in records.records(directory) if record.classes
        }
    except BadRecord:
        return {}


def sizes(directory: str) -> dict[str, int]:
    """Return the bytes that a copy of each disk's layers takes, by number."""
    found = {}
    for name in _listed(directory):
        disk = disk_names.disk_named(disk_names.disk_of(name)) if disk_names.are_layers(name) else None
        # Layers on a missing device are left out; the caller need not fail.
        if disk is not None and os.path.isdir(f"{directory}/{name}"):
            found[str(disk)] = _held(entry.path for entry in os.scandir(f"{directory}/{name}"))
    return found


def describe(directory: str) -> SeenVm:
    """Return what there is of a VM directory; without our records it is a remainder, or another driver's."""
    is_whole = os.path.isdir(disk_names.records(directory))
    return SeenVm(os.path.isdir(directory), is_whole, len(inventory(directory)), history.seq_of(directory))


def records_of(vm_dir: str) -> DescribedVm:
    """Return the records of a VM's disks, and whether its directory is `present`."""
    return DescribedVm(os.path.isdir(vm_dir), [record.to_data() for record in records.records(vm_dir)])


# -- the same directory under two names -------------------------------------------------------------


def mark(vm: int, vm_dir: str) -> MarkedVm:
    """Write a token into the VM directory and its parent, by which another host recognizes the directory.

    Both: another NFS client may have cached for a while that the VM directory was not there.
    """
    if locks.is_held(disk_names.disks_lock(disk_names.base_store_of(vm_dir), vm)):
        # A move of a disk between devices, which oned did not start, would change the directory.
        job_lock.take(vm, vm_dir)
    parent = os.path.dirname(vm_dir)
    for folder in (parent, vm_dir):
        files.remove_stale(folder)
    found = seen(vm_dir)
    token = os.path.basename(files.staged_name(f"{parent}/{HERE}-{vm}"))
    if not found.present:
        return found
    for folder in (vm_dir, parent):
        try:
            os.close(os.open(f"{folder}/{token}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except OSError:
            break  # a full disk must not stop the move; the fingerprint identifies the directory as well
    point("directory marked")
    return found._replace(token=token, seen=fingerprint(vm_dir))


def seen(vm_dir: str) -> MarkedVm:
    """Return what `mark` does, for a directory without a token."""
    found = MarkedVm(**describe(vm_dir)._asdict(), token="", seen="", bytes=0, bases=())
    if not found.present:
        return found
    return found._replace(
        seen=fingerprint(vm_dir),
        bytes=allocated(vm_dir),
        bases=bases(vm_dir),
        diffs=has_diffs(vm_dir),
        classes=classes(vm_dir),
        sizes=sizes(vm_dir),
    )


def unmark(vm_dir: str, token: str) -> None:
    """Remove the token."""
    if disk_names.is_staged(token) and "/" not in token:
        for folder in (os.path.dirname(vm_dir), vm_dir):
            files.unlink(f"{folder}/{token}")


def look(vm_dir: str, token: str, seen: str) -> FoundVm:
    """Return what there is of a VM directory, and whether it has this token or fingerprint."""
    is_same = _has_token(vm_dir, token) or bool(seen and fingerprint(vm_dir) == seen)
    return FoundVm(**describe(vm_dir)._asdict(), same=is_same)


def _has_token(directory: str, token: str) -> bool:
    for folder in (os.path.dirname(directory), directory) if token else ():
        files.refresh(folder)
        try:
            os.close(os.open(f"{folder}/{token}", os.O_RDONLY))
            return True
        except OSError:
            pass
    return False
