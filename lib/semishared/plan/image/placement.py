# SPDX-License-Identifier: Apache-2.0
"""Where a disk lives and how its overlay is made: attributes of the image, else of its datastore.

`overlay_options` needs no attribute: [overlays] of semishared.conf decides.
"""

from __future__ import annotations

from typing import Optional

from ...errors import BadAttribute
from ...model.attributes import CLASS, FS, LOCAL, PLACE, SHARE_ACCESS
from ...model.disk.place import DIFF, IN_PLACE, PLACES, STORE_CLONE, Place
from ...opennebula.xml import Datastore, Disk, Image


def place(image: Image, datastore: Datastore) -> Place:
    """Return the place of a disk that is cloned from `image`; raise BadAttribute."""
    where, where_from = PLACE.said(image, datastore)
    how, how_from = LOCAL.said(image, datastore)
    if where == "shared":
        if how_from and how_from == where_from:
            raise BadAttribute(
                f"SEMISHARED_LOCAL = {how} of {how_from} contradicts its SEMISHARED_PLACE = shared"
            )
        return STORE_CLONE
    return PLACES[how]


def is_client(image: Optional[Image], datastore: Datastore) -> bool:
    """Tell whether guests are clients of the share `image` themselves (None: one without an attribute).

    Raise BadAttribute, also where that cannot be.
    """
    access, holder = SHARE_ACCESS.said(image, datastore)
    fs = FS.text(datastore).lower()
    if access == "client" and fs not in ("", "cephfs"):
        raise BadAttribute(
            f"SEMISHARED_SHARE_ACCESS of {holder} is client: datastore {datastore.id} is on {fs}, "
            f"only cephfs has clients"
        )
    return access == "client"


def device_classes(image: Image, datastore: Datastore) -> tuple[str, ...]:
    """Return the classes of devices for local disks from `image`, the first to be tried in front; () for any;
    raise BadAttribute.
    """
    return tuple(CLASS.value(image, datastore).split())


def is_diff(image: Image, datastore: Datastore) -> bool:
    """Tell whether disks of a persistent image lie over bases of their hosts; raise BadAttribute."""
    return PLACE.value(image, datastore) == "local"


def attached(image: Image, datastore: Datastore, disk: Disk) -> Place:
    """Return the place of a disk that ln attaches: persistent, or read-only; raise BadAttribute."""
    where, where_from = PLACE.said(image, datastore)
    LOCAL.value(image, datastore)
    if where != "local" or disk.is_readonly:
        return IN_PLACE  # nothing is written to what is read-only: there would be nothing to commit
    if image.is_shareable:
        raise BadAttribute(
            f"SEMISHARED_PLACE = local of {where_from} contradicts PERSISTENT_TYPE = SHAREABLE: what several "
            "guests write at once is in one place"
        )
    return DIFF


def reason(image: Image, datastore: Datastore, disk: Disk) -> str:
    """Return, in a few words, why a disk from `image` is where `place` or `attached` says."""
    where, where_from = PLACE.said(image, datastore)
    how, how_from = LOCAL.said(image, datastore)
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
