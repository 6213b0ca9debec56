# SPDX-License-Identifier: Apache-2.0
"""Image datastores are mounted beside system datastores, and one of them hangs: who moves disks between
devices does not wait with it.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from semishared.device import devices, folders, systems
from semishared.disk import device_move
from semishared.errors import SystemAway, ToolFailed, ToolTimeout
from semishared.host import leftovers
from semishared.model import answers
from semishared.model import steps as s
from semishared.model.device import steps as device_steps
from semishared.model.disk.commit_steps import CreateDiff
from semishared.model.leftover_steps import Discard, LookAround
from semishared.plan.care import gc
from semishared.tools.run import DIES_WITH_US
from tools.test_hung_device import hanging
from tools.test_pool import Pool, of_size
from tools.world import World, qemu_io

LIMIT_S = 30
LISTED = """
import sys
sys.path.insert(0, sys.argv[1])
from semishared.host import watch
found = watch.Round(sys.argv[2], 0)
print([item.name for item in found._held(sys.argv[3])], found._in_memory())
"""


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    systems._silent.clear()


def test_the_round_of_the_watcher_does_not_wait_for_a_store_that_hangs(world: World, pool: Pool) -> None:
    pool.set()
    world.clone(world.image(), world.disk())
    link = devices.link_of(f"{world.disk().path}.snap")
    assert link
    (world.location / "104").mkdir()
    with hanging(world, str(world.location / "104")):
        lib = str(Path(systems.__file__).parents[2])
        words = [*DIES_WITH_US, "/usr/bin/python3", "-c", LISTED, lib, str(world.root), link.uuid]
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
        assert done.stdout.decode() == f"['{link.name}'] []\n"
        # Nor does it take for left over what it may not have seen.
        started = time.monotonic()
        with pytest.raises(ToolTimeout, match=r"/104 on \S+ does not answer"):
            folders.layers_links(str(world.location))
        assert leftovers.find_unlinked(str(world.location)) == [] and os.path.isdir(
            f"{world.disk().path}.snap"
        )
        device_move._discard_unlinked(str(world.root), world.disk())
        assert time.monotonic() - started < LIMIT_S
    systems._silent.clear()
    assert folders.layers_links(str(world.location)) == {link}
    assert [item.name for item in device_move.held(device_steps.ListHeld(str(world.root)))] == [link.name]


def test_what_is_mounted_is_a_system_datastore_if_it_says_so(world: World) -> None:
    location = str(world.location)
    (world.location / "no number").mkdir()
    os.symlink("101", world.location / "105")
    os.symlink(str(world.top), world.location / "106")
    (world.system / ".monitor").write_text("semishared\n")
    assert systems.systems(location) == ["100", "101", "105"]
    with of_size(world.store, "50%"):
        assert systems.systems(location, whole=True) == ["101", "105"]
        (world.store / ".monitor").write_text("semishared\n")
        assert systems.systems(location, whole=True) == ["100", "101", "105"]
    place = world.location.with_name("with a space")
    place.joinpath("100").mkdir(parents=True)
    with of_size(place / "100", "50%"):
        assert systems.systems(str(place)) == []
    assert systems.systems(str(place)) == ["100"]


def test_one_that_is_not_mounted_any_more_is_not_an_empty_one(world: World, pool: Pool) -> None:
    pool.set()
    aside, system, note = world.top / "aside", world.location / "103", world.root / "mounted" / "103"
    for directory in (aside, system):
        directory.mkdir()
    overlay, diff = world.disk(5, 1, 103), world.disk(9, 1, 103)
    with bound(aside, system):
        world.clone(world.image(), overlay)
        persistent = world.image("persistent", pattern=0x55)._replace(id=9)
        world.on(s.PrepareVm(9, diff.vm_dir), CreateDiff(diff, persistent, 0, ""))
        qemu_io(f"{diff.path}.snap/0", "qcow2", "write -P 0x77 2M 64k")
        world.on(s.RemoveVm(9, diff.vm_dir))
        assert note.exists()
        before, leases = folders.layers_links(str(world.location)), world.leases()
        assert len(before) == len(leases) == 2 and not found(world)
    with pytest.raises(SystemAway, match=rf"/103 on \S+ is not mounted, and was \({note}\)"):
        folders.layers_links(str(world.location))
    assert not found(world), "nobody knows whose it is"
    (facts,) = world.on(LookAround(str(world.location), (101, 103), (), False))
    assert isinstance(facts, dict) and [refused["id"] for refused in facts["refused"]] == [SystemAway.id]
    with pytest.raises(SystemAway):
        world.clone(world.image(), world.disk(6, 1, 103))
    assert not list(system.iterdir()), "it would be hidden by what is mounted there"
    # Somebody looks when nothing is noted, and removes what was found when it is.
    note.rename(world.top / "note")
    steps = [step for finding in found(world) if not finding.keep for step in finding.steps()]
    assert {step.kind for step in steps if isinstance(step, Discard)} == {"unlinked", "lease"}
    (world.top / "note").rename(note)
    for step in steps:
        assert world.on(step) == [{"removed": False}]
    device_move._discard_unlinked(str(world.root), diff)
    with bound(aside, system):
        assert (
            folders.layers_links(str(world.location)) == before
            and world.leases() == leases
            and not found(world)
        )
        (kept,) = system.glob(".kept-9-*")
        qemu_io(kept / "disk.1.snap" / "0", "qcow2", "read -P 0x77 2M 64k")
    note.unlink()
    world.clone(world.image(), world.disk(6, 1, 103))
    assert not note.exists(), "it is a plain directory from now on"


def test_what_cannot_be_read_is_not_taken_for_somebody_elses(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.system / ".monitor").write_text("semishared\n")

    def killed(*_: object, **__: object) -> str:
        raise ToolFailed("grep exited with -9")

    monkeypatch.setattr(systems, "run", killed)
    with pytest.raises(ToolTimeout, match="cannot be read: grep was ended"):
        systems.is_ours(str(world.system))
    assert not systems.is_ours(str(world.store)), "there is none"


def found(world: World) -> list[gc.Finding]:
    (facts,) = world.on(LookAround(str(world.location), (101, 103), (), False))
    machine = gc.Machine("here", str(world.location), answers.one("here", LookAround, facts), False)
    known = gc.Known({5: "here"}, frozenset({(100, 7), (100, 9)}), frozenset())
    seen = gc.find([machine], known, 0, True)
    return [finding for finding in seen if finding.kind in ("unlinked", "lease")]


@contextmanager
def bound(aside: Path, directory: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", str(aside), str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)
