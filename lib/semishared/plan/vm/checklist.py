# SPDX-License-Identifier: Apache-2.0
"""What travels with a running guest, what its target host must have, and the room for a VM's directory."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Mapping, Sequence

from ...errors import MigrationRefused
from ...model import steps as s
from ...model.disk import names as disk_names
from ...model.vm.move_steps import MakeRoom
from ...named import NamedTuple
from ...opennebula.args import VmPlace
from ...opennebula.xml import Disk, Vm
from ...units import MiB
from ..disk.disks import DRIVER
from ..image import placement

if TYPE_CHECKING:
    # Every action imports the plans of all; only those around a live migration read records.
    from ...model.disk.record import Record


class Luggage(NamedTuple):
    """What travels with the guest: its disks, their bases, stores to probe, disks opened over the network.

    `files` are disks of other drivers, as the guest has them open; `places` the directories to probe for
    those.
    """

    own: tuple[int, ...]
    bases: tuple[s.StageBase, ...]
    stores: tuple[str, ...]
    network: tuple[s.ReachDisk, ...] = ()
    files: tuple[str, ...] = ()
    places: tuple[str, ...] = ()


def of_others(vm: Vm, records: Sequence[Record]) -> list[Disk]:
    """Return the disks of other drivers; raise MigrationRefused for one of ours without its record."""
    known = {record.disk for record in records}
    found = [disk for disk in vm.disks if disk.id not in known]
    for disk in found:
        if disk.driver == DRIVER:
            raise MigrationRefused(f"disk {disk.id} of VM {vm.id} has no record")
    return found


def refusal(vm: Vm, disk: Disk, why: str) -> MigrationRefused:
    """Return the error that names a disk of another driver."""
    return MigrationRefused(
        f"disk {disk.id} of VM {vm.id} is none of ours (driver {disk.driver or 'unknown'}) and {why}"
    )


def own_disks(vm: Vm, records: Sequence[Record]) -> tuple[int, ...]:
    """Return the disks on the host alone; raise EncryptedDisk, naming the disk, if one cannot move live."""
    own = tuple(sorted(record.disk for record in records if record.is_local))
    placement.check_running(vm, own, "live migration")
    return own


def packed(vm: Vm, records: Sequence[Record], vm_dir: str, opened: Mapping[str, s.OpenedDisk]) -> Luggage:
    """Return what is to travel to `vm_dir`; raise MigrationRefused, EncryptedDisk, naming the disk.

    `records`: of the source host; `opened`: the guest's open disks by target, asked for if other drivers have
    any.
    """
    own, root = own_disks(vm, records), disk_names.base_store_of(vm_dir)
    bases = {record.of_image: s.StageBase(root, record.of_image) for record in records if record.place.leases}
    shared = [record for record in records if not record.is_local or record.place.is_remote]
    networked = [record for record in shared if record.network or record.over]
    stores = {posixpath.dirname(record.of_image.source) for record in shared if record not in networked}
    network = [s.ReachDisk(s.DiskRef(vm.id, record.disk, vm_dir), record.to_data()) for record in networked]
    files, places = _shared(vm, of_others(vm, records), opened)
    return Luggage(own, tuple(bases.values()), tuple(sorted(stores)), tuple(network), files, places)


def _shared(
    vm: Vm, others: Sequence[Disk], opened: Mapping[str, s.OpenedDisk]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of other drivers' disks, and the directories that both hosts must share.

    A disk that QEMU opens over the network is the same wherever it does that.
    """
    files, places = [], set[str]()
    for disk in others:
        found = opened.get(disk.target)
        if found is None:
            raise refusal(vm, disk, "the guest does not have it open")
        if found.type == "network":
            continue
        if found.type != "file" or "" in found.directories:
            what = "a file in the VM's own directory" if found.type == "file" else f"of the type {found.type}"
            raise refusal(vm, disk, f"{what}, not known to be the same on both hosts")
        files.append(found.path)
        places.update(found.directories)
    return tuple(files), tuple(sorted(places))


def can_run(vm: Vm, machine: s.GuestMachine) -> tuple[s.CheckMachine, ...]:
    """Return what has a host look whether it has the machine of a guest that is to go on there."""
    return (s.CheckMachine(vm.id, *machine._asdict().values()),) if machine.machine else ()


LITTLE = 256 * MiB
"""Bytes in a VM directory besides disks and memory: domains, CONTEXT, records, maps of qcow2."""


def room_for_arrival(place: VmPlace, seen: s.MarkedVm, *, keep_bases: bool = True) -> MakeRoom:
    """Return what makes room at `place` for a directory as LookAtVm has seen it; a disk that wants a class of
    devices is apart.

    Without `keep_bases` its disks lie there without theirs.
    """
    every, bases = seen.sizes, tuple(seen.bases) if keep_bases else ()
    sizes = {disk: size for disk, size in every.items() if disk not in seen.classes}
    return MakeRoom(place.vm, place.path, seen.bytes, bases, sizes, sum(every.values()) - sum(sizes.values()))


def most_bytes(vm: Vm) -> int:
    """Return the most bytes that a VM's directory may have, by oned's sizes; no machine accepts more."""
    # Of each disk its layers, one more while it moves, and what a diff lies over.
    disks = sum(max(disk.size, disk.original_size) * (3 + len(vm.snapshots_of(disk.id))) for disk in vm.disks)
    return (disks + max(vm.number("TEMPLATE/MEMORY", 0), 0) * MiB) * 11 // 10 + LITTLE
