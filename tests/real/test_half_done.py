# SPDX-License-Identifier: Apache-2.0
"""A hypervisor's script does its work and says that it failed: oned and the guest differ about a disk."""

from __future__ import annotations

import pytest

from lab.cloud import RBD_STORE, STORE, SYSTEM
from lab.oned import ActionFailed
from lab.oned.states import Img
from real.conftest import RealCloud
from real.injected import ALL_THE_SAME, DATA, KIB, SAID, Disks, failing_on, nothing_to_remove


@pytest.mark.parametrize("store", [STORE, RBD_STORE])
def test_an_attached_disk_that_oned_does_not_know_of(cloud: RealCloud, os_image: int, store: int) -> None:
    """oned gives the image back while the guest has it open: no other VM gets it before that one is off."""
    more = cloud.data_image(f"unknown-{store}", DATA, persistent=True, store=store)
    disks = Disks(cloud, os_image, f"half-attached-{store}").started()
    with failing_on(cloud, "h1", "kvm/attach_disk", ALL_THE_SAME), pytest.raises(ActionFailed, match=SAID):
        cloud.oned.disk_attach(disks.vm, more)
    guest = cloud.guest(disks.vm)
    assert cloud.oned.image(more).state == Img.READY
    guest.write("vdd", "unseen", 8192, 64)
    guest.loop("vdd", "loop", 9216, 64, 4)
    other = cloud.create(f"other-{store}", [{"IMAGE_ID": str(image)} for image in (os_image, more)])
    with pytest.raises(ActionFailed, match=f"SS079 image {more} is written to by"):
        cloud.oned.vm_deploy(other, "h2", SYSTEM)
    guest.wait_written("vdd")
    counts = guest.loop_stop("vdd")
    assert (counts["errors"], counts["mismatches"]) == (0, 0), counts
    guest.sync()
    cloud.oned.vm_poweroff(disks.vm)
    cloud.oned.vm_recover(other, "retry")
    cloud.guest(other).check("vdb", "unseen", 8192, 64)
    cloud.oned.vm_resume(disks.vm)
    assert "vdd" not in cloud.guest(disks.vm).disks()
    disks.check()
    cloud.terminate(other)
    disks.gone()
    cloud.oned.image_delete(more)


def test_an_attached_copy_that_oned_does_not_know_of(cloud: RealCloud, os_image: int) -> None:
    """Its file is removed under the guest, which loses it when it is off, and nothing else."""
    more = cloud.data_image("unknown-copy", DATA)
    disks = Disks(cloud, os_image, "half-copied").started()
    with failing_on(cloud, "h1", "kvm/attach_disk", ALL_THE_SAME), pytest.raises(ActionFailed, match=SAID):
        cloud.oned.disk_attach(disks.vm, more)
    nothing_to_remove(cloud)
    cloud.oned.vm_poweroff(disks.vm)
    cloud.oned.vm_resume(disks.vm)
    assert "vdd" not in cloud.guest(disks.vm).disks()
    disks.check()
    cloud.oned.disk_attach(disks.vm, more)
    cloud.guest(disks.vm).check("vdd", "base", 0, KIB)
    disks.gone()
    cloud.oned.image_delete(more)


def test_a_detached_disk_that_oned_still_has(cloud: RealCloud, os_image: int) -> None:
    """It is detached once more, and what was written is in the image."""
    disks = Disks(cloud, os_image, "half-detached").started()
    with failing_on(cloud, "h1", "kvm/detach_disk", ALL_THE_SAME), pytest.raises(ActionFailed, match=SAID):
        cloud.oned.disk_detach(disks.vm, 1)
    assert "vdb" not in cloud.guest(disks.vm).disks()
    assert cloud.oned.image(disks.mine).state == Img.USED_PERS
    nothing_to_remove(cloud)
    cloud.oned.disk_detach(disks.vm, 1)
    assert cloud.oned.image(disks.mine).state == Img.READY
    cloud.oned.disk_attach(disks.vm, disks.mine)
    cloud.guest(disks.vm).check("vdb", "new", 8192, 64)
    disks.gone()
