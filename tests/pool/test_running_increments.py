# SPDX-License-Identifier: Apache-2.0
"""Disks that move to other devices of their host, under their guest and while it is off, are in the next
increment of their backup with what changed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from increments.rig import Rig
from lab import roots
from lab.cloud import Cloud
from pool.test_pool import DECLARED, device_of, said
from pool.test_running import moved

KINDS = ("overlay", "copy", "raw copy", "remote-first", "diff", "volatile")


@pytest.fixture()
def rig(cloud: Cloud, tmp_path: Path) -> Iterator[Rig]:
    """Return a VM on h1, whose own disks are on devices."""
    cloud.oned.host_update(cloud.oned.host("h1").id, {"SEMISHARED_POOL": DECLARED})
    said(cloud, "pool", "add", "h1")
    made = Rig(cloud, tmp_path, "marked", KINDS)
    yield made
    made.close()


def drained(rig: Rig) -> None:
    """Empty each device that has a disk of the VM, one after the other, so that every disk moves."""
    gone = set()
    for path in sorted({device_of(rig.cloud, rig.vm, number) for number in rig.numbers.values()}):
        summary, _ = moved(rig.cloud, "drain", "h1", path)
        gone |= {row["disk"] for row in summary["rows"] if row["vm"] == rig.vm and row["how"] == "moved"}
        said(rig.cloud, "pool", "add", "h1")
    assert gone >= set(rig.numbers.values()), gone


@pytest.mark.skipif(roots.LIBVIRT_7_0, reason="libvirt 7.0 has no backups of running guests")
@pytest.mark.fault(86, "what happened between two backups is in the second, whole where a mark was lost")
def test_increment_after_moves_to_other_devices(rig: Rig) -> None:
    kept = rig.kept
    kept.back_up()
    rig.model.write("running", 2048, 64)
    drained(rig)
    rig.model.write("moved", 3072, 64)
    kept.back_up()
    rig.cloud.oned.vm_poweroff(rig.vm, hard=True)
    drained(rig)
    kept.back_up(live=False)
    rig.cloud.oned.vm_resume(rig.vm)
    rig.model.write("again", 4096, 64)
    kept.back_up()
    assert kept.whole == [{}, {}, {}, {}]
    kept.check()
