# SPDX-License-Identifier: Apache-2.0
"""A running guest that goes on in a copy of its VM directory, killed at every step of that; with and without
its QEMU.

Whichever of the two directories oned says is the VM's, the next action there has all that the guest had
written.
"""

from __future__ import annotations

import json
import os
import traceback
from typing import Dict, Iterator, List

import pytest

from semishared.errors import SemisharedError

from .cloud import SYSTEM, Cloud
from .live import COPY, DOMAIN, OVERLAY, TRACE, VM, VM_DIR, Environment, Live, digest, s, written

ALL = bool(os.environ.get("SEMISHARED_FULL"))
EVERY = 1 if ALL else 10
OWN = (OVERLAY, COPY)
COPIED = f"{SYSTEM.replace('/101', '/103')}/{VM}"
SINCE = written(1, 2, 5)
ENTER = s.MergeDeltas(VM, COPIED, DOMAIN)
GO_BACK = s.MergeDeltas(VM, VM_DIR, DOMAIN)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with Cloud.up() as cloud:
        live = Live(cloud)
        try:
            for disk in OWN:
                for mark in (1, 2):
                    live.write(disk, mark)
            live.save("plain")
            yield live
        finally:
            live.close()


def begin(live: Live) -> None:
    """Have a guest on its deltas, a copy of its directory in the other datastore, and what the guest wrote
    since.
    """
    live.end_domain()
    live.host.run(["rm", "-rf", COPIED])
    live.restore("plain")
    live.start()
    copy = s.RenameVm(VM, VM_DIR, COPIED, True, "", (0, 1, 2, 3), live=True)
    live.run({}, s.AddDeltas(VM, VM_DIR, DOMAIN, OWN), copy)
    for disk in OWN:
        live.write_running(disk, 5)


def enter(live: Live, env: Environment) -> None:
    live.run(env, ENTER)


def record(live: Live, vm_dir: str, disk: int) -> Dict[str, str]:
    found = json.loads(live.host.path(f"{vm_dir}/.semishared/disk.{disk}.json").read_text())
    assert isinstance(found, dict)
    return found


def check(live: Live, vm_dir: str, now: bytes) -> None:
    """See that a directory has the whole VM, and nothing under way."""
    names = os.listdir(live.host.path(f"{vm_dir}/.semishared"))
    assert not [name for name in names if not name.startswith(("disk.", "clone.", "vm."))], names
    for disk in OWN:
        found = record(live, vm_dir, disk)
        assert os.path.basename(found["path"]) == "0", found
        assert found["path"].startswith(vm_dir)
        assert live.reads(found["path"], found["format"]) == digest(now)
        assert live.host.path(f"{vm_dir}/disk.{disk}.snap/1000000").exists() is False


def check_opened(live: Live, vm_dir: str) -> None:
    said = {
        line.split()[0]: line.split()[1]
        for line in live.virsh("domblklist", DOMAIN).splitlines()
        if line.strip()
    }
    assert live.virsh("domstate", DOMAIN) == "running"
    for disk in OWN:
        assert os.path.normpath(said[f"vd{'abcd'[disk]}"]) == record(live, vm_dir, disk)["path"]
        assert not live.virsh("blockjob", DOMAIN, f"vd{'abcd'[disk]}", "--info", "--raw").strip()


def points(live: Live) -> List[str]:
    begin(live)
    live.forget_trace()
    enter(live, {"SEMISHARED_TRACE": TRACE})
    names = live.points()
    check_opened(live, COPIED)
    live.end_domain()
    check(live, COPIED, SINCE)
    return names


def test_killed_at_every_step_both_directories_are_whole_until_one_is_entered(live: Live) -> None:
    names, failures = points(live), []
    assert {
        "delta is being mirrored",
        "mirrors equal",
        "guest has gone over",
        "copy entered",
        "deltas gone",
    } <= set(names)
    entered = names.index("guest has gone over")
    for number, name in enumerate(names, 1):
        if number % EVERY and name not in ("mirrors equal", "guest has gone over", "copy entered"):
            continue
        for then in ("again", "without its QEMU", *(("back",) if number <= entered else ())):
            try:
                begin(live)
                with pytest.raises(SemisharedError):
                    enter(live, {"SEMISHARED_KILL_AT": str(number)})
                if then == "without its QEMU":
                    live.end_domain()
                live.run({}, GO_BACK if then == "back" else ENTER)
                place = VM_DIR if then == "back" else COPIED
                if then != "without its QEMU":
                    check_opened(live, place)
                    live.end_domain()
                check(live, place, SINCE)
            except Exception:  # noqa: BLE001 - all points are tried, all failures told
                failures.append(f"killed at {number} ({name}), then {then}: {traceback.format_exc(limit=-3)}")
    assert not failures, "\n".join(failures)


def test_copy_that_its_guest_has_not_entered_does_not_move_without_what_it_wrote(live: Live) -> None:
    begin(live)
    live.end_domain()
    live.run({}, s.RenameVm(VM, COPIED, f"{COPIED.replace('/103', '/104')}", True, "", (0, 1, 2, 3)))
    check(live, f"{COPIED.replace('/103', '/104')}", SINCE)
    live.host.run(["rm", "-rf", f"{COPIED.replace('/103', '/104')}"])


def test_directory_that_a_guest_has_open_is_not_removed(live: Live) -> None:
    begin(live)
    with pytest.raises(SemisharedError, match="open"):
        live.run({}, s.CheckNotOpen(VM, VM_DIR, DOMAIN, disks=True))
    live.run(
        {}, s.CheckNotOpen(VM, VM_DIR, DOMAIN, disks=False), s.CheckNotOpen(VM, COPIED, DOMAIN, disks=True)
    )
    enter(live, {})
    live.run({}, s.CheckNotOpen(VM, VM_DIR, DOMAIN, disks=True))
    with pytest.raises(SemisharedError, match="open"):
        live.run({}, s.CheckNotOpen(VM, COPIED, DOMAIN, disks=True))


def test_guest_that_somebody_has_paused_stays_where_it_is(live: Live) -> None:
    begin(live)
    with live.paused():
        enter(live, {})
    live.write_running(OVERLAY, 6)
    enter(live, {})
    check_opened(live, COPIED)
    live.end_domain()
    assert live.reads(record(live, COPIED, OVERLAY)["path"], "qcow2") == digest(written(1, 2, 5, 6))
