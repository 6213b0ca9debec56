# SPDX-License-Identifier: Apache-2.0
"""Overlays are made by the size of the disk, unless the site says how."""

from __future__ import annotations

import pytest

from semishared.config import Config
from semishared.plan.image.placement import BY_SIZE, CACHED, overlay_options

GiB = 1 << 30


@pytest.mark.parametrize(
    ("size", "cluster"),
    [
        (0, "128k"),
        (1, "128k"),
        (256 * GiB, "128k"),
        (256 * GiB + 1, "256k"),
        (512 * GiB, "256k"),
        (4096 * GiB, "256k"),
    ],
)
def test_clusters_are_the_smallest_whose_tables_qemu_keeps(size: int, cluster: str) -> None:
    assert overlay_options(BY_SIZE, size) == f"extended_l2=on,cluster_size={cluster}"
    kib = int(cluster.rstrip("k"))
    # An entry of 16 bytes for each cluster.
    assert kib == 256 or -(-size // (kib << 10)) * 16 <= CACHED


def test_what_the_site_says_holds_for_each_size() -> None:
    assert overlay_options("", 1024 * GiB) == ""
    assert overlay_options("cluster_size=2M", GiB) == "cluster_size=2M"
    assert Config().overlays_options == BY_SIZE
