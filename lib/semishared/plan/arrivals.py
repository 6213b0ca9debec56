# SPDX-License-Identifier: Apache-2.0
"""What is asked of a host that a VM's directory is to come to."""

from __future__ import annotations

from typing import Any, Mapping

from ..model.steps_move import MakeRoom
from ..opennebula.args import VmPlace
from ..opennebula.xml import Vm
from ..units import MiB

LITTLE = 256 * MiB
"""Bytes of what is in a VM directory beside disks and memory: domains, CONTEXT, records, maps of qcow2."""


def room(place: VmPlace, seen: Mapping[str, Any], *, keep_bases: bool = True) -> MakeRoom:
    """Return what makes room at `place` for a directory as LookAtVm has seen it; a disk that wants a class of
    devices is apart.

    Without `keep_bases` its disks lie there without theirs.
    """
    every, bases = seen.get("sizes", {}), tuple(seen["bases"]) if keep_bases else ()
    sizes = {disk: size for disk, size in every.items() if disk not in seen.get("classes", {})}
    return MakeRoom(
        place.vm, place.path, int(seen["bytes"]), bases, sizes, sum(every.values()) - sum(sizes.values())
    )


def most(vm: Vm) -> int:
    """Return the bytes that the directory of a VM may have at most, by the sizes that oned has: more than
    that nobody takes from a host.
    """
    # Of each disk its layers, one more while it moves, and what a diff lies over.
    disks = sum(max(disk.size, disk.original_size) * (3 + len(vm.snapshots_of(disk.id))) for disk in vm.disks)
    return (disks + max(vm.number("TEMPLATE/MEMORY", 0), 0) * MiB) * 11 // 10 + LITTLE
