# SPDX-License-Identifier: Apache-2.0
"""What a host or a record says of the image of a disk, against the image that oned has acquired for that disk.

Both may say that there is a disk, whether the disk is the image or its clone, and over which generation it lies. Where that is, as whom
it is opened and by which configuration is oned's word.
"""

from __future__ import annotations

from typing import List, Mapping, Sequence

from ..errors import BadRecord, ForeignImage
from . import layout_pool
from .network_disk import NetworkDisk
from .record import Record
from .refs import ImageRef


def compared(said: ImageRef, right: ImageRef, vm: int, disk: int) -> ImageRef:
    """Return the image, or its clone for a disk, that is `said`, as oned has it; raise ForeignImage if it is neither."""
    sources = [right.source]
    if right.access.can.has_bridge:
        sources.append(layout_pool.clone(right.source, vm, disk))
    if (said.store, said.id, said.format) != (right.store, right.id, right.format) or said.source not in sources:
        raise ForeignImage(
            f"disk {disk} of VM {vm} is said to be of {said.source!r} (image {said.id}, {said.format}, of datastore {said.store}), and "
            f"OpenNebula has {right.source!r} (image {right.id}, {right.format}, of datastore {right.store})"
        )
    return right._replace(source=said.source, generation=said.generation)


def record(said: Record, right: ImageRef, vm: int) -> Record:
    """Return a record of a disk with oned's image, reached as oned's datastore says; raise ForeignImage if it is of another one."""
    image, network, over = said.image, said.network, said.over
    if image is None:
        raise ForeignImage(f"disk {said.disk} of VM {vm} is said to be made from nothing, and OpenNebula has image {right.id} for it")
    found = compared(image, right, vm, said.disk)
    if found.source != right.source or (over and over.name != right.source):
        raise ForeignImage(
            f"disk {said.disk} of VM {vm} is said to be made from {over.name if over else found.source!r}, not {right.source!r}"
        )
    if bool(network or over) and not right.access.can.has_bridge:
        raise BadRecord(f"the record of disk {said.disk} of VM {vm} names a network, and the store of image {right.id} is none")
    if network:
        network = NetworkDisk.of(compared(image._replace(source=network.name), right, vm, said.disk).source, right.access)
    if over:
        over = NetworkDisk.below(right.source, over.snapshot, right.access)
    return said._replace(image=found, network=network, over=over)


def records(said: Sequence[Record], images: Mapping[int, ImageRef], vm: int) -> List[Record]:
    """Return the records that a host has of a VM, with oned's `images` of its disks; raise ForeignImage."""
    for one in said:
        if one.image and one.disk not in images:
            raise ForeignImage(f"disk {one.disk} of VM {vm} is said to be of {one.image.source!r}, and OpenNebula has no image for it")
    return [record(one, images[one.disk], vm) if one.disk in images else one for one in said]
