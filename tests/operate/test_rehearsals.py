# SPDX-License-Identifier: Apache-2.0
"""Each action of VMs with disks of every place is rehearsed before it is done, with guests that run: nothing
changes anywhere.
"""

from __future__ import annotations

from typing import Any

import pytest

import rehearsing
from lab.cloud import STORE, Cloud
from semishared.plan.vm import hypervisor

OF_GUESTS = {
    "snap_create_live",
    "prebackup_live",
    "postbackup_live",
    "premigrate",
    "postmigrate",
    "failmigrate",
    "restore",
    *(f"vmm/{name}" for name in hypervisor.PLANNERS),
}
"""What no machine without guests can show (tests/tools and tests/cephstore have all others)."""


@pytest.mark.fault(21, "`semishared plan` of every action changes nothing on any machine, nor a guest")
def test_every_action_is_rehearsed_and_then_done(cloud: Cloud) -> None:
    places: dict[str, dict[str, Any]] = {
        "mine": {"persistent": True},
        "copy": {"SEMISHARED_LOCAL": "copy"},
        "beside": {"SEMISHARED_PLACE": "shared"},
    }
    with rehearsing.rehearsing(cloud) as found:
        rehearsing.life(cloud, STORE, **places)
        rehearsing.moved_live(cloud, STORE)
    assert {*found.said, *found.refused} >= OF_GUESTS
    assert found.said["vmm/migrate"] == [["MigrateDomain", "SyncTime"]] * 3 and "vmm/migrate" in found.refused
    assert found.said["vmm/deploy"] == [["BecomeStock"]] * 3
    assert found.said["vmm/restore"] == [["WriteCheckpoint", "BecomeStock"]]
    assert found.said["postmigrate"] == [["UnmarkVm", "CheckNotRunning", "ClearVm", "MergeDeltas"]] * 3
    assert cloud.leftovers() == []
