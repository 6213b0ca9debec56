# SPDX-License-Identifier: Apache-2.0
"""`remote-first` disks: layers on the host, the lowest over the image on its store.

    disk.N.snap/0  over  <datastore>/.semishared/NAME/image -> ../../NAME
                    or   POOL/IMAGE@SNAPSHOT. libvirt and qemu-img get its full name; of the header's
                         name only the protocol counts

While a VM has such a disk, oned keeps the image in use. So no session begins on the image, and its content
stays the same.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager
from typing import Iterator

from .. import store
from ..errors import ImageChanged, MissingImage, NotSupported, SemisharedError
from ..guest import active_layer
from ..model.disk.record import Record
from ..model.refs import ImageRef
from ..model.store import dir_names
from ..store.dir import image as dir_image
from ..tools import layers, qemu_img
from ..tools.effects import point


def backing_name(record: Record) -> str:
    """Return the backing file name for the header of a disk's lowest layer.

    For an image on the network it is a `json:` name: options in an `rbd:` name would override those beside
    it.
    """
    return f"json:{json.dumps(record.over.node)}" if record.over else link_of(record)


def size(record: Record) -> int:
    """Return the virtual size of the image in bytes, opened with the credentials that the guest will use."""
    name, over = link_of(record), record.over
    if over:
        name = qemu_img.rbd_name(f"{over.name}@{over.snapshot}", over.user, over.conf)
    return qemu_img.virtual_size(name, record.of_image.format)


def link_of(record: Record) -> str:
    """Return the link to the image in a mounted store."""
    return dir_names.link_of(record.of_image.source)


def lies_over_it(record: Record, path: str, trouble: str) -> bool:
    """Return True if the layer's `trouble` is only its image on the store; correct the header's name."""
    name, format = layers.backing_of(path)
    if trouble != layers.outside(name):
        return False
    wanted = backing_name(record)
    if not record.over:
        return (name, format) == (wanted, record.of_image.format)
    if re.match(layers.PROTOCOL, name) and name != wanted:
        qemu_img.lay_over(path, wanted, "raw")
    return bool(re.match(layers.PROTOCOL, name))


def name_in_full(record: Record, path: str, *, is_open: bool) -> None:
    """Write the Ceph user into the backing file name of the lowest layer below `path`, if on the network.

    QEMU's pull leaves a name without the user. Raise NotSupported if it has, and a guest has the layers open
    (`is_open`): only its QEMU may change a header then.
    """
    if not record.over:
        return
    lowest = [path, *(name for name, _ in layers.below(path, "qcow2", over_network=True))][-1]
    wanted = backing_name(record)
    if layers.backing_of(lowest)[0] == wanted:
        return
    if is_open:
        why = f"the guest has {lowest} open, which does not say as whom {record.over.name} is read"
        raise NotSupported(f"{why}: the snapshot can be deleted while the VM is off")
    qemu_img.lay_over(lowest, wanted, "raw")
    point("layer named in full")


def check(record: Record) -> None:
    """Raise unless the image below a disk is in the right store, and readable from this machine."""
    image = record.of_image
    try:
        if not record.over:
            store.of(image.access).check(image)
            dir_image.check_link(dir_image.Stored(image.source))
        elif record.over.snapshot not in _snapshots(image):
            raise MissingImage(f"{record.over.name} has no snapshot {record.over.snapshot}")
    except SemisharedError as e:
        here = f"disk {record.disk} reads from {image.source}, which {os.uname().nodename} does not have"
        raise type(e)(f"{here}: {e.detail}") from None


def check_unchanged(record: Record) -> None:
    """Raise ImageChanged if the image below a disk has changed: its base would have other content."""
    image, over = record.of_image, record.over
    if not over:
        content = store.content(image)
        now = content.generation(content.see())
        same = not image.generation or now == image.generation
    else:
        from ..store.rbd import ceph
        from ..store.rbd import image as rbd_image

        with ceph.opened(*ceph.pool_of(image, image.access.reader), read_only=True) as opened:
            found = rbd_image.find(opened, over.snapshot)
            same = found is not None and rbd_image.is_unchanged(opened, found)
    if not same:
        raise ImageChanged(f"{image.source} was written to since disk {record.disk} was made over it")


def _snapshots(image: ImageRef) -> list[str]:
    from ..store.rbd import ceph
    from ..store.rbd import image as rbd_image

    return rbd_image.names(*ceph.pool_of(image, image.access.reader))


@contextmanager
def opened(record: Record, path: str) -> Iterator[str]:
    """Yield the name by which qemu-img reads the layer `path` with its whole backing chain."""
    check(record)
    yield active_layer.for_qemu_img(record, path)
