# SPDX-License-Identifier: Apache-2.0
"""Directories beside a VM directory: not published yet, or not the VM's any more.

    .incoming-VM-RANDOM     received by one action, which holds locks/incoming-VM-RANDOM while it lives
    .outgoing-VM-RANDOM     set aside by a move whose own directory takes the place
    .removed-VM-RANDOM      removed: a removal begins with this rename, so a remainder never looks like a VM

0.1.0 had `.incoming-VM` and `.outgoing-VM`. An action that makes or removes the VM's directory sweeps those
that no process works on.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ..errors import SemisharedError, ToolFailed
from ..model.disk import names as disk_names
from ..tools import files, locks, run
from ..tools.effects import point
from . import on_devices


def new_name(kind: str, vm_dir: str) -> str:
    """Return a new name of this kind beside a VM directory."""
    parent, name = os.path.split(vm_dir)
    return disk_names.beside(parent, kind, name, os.urandom(6).hex())


def listed(vm_dir: str, *kinds: str) -> list[str]:
    """Return the directories of these kinds beside a VM directory."""
    parent, vm = os.path.split(vm_dir)
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return []
    said = [(name, disk_names.beside_named(name)) for name in names if name.startswith(".")]
    return sorted(f"{parent}/{name}" for name, own in said if own and str(own.vm) == vm and own.kind in kinds)


def bury(path: str, vm: int) -> str:
    """Take a directory away by one durable rename; return its new name."""
    removed = new_name("removed", f"{os.path.dirname(path)}/{vm}")
    files.refuse()
    try:
        os.rename(path, removed)
    except FileNotFoundError:
        return removed
    except OSError as e:
        raise ToolFailed(f"{path} on {os.uname().nodename} cannot be removed: {e.strerror}") from None
    point(f"{os.path.basename(path)} set aside")
    files.fsync(os.path.dirname(path))
    return removed


def sweep(vm_dir: str, root: str, vm: int) -> None:
    """Remove what removals have set aside, and what dead receivers have left."""
    for path in listed(vm_dir, "incoming"):
        if not locks.is_held(disk_names.incoming_lock(root, path)):
            bury(path, vm)
    for path in listed(vm_dir, "removed"):
        on_devices.remove_tree(path)
        point("removed directory gone")
    try:
        left = [name for name in os.listdir(disk_names.locks(root)) if disk_names.incoming_of(name, vm)]
    except FileNotFoundError:
        return
    for name in left:
        # The receiver makes the lock before the directory, and removes it afterwards.
        if files.is_absent(f"{os.path.dirname(vm_dir)}/{disk_names.incoming_of(name, vm)}"):
            locks.forget(disk_names.lock(root, name))


def tidy(vm_dir: str, root: str, vm: int) -> None:
    """Sweep what can be removed; errors are ignored, as the rest harms no action, and gc reports it."""
    try:
        sweep(vm_dir, root, vm)
    except (SemisharedError, OSError):
        pass


@contextmanager
def receiving(vm: int, vm_dir: str, root: str) -> Iterator[str]:
    """Yield a directory of this process to fill and rename; an error in the block removes it."""
    staging = new_name("incoming", vm_dir)
    lock = disk_names.incoming_lock(root, staging)
    os.makedirs(disk_names.locks(root), exist_ok=True)
    with locks.exclusive(lock, 30) as file:
        # Child processes inherit the lock: they die a moment after their parent, and may still write.
        run.kept.append(file.fileno())
        try:
            with files.enough_space(staging):
                os.makedirs(staging)
            point("incoming made")
            yield staging
        except BaseException:
            # It may be what fills the file system.
            on_devices.remove_tree(staging)
            raise
        finally:
            run.kept.remove(file.fileno())
            locks.remove(lock)
