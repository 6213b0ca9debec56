# SPDX-License-Identifier: Apache-2.0
"""Disks of VMs that are off, or that go one by one, when a killed action has left something begun on them
(recovery.py ends that).

Without notes of such nothing is loaded that drives a guest: that is dear, and most actions find none.
"""

from __future__ import annotations

import os

from ..base import cache, devices
from ..guest import job_lock
from ..model import layout, layout_delta, layout_devices
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
        notes = os.listdir(layout.records(vm_dir))
    except FileNotFoundError:
        return
    if any(map(layout.is_unsettled, notes)):
        from . import recovery

        job_lock.take(vm, vm_dir)
        recovery.recover(vm_dir, "")


def put_back(disk: DiskRef) -> None:
    """Have the layers of a disk, which no guest has open any more, where its record says; the caller has the
    turn.

    Those that were about to leave their device would be taken for what their names lead to, and what a guest
    wrote last be lost.
    """
    if not files.is_absent(layout_devices.left(layout.layers(disk.path))):
        from ..guest import device_switch

        device_switch.end_of(disk.vm_dir, disk.disk)


def forget(disk: DiskRef) -> None:
    """Have the note of deltas be without a disk that is being removed: another one may come to have its
    number.
    """
    if not files.is_absent(layout_delta.note(disk.vm_dir)):
        from ..guest import active_layer

        active_layer.forget(disk.vm_dir, disk.disk)
