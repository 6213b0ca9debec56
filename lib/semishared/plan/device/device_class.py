# SPDX-License-Identifier: Apache-2.0
"""The class of device for a local disk: said by SEMISHARED_CLASS, noted in its record for its moves.

What a persistent image is to get back is never in memory, which is empty after a restart of the host.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from ...model import steps as s
from ...model.device.classes import MEMORY
from ...model.disk.place import Place
from ...model.exchange import On, Plan, warn
from ...opennebula.xml import Datastore, Disk, Image, Vm
from ..image import placement

GROWTH = 10
"""One in so many bytes of its size is what an overlay is taken to come to hold (disk/create.py)."""


def wanted(image: Image, datastore: Datastore, place: Place) -> tuple[str, ...]:
    """Return the classes for a disk, () if it does not lie on a device, or nobody says; raise
    BadAttribute.
    """
    found = placement.device_classes(image, datastore)
    if not place.is_local or not place.is_layered:
        return ()
    return tuple(word for word in found if word != MEMORY) if place.commits else found


def warned(disk: Disk, image: Image, datastore: Datastore, place: Place) -> Plan:
    """Say it if a disk would be in memory, and must not be."""
    if place.commits and MEMORY in placement.device_classes(image, datastore):
        yield warn(
            f"disk {disk.id} is of a persistent image: SEMISHARED_CLASS = {MEMORY} is not for it, "
            f"what is in memory can be lost"
        )


def placed(host: str, ref: s.DiskRef, disk: Disk, classes: tuple[str, ...], place: Place) -> Plan:
    """Have a place for a disk before it, and what it lies over, is made: it may be refused."""
    if classes:
        from ...model.device.steps import PlaceLayers

        size = max(disk.size, disk.original_size)
        expected = size if place.name == "copy" else size // GROWTH
        yield On(host, (s.PrepareVm(ref.vm, ref.vm_dir), PlaceLayers(ref, classes, size, expected)))


def noted(host: str, ref: s.DiskRef, classes: tuple[str, ...]) -> Plan:
    """Note the classes of a disk that was just made."""
    if classes:
        from ...model.device.steps import NoteClasses

        yield On(host, (NoteClasses(ref, classes),))


def travelling(vm: Vm, classes: Mapping[Any, Sequence[str]], more: int = 0) -> dict[str, Any]:
    """Return what disks want where they go (ReceiveVm), of each that has `classes` by its number in its
    record.

    `more`: layers that they get on their way.
    """
    numbered = {int(number): list(words) for number, words in classes.items()}
    return {
        str(disk.id): {
            "classes": numbered[disk.id],
            "size": max(disk.size, disk.original_size),
            "layers": len(vm.snapshots_of(disk.id)) + 1 + more,
        }
        for disk in vm.disks
        if disk.id in numbered
    }
