# SPDX-License-Identifier: Apache-2.0
"""What lies beside a VM directory: VM directories that are on their way to be one, or are one no more.

    .incoming-VM-RANDOM     received by one action, which holds locks/incoming-VM-RANDOM while it lives
    .outgoing-VM-RANDOM     set aside by a move whose own directory takes the place
    .removed-VM-RANDOM      removed: a removal begins with this one rename, and a remainder is never taken for
    a VM

0.1.0 had `.incoming-VM` and `.outgoing-VM`. Whoever removes or makes the VM's directory sweeps what nobody is
at work on.
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
    """Return a name of this kind that no other process uses."""
    parent, name = os.path.split(vm_dir)
    return disk_names.beside(parent, kind, name, os.urandom(6).hex())


def listed(vm_dir: str, *kinds: str) -> list[str]:
    """Return what there is of these kinds beside a VM directory."""
    parent, vm = os.path.split(vm_dir)
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return []
    said = [(name, disk_names.beside_named(name)) for name in names if name.startswith(".")]
    return sorted(f"{parent}/{name}" for name, own in said if own and str(own.vm) == vm and own.kind in kinds)


def bury(path: str, vm: int) -> str:
    """Take a directory out of its place by one durable rename; return its new name."""
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
    """Remove what removals have set aside, and what receivers that died have left."""
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
        # Its holder makes the lock before the directory and removes it after it.
        if files.is_absent(f"{os.path.dirname(vm_dir)}/{disk_names.incoming_of(name, vm)}"):
            locks.forget(disk_names.lock(root, name))


def tidy(vm_dir: str, root: str, vm: int) -> None:
    """Sweep what can be removed; the rest is no disk and stops no action; gc says why it stays."""
    try:
        sweep(vm_dir, root, vm)
    except (SemisharedError, OSError):
        pass


@contextmanager
def receiving(vm: int, vm_dir: str, root: str) -> Iterator[str]:
    """Yield a directory of this process, to be filled and renamed; an error in the block removes it."""
    staging = new_name("incoming", vm_dir)
    lock = disk_names.incoming_lock(root, staging)
    os.makedirs(disk_names.locks(root), exist_ok=True)
    with locks.exclusive(lock, 30) as file:
        # What we run dies a moment after us, and may still write.
        run.kept.append(file.fileno())
        try:
            with files.enough_space(staging):
                os.makedirs(staging)
            point("incoming made")
            yield staging
        except BaseException:
            # It may be what fills the disk.
            on_devices.remove_tree(staging)
            raise
        finally:
            run.kept.remove(file.fileno())
            locks.remove(lock)
