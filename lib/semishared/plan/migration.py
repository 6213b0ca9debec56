# SPDX-License-Identifier: Apache-2.0
"""Live migration of a VM whose disks are all in place.

                   source                          target
premigrate         records are read                VM directory, links, context ISO
                   every store is probed  ----->   and seen to be the same
                                                   disks on the network are seen to be within reach
(vmm/migrate)      libvirt moves the guest; no disk of ours is copied
postmigrate        directory removed               -
failmigrate        -                               directory removed
each removal only where the domain is known not to run.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, NamedTuple, Sequence

from ..errors import MigrationRefused
from ..model import steps as s
from ..opennebula.args import Migrate
from ..opennebula.xml import Vm

if TYPE_CHECKING:
    # Every action imports the plans of all; only this one reads records.
    from ..model.record import Record


class InPlace(NamedTuple):
    """What travels with the guest: links to make, stores to probe, disks that QEMU opens over the network."""

    links: tuple[s.LinkInPlace, ...]
    stores: tuple[str, ...]
    network: tuple[s.TakeNetworkDisk, ...] = ()


def check(request: Migrate, vm: Vm, records: Sequence[Record], datastore: int) -> InPlace:
    """Return what to make at the target; raise MigrationRefused, naming the disk, if any disk would be left behind.

    `records` are those of the source host, `datastore` the system datastore that the VM is leaving.
    """
    if request.source_host == request.target.host:
        raise MigrationRefused(f"VM {vm.id} cannot change its system datastore while it runs (not supported yet)")
    if int(request.target.path.split("/")[-2]) != datastore:
        raise MigrationRefused(f"VM {vm.id} cannot change host and system datastore at once")
    known = {record.disk: record for record in records}
    links, network = [], []
    for disk in vm.disks:
        if disk.id not in known:
            raise MigrationRefused(f"disk {disk.id} of VM {vm.id} is none of ours (driver {disk.driver or 'unknown'})")
    for number, record in sorted(known.items()):
        if record.is_local or record.image is None:
            raise MigrationRefused(
                f"disk {number} of VM {vm.id} is local to {request.source_host} ({record.how}): live migration of local disks "
                "is not supported yet"
            )
        ref = s.DiskRef(vm.id, number, request.target.path)
        if record.network:
            network.append(s.TakeNetworkDisk(ref, record.to_data()))
        elif record.place.moves_live != "nothing":
            raise MigrationRefused(f"disk {number} of VM {vm.id} ({record.how}) cannot migrate live yet")
        else:
            links.append(s.LinkInPlace(ref, record.image, record.readonly, session=False))
    stores = sorted({posixpath.dirname(link.image.source) for link in links})
    return InPlace(tuple(links), tuple(stores), tuple(network))
