# SPDX-License-Identifier: Apache-2.0
"""Guests on hosts of two Debian releases: deployed on each, and moved live from each to the other while they
write.
"""

from __future__ import annotations

import pytest

from lab.cloud import SYSTEM, Cloud
from lab.guest import Guest, content

KIB = 1024
DATA = content("base", 0, KIB)
WRITTEN = ("vdb", "vdc", "vdd")
PER_SECOND = 4
"""Blocks that a guest writes to each disk."""


def start(guest: Guest, *disks: str) -> None:
    for disk in disks:
        guest.loop(disk, f"loop-{disk}", 4 * KIB, 4 * KIB, PER_SECOND)


def stop(guest: Guest, *disks: str) -> None:
    for disk in disks:
        guest.wait_written(disk)
        counts = guest.loop_stop(disk)
        assert (counts["errors"], counts["mismatches"]) == (0, 0), (disk, counts)
        assert counts["writes"] > 10


@pytest.mark.parametrize("born", ["h1", "h2"])
def test_a_guest_that_writes_moves_live_between_releases(cloud: Cloud, os_image: int, born: str) -> None:
    """One disk in place, an overlay over a base, and one that is of the host alone."""
    mine = cloud.data_image(f"mine-{born}", DATA, persistent=True)
    cow = cloud.data_image(f"cow-{born}", DATA, format="qcow2")
    disks = [{"IMAGE_ID": str(image)} for image in (os_image, mine, cow)]
    vm = cloud.deploy(f"born-on-{born}", [*disks, {"TYPE": "fs", "SIZE": "16", "FORMAT": "qcow2"}], born)
    guest = cloud.guest(vm)
    for disk in ("vdb", "vdc"):
        guest.check(disk, "base", 0, KIB)
        guest.write(disk, "before", 2 * KIB, 64)
    start(guest, *WRITTEN)
    other = "h2" if born == "h1" else "h1"
    for target in (other, born):
        left = cloud.lab.node(cloud.oned.vm(vm).last.host.name), cloud.vm_dir(vm)
        cloud.oned.vm_migrate(vm, target, SYSTEM, how="live")
        assert cloud.oned.state(vm) == ("ACTIVE", 3)
        assert cloud.files(*left) == []
        guest = cloud.guest(vm)
        for disk in ("vdb", "vdc"):
            guest.check(disk, "base", 0, KIB)
            guest.check(disk, "before", 2 * KIB, 64)
    stop(guest, *WRITTEN)
    cloud.terminate(vm)
    assert cloud.read(cloud.source(mine), "raw", 64 << 10, 2 * KIB << 10) == content("before", 2 * KIB, 64)
    assert cloud.leftovers() == []
