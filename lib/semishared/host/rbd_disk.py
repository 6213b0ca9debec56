# SPDX-License-Identifier: Apache-2.0
"""Whether this host could open a disk over the network, before a running guest comes here."""

from __future__ import annotations

import os

from ..errors import MigrationRefused, MissingImage, SemisharedError
from ..guest import virsh
from ..model.disk.record import Record
from ..model.steps import ReachDisk
from ..store.rbd import ceph
from ..store.rbd import image as rbd_image


def reach(step: ReachDisk) -> None:
    """Raise MigrationRefused if QEMU would not find the disk of a VM that is to come here."""
    disk, record = step.disk, Record.from_data({**step.record, "disk": step.disk.disk})
    network, image = record.network or record.over, record.stored or record.image
    assert network is not None and image is not None
    host = os.uname().nodename
    if network.secret not in virsh.secrets():
        raise MigrationRefused(
            f"libvirt on {host} does not know the secret {network.secret} for disk {disk.disk} of "
            f"VM {disk.vm}"
        )
    try:
        where, name = ceph.pool_of(image, image.access.reader)
        with ceph.opened(where, name, read_only=True) as opened:
            if network.snapshot and not rbd_image.find(opened, network.snapshot):
                raise MissingImage(f"it has no snapshot {network.snapshot}")
    except SemisharedError as e:
        raise MigrationRefused(
            f"{host} cannot open {network.name}, disk {disk.disk} of VM {disk.vm}: {e.detail}"
        ) from None
