# SPDX-License-Identifier: Apache-2.0
"""What `semishared status` says of disks of which the machine of their VM has no record."""

from __future__ import annotations

from typing import Any

import pytest

from semishared.cli import status
from semishared.opennebula.xml import Vm


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
