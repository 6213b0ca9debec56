# SPDX-License-Identifier: Apache-2.0
"""`onevm recover --failure` of each action that failed, or that hangs: where the VM is, and the ways out.

In most failure states oned does nothing; a cold move goes back to where it began, and no driver is asked;
beside a running VM it gives up what was under way (lcm/LifeCycleStates.cc of 7.4).
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Callable, Dict, NamedTuple, Tuple

import pytest

from lab.guest import content
from lab.oned import ActionFailed, Lcm
from lab.oned.states import Img
from real.conftest import SEMISHARED, RealCloud, wait_until
from real.injected import (
    ALL_THE_SAME,
    KIB,
    SAID,
    Disks,
    failing,
    failing_on,
    nothing_to_remove,
    recover_failure,
)
from real.oned import BEGINS_S

RUNNING = ("ACTIVE", Lcm.RUNNING)


class Stays(NamedTuple):
    """An action that ends in a failure state of its own."""

    fails: Callable[[RealCloud], AbstractContextManager[None]]
    call: Callable[[Disks], object]
    failed: int
    before: Tuple[Callable[[Disks], object], ...] = ()
    after: str = "ACTIVE"
    """STATE once it was tried again."""


def undeploy(disks: Disks) -> None:
    disks.cloud.oned.vm_undeploy(disks.vm, hard=True)


def stop(disks: Disks) -> None:
    disks.cloud.oned.vm_stop(disks.vm)


def terminate(disks: Disks) -> None:
    disks.cloud.oned.vm_terminate(disks.vm, hard=True)


def move(disks: Disks, how: str = "save") -> None:
    disks.cloud.oned.vm_migrate(disks.vm, "h2", how=how)


MOVE = partial(failing, action="mv")
STARTED = (Disks.started,)
STAYS: Dict[str, Stays] = {
    "prolog": Stays(partial(failing, action="clone", only="disk.2"), Disks.deploy, Lcm.PROLOG_FAILURE),
    "boot": Stays(partial(failing_on, host="h1", script="kvm/deploy"), Disks.deploy, Lcm.BOOT_FAILURE),
    "prolog-undeployed": Stays(MOVE, Disks.deploy, Lcm.PROLOG_UNDEPLOY_FAILURE, (*STARTED, undeploy)),
    "prolog-stopped": Stays(MOVE, Disks.deploy, Lcm.PROLOG_RESUME_FAILURE, (*STARTED, stop)),
    "boot-undeployed": Stays(
        partial(failing_on, host="h1", script="kvm/deploy"),
        Disks.deploy,
        Lcm.BOOT_UNDEPLOY_FAILURE,
        (*STARTED, undeploy),
    ),
    "boot-stopped": Stays(
        partial(failing_on, host="h1", script="kvm/restore"),
        Disks.deploy,
        Lcm.BOOT_STOPPED_FAILURE,
        (*STARTED, stop),
    ),
    "boot-moved": Stays(
        partial(failing_on, host="h2", script="kvm/restore"), move, Lcm.BOOT_MIGRATE_FAILURE, STARTED
    ),
    "epilog": Stays(partial(failing, action="mvds"), terminate, Lcm.EPILOG_FAILURE, STARTED, "DONE"),
    "epilog-undeployed": Stays(MOVE, undeploy, Lcm.EPILOG_UNDEPLOY_FAILURE, STARTED, "UNDEPLOYED"),
    "epilog-stopped": Stays(MOVE, stop, Lcm.EPILOG_STOP_FAILURE, STARTED, "STOPPED"),
}


def failed(cloud: RealCloud, os_image: int, name: str, case: Stays) -> Disks:
    """Return a VM in a failure state that `recover --failure` has left as it was."""
    disks = Disks(cloud, os_image, name)
    for step in case.before:
        step(disks)
    with case.fails(cloud), pytest.raises(ActionFailed, match=SAID):
        case.call(disks)
    assert disks.at == ("ACTIVE", case.failed)
    recover_failure(cloud, disks.vm)
    assert disks.at == ("ACTIVE", case.failed)
    return disks


@pytest.mark.parametrize("what", sorted(STAYS))
def test_what_recover_failure_leaves_as_it_is_can_be_tried_again(
    cloud: RealCloud, os_image: int, what: str
) -> None:
    case = STAYS[what]
    disks = failed(cloud, os_image, f"again-{what}", case)
    cloud.oned.vm_recover(disks.vm, "retry")
    assert disks.at[0] == case.after
    if case.after in ("UNDEPLOYED", "STOPPED"):
        cloud.oned.vm_deploy(disks.vm, "h2", 101)
    if case.after != "DONE":
        assert disks.at == RUNNING
        disks.check() if disks.is_written else disks.write()
    disks.gone()
    nothing_to_remove(cloud)


@pytest.mark.parametrize(
    "what", ["boot", "boot-moved", "epilog", "epilog-undeployed", "prolog", "prolog-undeployed"]
)
def test_what_recover_failure_leaves_as_it_is_can_be_deleted(
    cloud: RealCloud, os_image: int, what: str
) -> None:
    """The image of the disk in place is in ERROR then, as of any driver, and whole."""
    disks = failed(cloud, os_image, f"deleted-{what}", STAYS[what])
    cloud.oned.vm_recover(disks.vm, "delete")
    assert disks.at[0] == "DONE"
    assert [cloud.oned.image(image).state for image in (disks.mine, disks.own)] == [Img.ERROR, Img.READY]
    assert cloud.leftovers() == []
    nothing_to_remove(cloud)
    cloud.oned.image_enable(disks.mine)
    other = cloud.deploy(
        f"other-{what}", [{"IMAGE_ID": str(image)} for image in (os_image, disks.mine)], "h2"
    )
    guest = cloud.guest(other)
    guest.check("vdb", "base", 0, KIB)
    if disks.is_written:
        guest.check("vdb", "new", 8192, 64)
    cloud.terminate(other)
    disks.gone()


@pytest.mark.parametrize("what", ["boot", "prolog"])
def test_what_recover_failure_leaves_as_it_is_can_be_made_anew(
    cloud: RealCloud, os_image: int, what: str
) -> None:
    disks = failed(cloud, os_image, f"anew-{what}", STAYS[what])
    cloud.oned.vm_recover(disks.vm, "recreate")
    wait_until(lambda: disks.at == RUNNING, "the scheduler does not start it")
    disks.write()
    disks.gone()
    nothing_to_remove(cloud)


BACK: Dict[str, Tuple[Callable[[Disks], object], int, str]] = {
    "running": (Disks.check, Lcm.PROLOG_MIGRATE_FAILURE, "ACTIVE"),
    "off": (
        lambda disks: disks.cloud.oned.vm_poweroff(disks.vm, hard=True),
        Lcm.PROLOG_MIGRATE_POWEROFF_FAILURE,
        "POWEROFF",
    ),
    "suspended": (
        lambda disks: disks.cloud.oned.vm_suspend(disks.vm),
        Lcm.PROLOG_MIGRATE_SUSPEND_FAILURE,
        "SUSPENDED",
    ),
}
"""What a VM is before it is moved, which failure state it comes to, and where it is back."""


@pytest.mark.parametrize("what", sorted(BACK))
def test_a_move_that_moved_nothing_goes_back(cloud: RealCloud, os_image: int, what: str) -> None:
    disks, (before, lcm, state) = Disks(cloud, os_image, f"back-{what}").started(), BACK[what]
    before(disks)
    with failing(cloud, "mv"), pytest.raises(ActionFailed, match=SAID):
        move(disks)
    assert disks.at == ("ACTIVE", lcm)
    cloud.oned.vm_recover(disks.vm, "failure")
    assert (disks.at[0], disks.host) == (state, "h1")
    nothing_to_remove(cloud)
    if state != "ACTIVE":
        cloud.oned.vm_resume(disks.vm)
    assert (disks.at, disks.host) == (RUNNING, "h1")
    disks.check()
    disks.gone()


@pytest.mark.parametrize("what", ["off", "suspended"])
def test_a_move_that_was_done_and_is_called_failed_is_brought_back(
    cloud: RealCloud, os_image: int, what: str
) -> None:
    """oned has it on h1, and all of it is on h2: it does not start, no move loses it, and the page helps."""
    disks, (before, lcm, state) = Disks(cloud, os_image, f"done-{what}").started(), BACK[what]
    before(disks)
    # Its directory goes last.
    with failing(cloud, "mv", only=" 101", work=ALL_THE_SAME), pytest.raises(ActionFailed, match=SAID):
        move(disks)
    assert disks.at == ("ACTIVE", lcm)
    recover_failure(cloud, disks.vm)
    assert (disks.at[0], disks.host) == (state, "h1")
    h2, where = cloud.lab.node("h2"), cloud.vm_dir(disks.vm)
    there = cloud.files(h2, where)
    assert "disk.2.snap/0" in there
    with pytest.raises(ActionFailed):
        cloud.oned.vm_resume(disks.vm)
    assert (disks.at[0], disks.host) == (state, "h1")
    with pytest.raises(ActionFailed, match="SS063 VM .* on h2 has what did not arrive"):
        move(disks)
    recover_failure(cloud, disks.vm)
    assert cloud.files(h2, where) == there
    # As docs/how-to/failed-moves.md says.
    h1 = cloud.lab.node("h1")
    h1.run(["mv", where, f"{where}.aside"])
    with pytest.raises(ActionFailed, match=f"SS090 VM {disks.vm}.* not on h1"):
        move(disks)
    recover_failure(cloud, disks.vm)
    words = ["/var/lib/one/remotes/tm/semishared/mv", f"h2:{where}", f"h1:{where}", str(disks.vm), "101"]
    assert b"is kept" in cloud.lab.fe.run(words).stderr
    cloud.oned.vm_resume(disks.vm)
    disks.check()
    h1.run(["rm", "-r", f"{where}.aside"])
    cloud.lab.fe.run([SEMISHARED, "gc", "--now", "--yes"], timeout=300)
    assert not cloud.files(h2, where)
    disks.check()
    disks.gone()
    nothing_to_remove(cloud)


class Hangs(NamedTuple):
    """What oned is asked for, and the same again, to its end."""

    action: str
    ask: Callable[[Disks], Tuple[object, ...]]
    again: Callable[[Disks], object]


def attach(disks: Disks) -> None:
    disk = disks.cloud.oned.disk_attach(disks.vm, disks.own)
    guest = disks.cloud.guest(disks.vm)
    guest.wait_disk("vdd")
    guest.check("vdd", "base", 0, KIB)
    disks.cloud.oned.disk_detach(disks.vm, disk)


def save_as(disks: Disks) -> None:
    oned = disks.cloud.oned
    (never,) = [image for image in oned.images.values() if image.name == "never"]
    assert never.state == Img.ERROR
    oned.image_delete(never.id)
    saved = oned.disk_saveas(disks.vm, 2, "saved-again")
    assert disks.cloud.read(oned.image(saved).source, "qcow2", 64 << 10, 8192 << 10) == content(
        "new", 8192, 64
    )
    oned.image_delete(saved)


def detach(disks: Disks) -> None:
    """oned has one state for attach and detach: what failed is an attach, and the disk is none of the VM."""
    oned, guest = disks.cloud.oned, disks.cloud.guest(disks.vm)
    assert oned.vm(disks.vm).disk(2) is None
    guest.wait_disk("vdc", present=False)
    disks.has_own = False
    disk = oned.disk_attach(disks.vm, disks.own)
    guest.wait_disk("vdc")
    guest.check("vdc", "base", 0, KIB)
    guest.check("vdc", "zero", 8192, 64)
    oned.disk_detach(disks.vm, disk)


HANGS: Dict[str, Hangs] = {
    "attach": Hangs("clone", lambda disks: ("vm.attach", f'DISK=[IMAGE_ID="{disks.own}"]'), attach),
    "detach": Hangs("delete", lambda disks: ("vm.detach", 2), detach),
    "snapshot": Hangs(
        "snap_create_live",
        lambda disks: ("vm.disksnapshotcreate", 2, "s"),
        lambda disks: disks.cloud.oned.disk_snapshot_create(disks.vm, 2, "s"),
    ),
    "resize": Hangs(
        "resize",
        lambda disks: ("vm.diskresize", 2, "24"),
        lambda disks: disks.cloud.oned.disk_resize(disks.vm, 2, 24),
    ),
    "save-as": Hangs("cpds", lambda disks: ("vm.disksaveas", 2, "never", "", -1), save_as),
    "move": Hangs(
        "premigrate",
        lambda disks: ("vm.migrate", disks.cloud.oned.host("h2").id, True, False, -1, 0),
        lambda disks: move(disks, "live"),
    ),
}


@pytest.mark.parametrize("what", sorted(HANGS))
def test_what_hangs_beside_a_running_vm_is_given_up_and_done_again(
    cloud: RealCloud, os_image: int, what: str
) -> None:
    """An operator tells oned that it failed, and ends its script."""
    case = HANGS[what]
    disks = Disks(cloud, os_image, f"hangs-{what}").started()
    pids = cloud.lab.fe.path("/var/tmp/hanging")
    with failing(cloud, case.action, work="echo $$ >/var/tmp/hanging; sleep 600"):
        method, *words = case.ask(disks)
        cloud.oned.api.call(str(method), disks.vm, *words)
        wait_until(pids.exists, f"{case.action} is not called", 60)
        recover_failure(cloud, disks.vm)
        assert (disks.at, disks.host) == (RUNNING, "h1")
        pid = pids.read_text().strip()
        pids.unlink()
        cloud.lab.fe.run(["pkill", "-KILL", "-P", pid])
        time.sleep(BEGINS_S)
    assert (disks.at, disks.host) == (RUNNING, "h1")
    if what != "detach":  # the hypervisor comes before its script: it is unplugged
        disks.check()
    case.again(disks)
    disks.check()
    disks.gone()
    nothing_to_remove(cloud)
