# SPDX-License-Identifier: Apache-2.0
"""Steps about the devices of a host's pool: what `semishared pool` asks (pool/labels.py)."""

from __future__ import annotations

from typing import Any

from ..refs import DiskRef, Step, looks


@looks
class ListDevices(Step[Any]):
    """Report the devices of the host's pool: what they are, what they hold, which are there."""

    root: str


class SetDevices(Step[Any]):
    """Make these the host's only devices that take disks and bases: label them, or refuse all."""

    root: str
    devices: tuple[str, ...]
    """Words of SEMISHARED_POOL (plan/device/choose.py)."""
    host_id: int = -1
    """OpenNebula's id of the host: two hosts may have one name."""


class CloseDevice(Step[Any]):
    """Close a device to new files, until SetDevices names it again."""

    root: str
    device: str
    """Its UUID."""


@looks
class ListHeld(Step[Any]):
    """Report what lies on each device: layers of disks, by their VMs' directories, and bases."""

    root: str


class MoveLayers(Step[Any]):
    """Move all layers of a disk to another device; report how, or why not.

    The machine asks, when it has the VM to itself, whether oned still has it as it was: {"question": "vm",
    "vm": id} -> {"why" not, "is_off": its guest is not to run}.
    """

    disk: DiskRef
    """Its VM directory may also be a kept one (disk/retained_diffs.py)."""
    domain: str
    """'' for a kept disk of a VM that is gone."""
    name: str
    """The name of the directory on its present device."""
    target: str
    """The UUID of the target device."""
    rate: int
    """Bytes per second at most, 0 for no limit."""


class MoveBase(Step[Any]):
    """Move a base, with its leases, to another device; report how, or why not."""

    root: str
    name: str
    target: str
    rate: int


class PlaceLayers(Step[None]):
    """Place the layers of a new disk on a device of one of these classes, or refuse it.

    It will take about `expected` bytes, and `size` at most.
    """

    disk: DiskRef
    classes: tuple[str, ...]
    """Of device_class.WORDS, the first to try in front."""
    size: int
    expected: int


class NoteHot(Step[None]):
    """Note that a disk's guest is to read its base from memory, where there is room."""

    disk: DiskRef


class NoteClasses(Step[None]):
    """Note the device classes that a disk wants, wherever it goes."""

    disk: DiskRef
    classes: tuple[str, ...]
