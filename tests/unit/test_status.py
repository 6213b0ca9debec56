# SPDX-License-Identifier: Apache-2.0
"""What `semishared status` says of disks of which the machine of their VM has no record."""

from __future__ import annotations

from typing import Any

import pytest

from semishared.cli import cluster, status
from semishared.model.base.steps import ReportedDisk, ReportedVm
from semishared.model.job_steps import Job
from semishared.opennebula.xml import Vm, parse


@pytest.fixture
def cloud() -> Any:
    """What oned and two machines have said: neither has a record of any disk."""
    found: Any = object.__new__(status.Cloud)
    found.front_end, found.records, found.bases, found.images, found.stores = "fe", {}, [], {}, {}
    found.space = {"fe": {}, "h1": {}}
    return found


def vm(state: int, lcm: int) -> Vm:
    return Vm.parse(
        f"<VM><ID>5</ID><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE><HISTORY_RECORDS><HISTORY><SEQ>0</SEQ><HOSTNAME>h1</HOSTNAME>"
        "<DS_ID>101</DS_ID></HISTORY></HISTORY_RECORDS><TEMPLATE><DISK><DISK_ID>0</DISK_ID><TM_MAD>semishared</TM_MAD></DISK></TEMPLATE></VM>"
    )


@pytest.mark.parametrize(("state", "lcm"), [(3, 3), (4, 0), (5, 0), (8, 0), (9, 0)])
def test_a_disk_without_a_record_is_missing_where_nothing_is_under_way(
    cloud: Any, state: int, lcm: int
) -> None:
    (row,) = cloud.rows(vm(state, lcm))
    assert row["missing"] == "no record"


@pytest.mark.parametrize("lcm", [1, 2, 17, 42])
def test_a_disk_that_is_being_made_is_not_missing(cloud: Any, lcm: int) -> None:
    """PROLOG, BOOT, and what oned does to a VM that runs: the record comes with the disk."""
    (row,) = cloud.rows(vm(3, lcm))
    assert row["missing"] == ""


def test_of_a_machine_that_was_not_asked_nothing_is_known(cloud: Any) -> None:
    del cloud.space["h1"]
    assert cloud.rows(vm(3, 3))[0]["missing"] == ""


UNDER_WAY = [
    (3, 1, "being made (PROLOG)"),
    (3, 15, "being made (CLEANUP_RESUBMIT)"),
    (3, 4, "being moved from h0 to h1 (MIGRATE)"),
    (3, 8, "being moved from h0 to h1 (PROLOG_MIGRATE)"),
    (3, 60, "being moved from h0 to h1 (PROLOG_MIGRATE_UNKNOWN)"),
    (3, 31, "being brought from the front-end (PROLOG_UNDEPLOY)"),
    (3, 10, "being brought to the front-end (EPILOG_STOP)"),
    (3, 11, "being removed (EPILOG)"),
    (3, 23, "being removed (CLEANUP_DELETE)"),
    (3, 17, "oned is at work on it (HOTPLUG)"),
    (3, 42, "waits for onevm recover (EPILOG_UNDEPLOY_FAILURE)"),
    (1, 0, "not on a host yet (PENDING)"),
]


@pytest.mark.parametrize(("state", "lcm", "said"), UNDER_WAY)
@pytest.mark.fault(60, "of a disk without a record, status says what is under way, or who has not answered")
def test_a_disk_without_a_record_is_said_by_what_is_under_way(
    cloud: Any, state: int, lcm: int, said: str
) -> None:
    found = vm(state, lcm)
    records = found.element.find("HISTORY_RECORDS")
    assert records is not None
    records.insert(0, parse("<HISTORY><SEQ>-1</SEQ><HOSTNAME>h0</HOSTNAME></HISTORY>", "HISTORY"))
    (row,) = cloud.rows(found)
    assert status.lives(row) == said == row["under_way"]
    line = cluster.line({"vm": 5, "name": "x", "how": "seen", "host": "h1", "why": "", "disks": [row]})
    assert said in line and "None" not in line


@pytest.mark.fault(60, "of a disk without a record, status says what is under way, or who has not answered")
def test_of_a_disk_on_a_machine_that_is_silent_that_is_said(cloud: Any) -> None:
    del cloud.space["h1"]
    (row,) = cloud.rows(vm(3, 3))
    assert status.lives(row) == "unknown: h1 has not answered"
    assert status.lives(cloud.rows(vm(3, 1))[0]) == "being made (PROLOG)"


@pytest.mark.fault(75, "what an action moves is seen while it moves it, and not after")
@pytest.mark.parametrize(
    ("state", "lcm", "disk", "said"),
    [
        (3, 1, 0, "copying, 41 %, 80.0 MiB/s from h2 (PROLOG)"),
        (3, 1, -1, "copying, 41 %, 80.0 MiB/s from h2 (PROLOG)"),
        (3, 1, 1, "being made (PROLOG)"),
        (3, 3, 0, "copying, 41 %, 80.0 MiB/s from h2"),
    ],
)
def test_what_is_moved_of_a_disk_is_said_with_how_far_it_is(
    cloud: Any, state: int, lcm: int, disk: int, said: str
) -> None:
    fetch = Job(7, "1", "clone", "fetch", 5, disk, "", "h2", "", 41 << 20, 100 << 20, 80 << 20, 1, "oned")
    cloud.jobs = [("h1", fetch), ("h1", fetch._replace(vm=6))]
    (row,) = cloud.rows(vm(state, lcm))
    assert row["under_way"] == said
    if lcm == 1:
        assert status.lives(row) == said


def test_a_disk_that_is_there_is_said_with_what_is_under_way(cloud: Any) -> None:
    disk = ReportedDisk(0, "overlay", "local", "qcow2", "/d", 1, 0, None, "normal", None, "", None, True)
    cloud.records[("h1", 5)] = ReportedVm(5, 101, [disk], "")
    (row,) = cloud.rows(vm(3, 8))
    assert status.lives(row) == "local, overlay, being moved (PROLOG_MIGRATE), a delta"
    (row,) = cloud.rows(vm(3, 3))
    assert status.lives(row) == (
        "local, overlay, a delta of a move that runs, or was killed: its next action merges it"
    )
