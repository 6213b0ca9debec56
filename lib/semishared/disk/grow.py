# SPDX-License-Identifier: Apache-2.0
"""Grow a disk that no guest has open: its active layer, or the image that it is, or its clone on the store.

One that a guest has open is grown by its hypervisor, if there is room for that.
"""

from __future__ import annotations

import os

from .. import store
from ..errors import MissingImage, NotSupported
from ..model.record import Record
from ..model.steps import AllowGrowth, DiskRef, GrowDisk, ImageRef
from ..tools import beneath, files, qemu_img
from ..tools.crash_points import point
from . import in_memory, records, unsettled


def grow(step: GrowDisk) -> dict[str, object]:
    """Grow a disk: its active layer, or the image it is; return which that is if it is on the network, and
    not grown here.
    """
    unsettled.settle(step.disk.vm, step.disk.vm_dir)
    record = records.record_of(step.disk)
    if record.bridged:
        return records.on_store(record)
    _check_writable(step.disk, record)
    image, path = record.stored, record.path
    if image:
        # Not by the link that the guest has: what it leads to is what is looked at.
        store.of(image.access).grow(image, step.size)
    elif not files.exists(path):
        raise MissingImage(f"{path} is not there on {os.uname().nodename}")
    elif not record.is_local:
        _grow_clone(record.of_image, path, step.size)
    else:
        in_memory.more(os.path.dirname(path), size=step.size, layers=0)
        qemu_img.grow(path, record.format, step.size)
    point("disk grown")
    return {}


def _check_writable(disk: DiskRef, record: Record) -> None:
    """Raise NotSupported for a disk that is read-only, whose image others may have too: oned may say of it
    what it likes by now.
    """
    if record.readonly:
        raise NotSupported(f"disk {disk.disk} of VM {disk.vm} is read-only, and is not grown")


def allow(step: AllowGrowth) -> None:
    """Promise memory to a disk that lies there and is about to grow; raise MemoryPromised if there is too
    little, NotSupported.
    """
    record = records.read_record(step.disk.vm_dir, step.disk.disk)
    if record:
        _check_writable(step.disk, record)
    if record and record.is_local:
        in_memory.more(os.path.dirname(record.path), size=step.size, layers=0)


def _grow_clone(image: ImageRef, path: str, size: int) -> None:
    """Grow a layer of a clone on a store, opened beneath its root."""
    store.of(image.access).check(image)
    fd = beneath.open_file(image.root, path[len(image.root) + 1 :], os.O_RDWR)
    try:
        qemu_img.grow(beneath.path_of(fd), "qcow2", size)
    finally:
        os.close(fd)
