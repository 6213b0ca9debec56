# SPDX-License-Identifier: Apache-2.0
"""Steps on layers, snapshots and sizes of disks. model/steps.py passes them on."""

from __future__ import annotations

from typing import Any

from ..refs import DiskRef, Step, looks


class DescribeDisk(Step[Any]):
    """Report a disk's record, its layers and their order, its snapshot copies, and the guest (`domain`)."""

    disk: DiskRef
    domain: str


@looks
class LookAtDisk(Step[Any]):
    """Report what DescribeDisk does, and hold nothing; {"unsettled": True} if a killed action has left what
    that would end.
    """

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


class SwitchLayer(Step[Any]):
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


class CopyOut(Step[Any]):
    """Publish an independent copy of a disk in place as a snapshot beside its image."""

    disk: DiskRef
    snapshot: int
    domain: str
    target: str
    freeze: str = "NONE"


class RestGuest(Step[Any]):
    """Freeze a running guest (`freeze`) while the front-end does something elsewhere, until it says so."""

    vm: int
    vm_dir: str
    domain: str
    freeze: str


class GrowDisk(Step[Any]):
    """Grow a disk that no guest has open to `size` bytes, at least."""

    disk: DiskRef
    size: int


class AllowGrowth(Step[None]):
    """Promise room for a running guest's disk of `size` bytes, before its hypervisor grows it."""

    disk: DiskRef
    size: int
