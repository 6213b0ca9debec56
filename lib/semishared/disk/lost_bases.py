# SPDX-License-Identifier: Apache-2.0
"""The bases of a VM that is about to boot, where the device on which they lay is not there: had again, on
another one.

What its disks lie over are bases of known generations, each of which is the hash of its content: whoever has
that, the store or another host, gives it, and every extent is verified. The lease then stands where it stood,
and no header says anything else.

What cannot be had is only told of: the VM may run, and only its CONTEXT be made anew. Who boots it is refused
(vmm/records.py).
"""

from __future__ import annotations

from typing import Callable

from ..base import cache, devices, room
from ..base.ensure import ensure
from ..errors import BadRecord, SemisharedError
from ..model import layout
from ..model.record import Record
from ..tools import files
from . import on_devices, records


def replace(vm: int, vm_dir: str, ask: room.Ask | None, warn: Callable[[str], None]) -> None:
    """Have the bases again without which disks of the VM cannot be opened; `warn` is told why one cannot be
    had.
    """
    root = cache.root_of(vm_dir)
    if not devices.registered(root):
        return
    try:
        found = records.records(vm_dir)
    except BadRecord:
        return  # who boots it says so
    if any(on_devices.is_away(layout.disk(vm_dir, record.disk)) for record in found):
        return  # it cannot boot, whatever its disks lay over
    for record in found:
        if _is_lost(root, vm, record):
            try:
                ensure(root, record.of_image, ask, (vm, record.disk), want=room.FOR_THIS)
            except SemisharedError as e:
                warn(
                    f"the base of disk {record.disk} lay on a device that is not there, and "
                    f"cannot be had again: {e.line()}"
                )
            if files.is_absent(vm_dir):
                # The VM was deleted meanwhile.
                cache.release(root, vm, record.disk)


def _is_lost(root: str, vm: int, record: Record) -> bool:
    """Tell whether a disk has no lease on what it lies over, and that is, or was, on a device that is not
    there.
    """
    if not record.place.leases or record.image is None:
        return False
    base = cache.named(root, record.image, record.image.generation)
    return devices.link_of(base.directory) is not None and files.is_absent(base.lease(vm, record.disk))
