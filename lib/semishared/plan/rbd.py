# SPDX-License-Identifier: Apache-2.0
"""Plans for disks whose image is reached over the network: host and bridge take turns.

                 host                                   bridge
    ln                                                  nobody writes to the image? its generations end
                 record
    clone, shared
                 record (so that delete knows)
                                                        clone of the frozen image
                 still wanted? else it is removed again
    clone, local
                 is the content frozen, and which?
                                                        frozen, if it is not
                 base, straight from RBD
                                                        generation named, if it was not
                 overlay or copy
    delete of a clone
                 deletion noted
                                                        clone removed
                 record removed
    snapshots, resize
                 record read; turn taken
                                                        done there
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import BadArguments, NotSupported
from ..model import steps as s
from ..model import steps_image
from ..model.network_disk import NetworkDisk
from ..opennebula.args import FromImage
from ..opennebula.xml import Datastore, Disk, Image
from . import disks, encryption, images, placement


class Clone(NamedTuple):
    """How a disk is made from an image."""

    where: str
    """shared, overlay or copy"""
    image: s.ImageRef
    target: s.DiskRef
    root: str
    min_size: int
    options: str

    @property
    def store_clone(self) -> str:
        """Return the name of the image's clone for this disk, as OpenNebula's own driver has it."""
        return f"{self.image.source}-{self.target.vm}-{self.target.disk}"

    def record(self) -> list[s.Step]:
        """Return what the host does first for a disk on the store."""
        network = NetworkDisk.of(self.store_clone, self.image.access)
        return [
            s.PrepareVm(self.target.vm, self.target.vm_dir),
            steps_image.RecordNetwork(self.target, self.image, network, "store-clone", readonly=False),
        ]

    def on_store(self) -> list[s.Step]:
        """Return what the bridge does for a disk on the store."""
        return [steps_image.CloneStored(self.image, self.store_clone, self.min_size)]

    def local(self, generation: str) -> list[s.Step]:
        """Return what the host does for a local disk; `generation` '' is that of the frozen image, whichever it is."""
        image = self.image._replace(generation=generation)
        prepare = s.PrepareVm(self.target.vm, self.target.vm_dir)
        if self.where == "copy":
            return [prepare, s.CopyImage(self.target, image, self.min_size)]
        return [s.StageBase(self.root, image), prepare, s.CreateOverlay(self.target, image, self.min_size, self.options)]


def clone(request: FromImage, disk: Disk, image: Image, datastore: Datastore, options: str) -> Clone:
    """Plan clone."""
    if image.is_persistent:
        raise BadArguments(f"image {image.id} is persistent, it is attached in place and never cloned")
    ref = images.image_ref(image, datastore, request.source, "source")
    where = placement.place(image, datastore, is_persistent=False)
    encryption.check_clone(disk, image, where, is_mounted=False)
    root = f"{request.target.vm_place.datastore_location}/.semishared"
    return Clone(where, ref, disks.disk_ref(request.target), root, disks.grown(disk), options)


def ln(request: FromImage, disk: Disk, image: Image, datastore: Datastore) -> tuple[list[s.Step], list[s.Step]]:
    """Plan ln: (steps on the bridge, then those on the host)."""
    placement.place(image, datastore, is_persistent=True)
    encryption.secret(disk, image)
    ref, target = images.image_ref(image, datastore, request.source, "source"), disks.disk_ref(request.target)
    network = NetworkDisk.of(ref.source, ref.access)
    on_host = [
        s.PrepareVm(target.vm, target.vm_dir),
        steps_image.RecordNetwork(target, ref, network, "in-place", disk.is_readonly),
    ]
    return [steps_image.BeginSession(ref, disk.is_readonly, disk.is_shareable)], on_host


def snapshot(what: str, image: s.ImageRef, number: int, readonly: bool) -> list[s.Step]:
    """Plan `what` (create, delete, revert) of snapshot `number` of a disk on the network, on the bridge."""
    if readonly:
        raise NotSupported(f"{image.source} is attached read-only, it cannot have snapshots of a VM")
    steps = {
        "create": steps_image.KeepSnapshot,
        "delete": steps_image.ForgetSnapshot,
        "revert": steps_image.RevertImage,
    }
    return [steps[what](image, number)]
