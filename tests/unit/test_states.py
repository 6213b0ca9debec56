# SPDX-License-Identifier: Apache-2.0
"""States and types of oned's objects: their numbers are said once (opennebula/states.py), by oned's names."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Iterator

import pytest

from lab.oned import states as lab
from semishared.opennebula import states
from unit.sources import nodes, parsed

LIB = Path(__file__).resolve().parents[2] / "lib" / "semishared"
READ = {"state", "lcm_state", "type"}
"""Attributes of views (opennebula/xml.py) that are such numbers."""
TEXTS = {"STATE", "LCM_STATE", "TYPE"}
"""Where oned has them."""
HEADERS = {
    "VmState": "INIT 0 PENDING 1 HOLD 2 ACTIVE 3 STOPPED 4 SUSPENDED 5 DONE 6 POWEROFF 8 UNDEPLOYED 9 "
    "CLONING 10 CLONING_FAILURE 11",
    "LcmState": "LCM_INIT 0 PROLOG 1 BOOT 2 RUNNING 3 MIGRATE 4 SAVE_STOP 5 SAVE_SUSPEND 6 SAVE_MIGRATE 7 "
    "PROLOG_MIGRATE 8 PROLOG_RESUME 9 EPILOG_STOP 10 EPILOG 11 SHUTDOWN 12 CLEANUP_RESUBMIT 15 UNKNOWN 16 "
    "HOTPLUG 17 SHUTDOWN_POWEROFF 18 BOOT_UNKNOWN 19 BOOT_POWEROFF 20 BOOT_SUSPENDED 21 BOOT_STOPPED 22 "
    "CLEANUP_DELETE 23 HOTPLUG_SNAPSHOT 24 HOTPLUG_NIC 25 HOTPLUG_SAVEAS 26 HOTPLUG_SAVEAS_POWEROFF 27 "
    "HOTPLUG_SAVEAS_SUSPENDED 28 SHUTDOWN_UNDEPLOY 29 EPILOG_UNDEPLOY 30 PROLOG_UNDEPLOY 31 "
    "BOOT_UNDEPLOY 32 HOTPLUG_PROLOG_POWEROFF 33 HOTPLUG_EPILOG_POWEROFF 34 BOOT_MIGRATE 35 "
    "BOOT_FAILURE 36 BOOT_MIGRATE_FAILURE 37 PROLOG_MIGRATE_FAILURE 38 PROLOG_FAILURE 39 "
    "EPILOG_FAILURE 40 EPILOG_STOP_FAILURE 41 EPILOG_UNDEPLOY_FAILURE 42 PROLOG_MIGRATE_POWEROFF 43 "
    "PROLOG_MIGRATE_POWEROFF_FAILURE 44 PROLOG_MIGRATE_SUSPEND 45 PROLOG_MIGRATE_SUSPEND_FAILURE 46 "
    "BOOT_UNDEPLOY_FAILURE 47 BOOT_STOPPED_FAILURE 48 PROLOG_RESUME_FAILURE 49 PROLOG_UNDEPLOY_FAILURE 50 "
    "DISK_SNAPSHOT_POWEROFF 51 DISK_SNAPSHOT_REVERT_POWEROFF 52 DISK_SNAPSHOT_DELETE_POWEROFF 53 "
    "DISK_SNAPSHOT_SUSPENDED 54 DISK_SNAPSHOT_DELETE_SUSPENDED 56 DISK_SNAPSHOT 57 DISK_SNAPSHOT_DELETE 59 "
    "PROLOG_MIGRATE_UNKNOWN 60 PROLOG_MIGRATE_UNKNOWN_FAILURE 61 DISK_RESIZE 62 DISK_RESIZE_POWEROFF 63 "
    "DISK_RESIZE_UNDEPLOYED 64 HOTPLUG_NIC_POWEROFF 65 HOTPLUG_RESIZE 66 HOTPLUG_SAVEAS_UNDEPLOYED 67 "
    "HOTPLUG_SAVEAS_STOPPED 68 BACKUP 69 BACKUP_POWEROFF 70 RESTORE 71",
    "ImageState": "INIT 0 READY 1 USED 2 DISABLED 3 LOCKED 4 ERROR 5 CLONE 6 DELETE 7 USED_PERS 8 "
    "LOCKED_USED 9 LOCKED_USED_PERS 10",
    "ImageType": "OS 0 CDROM 1 DATABLOCK 2 KERNEL 3 RAMDISK 4 CONTEXT 5 BACKUP 6 FILESYSTEM 7",
    "HostState": "INIT 0 MONITORING_MONITORED 1 MONITORED 2 ERROR 3 DISABLED 4 MONITORING_ERROR 5 "
    "MONITORING_INIT 6 MONITORING_DISABLED 7 OFFLINE 8",
    "DatastoreType": "IMAGE_DS 0 SYSTEM_DS 1 FILE_DS 2 BACKUP_DS 3",
}
"""The enumerations of include/*.h of OpenNebula 7.4; MONITORING_* of a host are of 6.10."""
OF_VIEWS = {"disk", "template", "mount", "mounted", "found"}
"""What has a `type` that is a word."""


@pytest.mark.parametrize("name", HEADERS)
def test_states_have_the_numbers_of_oned(name: str) -> None:
    words = HEADERS[name].split()
    found = vars(getattr(states, name)).items()
    said = {word: number for word, number in found if isinstance(number, int) and not word.startswith("__")}
    assert said == dict(zip(words[::2], map(int, words[1::2])))


def test_failures_are_all_states_that_are_called_so() -> None:
    named = {number for name, number in vars(states.LcmState).items() if name.endswith("_FAILURE")}
    assert states.LcmState.FAILURES == named >= set(lab.FAILURE.values())


def test_a_state_has_a_name() -> None:
    assert [states.name_of(number) for number in (3, 9, 11, 7, -1)] == [
        "ACTIVE",
        "UNDEPLOYED",
        "CLONING_FAILURE",
        "7",
        "-1",
    ]


def _is_state(node: ast.AST) -> bool:
    """Tell whether something is the state or the type of one of oned's objects."""
    if isinstance(node, ast.Attribute):
        return node.attr in READ and not (isinstance(node.value, ast.Name) and node.value.id in OF_VIEWS)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "number":
        words = [word.value for word in node.args if isinstance(word, ast.Constant)]
        return any(str(word).rpartition("/")[2] in TEXTS for word in words)
    return isinstance(node, ast.Name) and node.id in ("state", "lcm_state", "lcm")


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value is not True


def _numbers(node: ast.AST) -> bool:
    """Tell whether something is a number, or has one within it."""
    return any(map(_is_number, ast.walk(node)))


def bare(text: str) -> Iterator[int]:
    """Yield the lines of a module in which a number is compared with a state, or looked up by one; a name for
    one that the module has itself counts as that number.
    """
    tree = parsed(text)
    own: set[str] = set()
    for line in tree.body:
        if isinstance(line, ast.Assign) and _numbers(line.value):
            own |= {
                name.id for target in line.targets for name in ast.walk(target) if isinstance(name, ast.Name)
            }

    def is_bare(node: ast.AST) -> bool:
        names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        return _numbers(node) or bool(names & own)

    for node in nodes(text):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            parts = [
                part for side in sides for part in (side.elts if isinstance(side, ast.Tuple) else [side])
            ]
            if any(map(_is_state, parts)) and any(is_bare(part) for part in parts if not _is_state(part)):
                yield node.lineno
        elif isinstance(node, ast.Subscript) and _is_state(node.slice) and is_bare(node.value):
            yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            if any(map(_is_state, node.args)) and is_bare(node.func.value):
                yield node.lineno


def test_no_bare_number_is_compared_with_a_state() -> None:
    found = {str(path.relative_to(LIB)): list(bare(path.read_text())) for path in sorted(LIB.rglob("*.py"))}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "text",
    [
        "vm.state == 3",
        "8 == host.state",
        "vm.lcm_state in (60, 61)",
        "image.type not in {0, 2}",
        "vm.number('LCM_STATE') != 3",
        "(vm.state, vm.lcm_state) == (3, 16)",
        "(vm.number('STATE'), vm.seq) == (ACTIVE, 16)",
        "ACTIVE = 3\nvm.state == ACTIVE",
        "ACTIVE, DONE = 3, 6\nvm.is_there and vm.state in (DONE, VmState.HOLD)",
        "MOVING = frozenset({8, 9})\nvm.lcm_state in MOVING",
        "NAMES = {1: 'PENDING'}\nNAMES.get(vm.state, '')",
        "NAMES = {1: 'PENDING'}\nNAMES[vm.state]",
        "def work(vm):\n    state = vm.state\n    return state == 3",
    ],
)
def test_a_bare_number_is_found(text: str) -> None:
    assert list(bare(text))


@pytest.mark.parametrize(
    "text",
    [
        "vm.state == VmState.ACTIVE",
        "MOVING = (LcmState.MIGRATE, *moves.UNKNOWN)\nvm.lcm_state in MOVING",
        "disk.type == 'SWAP'",
        "(then.seq, then.lcm_state) != (now.seq, now.lcm_state)",
        "name_of(vm.state)",
    ],
)
def test_a_name_is_none(text: str) -> None:
    assert not list(bare(text))
