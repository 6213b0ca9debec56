# SPDX-License-Identifier: Apache-2.0
"""What killed actions left unfinished in a guest, or in disks of one that is gone: found by notes, and ended.

An action on the disks takes the turn (guest/job_lock.py) and begins with `recover`. Without notes no module
that drives a guest is loaded: loading them is slow, and most actions find none.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ..base import cache
from ..device import folders, offline
from ..errors import SemisharedError
from ..guest import job_lock
from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..model.refs import DiskRef
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from . import on_devices, records


def recover(vm_dir: str, name: str) -> None:
    """Wake a guest that a killed action left at rest, and end the jobs left; `name` is '' without a guest.

    Raise DeviceMissing, with only the rest ended, if a device with unfinished layers is missing.
    """
    from ..guest import block_jobs, freeze

    freeze.wake(vm_dir, name)
    freeze.tidy(vm_dir)
    check_there(vm_dir)
    for note in sorted(left(vm_dir)):
        disk = disk_names.job_noted(note)
        if disk is None:
            continue
        path = disk_names.job_note(vm_dir, disk)
        job = files.read_json(path) or {}
        if freeze.is_of_this_run(job, name):
            block_jobs.end(vm_dir, name, job)
        else:
            _put_back(vm_dir, disk, job)
        _tidy(vm_dir, disk, job)
        files.unlink(path)
        point("job ended")
    if records.goes_over(vm_dir):
        from ..device import memory
        from ..guest import active_layer, go_over

        # Also disks that were to be detached: each of those got its lease first.
        noted = [switch.after.disk for switch in active_layer.noted(vm_dir)]
        go_over.settle(vm_dir, name)
        _release(vm_dir, noted)
        for disk in noted:
            memory.settle(disk_names.layers(disk_names.disk(vm_dir, disk)))


@contextmanager
def ended_on_failure(vm_dir: str, name: str) -> Iterator[None]:
    """Recover after a failure of the block; if that fails, the next action on the disks does."""
    try:
        yield
    except Exception:
        try:
            recover(vm_dir, name)
        except SemisharedError:
            pass
        raise


def _release(vm_dir: str, disks: list[int]) -> None:
    """Free the leases of disks that were to lie over bases, and still read from their store."""
    for disk in disks:
        record = records.read_record(vm_dir, disk)
        if record and record.place.is_remote:
            cache.release(cache.root_of(vm_dir), int(os.path.basename(vm_dir)), disk)


def check_there(vm_dir: str) -> None:
    """Raise DeviceMissing if the layers of a disk with an unfinished action are on a missing device.

    A missing layer would look finished, and the guest's last writes would be lost when the device returns.
    """
    jobs = [disk for disk in map(disk_names.job_noted, left(vm_dir)) if disk is not None]
    disks = {disk for disk in jobs if "layer" in (files.read_json(disk_names.job_note(vm_dir, disk)) or {})}
    if records.goes_over(vm_dir):
        from ..guest import active_layer

        disks |= {switch.after.disk for switch in active_layer.noted(vm_dir)}
    disks = {disk for disk in disks if not files.is_absent(disk_names.record(vm_dir, disk))}
    if disks:
        offline.look(disk_names.base_store_of(vm_dir))
    for disk in sorted(disks):
        on_devices.check_written(vm_dir, disk)


def left(vm_dir: str) -> list[str]:
    """Return the names of the notes that `recover` handles."""
    try:
        return list(filter(disk_names.is_unsettled, os.listdir(disk_names.records(vm_dir))))
    except FileNotFoundError:
        return []


def _put_back(vm_dir: str, disk: int, job: dict[str, object]) -> None:
    """Rebase a layer onto its former backing file, after a pull that its QEMU did not finish."""
    below, record = str(job.get("below", "")), records.read_record(vm_dir, disk)
    if "layer" not in job or not record:
        return
    folder = os.path.dirname(record.path)
    layer = f"{folder}/{job['layer']}"
    # The lower layer is missing only if the pull was complete, and the host failed before its note went.
    if {str(job["layer"]), below} <= set(on_devices.listed(folder)) and layers.backing_of(layer)[0] != below:
        qemu_img.lay_over(layer, below, str(job.get("below_format", "")))
        point("layer put back")


def _tidy(vm_dir: str, disk: int, job: dict[str, object]) -> None:
    """Remove what a pull left beside its layer: empty layers made for libvirt, and its note on a store."""
    record, numbers = records.read_record(vm_dir, disk), job.get("stand_ins")
    if not record or not isinstance(numbers, list):
        return
    from ..guest import block_jobs

    folder = os.path.dirname(record.path)
    files.remove_staged(folder)
    block_jobs.leave(folder, [number for number in numbers if isinstance(number, int)])
    if record.place.is_clone:
        from ..store.dir import clones

        clones.forget_pull(folder)


# -- VMs that are off, and single disks --------------------------------------------------------------


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
    if left(vm_dir):
        job_lock.take(vm, vm_dir)
        recover(vm_dir, "")


def put_back(disk: DiskRef) -> None:
    """Put the layers of a disk without a guest back where its record says; the caller has the turn.

    Otherwise an unfinished move's link would lead to older layers, and the guest's last writes would be lost.
    """
    if not files.is_absent(device_names.left(disk_names.layers(disk.path))):
        from ..guest import go_over_files

        go_over_files.put_back(disk.vm_dir, disk.disk)


def forget(disk: DiskRef) -> None:
    """Remove a disk from the note of a go-over: a new disk may get its number."""
    if records.goes_over(disk.vm_dir):
        from ..guest import active_layer

        active_layer.forget(disk.vm_dir, disk.disk)
