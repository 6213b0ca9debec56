# SPDX-License-Identifier: Apache-2.0
"""Steps on layers, snapshots and sizes of disks. model/steps.py passes them on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...named import Named
from ..refs import DiskRef, Step, looks

if TYPE_CHECKING:
    from typing import Optional, Union  # noqa: F401 - answers in quotes

    from ..shapes import Count, Disk, Format


class OnStore(Named):
    """A disk that is an image on a store with a bridge, where the front-end has to go on."""

    on_store: Any
    """That image, as JSON data."""
    how: str
    readonly: bool


class SeenLayer(Named):
    """A layer: the number of the one below (-1: not ours) and how its own header names that."""

    parent: int
    format: Format
    backing: str = ""
    backing_format: Format = ""


class DescribedDisk(Named):
    """A disk's record, its layers or snapshot copies, and its guest."""

    how: str
    format: Format
    image: Any
    """The image that the disk is, as JSON data; None for a disk of its own layers."""
    layers: dict[Disk, SeenLayer]
    active: int
    snapshots: tuple[Count, ...]
    aliases: tuple[Count, ...]
    """Numbers of layers that have a higher number too."""
    target: str
    system_snapshots: Count
    waiting: Optional[Count] = None
    """Bytes that the image does not have."""
    uncommitted: Optional[tuple[Disk, ...]] = None
    """Layers that the image does not have."""
    session: str = ""
    """The session in which the image is open."""


class UnsettledDisk(Named):
    """A killed action has left what DescribeDisk would end."""

    unsettled: bool


class Rested(Named):
    """How a guest rested: AGENT, SUSPEND or NONE, and why not in a better way; '': it did not."""

    rest: str = ""
    why: str = ""


class DescribeDisk(Step["Union[OnStore, DescribedDisk]"]):
    """Report a disk's record, its layers and their order, its snapshot copies, and the guest (`domain`)."""

    disk: DiskRef
    domain: str


@looks
class LookAtDisk(Step["Union[OnStore, DescribedDisk, UnsettledDisk]"]):
    """Report what DescribeDisk does, and hold nothing."""

    disk: DiskRef
    domain: str


class NameLayer(Step[None]):
    """Give a layer another number too."""

    disk: DiskRef
    layer: int
    name: int


class AddLayer(Step[None]):
    """Publish a new empty layer over another one, in place of whatever layer has its number."""

    disk: DiskRef
    layer: int
    over: int
    over_format: str


class ActivateLayer(Step[None]):
    """Make a layer the one that is written: the record first, then the link."""

    disk: DiskRef
    layer: int
    format: str


class SwitchLayer(Step[Rested]):
    """Make a running guest write to the layer `to` from now on, in a freeze (`freeze`, guest/freeze.py)."""

    disk: DiskRef
    layer: int
    to: int
    domain: str
    target: str
    freeze: str = "NONE"


class MergeLayer(Step[None]):
    """Give a layer what the one below it holds, and put it over `backing` ('' for nothing).

    `copy` leaves the file alone that a running guest has open, and replaces its name.
    """

    disk: DiskRef
    layer: int
    backing: str
    backing_format: str
    copy: bool


class PullLayer(Step[None]):
    """Let a running guest do that to the layer it writes to, and make it durable."""

    disk: DiskRef
    layer: int
    domain: str
    target: str
    backing: str


class DropStrays(Step[None]):
    """Remove what snapshots that failed have left: names of layers that OpenNebula does not know, with
    nothing over them.
    """

    disk: DiskRef
    known: tuple[int, ...]
    domain: str


class DropLayer(Step[None]):
    """Remove a layer over which nothing lies any more."""

    disk: DiskRef
    layer: int


class CopyOut(Step[Rested]):
    """Publish an independent copy of a disk in place as a snapshot beside its image."""

    disk: DiskRef
    snapshot: int
    domain: str
    target: str
    freeze: str = "NONE"


class RestGuest(Step[Rested]):
    """Freeze a running guest (`freeze`) while the front-end does something elsewhere, until it says so."""

    vm: int
    vm_dir: str
    domain: str
    freeze: str


class GrowDisk(Step["Optional[OnStore]"]):
    """Grow a disk that no guest has open to `size` bytes, at least."""

    disk: DiskRef
    size: int


class AllowGrowth(Step[None]):
    """Promise room for a running guest's disk of `size` bytes, before its hypervisor grows it."""

    disk: DiskRef
    size: int
