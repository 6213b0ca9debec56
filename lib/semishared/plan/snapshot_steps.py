# SPDX-License-Identifier: Apache-2.0
"""The part of the vocabulary that concerns layers, snapshots and sizes of disks. steps.py passes it on."""

from __future__ import annotations

from dataclasses import dataclass

from .refs import DiskRef, Step


@dataclass(frozen=True)
class DescribeDisk(Step):
    """Report a disk's record, its layers and who lies over whom, its snapshot copies, and (`domain`) the guest's view."""

    disk: DiskRef
    domain: str


@dataclass(frozen=True)
class NameLayer(Step):
    """Give a layer another number too."""

    disk: DiskRef
    layer: int
    name: int


@dataclass(frozen=True)
class AddLayer(Step):
    """Publish a new empty layer over another one, in place of whatever layer has its number."""

    disk: DiskRef
    layer: int
    over: int
    over_format: str


@dataclass(frozen=True)
class ActivateLayer(Step):
    """Make a layer the one that is written: the record first, then the link."""

    disk: DiskRef
    layer: int
    format: str


@dataclass(frozen=True)
class SwitchLayer(Step):
    """Make a running guest write to the layer `to` from now on."""

    disk: DiskRef
    layer: int
    to: int
    domain: str
    target: str


@dataclass(frozen=True)
class MergeLayer(Step):
    """Give a layer what the one below it holds, and put it over `backing` ('' for nothing).

    `copy` leaves the file alone that a running guest has open, and replaces its name.
    """

    disk: DiskRef
    layer: int
    backing: str
    backing_format: str
    copy: bool


@dataclass(frozen=True)
class PullLayer(Step):
    """Let a running guest do that to the layer it writes to."""

    disk: DiskRef
    layer: int
    domain: str
    target: str
    backing: str


@dataclass(frozen=True)
class DropLayer(Step):
    """Remove a layer over which nothing lies any more."""

    disk: DiskRef
    layer: int


@dataclass(frozen=True)
class CopyOut(Step):
    """Publish an independent copy of a disk in place as a snapshot beside its image."""

    disk: DiskRef
    snapshot: int
    domain: str
    target: str


@dataclass(frozen=True)
class CopyBack(Step):
    """Make a snapshot beside the image `source` its content; a new session begins."""

    source: str
    snapshot: int


@dataclass(frozen=True)
class DropCopy(Step):
    """Remove a snapshot beside the image of a disk in place."""

    disk: DiskRef
    snapshot: int


@dataclass(frozen=True)
class GrowDisk(Step):
    """Grow a disk that nobody has open to `size` bytes, at least."""

    disk: DiskRef
    size: int
