# SPDX-License-Identifier: Apache-2.0
"""The layers of a disk that a running guest has open go to another device of their host's pool: all of them
(moved_layers.py).

The guest writes to a delta while what is below that is copied, as in a move to another host; then QEMU
mirrors the delta into the copy, and the guest goes on with that (guest/device_switch.py). On its new device
it opens the base anew: where that is by now.

What leaves memory may leave it when that is full, and its guest stands still: the delta has its room then
from what is kept free for it (base/spare.py), and a run that was killed is gone on with instead of undone,
for which there might be no room.

Whatever ends this ends it on the one device or the other, and so does the next action on the VM's disks
(recovery.py).
"""

from __future__ import annotations

import os

from ..base import cache, device_label, devices, moving, overcommitted, spare
from ..base.moving import Copying, Tell
from ..errors import CannotMove, NoSpace
from ..guest import active_layer, block_jobs, deltas, device_switch, domain
from ..model import layout, layout_devices
from ..model.device_class import MEMORY
from ..model.layout_devices import Link
from ..model.record import Record
from ..model.steps_device import MoveLayers
from ..tools import files
from ..tools.crash_points import point
from ..tools.undo import Undo
from ..units import MiB, human
from . import layer_copies, on_devices, records, recovery, vm_dir
from .epochs import Planned

FLOOR = 64 * MiB
"""So many bytes stay free on the device that is left, where guests go on writing: one that found it full
would be paused.
"""


def move(step: MoveLayers, planned: Planned, tell: Tell, was: Link, new: Link) -> None:
    """Move the layers of a disk from one place to another, which is no memory; its guest runs, or waits for
    room in memory.

    The caller has the turn. A delta that is there is that of a move that was killed.
    """
    disk, root = step.disk, cache.root_of(step.disk.vm_dir)
    folder, directory = layout.layers(disk.path), layout_devices.directory(root, new)
    _check(step, root, was, new)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        record = records.record_of(disk)
    is_memory = _label(root, was).get("class") == MEMORY
    floor = 0 if is_memory else min(FLOOR, _free(folder) // 2)
    with recovery.ended_on_failure(disk.vm_dir, step.domain):
        if not active_layer.noted(disk.vm_dir):
            if is_memory and _free(folder) < spare.PIECE:
                spare.give(layout_devices.device(root, was.uuid))
            deltas.add(disk.vm_dir, step.domain, [record], moves=True)
        (record,) = active_layer.noted(disk.vm_dir)
        with Undo() as undo, files.enough_space(directory):
            undo.add(lambda: moving.discard(root, [new] if devices.link_of(folder) != new else []))
            _copy(
                folder,
                directory,
                record,
                Copying(on_devices.allocated(folder), step.rate, _watched(folder, floor, tell)),
            )
            with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
                if is_memory:
                    note_leaving(disk.vm_dir, disk.disk, new)
                device_switch.begin(disk.vm_dir, disk.disk, new)
            undo.keep()
        device_switch.go_over(
            disk.vm_dir, step.domain, record, step.rate, lambda: _see(layout_devices.left(folder), floor)
        )
        deltas.merge(disk.vm_dir, step.domain)
    if devices.link_of(folder) != new:
        raise CannotMove(f"disk {disk.disk} of VM {disk.vm}: its guest has not gone over")


def note_leaving(vm_dir: str, disk: int, new: Link) -> None:
    """Note that a disk is leaving memory for a place: as long as it is there, what its guest waits for may be
    what memory has refused.
    """
    path = layout_devices.left_note(vm_dir, disk)
    files.remove_staged(*os.path.split(path))
    files.write_json(path, {"version": 1, "to": layout_devices.target_of(new)})
    point("leaving of memory noted")


def has_left(vm_dir: str, disk: int) -> bool:
    """Tell whether a disk has left memory, and its guest was not seen to run since."""
    link = devices.link_of(layout.layers(layout.disk(vm_dir, disk)))
    said = files.hint(layout_devices.left_note(vm_dir, disk))
    return link is not None and said == {"version": 1, "to": layout_devices.target_of(link)}


def forget_left(vm_dir: str, disk: int) -> None:
    """Remove that note: what fails from now on is not memory."""
    files.unlink(layout_devices.left_note(vm_dir, disk))
    point("leaving of memory over")


def _check(step: MoveLayers, root: str, was: Link, new: Link) -> None:
    """Raise CannotMove for a disk that can be moved only while its VM is off."""
    which, record = f"disk {step.disk.disk} of VM {step.disk.vm}", records.record_of(step.disk)
    if _label(root, new).get("class") == MEMORY:
        raise CannotMove(f"{which}: what is to go to memory moves while its VM is off")
    if _label(root, was).get("class") == MEMORY and was.uuid not in {
        device.uuid for device in overcommitted.present(root)
    }:
        raise CannotMove(
            f"{which}: what is in memory that is promised once, and not for a delta, moves while "
            f"its VM is off"
        )
    if record.over:
        raise CannotMove(f"{which} lies over {record.over.name} on the network: it moves while its VM is off")
    count = len(domain.snapshots(step.domain))
    if count:
        raise CannotMove(
            f"{which}: the VM has {count} system snapshots, which libvirt keeps in its layers: it "
            f"moves while it is off"
        )
    if block_jobs.find(step.domain, record.path)[0] in domain.encrypted(step.domain):
        raise CannotMove(
            f"{which} is encrypted (LUKS_SECRET), and QEMU would write it decrypted: it moves "
            f"while its VM is off"
        )


def _label(root: str, link: Link) -> "dict[str, object]":
    return device_label.read(layout_devices.device(root, link.uuid))


def _copy(folder: str, directory: str, record: Record, copying: Copying) -> None:
    """Copy what lies below the delta of a disk; of a raw layer, which QEMU writes whole, only the file is
    made.
    """
    before = layer_copies.seen(folder)
    layer_copies.copy(folder, directory, copying, empty=record.layer if record.format == "raw" else "")
    if layer_copies.seen(folder) != before:
        raise CannotMove(f"{folder} on {os.uname().nodename} was changed while it was copied")


def _watched(folder: str, floor: int, tell: Tell) -> Tell:
    """Return what tells how far a copy is, and raises NoSpace when the device that is left becomes full
    meanwhile.
    """

    def told(**event: object) -> None:
        _see(folder, floor)
        tell(**event)

    return told


def _see(folder: str, floor: int) -> None:
    if _free(folder) < floor:
        here = os.uname().nodename
        raise NoSpace(
            f"{human(_free(folder))} are left on the device of {folder} on {here}, where its "
            f"guest writes until it has moved"
        )


def _free(folder: str) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize
