# SPDX-License-Identifier: Apache-2.0
"""A VM goes back to a snapshot of itself while its disks have marks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.cloud import DATASTORES, Cloud

from .rig import Rig

KINDS = ("overlay", "copy", "volatile")


@pytest.mark.fault(86, "a guest goes back to a system snapshot though its disks have bitmaps")
def test_guest_with_marks_goes_back_to_a_system_snapshot(cloud: Cloud, tmp_path: Path) -> None:
    """QEMU refuses that with a bitmap in a disk, in its midst: the guest would be gone. OpenNebula takes no
    such snapshot while MODE is INCREMENT; one of before may be there.
    """
    rig = Rig(cloud, tmp_path, "revert", KINDS)
    host = cloud.lab.node("h1")
    message = f"<VMM_DRIVER_ACTION_DATA><DATASTORE><BASE_PATH>{DATASTORES}/101</BASE_PATH></DATASTORE></VMM_DRIVER_ACTION_DATA>"  # noqa: E501

    def act(action: str, snapshot: str) -> None:
        argv = [f"/var/tmp/one/vmm/semishared/{action}", f"one-{rig.vm}", snapshot, str(rig.vm), "h1"]
        done = host.run(argv, input=message.encode(), check=False, timeout=300)
        assert done.returncode == 0, done.stderr.decode()

    rig.model.write("kept", 1024, 64)
    act("snapshot_create", "0")
    held = rig.model.held()
    rig.kept.back_up()
    rig.model.write("given-up", 2048, 64)
    rig.kept.back_up()
    assert not rig.kept.whole[-1]
    act("snapshot_revert", "snap-0")
    for target in rig.targets.values():
        rig.model.is_again(target, held)
    rig.model.write("after", 3072, 64)
    rig.kept.back_up()
    assert set(rig.kept.whole[-1]) == set(rig.numbers.values())
    assert all("went back to a system snapshot" in why for why in rig.kept.whole[-1].values())
    rig.model.write("next", 4096, 64)
    rig.kept.back_up()
    assert not rig.kept.whole[-1]
    rig.kept.check()
    rig.close()
