# SPDX-License-Identifier: Apache-2.0
"""Steps about the devices of a host's pool: what `semishared pool` asks (pool/labels.py)."""

from __future__ import annotations

from ...named import NamedTuple
from ..refs import DiskRef, looks


@looks
class ListDevices(NamedTuple):
    """Report the devices of the host's pool: what they are, what they hold, which are there."""

    root: str


class SetDevices(NamedTuple):
    """Let these, and no others, be the devices that take disks and bases on the host: label them, or refuse
    all of them.
    """

    root: str
    devices: tuple[str, ...]
    """Words of SEMISHARED_POOL (plan/device/choose.py)."""
    host_id: int = -1
    """What OpenNebula calls the host: two may have one name."""


class CloseDevice(NamedTuple):
    """Let a device take nothing more, until SetDevices names it again."""

    root: str
    device: str
    """Its UUID."""


@looks
class ListHeld(NamedTuple):
    """Report what lies on each device: layers of disks, by the directories of VMs that lead to them, and
    bases.
    """

    root: str


class MoveLayers(NamedTuple):
    """Move all layers of a disk to another device; report how, or why not.

    The machine asks, when it has the VM to itself, whether oned still has it as it was: {"question": "vm",
    "vm": id} -> {"why" not, "is_off": its guest is not to run}.
    """

    disk: DiskRef
    """Its VM directory may also be one that is kept (disk/retained_diffs.py)."""
    domain: str
    """'' of what is kept of a VM that is gone."""
    name: str
    """Of the directory on the device that is to be left."""
    target: str
    """The UUID of the device where they are to be."""
    rate: int
    """Bytes per second at most, 0 for no limit."""


class MoveBase(NamedTuple):
    """Move a base, with its leases, to another device; report how, or why not."""

    root: str
    name: str
    target: str
    rate: int


class PlaceLayers(NamedTuple):
    """Let the layers of a disk that is to be made lie on a device of one of these classes, or refuse it.

    It will take about `expected` bytes, and `size` at most.
    """

    disk: DiskRef
    classes: tuple[str, ...]
    """Of device_class.WORDS, the one to be tried first in front."""
    size: int
    expected: int


class NoteHot(NamedTuple):
    """Note of a disk that its guest is to read its base from memory, where there is room."""

    disk: DiskRef


class NoteClasses(NamedTuple):
    """Note of a disk on which classes of devices it is to lie, wherever it goes."""

    disk: DiskRef
    classes: tuple[str, ...]
