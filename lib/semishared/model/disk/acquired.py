# SPDX-License-Identifier: Apache-2.0
"""A host's or a record's word on the image of a disk, against what oned has given the VM as that disk.

Both may say that there is a disk, and over which generation it lies. oned alone says which image it is of,
whether it is that image or only made from it, where that is, and by which user and configuration it is
opened.
"""

from __future__ import annotations

from typing import List, Mapping, Optional, Sequence

from ...errors import BadArguments, ForeignImage
from ...named import NamedTuple
from ..refs import ImageRef
from ..store import rbd_names
from ..store.access import is_path
from .network_disk import NetworkDisk
from .record import Record


class Given(NamedTuple):
    """What oned has given a VM as one disk."""

    image: Optional[ImageRef]
    """The image that oned has acquired for the disk; None for a volatile one."""
    is_clone: bool = False
    """The disk is made from the image, which other VMs may use; else it is the image, or is committed to it.
    """
    is_readonly: bool = False

    def to_data(self) -> dict[str, object]:
        """Return it as JSON data."""
        return {**self._asdict(), "image": self.image.to_data() if self.image else None}

    @classmethod
    def from_data(cls, data: object) -> Given:
        """Return what is in JSON data; raise BadArguments."""
        if not isinstance(data, dict) or set(data) != set(cls._fields):
            raise BadArguments(f"not a disk of oned's: {str(data)[:200]}")
        return cls(
            ImageRef.from_data(data["image"]) if data["image"] else None,
            data["is_clone"] is True,
            data["is_readonly"] is True,
        )


def compared(said: ImageRef, right: ImageRef, vm: int, disk: int) -> ImageRef:
    """Return oned's image of a disk that is said to be of `said`; raise ForeignImage if they differ."""
    if said[:4] != right[:4]:
        raise ForeignImage(
            f"disk {disk} of VM {vm} is said to be of {said.source!r} (image {said.id}, "
            f"{said.format}, of datastore {said.store}), and "
            f"OpenNebula has {right.source!r} (image {right.id}, {right.format}, of datastore {right.store})"
        )
    return right._replace(generation=said.generation)


def in_store(given: Given, vm: int, disk: int) -> ImageRef:
    """Return a disk's image in its store: the clone, where oned has it cloned and it is on the network."""
    assert given.image
    if given.is_clone and not is_path(given.image.source):
        return given.image._replace(source=rbd_names.clone(given.image.source, vm, disk))
    return given.image


def record(said: Record, given: Given, vm: int) -> Record:
    """Return a record with oned's image, reached by oned's datastore; raise ForeignImage if another."""
    right, image, network, over = given.image, said.image, said.network, said.over
    what = f"disk {said.disk} of VM {vm} is said to be"
    if right is None:
        _made_empty(said, vm)
        return said
    if image is None:
        raise ForeignImage(f"{what} made from nothing, and OpenNebula has image {right.id} for it")
    found = compared(image, right, vm, said.disk)
    if over and over.name != right.source:
        raise ForeignImage(f"{what} made from {over.name!r}, not {right.source!r}")
    if (said.place.is_image or said.place.commits) == given.is_clone:
        has = "a disk made from it" if given.is_clone else "that image itself"
        raise ForeignImage(f"{what} {said.how} of image {right.id}, and OpenNebula has given it {has}")
    if said.place.is_image and given.is_readonly and not said.readonly:
        raise ForeignImage(
            f"{what} image {right.id} to be written to, which OpenNebula has given it to be read"
        )
    if network:
        own = in_store(given, vm, said.disk)
        network = NetworkDisk.of(
            compared(image._replace(source=network.name), own, vm, said.disk).source, right.access
        )
    if over:
        over = NetworkDisk.below(right.source, over.snapshot, right.access)
    return said._replace(image=found, network=network, over=over)


def records(said: Sequence[Record], given: Mapping[int, Given], vm: int) -> List[Record]:
    """Return a host's records of a VM, with the images that oned has `given` it; raise ForeignImage."""
    return [record(one, given.get(one.disk, Given(None)), vm) for one in said]


def _made_empty(said: Record, vm: int) -> None:
    """Raise ForeignImage if a record names an image for a disk that has none in oned."""
    of = (
        said.image.source
        if said.image
        else said.network.name
        if said.network
        else ""
        if said.is_local
        else said.path
    )
    if of:
        raise ForeignImage(
            f"disk {said.disk} of VM {vm} is said to be of {of!r}, and OpenNebula has no image for it"
        )
