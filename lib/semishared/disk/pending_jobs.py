# SPDX-License-Identifier: Apache-2.0
"""Disks on which a killed action left a job: of VMs that are off, or one by one (recovery.py ends it).

Without such notes no module that drives a guest is loaded: loading them is slow, and most actions find none.
"""

from __future__ import annotations

import os

from ..device import folders
from ..guest import job_lock
from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..model.refs import DiskRef
from ..tools import files


def end_others(vm: int, vm_dir: str) -> None:
    """End any action on the disks: a late backup would recreate the directory, a detach lease a base."""
    if not files.is_absent(job_lock.lock_path(vm, vm_dir)):
        job_lock.take(vm, vm_dir)


def end_moves(vm: int, vm_dir: str) -> None:
    """Take the turn on a host with devices: a present move of a disk ends, and later ones wait."""
    if folders.may_move(vm_dir):
        job_lock.take(vm, vm_dir)


def settle(vm: int, vm_dir: str) -> None:
    """Recover the disks of a VM that does not run, before one of them is read or changed."""
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
    """Put the layers of a disk without a guest back where its record says; the caller has the turn.

    Otherwise an unfinished move's link would lead to older layers, and the guest's last writes would be lost.
    """
    if not files.is_absent(device_names.left(disk_names.layers(disk.path))):
        from ..guest import device_switch

        device_switch.end_of(disk.vm_dir, disk.disk)


def forget(disk: DiskRef) -> None:
    """Remove a disk from the note of deltas: a new disk may get its number."""
    if not files.is_absent(disk_names.delta_note(disk.vm_dir)):
        from ..guest import active_layer

        active_layer.forget(disk.vm_dir, disk.disk)
