# SPDX-License-Identifier: Apache-2.0
"""A running guest goes on with a disk's layers on another device, under their names (model/device/names.py).

    A/layers/V-N-x   K <- D  <- guest     <- disk.N.snap                           a delta is put on the disk
                                                                                   (deltas.py)
    B/layers/V-N-y   K                                                             the layers below are copied
    A/layers/V-N-x   K <- D  <- guest     <- disk.N.left.snap                      `begin`
    B/layers/V-N-y   K  = mirror of D     <- disk.N.snap
    B/layers/V-N-y   K  <- guest          <- disk.N.snap                           `end`

QEMU opens the copy by the disk's own names, as libvirt keeps the names for later. It has the original open
already, and no process opens that by name meanwhile. While a disk's record names the delta, A is right; when
it names a layer, B is. The record changes only while the guest rests and both are equal. So an action that
finds a link disk.N.left.snap ends the switch by the record.
"""

from __future__ import annotations

import os
from typing import Callable, Dict

from ..errors import ToolFailed
from ..model.device import names as device_names
from ..model.device.names import Link
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..tools import files
from ..tools.effects import point
from . import active_layer, block_jobs, job_events, mirror


def begin(vm_dir: str, disk: int, new: Link) -> None:
    """Give the disk's names to the copies of its layers, in another place, `new`."""
    folder = disk_names.layers(disk_names.disk(vm_dir, disk))
    files.remove_staged(*os.path.split(device_names.left(folder)))
    files.symlink(os.readlink(folder), device_names.left(folder))
    point("old device noted")
    files.remove_staged(*os.path.split(folder))
    files.symlink(device_names.target_of(new), folder)
    point("layers have their names on the new device")


def go_over(vm_dir: str, name: str, record: Record, rate: int, see: Callable[[], None]) -> None:
    """Have QEMU mirror a disk's delta into the copy of the layer below it, and pivot to that copy.

    libvirt mirrors a delta alone into no raw file, so QEMU copies a raw layer whole, at `rate` bytes per
    second (0: no limit). `see` is called while the mirror works; an error that it raises ends the switch.
    """
    opened = active_layer.opened(vm_dir, name)
    target = opened.get(os.path.realpath(active_layer.delta_of(record)), "")
    if not target:
        raise ToolFailed(
            f"domain {name} on {os.uname().nodename} does not write to the delta of disk {record.disk}"
        )
    with job_events.listening(name, target) as job:
        if record.format == "raw":
            mirror.begin_whole(name, target, record.path, rate)
        else:
            mirror.begin(name, target, record.path)
        point("layers are being mirrored")
        job.wait_until_ready(see)
    point("layers ready on the new device")
    mirror.go_over(vm_dir, name, [target], "its disk stays where it is until it runs")


def left(vm_dir: str) -> Dict[int, str]:
    """Return the links to the old devices of disks that are moving, by disk."""
    found = {}
    for entry in os.listdir(vm_dir) if os.path.isdir(vm_dir) else ():
        disk = device_names.left_named(entry)
        if disk is not None and os.path.islink(f"{vm_dir}/{entry}"):
            found[disk] = f"{vm_dir}/{entry}"
    return found


def end(vm_dir: str, name: str) -> None:
    """Complete or roll back a switch, by the record; `name` is '' when no guest runs.

    No job is left on these disks afterwards.
    """
    begun = left(vm_dir)
    if not begun:
        return
    if name:
        for target in active_layer.opened(vm_dir, name).values():
            block_jobs.end_job(name, target)
        active_layer.settle(vm_dir, name)
    for disk in sorted(begun):
        end_of(vm_dir, disk)


def end_of(vm_dir: str, disk: int) -> None:
    """End the switch of one disk, on which there is no job; without its record both sides stay."""
    folder = disk_names.layers(disk_names.disk(vm_dir, disk))
    link, record = device_names.left(folder), files.read_json(disk_names.record(vm_dir, disk))
    if not record:
        return
    was, now = os.readlink(link), os.readlink(folder)
    if was != now and disk_names.is_delta(str(record.get("path", ""))):
        files.remove_staged(*os.path.split(folder))
        files.symlink(was, folder)
        point("layers have their names on the old device again")
        was, now = now, was
    os.unlink(link)
    files.fsync(vm_dir)
    point("device switch ended")
    if was != now:
        _discard(vm_dir, was)
        point("layers gone from the other device")


def _discard(vm_dir: str, target: str) -> None:
    """Remove layers without a link, if their device is there; else gc finds them."""
    link = device_names.linked(target)
    directory = device_names.directory(disk_names.base_store_of(vm_dir), link) if link else ""
    if directory and os.path.isdir(directory):
        files.remove_folder(directory, ignore_errors=True)
