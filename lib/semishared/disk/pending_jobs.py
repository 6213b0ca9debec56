# SPDX-License-Identifier: Apache-2.0
"""Disks, of VMs that are off or one by one, on which a killed action left a job (recovery.py ends it).

Without notes of such nothing is loaded that drives a guest: that is dear, and most actions find none.
"""

from __future__ import annotations

import os

from ..base import cache
from ..device import devices
from ..guest import job_lock
from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..model.refs import DiskRef
from ..tools import files


def end_others(vm: int, vm_dir: str) -> None:
    """End who is at work on the disks yet: a backup that nobody waits for would make the directory anew, a
    detachment take a lease.
    """
    if not files.is_absent(job_lock.lock_path(vm, vm_dir)):
        job_lock.take(vm, vm_dir)


def end_moves(vm: int, vm_dir: str) -> None:
    """Have the turn where there are devices between which disks go: what goes now ends, and what is asked for
    waits for us.
    """
    if devices.registered(cache.root_of(vm_dir)):
        job_lock.take(vm, vm_dir)


def settle(vm: int, vm_dir: str) -> None:
    """End what is left on the disks of a VM that does not run, before one of them is read or changed."""
    end_moves(vm, vm_dir)
    try:
        notes = os.listdir(disk_names.records(vm_dir))
    except FileNotFoundError:
        return
    if any(map(disk_names.is_unsettled, notes)):
        from . import recovery

        job_lock.take(vm, vm_dir)
        recovery.recover(vm_dir, "")


def put_back(disk: DiskRef) -> None:
    """Put the layers of a disk without a guest where its record says; the caller has the turn.

    Those that were about to leave their device would be taken for what their names lead to, and what a guest
    wrote last be lost.
    """
    if not files.is_absent(device_names.left(disk_names.layers(disk.path))):
        from ..guest import device_switch

        device_switch.end_of(disk.vm_dir, disk.disk)


def forget(disk: DiskRef) -> None:
    """Take a disk that is being removed out of the note of deltas: a new disk may get its number."""
    if not files.is_absent(disk_names.delta_note(disk.vm_dir)):
        from ..guest import active_layer

        active_layer.forget(disk.vm_dir, disk.disk)
