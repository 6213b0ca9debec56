# SPDX-License-Identifier: Apache-2.0
"""A running guest's local disk of a persistent image: commits that are refused, killed, and overlap; detached
while it runs on.
"""

from __future__ import annotations

import json
import os
import re
import threading
import traceback
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

import pytest

from semishared.errors import SemisharedError, VmBusy
from semishared.model.exchange import AskOned, On, drive
from semishared.opennebula.args import DiskPlace, VmPlace
from semishared.opennebula.xml import Vm
from semishared.plan.disk import commits

from .cloud import Cloud, until
from .live import DOMAIN, IN_PLACE, OVERLAY, TRACE, VM, VM_DIR, Environment, Live, written

DISK = IN_PLACE
"""The one whose image is persistent, and local here."""
LOCAL = "<SEMISHARED_PLACE>local</SEMISHARED_PLACE>"
ALL = bool(os.environ.get("SEMISHARED_FULL"))
ALWAYS = (
    "layer added",
    "guest frozen",
    "guest switched",
    "commit decided",
    "staged committed.3",
    "commit recorded",
    "layer merged",
)
"""Points that are killed at in every run."""
NOTE = f"{VM_DIR}/.semishared/frozen.json"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Cloud.up() as cloud:
        live = Live(cloud, {DISK: LOCAL})
        try:
            yield live
        finally:
            live.close()


@pytest.fixture()
def running(live: Live) -> Live:
    """Have a guest that has written since its start."""
    live.restore("new")
    live.start()
    live.write_running(DISK, 1)
    return live


def told(live: Live) -> Vm:
    """Return what oned says of the VM."""
    return Vm.parse(live.cloud.answers.texts["vm", VM])


def commit(live: Live, env: Environment | None = None, then: Optional[Vm] = None) -> int:
    """Commit on request, as `semishared commit` plans it; `then`: what oned said of the VM before."""
    place = DiskPlace(VmPlace("h1", VM_DIR, VM), f"disk.{DISK}", DISK)
    with live.session(env or {}) as session:

        def do(wanted: Any) -> Any:
            if isinstance(wanted, On):
                return session.run(wanted.steps)
            return told(live) if isinstance(wanted, AskOned) else None

        return drive(commits.commit(place, then or told(live), DOMAIN, "SUSPEND"), do)


def layers_of(live: Live) -> List[str]:
    return sorted(os.listdir(live.host.path(f"{VM_DIR}/disk.{DISK}.snap")))


def stored(live: Live) -> bytes:
    """Return what is in the image on the store."""
    return bytes(live.cloud.fe.path(live.mine).read_bytes())


def points(live: Live) -> Dict[str, int]:
    """Return the points of a commit of a running guest, by name: the first of each."""
    live.forget_trace()
    commit(live, {"SEMISHARED_TRACE": TRACE})
    passed = live.points()
    return {name: passed.index(name) + 1 for name in passed}


def killed(live: Live, at: int) -> None:
    """Kill a commit at a point."""
    with pytest.raises(SemisharedError):
        commit(live, {"SEMISHARED_KILL_AT": str(at)})


def test_guest_that_is_detached_from_its_disk_goes_on(live: Live) -> None:
    live.restore("new")
    live.start(without=[DISK])
    # What a killed action, and who watched it, have left in the guest, which lies over other disks.
    job = {"target": "vda", "run": live.virsh("domid", DOMAIN)}
    live.host.path(f"{VM_DIR}/.semishared/job.{OVERLAY}.json").write_text(json.dumps(job))
    live.host.path(NOTE).write_text(
        json.dumps({"how": "SUSPEND", "run": live.virsh("domid", DOMAIN), "token": "00"})
    )
    live.virsh("suspend", DOMAIN)
    done = live.cloud.tm("mvds", f"h1:{VM_DIR}/disk.{DISK}", live.mine, str(VM), "100")
    assert done.returncode == 0, done.stderr.decode()
    live.at_rest()
    assert not live.host.path(f"{VM_DIR}/disk.{DISK}").is_symlink()


def test_commits_of_a_guest_that_writes_on(running: Live) -> None:
    assert commit(running) > 0
    assert stored(running) == written(1)
    assert commit(running) == 0
    for mark in (2, 3):
        running.write_running(DISK, mark)
        assert commit(running) > 0
        assert len(layers_of(running)) == 2
    assert stored(running) == written(1, 2, 3)
    running.at_rest()
    running.check_running(DISK, written(1, 2, 3))


def test_refusals_add_no_layer(running: Live) -> None:
    before = layers_of(running)
    running.cloud.fe.run(["qemu-io", "-f", "raw", "-c", "write -P 9 7M 64k", running.mine], user="oneadmin")
    for mark in (2, 3):
        with pytest.raises(SemisharedError, match="by somebody else"):
            commit(running)
        assert layers_of(running) == before
        running.write_running(DISK, mark)
    running.at_rest()


def test_killed_ones_add_one_layer_in_all(running: Live) -> None:
    first = points(running)["commit staged"]
    running.write_running(DISK, 2)
    killed(running, first)
    # What was frozen by the one that was killed comes before anything else is.
    again = points(running)["commit staged"]
    assert again < first
    assert (stored(running), len(layers_of(running))) == (written(1, 2), 2)
    running.write_running(DISK, 3)
    killed(running, first)
    deep = len(layers_of(running))
    for mark in (5, 6):
        running.write_running(DISK, mark)
        killed(running, again)
        assert len(layers_of(running)) == deep
    assert stored(running) == written(1, 2)
    commit(running)
    assert (stored(running), len(layers_of(running))) == (written(1, 2, 3, 5, 6), 2)
    running.at_rest()
    running.check_running(DISK, written(1, 2, 3, 5, 6))


def begin(live: Live) -> None:
    """Have a guest that has written since its last commit."""
    live.restore("new")
    live.start()
    live.write_running(DISK, 1)
    commit(live)
    live.write_running(DISK, 2)


def test_killed_anywhere_and_done_again(live: Live) -> None:
    begin(live)
    found = points(live)
    assert set(ALWAYS) <= set(found)
    wrong = []
    for name, at in sorted(found.items(), key=lambda item: item[1]):
        if not (ALL or name in ALWAYS):
            continue
        try:
            begin(live)
            killed(live, at)
            assert stored(live) in (written(1), written(1, 2))
            live.write_running(DISK, 3)
            commit(live)
            assert stored(live) == written(1, 2, 3)
            assert len(layers_of(live)) == 2
            live.at_rest()
            live.check_running(DISK, written(1, 2, 3))
        except (AssertionError, SemisharedError):
            wrong.append(f"{name}: {traceback.format_exc()}")
    assert not wrong, "\n".join(wrong)


def test_second_commit_ends_nobodys_work(running: Live) -> None:
    at = points(running)["commit staged"]
    running.write_running(DISK, 2)
    with stopped(running, at) as first:
        with pytest.raises(VmBusy, match="disks of VM 7 on h1") as caught:
            commit(running)
        process = re.search(r"test \(process ([0-9]+)\)", caught.value.detail)
        assert process, caught.value.detail
        running.host.run(["kill", "-CONT", process.group(1)])
    assert len(first) == 1 and first[0] > 0
    assert stored(running) == written(1, 2)
    running.at_rest()


@contextmanager
def stopped(live: Live, at: int) -> Iterator[List[int]]:
    """Have a commit stand still at a point within the block; yield what will hold what it has returned."""
    found: List[int] = []
    live.forget_trace()
    env = {"SEMISHARED_STOP_AT": str(at), "SEMISHARED_TRACE": TRACE}
    thread = threading.Thread(target=lambda: found.append(commit(live, env)))
    thread.start()
    try:
        until(
            lambda: live.host.path(TRACE).exists() and len(live.points()) == at,
            30,
            "a commit that stands still",
            0.05,
        )
        yield found
    finally:
        thread.join(60)
    assert not thread.is_alive()


def test_domain_that_was_said_to_run_and_does_not(running: Live) -> None:
    running.end_domain()
    running.write(DISK, 2)
    assert commit(running) > 0
    assert stored(running) == written(1, 2)
    running.check(DISK, written(1, 2), {})


def test_nothing_is_committed_of_a_vm_that_oned_is_at_work_on(
    running: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, before, then = running.cloud.answers.texts, layers_of(running), told(running)
    monkeypatch.setitem(texts, ("vm", VM), texts["vm", VM].replace("<LCM_STATE>3<", "<LCM_STATE>4<"))
    with pytest.raises(VmBusy, match="LCM state 4"):
        commit(running, then=then)
    assert (layers_of(running), stored(running)) == (before, written())
