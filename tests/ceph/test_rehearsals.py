# SPDX-License-Identifier: Apache-2.0
"""Each action of VMs with disks on Ceph is rehearsed before it is done: nothing changes on any machine, in a
guest, or in Ceph.
"""

from __future__ import annotations

from typing import Any

import pytest

import rehearsing
from lab.ceph import Cluster
from lab.cloud import RBD_STORE, Cloud


@pytest.mark.long  # tests/operate has the guests, tests/cephstore the images
@pytest.mark.fault(
    21, "`semishared plan` of every action changes nothing on any machine, nor a guest, nor in Ceph"
)
def test_every_action_is_rehearsed_and_then_done(cloud: Cloud, ceph: Cluster) -> None:
    places: dict[str, dict[str, Any]] = {
        "mine": {"persistent": True},
        "copy": {"SEMISHARED_LOCAL": "copy"},
        "beside": {"SEMISHARED_PLACE": "shared"},
    }
    before = set(cloud.oned.images)
    with rehearsing.rehearsing(cloud) as found:
        rehearsing.life(cloud, RBD_STORE, **places)
        rehearsing.moved_live(cloud, RBD_STORE)
    assert found.said["vmm/migrate"] == [["MigrateDomain", "SyncTime"]] * 3 and "vmm/migrate" in found.refused
    assert found.said["vmm/deploy"] == [["BecomeStock"]] * 3
    assert {"premigrate", "postmigrate", "failmigrate", "restore", "snap_create_live"} <= set(found.said)
    assert cloud.leftovers() == []
    # One of them has a snapshot.
    for image in sorted(set(cloud.oned.images) - before):
        cloud.oned.image_delete(image)
