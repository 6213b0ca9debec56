# SPDX-License-Identifier: Apache-2.0
"""How a local overlay is made: as `options` in [overlays] of semishared.conf says, or by the size of the
disk.

An overlay's tables have 16 bytes for each cluster with subclusters, and QEMU keeps 32 MiB of them in memory
at most. Clusters of 128 KiB, whose subclusters a write of 4 KiB fills, are best as long as the tables of all
of the disk fit there. If they do not, random writes all over the disk wait for tables that are read and
written again and again, and clusters of twice that size have half as many
(docs/explanation/overlay-options.md has the measurements).
"""

from __future__ import annotations

BY_SIZE = "by-size"
ENTRY = 16
"""Bytes in an L2 table for a cluster with subclusters (docs/interop/qcow2.txt of QEMU)."""
CACHED = 32 << 20
"""Bytes of L2 tables in QEMU's cache, unless it is told otherwise (DEFAULT_L2_CACHE_MAX_SIZE in
block/qcow2.h).
"""
SMALL, LARGE = 128 << 10, 256 << 10
"""Bytes of a cluster; larger ones than these were not found to be better anywhere."""


def for_size(configured: str, size: int) -> str:
    """Return the options (`qemu-img create -o`) of an overlay for a disk of `size` bytes, 0 if that is not
    known.
    """
    if configured != BY_SIZE:
        return configured
    cluster = LARGE if size > CACHED // ENTRY * SMALL else SMALL
    return f"extended_l2=on,cluster_size={cluster >> 10}k"
