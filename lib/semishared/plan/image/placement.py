# SPDX-License-Identifier: Apache-2.0
"""Where a disk lives and how its overlay is made: attributes of the image, else of its datastore.

    SEMISHARED_PLACE = auto|shared|local            auto: persistent -> shared (in place), else local
    SEMISHARED_LOCAL = overlay|copy|remote-first    how a non-persistent disk is local
    SEMISHARED_DETACH = on-request|after-boot       when a remote-first disk of a running VM gets a local base
    SEMISHARED_ON_HOST_FAILURE = wait|recreate      may a local disk be made anew when its host is lost
    SEMISHARED_IO_CLASS = production|normal|scratch how much a disk may read and write (io_class.py)
    SEMISHARED_BASES = disk|ram                     whether guests read the base from memory (base/hot.py)
    SEMISHARED_CLASS = ram|fast|slow|any ...        class of its host's devices for a local disk
                                                    (plan/device/device_class.py)
    SEMISHARED_SHARE_ACCESS = virtiofs|client       how a guest reaches a directory: through its host, or as a
                                                    client of Ceph (plan/share/client_keys.py)

`overlay_options` needs no attribute: [overlays] of semishared.conf decides.
"""

from __future__ import annotations

from typing import Optional, Sequence

from ...errors import BadAttribute
from ...model.device import classes
from ...model.disk.place import DIFF, IN_PLACE, PLACES, STORE_CLONE, Place
from ...model.disk.record import IO_CLASSES, NORMAL
from ...opennebula.xml import Datastore, Disk, Image

WHERE = ("auto", "shared", "local")
LOCALS = tuple(
    place.name for place in PLACES.values() if place.is_local and place.is_layered and not place.commits
)
"""Volatile disks, which have no layers, are of no image; the one that commits is for persistent images."""


ON_HOST_FAILURE = ("wait", "recreate")
DETACH = ("on-request", "after-boot")
BASES = ("disk", "ram")
ACCESS = ("virtiofs", "client")


def _value(
    image: Optional[Image], datastore: Datastore, name: str, known: Sequence[str], default: str
) -> tuple[str, str]:
    """Return the value in force and who says so; raise BadAttribute if it is not one of `known`."""
    for holder, text in (
        (f"image {image.id}", image.attribute(name)) if image else ("", ""),
        (f"datastore {datastore.id}", datastore.attribute(name)),
    ):
        if text:
            value = text.strip().lower()
            if value not in known:
                raise BadAttribute(f"{name} of {holder} is {text!r}, not one of {', '.join(known)}")
            return value, holder
    return default, ""


def place(image: Image, datastore: Datastore) -> Place:
    """Return the place of a disk that is cloned from `image`; raise BadAttribute."""
    where, where_from = _value(image, datastore, "SEMISHARED_PLACE", WHERE, "auto")
    how, how_from = _value(image, datastore, "SEMISHARED_LOCAL", LOCALS, "overlay")
    if where == "shared":
        if how_from and how_from == where_from:
            raise BadAttribute(
                f"SEMISHARED_LOCAL = {how} of {how_from} contradicts its SEMISHARED_PLACE = shared"
            )
        return STORE_CLONE
    return PLACES[how]


def detach_when(image: Image, datastore: Datastore) -> str:
    """Return when remote-first disks from `image` are detached from their store; raise BadAttribute."""
    return _value(image, datastore, "SEMISHARED_DETACH", DETACH, "on-request")[0]


def io_class(image: Optional[Image], datastore: Datastore) -> str:
    """Return the I/O class of disks from `image`, or of volatile disks, whose `datastore` is the system's;
    raise BadAttribute.
    """
    return _value(image, datastore, "SEMISHARED_IO_CLASS", IO_CLASSES, NORMAL)[0]


def is_hot(image: Image, datastore: Datastore) -> bool:
    """Tell whether guests read the base of `image` from memory, where there is room; raise BadAttribute."""
    return _value(image, datastore, "SEMISHARED_BASES", BASES, "disk")[0] == "ram"


def is_client(image: Optional[Image], datastore: Datastore) -> bool:
    """Tell whether guests are clients of the share `image` themselves (None: one without an attribute).

    Raise BadAttribute, also where that cannot be.
    """
    access, holder = _value(image, datastore, "SEMISHARED_SHARE_ACCESS", ACCESS, "virtiofs")
    fs = datastore.attribute("SEMISHARED_FS").lower()
    if access == "client" and fs not in ("", "cephfs"):
        raise BadAttribute(
            f"SEMISHARED_SHARE_ACCESS of {holder} is client: datastore {datastore.id} is on {fs}, "
            f"only cephfs has clients"
        )
    return access == "client"


def device_classes(image: Image, datastore: Datastore) -> tuple[str, ...]:
    """Return the classes of devices on which local disks from `image` are to lie, in the order to be tried;
    () if nobody says.

    Raise BadAttribute.
    """
    name = "SEMISHARED_CLASS"
    for holder, text in (
        (f"image {image.id}", image.attribute(name)),
        (f"datastore {datastore.id}", datastore.attribute(name)),
    ):
        if text:
            found = classes.words(text)
            if not found:
                known = ", ".join(classes.WORDS)
                raise BadAttribute(
                    f"{name} of {holder} is {text!r}, not one of {known} or several of them, each once"
                )
            return found
    return ()


def is_diff(image: Image, datastore: Datastore) -> bool:
    """Tell whether disks of a persistent image lie over bases of their hosts; raise BadAttribute."""
    return _value(image, datastore, "SEMISHARED_PLACE", WHERE, "auto")[0] == "local"


def attached(image: Image, datastore: Datastore, disk: Disk) -> Place:
    """Return the place of a disk that ln attaches: persistent, or read-only; raise BadAttribute."""
    where, where_from = _value(image, datastore, "SEMISHARED_PLACE", WHERE, "auto")
    _value(image, datastore, "SEMISHARED_LOCAL", LOCALS, "overlay")
    if where != "local" or disk.is_readonly:
        return IN_PLACE  # nothing is written to what is read-only: there would be nothing to commit
    if image.is_shareable:
        raise BadAttribute(
            f"SEMISHARED_PLACE = local of {where_from} contradicts PERSISTENT_TYPE = SHAREABLE: "
            f"what several guests write at once "
            "is in one place"
        )
    return DIFF


def may_recreate(image: Image, datastore: Datastore) -> bool:
    """Tell whether a local disk from `image` may begin anew elsewhere when its host is lost."""
    return _value(image, datastore, "SEMISHARED_ON_HOST_FAILURE", ON_HOST_FAILURE, "wait")[0] == "recreate"


def may_recreate_volatile(vm: int, disk: Disk) -> bool:
    """Tell the same of a disk of no image: DISK of the VM's template says it."""
    text = disk.text("SEMISHARED_ON_HOST_FAILURE")
    if text and text.lower() not in ON_HOST_FAILURE:
        raise BadAttribute(
            f"SEMISHARED_ON_HOST_FAILURE of disk {disk.id} of VM {vm} is {text!r}, not one of "
            f"{', '.join(ON_HOST_FAILURE)}"
        )
    return text.lower() == "recreate"


def reason(image: Image, datastore: Datastore, disk: Disk) -> str:
    """Return, in a few words, why a disk from `image` is where `place` or `attached` says."""
    where, where_from = _value(image, datastore, "SEMISHARED_PLACE", WHERE, "auto")
    how, how_from = _value(image, datastore, "SEMISHARED_LOCAL", LOCALS, "overlay")
    if image.is_persistent or disk.is_readonly:
        if attached(image, datastore, disk).commits:
            return f"persistent, SEMISHARED_PLACE = local of {where_from}: only here until it is committed"
        return "persistent: attached in place"
    if where_from and where != "auto":
        return f"SEMISHARED_PLACE = {where} of {where_from}"
    if how_from:
        return f"not persistent, SEMISHARED_LOCAL = {how} of {how_from}"
    return "not persistent: the default"


BY_SIZE = "by-size"
ENTRY = 16
"""Bytes in an L2 table for a cluster with subclusters (docs/interop/qcow2.txt of QEMU)."""
CACHED = 32 << 20
"""Bytes of L2 tables in QEMU's cache, unless it is told otherwise (DEFAULT_L2_CACHE_MAX_SIZE in
block/qcow2.h).
"""
SMALL, LARGE = 128 << 10, 256 << 10
"""Bytes of a cluster; larger ones than these were not found to be better anywhere."""


def overlay_options(configured: str, size: int) -> str:
    """Return the options (`qemu-img create -o`) of an overlay of `size` bytes, 0 if that is unknown.

    `options` in [overlays] of semishared.conf names them, or says that the size decides. An overlay's tables
    have 16 bytes for each cluster with subclusters, and QEMU keeps 32 MiB of them in memory at most. Clusters
    of 128 KiB, whose subclusters a write of 4 KiB fills, are best as long as the tables of the whole disk fit
    there. Otherwise random writes wait for tables that are read and written again and again, and clusters of
    twice that size have half as many (docs/explanation/overlay-options.md has the measurements).
    """
    if configured != BY_SIZE:
        return configured
    cluster = LARGE if size > CACHED // ENTRY * SMALL else SMALL
    return f"extended_l2=on,cluster_size={cluster >> 10}k"
