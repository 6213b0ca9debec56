# SPDX-License-Identifier: Apache-2.0
"""The part of the vocabulary that concerns images in stores. Loaded only for such (steps.py).

Most are carried out on the store's bridge, as its `bridge_user`; images are named POOL/IMAGE, and clones of an image for a
disk POOL/IMAGE-VM-DISK, as OpenNebula's own driver names them. Hosts only read, and write to what the bridge has made.
"""

from __future__ import annotations

from typing import NamedTuple

from .network_disk import NetworkDisk
from .refs import DiskRef, ImageRef
from .stores import Access

# -- on a host ----------------------------------------------------------------------------------------


class SeeImage(NamedTuple):
    """Report whether the present content of an image is frozen, and which generation it is."""

    image: ImageRef


class RecordNetwork(NamedTuple):
    """Record that a disk is opened over the network; there is no file of it."""

    disk: DiskRef
    image: ImageRef
    network: NetworkDisk
    how: str
    readonly: bool


class ConfirmDisk(NamedTuple):
    """Fail (VmGone) if a disk was deleted after this was planned."""

    disk: DiskRef


class ForgetDisk(NamedTuple):
    """Remove a disk's record, after what it names on the network is gone."""

    disk: DiskRef


class FillImage(NamedTuple):
    """Write the content of a local disk (at `snapshot`, -1 for now) to the new image that the bridge has made; `domain` runs."""

    disk: DiskRef
    image: ImageRef
    domain: str
    snapshot: int
    freeze: str = "NONE"


class RestoreImage(NamedTuple):
    """Give an image that the bridge has hidden and emptied the content of the qcow2 image whose bytes follow the plan."""

    disk: DiskRef
    image: ImageRef


# -- on the bridge ------------------------------------------------------------------------------------


class CreateImage(NamedTuple):
    """Publish an empty image of `size` bytes, with a file system unless `fs` is ''."""

    image: ImageRef
    size: int
    fs: str


class ReceiveImage(NamedTuple):
    """Publish an image whose extents follow the plan, with its generation."""

    image: ImageRef
    size: int


class HoldMoment(NamedTuple):
    """Keep the present content of `source`, which a guest writes to, for the CopyStored of that moment which follows."""

    image: ImageRef
    source: str


class CopyStored(NamedTuple):
    """Publish `image`, an independent copy of the image `source`, at snapshot `snapshot` (-1: as it is now)."""

    image: ImageRef
    source: str
    snapshot: int
    running: bool
    """A guest writes to `source`: copy the moment that HoldMoment has kept."""


class StageImage(NamedTuple):
    """Make an empty image of `size` bytes that is not published yet; report its name."""

    image: ImageRef
    size: int


class PublishImage(NamedTuple):
    """Publish what a host has written to a staged image."""

    image: ImageRef
    staged: str


class RemoveImage(NamedTuple):
    """Remove an image with its snapshots and all that is staged for it."""

    image: ImageRef


class RemoveClone(NamedTuple):
    """Remove the clone of an image for a disk, with its snapshots."""

    image: ImageRef


class MeasurePool(NamedTuple):
    """Report bytes used, in total and free of a pool."""

    access: Access
    pool: str


class ListPool(NamedTuple):
    """Report the names of all images of a pool."""

    access: Access
    pool: str


class LookAtImages(NamedTuple):
    """Report, for `semishared gc`, what some images of a pool are."""

    access: Access
    pool: str
    names: tuple[str, ...]


class DigestImage(NamedTuple):
    """Report the hex digest (`kind` as hashlib names it) of a whole image."""

    image: ImageRef
    kind: str


class FreezeImage(NamedTuple):
    """Have a snapshot of the present content of an image."""

    image: ImageRef


class NameGeneration(NamedTuple):
    """Name the frozen content with the id `snapshot` after its generation."""

    image: ImageRef
    snapshot: int
    generation: str


class BeginSession(NamedTuple):
    """End the generations of an image, before a guest writes to it (unless it is `readonly`), unless somebody writes to it.

    Report its size, and who has it open without being seen to write.
    """

    image: ImageRef
    readonly: bool
    shareable: bool = False
    """Others may write to it too."""


class CloneStored(NamedTuple):
    """Publish `target`, a copy-on-write clone of an image for a disk, of at least `min_size` bytes."""

    image: ImageRef
    target: str
    min_size: int


class KeepSnapshot(NamedTuple):
    """Keep the present content of an image as its snapshot `snapshot`."""

    image: ImageRef
    snapshot: int


class ForgetSnapshot(NamedTuple):
    """Remove a snapshot of an image."""

    image: ImageRef
    snapshot: int


class RevertImage(NamedTuple):
    """Give an image the content of its snapshot, and at least `size` bytes."""

    image: ImageRef
    snapshot: int
    size: int = 0


class FlattenImage(NamedTuple):
    """Give an image the content of its snapshot, and at least `size` bytes, and remove all snapshots."""

    image: ImageRef
    snapshot: int
    size: int = 0


class GrowImage(NamedTuple):
    """Grow an image to `size` bytes, at least."""

    image: ImageRef
    size: int


class BeginChange(NamedTuple):
    """Hide and empty an image while a host replaces its content; report its name meanwhile."""

    image: ImageRef
    min_size: int


class EndChange(NamedTuple):
    """Show a hidden image again: with its new content if that is `whole`, else with what it had."""

    image: ImageRef
    whole: bool
