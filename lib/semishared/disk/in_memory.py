# SPDX-License-Identifier: Apache-2.0
"""Layers in the host's memory (class ram): one is added or grown only if all fit at their full size.

Disks elsewhere need no promise.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import Iterator, Sequence

from ..base import cache
from ..device import devices, ledger
from ..errors import MemoryPromised
from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..model.steps import DiskRef
from ..tools import qemu_img
from ..units import human
from . import records


def more(folder: str, *, size: int = 0, layers: int = 1) -> None:
    """Promise memory for `layers` more than a disk has in `folder`, each of at least `size` bytes.

    Raise MemoryPromised, with nothing changed, if they would not fit at full size.
    """
    link = devices.link_of(folder)
    if link is None:
        return
    root = cache.root_of(os.path.dirname(folder))
    device = device_names.device(root, link.uuid)
    if not os.path.isfile(device_names.promise(device, link.name)):
        return
    from ..device import hot

    with ledger.promised(root):
        was, had = ledger.read_promises(device, link.name)
        size, layers = max(size, was), _count(folder) + layers
        hot.make_way(root, size * layers - was * had)
        # A device of weight 0 still has room for its own disks: they may leave it only by a live move.
        there = [
            found._replace(weight=found.weight or 1)
            for found in devices.present(root)
            if found.uuid == link.uuid
        ]
        left = sum(found.unpromised for found in there) + was * had
        if size * layers > max(left, was * had):
            raise MemoryPromised(
                f"{disk_names.disk_of(os.path.basename(folder))}: {layers} layers of up to "
                f"{human(size)} each are more than the "
                f"{human(max(left, 0))} that {devices.mount(root, link.uuid)} on "
                f"{os.uname().nodename} has for them"
            )
        if (size, layers) != (was, had):  # where memory is full there may be no room for a note
            ledger.write_promises(device, link.name, size, layers)


def more_each(folders: Sequence[str]) -> None:
    """Promise memory for one more layer of each disk; raise as `more`, with nothing changed."""
    with ExitStack() as promised:
        for folder in folders:
            more(folder)
            promised.callback(settle, folder)
        promised.pop_all()


def check_made(disk: DiskRef) -> None:
    """Raise MemoryPromised if a disk was made larger than promised and does not fit."""
    folder, record = disk_names.layers(disk.path), records.read_record(disk.vm_dir, disk.disk)
    if record and devices.link_of(folder):
        more(folder, size=qemu_img.virtual_size(record.active(disk.path), record.format), layers=0)


def settle(folder: str) -> None:
    """Take back the promises for layers that a disk does not have any more."""
    if os.path.isdir(folder):
        more(folder, layers=0)


@contextmanager
def another_layer(folder: str, size: int = 0) -> Iterator[None]:
    """Promise memory for one more layer of a disk, of at least `size` bytes, within the block."""
    more(folder, size=size)
    try:
        yield
    finally:
        settle(folder)


def _count(folder: str) -> int:
    """Count the layers; hard links count once."""
    return len({entry.inode() for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)})
