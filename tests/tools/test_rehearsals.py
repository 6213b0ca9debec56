# SPDX-License-Identifier: Apache-2.0
"""`semishared plan ACTION`, over its whole command line: it says what the action would do, and nothing
changes anywhere.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from rehearsing import things
from semishared.front import transfer
from tools.oned_site import HERE, STORE, SYSTEM, ActionSite

Words = List[str]
Situation = Callable[[ActionSite], Words]
SITUATIONS: Dict[str, Tuple[Situation, List[str]]] = {}
"""By name (its first word is the action): what leads to it, and returns the arguments; the steps that are
said to follow.

`...` at the end of these: what comes next depends on what the last of them answers.
"""


def situation(name: str, *steps: str) -> Callable[[Situation], Situation]:
    def add(made: Situation) -> Situation:
        SITUATIONS[name] = made, list(steps)
        return made

    return add


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ActionSite]:
    """One for all: each situation has an image and a VM of its own."""
    with ActionSite.up(tmp_path_factory.mktemp("site") / "one") as up:
        yield up


def place(site: ActionSite, vm: int, number: int = 0) -> str:
    return f"{HERE}:{site.disk(vm, number)}"


def from_image(site: ActionSite, image: int) -> Words:
    vm = site.vm(image)
    return [f"fe:{site.source(image)}", place(site, vm), str(vm), str(STORE)]


@situation("clone", "StageBase", "PrepareVm", "CreateOverlay")
def overlay(site: ActionSite) -> Words:
    return from_image(site, site.image())


@situation("clone as a copy", "PrepareVm", "CopyImage")
def copy(site: ActionSite) -> Words:
    return from_image(site, site.image(SEMISHARED_LOCAL="copy"))


@situation("clone over the store", "PrepareVm", "CreateRemote")
def remote(site: ActionSite) -> Words:
    return from_image(site, site.image(SEMISHARED_LOCAL="remote-first"))


@situation("clone on the store", "PrepareVm", "CloneOnStore")
def shared(site: ActionSite) -> Words:
    return from_image(site, site.image(SEMISHARED_PLACE="shared"))


@situation("ln", "PrepareVm", "LinkInPlace")
def in_place(site: ActionSite) -> Words:
    return from_image(site, site.image(persistent=True))


@situation("mkimage", "PrepareVm", "CreateVolatile")
def volatile(site: ActionSite) -> Words:
    vm = site.vm(site.image())
    return ["8", "raw", place(site, vm), str(vm), str(SYSTEM)]


@situation("mkswap", "PrepareVm", "CreateVolatile")
def swap(site: ActionSite) -> Words:
    vm = site.vm(site.image())
    return ["8", place(site, vm, 1), str(vm), str(SYSTEM)]


@situation("context", "PrepareVm", "ReplaceLostBases", "NoteIoClasses", "ReceiveFile")
def context(site: ActionSite) -> Words:
    vm, path = site.vm(site.image()), site.top / "context.sh"
    path.write_text("X=1\n")
    return [str(path), place(site, vm, 1), str(vm), str(SYSTEM)]


def made(site: ActionSite, action: str, persistent: bool = False, **attributes: str) -> int:
    """Return a VM that is off and has a disk 0 of an image."""
    vm = site.vm(site.image(persistent=persistent, **attributes))
    site.make(action, vm)
    return vm


@situation("mvds", "EndSession", "...")
def session_ends(site: ActionSite) -> Words:
    vm = made(site, "LN", persistent=True)
    return [place(site, vm), site.oned.vm(vm).disks[0]["SOURCE"], str(vm), str(STORE)]


@situation("cpds", "SaveDisk")
def saved(site: ActionSite) -> Words:
    vm = made(site, "CLONE")
    return [place(site, vm), f"{site.store}/{'f' * 32}", "-1", str(vm), str(STORE)]


@situation("delete", "RemoveDisk", "...")
def disk_removed(site: ActionSite) -> Words:
    vm = made(site, "CLONE", SEMISHARED_PLACE="shared")
    return [place(site, vm), str(vm), str(STORE)]


@situation("delete of a VM", "RemoveVm")
def vm_removed(site: ActionSite) -> Words:
    vm = made(site, "CLONE")
    return [f"{HERE}:{site.disk(vm).parent}", str(vm), str(SYSTEM)]


def snapshot(site: ActionSite, vm: int, number: int) -> Words:
    return [place(site, vm), str(number), str(vm), str(STORE)]


def with_snapshots(site: ActionSite, action: str, persistent: bool = False) -> int:
    """Return a VM with two snapshots of its disk."""
    vm = made(site, action, persistent)
    for number in range(2):
        site.tm("SNAP_CREATE", *snapshot(site, vm, number))
    return vm


@situation("snap_create", "AddLayer", "ActivateLayer")
def snap_create(site: ActionSite) -> Words:
    return snapshot(site, made(site, "CLONE"), 0)


@situation("snap_create of an image", "CopyOut")
def snap_create_in_place(site: ActionSite) -> Words:
    return snapshot(site, made(site, "LN", persistent=True), 0)


@situation("snap_delete", "MergeLayer", "DropLayer")
def snap_delete(site: ActionSite) -> Words:
    return snapshot(site, with_snapshots(site, "CLONE"), 0)


@situation("snap_delete of an image", "ForgetSnapshot")
def snap_delete_in_place(site: ActionSite) -> Words:
    return snapshot(site, with_snapshots(site, "LN", persistent=True), 0)


@situation("snap_revert", "AddLayer", "ActivateLayer", "GrowDisk")
def snap_revert(site: ActionSite) -> Words:
    return snapshot(site, with_snapshots(site, "CLONE"), 0)


@situation("snap_revert of an image", "RevertImage", "GrowDisk")
def snap_revert_in_place(site: ActionSite) -> Words:
    return snapshot(site, with_snapshots(site, "LN", persistent=True), 0)


@situation("resize", "GrowDisk", "...")
def grown(site: ActionSite) -> Words:
    vm = made(site, "CLONE")
    return [place(site, vm), "16", str(vm), str(STORE)]


@situation("mv", "RenameVm", "...")
def moved(site: ActionSite) -> Words:
    vm = made(site, "CLONE")
    here = site.disk(vm).parent
    (site.location / "103").mkdir(exist_ok=True)
    return [f"{HERE}:{here}", f"{HERE}:{site.location}/103/{vm}", str(vm), "103"]


def backup(site: ActionSite) -> Words:
    vm = made(site, "CLONE")
    return [f"{HERE}:{site.disk(vm).parent}", "0", f"one-{vm}", "-", str(vm), str(SYSTEM)]


@situation("prebackup", "BackUp")
def before_backup(site: ActionSite) -> Words:
    return backup(site)


@situation("postbackup", "EndBackup")
def after_backup(site: ActionSite) -> Words:
    words = backup(site)
    site.tm("PREBACKUP", *words, stdin=on_stdin(site, words))
    return words


def on_stdin(site: ActionSite, words: Words) -> str:
    """Return what oned gives an action on stdin: the VM, for backups."""
    return site.oned.vm(int(words[4])).to_xml() if len(words) == 6 else ""


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.fault(21, "`semishared plan` changes nothing on any machine: no name, byte, time or attribute")
def test_a_rehearsal_says_the_steps_and_changes_nothing(site: ActionSite, name: str) -> None:
    made, steps = SITUATIONS[name]
    words = made(site)
    before = things(site.location)
    stdin = on_stdin(site, words)
    said: Dict[str, Any] = json.loads(site.cli("plan", "--json", name.split()[0], *words, stdin=stdin).stdout)
    assert things(site.location) == before
    found = [step["step"] for part in said["plan"] if "answers" not in part for step in part["steps"]]
    assert found + ["..."] * said["open"] == steps
    site.tm(name.split()[0].upper(), *words, stdin=stdin)
    assert things(site.location) != before


def test_every_action_is_rehearsed_here() -> None:
    # A guest that runs, or must be known not to: tests/system.
    of_guests = {
        "snap_create_live",
        "prebackup_live",
        "postbackup_live",
        "premigrate",
        "postmigrate",
        "failmigrate",
        "restore",
    }
    assert {name.split()[0] for name in SITUATIONS} | of_guests == set(transfer.PLANNED)
