# SPDX-License-Identifier: Apache-2.0
"""Chains of incremental backups as a real oned has asked for them: recordings of stock drivers and of ours.

What is asserted here is what drivers may rely on: which actions are called in which order, what says the
mode, under which names the store's driver takes disks, and what oned makes of a failure.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any, Dict, Iterator, List, Tuple
from xml.etree import ElementTree

import pytest

import traces
from semishared.model.disk import names as disk_names
from semishared.model.disk.marks import FIRST, Asked
from semishared.opennebula.args import Backup
from semishared.opennebula.xml import Vm
from semishared.plan.disk import backup as plan

WHERE = "7.4/increments"
WHOLE = ("semishared-mixed", "stock-qcow2-cbt")
"""Where a backup that the datastore has not stored is made again."""
STUCK, STUCK_UNTIL_RESET = "stock-qcow2-snapshot", "stock-ceph"
NAMES = (*WHOLE, STUCK, STUCK_UNTIL_RESET)
Call = Dict[str, Any]
Asking = Tuple[Dict[str, Any], List[Call], Vm, Dict[str, str], Dict[str, str]]


def backups(name: str) -> Iterator[Asking]:
    """Yield each `onevm backup`: the step, its calls, the VM as the first of them had it, and BACKUP_CONFIG
    as it was then and after the step.
    """
    recording = traces.load(name, WHERE)
    for step in recording["steps"]:
        calls = [call for call in step["calls"] if "backup" in call["action"]]
        if not step["cmd"].startswith("onevm backup") or not calls:
            continue
        asked = traces.body(recording, calls[0]["stdin"])
        (after,) = (key for what, key in step["info_after"].items() if what.startswith("vm."))
        known = traces.body(recording, after)
        yield step, calls, Vm.parse(asked), _config(asked), _config(known)


def _config(vm: str) -> Dict[str, str]:
    return {row.tag: row.text or "" for row in ElementTree.fromstring(vm).findall("BACKUPS/BACKUP_CONFIG/*")}


def has_failed(calls: List[Call]) -> bool:
    return any(call["rc"] for call in calls)


def test_every_recording_is_read() -> None:
    assert sorted(NAMES) == traces.names(WHERE)
    for name in NAMES:
        assert {"s", "l"} <= set(outcomes(name))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_three_are_called_whatever_fails(name: str) -> None:
    for step, calls, *_ in backups(name):
        before, after = calls[0], calls[-1]
        live = "_live" if before["action"].endswith("_live") else ""
        wanted = [f"prebackup{live}", *([] if before["rc"] else ["backup"]), f"postbackup{live}"]
        assert [call["action"] for call in calls] == wanted, step["cmd"]
        assert (before["argv"], before["stdin"]) == (after["argv"], after["stdin"]), (
            "post is told what pre is"
        )
        assert {call["driver"] for call in (before, after)} == {calls[0]["driver"]}, "for all disks"


@pytest.mark.parametrize("name", NAMES)
def test_the_number_is_raised_by_what_succeeds_alone(name: str) -> None:
    for step, calls, _, asked, after in backups(name):
        last = int(asked["LAST_INCREMENT_ID"])
        assert int(after["LAST_INCREMENT_ID"]) == last + (not has_failed(calls)), step["cmd"]
        if has_failed(calls):
            assert after["INCREMENTAL_BACKUP_ID"] == asked["INCREMENTAL_BACKUP_ID"], step["cmd"]
        if "--reset" in step["cmd"]:
            assert (asked["LAST_INCREMENT_ID"], asked["INCREMENTAL_BACKUP_ID"]) == ("-1", "-1")


@pytest.mark.parametrize("name", NAMES)
def test_disks_lie_where_the_store_takes_them_under_the_names_that_we_give_them(name: str) -> None:
    for step, calls, vm, asked, _ in backups(name):
        if calls[0]["rc"]:
            continue
        backup, wants = Backup.parse(calls[0]["argv"]), plan.increment(vm)
        assert wants == {
            "since": int(asked["LAST_INCREMENT_ID"]),
            "chain": int(asked["INCREMENTAL_BACKUP_ID"]),
            "newest": max(vm.backup_ids, default=-1),
        }
        number = Asked(wants["since"], wants["chain"], wants["newest"]).number
        copies = {disk_names.backup_copy("backup", disk, number) for disk in backup.disks}
        left = {path for path in calls[0]["left"]["files"] if PurePath(path).parent == PurePath("backup")}
        assert left == {*copies, "backup/vm.xml"}, step["cmd"]
        if not calls[1]["rc"]:
            directory, _, format_ = calls[1]["stdout"].split()
            assert re.fullmatch("[0-9a-f]{6}", directory) and format_ == "raw"
        if name != STUCK:
            assert not [path for path in calls[-1]["left"]["files"] if path.startswith(("backup", "tmp"))]


@pytest.mark.parametrize("name", WHOLE)
def test_increments_are_merged_behind_the_back_of_the_transfer_driver(name: str) -> None:
    merges = 0
    for step, *_, asked, _ in backups(name):
        calls = [call for call in step["calls"] if call["action"] == "increment_flatten"]
        if not calls:
            continue
        merges += 1
        last = int(asked["LAST_INCREMENT_ID"]) + 1
        chain = [int(one.partition(":")[0]) for one in calls[0]["stdout"].split()[1].split(",")]
        assert chain == list(range(last + 1 - int(asked["KEEP_LAST"]), last + 1))
    assert merges


@pytest.mark.parametrize("name", NAMES)
def test_each_increment_was_restored_as_the_guest_had_it(name: str) -> None:
    steps = [step for step in traces.load(name, WHERE)["steps"] if "exact" in step]
    assert len([step for step in steps if step["cmd"].startswith("oneimage restore")]) >= 6
    for step in steps:
        assert step["exact"] and all(step["exact"].values()), step["cmd"]


def outcomes(name: str) -> str:
    """Return a letter for each backup: stored; lost, because the datastore did not store it; or not made."""
    letters = ""
    for _, calls, *_ in backups(name):
        letters += "-" if calls[0]["rc"] else "l" if has_failed(calls) else "s"
    return letters


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *((name, "sssl" + "s" + "s" + "sls" + "ss") for name in WHOLE),
        (STUCK_UNTIL_RESET, "sssl" + "-" + "s" + "s"),
        (STUCK, "sssl" + "-" + "-"),
    ],
)
def test_what_comes_after_a_backup_that_is_not_stored(name: str, wanted: str) -> None:
    assert outcomes(name) == wanted
    (reset,) = (number for number, found in enumerate(backups(name)) if "--reset" in found[0]["cmd"])
    assert reset == 5


def test_a_first_increment_is_what_no_chain_asks_for() -> None:
    for name in NAMES:
        assert next(backups(name))[3]["LAST_INCREMENT_ID"] == str(FIRST)
