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

from typing import Any, Mapping

from ..errors import NotSupported, VmGone
from ..model import steps as s
from ..model import steps_image
from ..model.exchange import Lines, On, Part, Plan, Say, agree
from ..model.network_disk import NetworkDisk


def clone(host: str, bridge: str, image: s.ImageRef, disk: s.DiskRef, min_size: int) -> Plan:
    """Make a disk that is a copy-on-write clone beside its image; the record comes first, so that delete knows."""
    # As OpenNebula's own driver names it.
    made = image._replace(source=f"{image.source}-{disk.vm}-{disk.disk}")
    network = NetworkDisk.of(made.source, image.access)
    yield On(host, (s.PrepareVm(disk.vm, disk.vm_dir), steps_image.RecordNetwork(disk, image, network, "store-clone", readonly=False)))
    yield On(bridge, (steps_image.CloneStored(image, made.source, min_size),))
    try:
        yield On(host, (steps_image.ConfirmDisk(disk),))
    except VmGone:
        yield On(bridge, (steps_image.RemoveClone(made),))
        raise


def frozen(host: str, bridge: str, image: s.ImageRef, root: str) -> Part[s.ImageRef]:
    """Have the image's content frozen; return the image with its generation.

    A content that nobody has hashed yet is, if there is a base store `root`, staged there for that; else it stays ''.
    """
    (seen,) = yield On(host, (steps_image.SeeImage(image),))
    if not seen["frozen"]:
        yield On(bridge, (steps_image.FreezeImage(image),))
    generation = seen["generation"]
    if not generation and root:
        (staged,) = yield On(host, (s.StageBase(root, image),))
        generation = str(staged["generation"])
        if "snapshot" in staged:
            yield On(bridge, (steps_image.NameGeneration(image, staged["snapshot"], generation),))
    return image._replace(generation=generation)


def ln(host: str, bridge: str, image: s.ImageRef, disk: s.DiskRef, *, readonly: bool, shareable: bool) -> Plan:
    """Attach an image in place."""
    network = NetworkDisk.of(image.source, image.access)
    yield agree(host)
    (begun,) = yield On(bridge, (steps_image.BeginSession(image, readonly, shareable),))
    yield Say(_who_has_it_open, (image.source, begun))
    yield On(host, (s.PrepareVm(disk.vm, disk.vm_dir), steps_image.RecordNetwork(disk, image, network, "in-place", readonly)))


def _who_has_it_open(source: str, begun: Mapping[str, Any]) -> Lines:
    if begun["open_by"]:
        yield "warn", f"{source} is open by {', '.join(begun['open_by'])}; without its exclusive lock nobody sees who writes"


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
