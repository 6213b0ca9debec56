# SPDX-License-Identifier: Apache-2.0
"""One action of a driver fails with a line of its own; what the user reads, and each way of recovery."""

from __future__ import annotations

from typing import Callable, Dict, Tuple

import pytest

from lab.guest import content
from lab.oned import ActionFailed, Lcm
from lab.oned.states import Img
from real.conftest import SEMISHARED, RealCloud
from real.injected import SAID, Disks, failing, seen


@pytest.mark.parametrize(
    ("action", "failed"),
    [("clone", Lcm.PROLOG_FAILURE), ("ln", Lcm.PROLOG_FAILURE), ("context", Lcm.BOOT_FAILURE)],
)
def test_a_failed_start_is_tried_again(cloud: RealCloud, os_image: int, action: str, failed: int) -> None:
    disks = Disks(cloud, os_image, f"start-{action}")
    with failing(cloud, action), pytest.raises(ActionFailed, match=SAID):
        disks.deploy()
    assert cloud.oned.state(disks.vm) == ("ACTIVE", failed)
    cloud.oned.vm_recover(disks.vm, "retry")
    assert cloud.oned.state(disks.vm) == ("ACTIVE", Lcm.RUNNING)
    disks.write()
    disks.check()
    disks.gone()


MOVES: Dict[str, Tuple[str, Callable[[RealCloud, int], None], int]] = {
    "undeploy": ("mv", lambda cloud, vm: cloud.oned.vm_undeploy(vm, hard=True), Lcm.EPILOG_UNDEPLOY_FAILURE),
    "stop": ("mv", lambda cloud, vm: cloud.oned.vm_stop(vm), Lcm.EPILOG_STOP_FAILURE),
    "move": (
        "mv",
        lambda cloud, vm: cloud.oned.vm_migrate(vm, "h2", how="poweroff-hard"),
        Lcm.PROLOG_MIGRATE_FAILURE,
    ),
}


@pytest.mark.parametrize("what", sorted(MOVES))
def test_a_failed_move_is_tried_again(cloud: RealCloud, os_image: int, what: str) -> None:
    action, call, failed = MOVES[what]
    disks = Disks(cloud, os_image, f"move-{what}")
    disks.deploy()
    disks.write()
    with failing(cloud, action), pytest.raises(ActionFailed, match=SAID):
        call(cloud, disks.vm)
    assert cloud.oned.state(disks.vm) == ("ACTIVE", failed)
    seen(cloud, disks.vm)
    cloud.oned.vm_recover(disks.vm, "retry")
    if what != "move":
        assert cloud.oned.vm(disks.vm).state in (4, 9)
        cloud.oned.vm_resume(disks.vm)
        cloud.oned.vm_deploy(disks.vm, "h2", 101)
    assert cloud.oned.vm(disks.vm).last.host.name == "h2"
    disks.check()
    disks.gone()


@pytest.mark.parametrize("how", ["retry", "success"])
@pytest.mark.parametrize("action", ["delete", "mvds"])
def test_a_failed_epilog_is_recovered(cloud: RealCloud, os_image: int, action: str, how: str) -> None:
    disks = Disks(cloud, os_image, f"epilog-{action}-{how}")
    disks.deploy()
    disks.write()
    with failing(cloud, action), pytest.raises(ActionFailed, match=SAID):
        cloud.oned.vm_terminate(disks.vm, hard=True)
    assert cloud.oned.state(disks.vm) == ("ACTIVE", Lcm.EPILOG_FAILURE)
    cloud.oned.vm_recover(disks.vm, how)
    assert cloud.oned.state(disks.vm)[0] == "DONE"
    if how == "success":
        # What the operator has called done was not: gc finds it.
        cloud.lab.fe.run([SEMISHARED, "gc", "--now", "--yes"], timeout=300)
    disks.gone()


HOT: Dict[str, Tuple[str, Callable[[RealCloud, Disks], object]]] = {
    "attach": ("clone", lambda cloud, disks: cloud.oned.disk_attach(disks.vm, disks.own)),
    "detach": ("delete", lambda cloud, disks: cloud.oned.disk_detach(disks.vm, 2)),
    "snapshot": ("snap_create_live", lambda cloud, disks: cloud.oned.disk_snapshot_create(disks.vm, 2, "s")),
    "resize": ("resize", lambda cloud, disks: cloud.oned.disk_resize(disks.vm, 2, 24)),
    "premigrate": ("premigrate", lambda cloud, disks: cloud.oned.vm_migrate(disks.vm, "h2", how="live")),
}


@pytest.mark.parametrize("what", sorted(HOT))
def test_what_fails_beside_a_running_vm_leaves_it_running(cloud: RealCloud, os_image: int, what: str) -> None:
    action, call = HOT[what]
    disks = Disks(cloud, os_image, f"hot-{what}")
    disks.deploy()
    disks.write()
    with failing(cloud, action), pytest.raises(ActionFailed, match=SAID):
        call(cloud, disks)
    assert cloud.oned.state(disks.vm) == ("ACTIVE", Lcm.RUNNING)
    assert cloud.oned.vm(disks.vm).last.host.name == "h1"
    if what != "detach":
        disks.check()
    disks.gone()


def test_a_failed_save_as_leaves_an_image_that_says_so(cloud: RealCloud, os_image: int) -> None:
    disks = Disks(cloud, os_image, "saved")
    disks.deploy()
    disks.write()
    with failing(cloud, "cpds"), pytest.raises(ActionFailed):
        cloud.oned.disk_saveas(disks.vm, 2, "saved-not")
    (image,) = [one for one in cloud.oned.images.values() if one.name == "saved-not"]
    assert image.state == Img.ERROR
    cloud.oned.image_delete(image.id)
    saved = cloud.oned.disk_saveas(disks.vm, 2, "saved-well")
    assert cloud.read(cloud.source(saved), "qcow2", 64 << 10, 8192 << 10) == content("new", 8192, 64)
    cloud.oned.image_delete(saved)
    disks.gone()
