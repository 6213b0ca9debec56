# SPDX-License-Identifier: Apache-2.0
"""What travels with a running guest, and what must be there where it goes."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, NamedTuple, Sequence

from ..errors import MigrationRefused
from ..model import layout
from ..model import steps as s
from ..opennebula.xml import Vm
from . import encryption

if TYPE_CHECKING:
    # Every action imports the plans of all; only those around a live migration read records.
    from ..model.record import Record


class Luggage(NamedTuple):
    """What travels with the guest: disks of its own, the bases below them, stores to probe, disks that QEMU opens over the network."""

    own: tuple[int, ...]
    bases: tuple[s.StageBase, ...]
    stores: tuple[str, ...]
    network: tuple[s.ReachDisk, ...] = ()


def own_disks(vm: Vm, records: Sequence[Record]) -> tuple[int, ...]:
    """Return the disks that lie on the host alone; raise MigrationRefused, EncryptedDisk, naming the disk that cannot move live."""
    known = {record.disk for record in records}
    for disk in vm.disks:
        if disk.id not in known:
            raise MigrationRefused(f"disk {disk.id} of VM {vm.id} is none of ours (driver {disk.driver or 'unknown'})")
    own = tuple(sorted(record.disk for record in records if record.is_local))
    encryption.check_running(vm, own, "live migration")
    return own


def packed(vm: Vm, records: Sequence[Record], vm_dir: str) -> Luggage:
    """Return what is to travel to `vm_dir`; raise as own_disks. `records` are those of the source host."""
    own, root = own_disks(vm, records), layout.base_store_of(vm_dir)
    bases = {record.of_image: s.StageBase(root, record.of_image) for record in records if record.place.leases}
    stores = {posixpath.dirname(record.of_image.source) for record in records if not record.is_local and not record.network}
    network = [s.ReachDisk(s.DiskRef(vm.id, record.disk, vm_dir), record.to_data()) for record in records if record.network]
    return Luggage(own, tuple(bases.values()), tuple(sorted(stores)), tuple(network))
