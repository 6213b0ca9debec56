# SPDX-License-Identifier: Apache-2.0
"""Memory that gets full: which disk leaves it for another device, and when a paused guest goes on.

Memory is judged by the fill of its file system. libvirt's threshold of a disk (virDomainSetBlockThreshold)
would tell of one guest's writing: it is said once, forgotten by a libvirtd that is started again and with
every layer that is put on the disk, and no threshold of a single disk is right for memory that all of them
share. A guest that was faster than whoever looks stands still, and loses nothing by it: so looking again and
again is enough.
"""

from __future__ import annotations

from typing import Collection, List, Mapping, Sequence

from ...model.device.classes import MEMORY
from ...named import NamedTuple
from ...units import MiB
from . import balance
from .balance import Item, Move
from .choose import RESERVE, Device

HIGH = 0.8
"""Memory that is fuller than that part of it gives a disk away."""
AHEAD_S = 10
"""What a disk comes to hold within so many seconds, if its guest goes on as it does, counts as if it were
there.
"""
ENOUGH = 64 * MiB
"""A guest goes on where so many bytes are free, or a twentieth of what there is if that is less."""


class Wait(NamedTuple):
    """A disk of a guest that stands still, on which a write has failed."""

    is_full: bool
    """Whether there was no room for it (ENOSPC), as far as QEMU says; else it is another error."""
    classes: Collection[str]
    """On which it is to lie (SEMISHARED_CLASS)."""
    was_in_memory: bool
    """It is there yet, or was a moment ago."""
    capacity: int
    """Bytes of the device, or the file system, where it lies by now."""
    free: int


def is_due(device: Device) -> bool:
    """Tell whether memory is so full that a disk is to leave it: of what is promised once, all else is
    refused before it is full.
    """
    return device.is_overcommitted and device.used > HIGH * device.capacity


def order(
    devices: Sequence[Device], items: Sequence[Item], memory: str, growth: Mapping[str, float]
) -> List[Move]:
    """Return the disks in memory that may lie elsewhere, where each would go, and the one first that will
    take most of it.

    `growth`: bytes per second, by the names of items. A disk that has to be in memory (`SEMISHARED_CLASS =
    ram` alone) stays there.
    """
    own = [item for item in items if item.device == memory and item.size > 0]
    own.sort(key=lambda item: (-(item.size + AHEAD_S * growth.get(item.name, 0)), item.name))
    moves = [move for item in own for move in balance.drain(devices, [item], memory)]
    return [move for move in moves if move.target]


def may_go_on(waits: Sequence[Wait]) -> bool:
    """Tell whether a guest that libvirt says stands still after an error goes on: all that failed was room in
    memory, and there is some.

    Other disks that fail are for people to look at. Memory itself fails for want of room alone, by whatever
    name that comes.
    """
    return bool(waits) and all(map(_has_room, waits))


def _has_room(wait: Wait) -> bool:
    is_ours = MEMORY in wait.classes and (wait.is_full or wait.was_in_memory)
    return is_ours and wait.free >= min(ENOUGH, wait.capacity // RESERVE)
