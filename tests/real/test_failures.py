# SPDX-License-Identifier: Apache-2.0
"""One action of a driver fails with a line of its own; what the user reads, and each way of recovery."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Dict, Iterator, Tuple

import pytest

from lab.guest import content
from lab.oned import ActionFailed, Lcm
from lab.oned.states import Img
from real.conftest import SEMISHARED, RealCloud
from real.front_end import REMOTES

KIB = 64
DATA = content("base", 0, KIB)
SAID = "SS999 disk 1: no such luck"
FAILING = f"#!/bin/sh\necho '{SAID}' >&2\nexit 1\n"


@contextmanager
def failing(cloud: RealCloud, action: str) -> Iterator[None]:
    """Have a transfer action fail without doing anything."""
    path = cloud.lab.fe.path(f"{REMOTES}/tm/semishared/{action}")
    real = path.read_text()
    path.write_text(FAILING)
    try:
        yield
    finally:
        path.write_text(real)


class Disks:
    """A VM with a disk in place and one that is its own."""

    def __init__(self, cloud: RealCloud, os_image: int, name: str) -> None:
        self.cloud = cloud
        self.mine = cloud.data_image(f"{name}-mine", DATA, persistent=True)
        self.own = cloud.data_image(f"{name}-own", DATA, format="qcow2")
        images = (os_image, self.mine, self.own)
        self.vm = cloud.create(name, [{"IMAGE_ID": str(image)} for image in images])

    def deploy(self) -> None:
        self.cloud.oned.vm_deploy(self.vm, "h1", 101)

    def write(self) -> None:
        guest = self.cloud.guest(self.vm)
        for disk in ("vdb", "vdc"):
            guest.check(disk, "base", 0, KIB)
            guest.write(disk, "new", 8192, 64)
        guest.sync()

    def check(self) -> None:
        guest = self.cloud.guest(self.vm)
        for disk in ("vdb", "vdc"):
            guest.check(disk, "base", 0, KIB)
            guest.check(disk, "new", 8192, 64)

    def gone(self) -> None:
        """End it, and see that nothing is left and nothing lost."""
        if self.cloud.oned.state(self.vm)[0] != "DONE":
            self.cloud.terminate(self.vm)
        assert self.cloud.leftovers() == []
        kept = self.cloud.read(self.cloud.source(self.mine), "raw", 64 << 10, 8192 << 10)
        assert kept == content("new", 8192, 64)
        for image in (self.mine, self.own):
            self.cloud.oned.image_delete(image)


def seen(cloud: RealCloud, vm: int) -> str:
    """Return what the user reads."""
    error = cloud.oned.error(vm)
    assert SAID in error, error
    return error


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
