# SPDX-License-Identifier: Apache-2.0
"""Steps about the devices of a host's pool: what `semishared pool` asks (pool/labels.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from ...named import Named
from ..refs import DiskRef, Step, looks

if TYPE_CHECKING:
    from ..shapes import Count, Lease, Path


class PoolDevice(Named):
    """A device of a host's pool.

    Of one that cannot be looked at the host knows its UUID, its path, and what is wrong.
    """

    uuid: str
    path: str
    """Where it is mounted."""
    class_: str
    weight: float
    """0: it takes nothing more."""
    total: Count
    """Bytes."""
    free: Count
    """Bytes."""
    disks: Count
    bases: Count
    promised: Count
    """Bytes that the files in memory can come to hold."""
    lost: list[str]
    """Disks, as VM-DISK, whose layers lay in memory that a restart has emptied."""
    is_old: bool
    """Whether its label is of before, without padding (device/label.py)."""
    state: str
    """'' if nothing is wrong."""
    mixes_memory: Optional[bool] = None
    """Whether guests' direct I/O reads and writes something else there; None: it was not looked at."""
    watched: Optional[bool] = None
    """Of memory: whether a watcher moves disks away when it is full."""
    limit: Optional[int] = None
    """Of memory: bytes at which zram refuses a page, 0 for no limit."""


class PoolDevices(Named):
    """The devices of a host's pool."""

    devices: list[PoolDevice]


class ChangedPool(Named):
    """What has become of a pool's devices, by their paths."""

    labelled: list[str]
    """New ones."""
    closed: list[str]
    """They hold something still, and take nothing more."""
    gone: list[str]


class HeldItem(Named):
    """What lies on a device: all layers of a disk, or a base."""

    part: str
    """Directory of the device: layers, or bases."""
    name: str
    """Name of its directory there."""
    device: str
    """The UUID of the device."""
    bytes: Count
    leases: tuple[Lease, ...] = ()
    """Of a base."""
    vm: Count = -1
    """Of a disk, as all below."""
    disk: Count = -1
    vm_dir: Path = ""
    classes: tuple[str, ...] = ()
    """Of devices, that the disk wants; none: any."""


class HeldItems(PoolDevices):
    """The same, and what lies on them."""

    items: list[HeldItem]


class Moved(Named):
    """How a move went, or why not."""

    bytes: Count
    """That were moved: 0 also of what lay there already."""
    seconds: float
    error: str
    """A line, '' if it went well."""
    id: str
    """Of the error."""


class MovedBase(Moved):
    """The same, of a base."""

    leases: tuple[Lease, ...]
    """That went with it."""


@looks
class ListDevices(Step[PoolDevices]):
    """Report the devices of the host's pool: what they are, what they hold, which are there."""

    root: str


class SetDevices(Step[ChangedPool]):
    """Make these the host's only devices that take disks and bases: label them, or refuse all."""

    root: str
    devices: tuple[str, ...]
    """Words of SEMISHARED_POOL (plan/device/choose.py)."""
    host_id: int = -1
    """OpenNebula's id of the host: two hosts may have one name."""


class CloseDevice(Step[None]):
    """Close a device to new files, until SetDevices names it again."""

    root: str
    device: str
    """Its UUID."""


@looks
class ListHeld(Step[HeldItems]):
    """Report what lies on each device: layers of disks, by their VMs' directories, and bases."""

    root: str


class MoveLayers(Step[Moved]):
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


class MoveBase(Step[MovedBase]):
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


class AllocateDisk(Step[None]):
    """Allocate all blocks that a disk's guest may write, where its file lies; one on the network has none."""

    disk: DiskRef


class NoteClasses(Step[None]):
    """Note the device classes that a disk wants, wherever it goes."""

    disk: DiskRef
    classes: tuple[str, ...]
