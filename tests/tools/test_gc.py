# SPDX-License-Identifier: Apache-2.0
"""gc on a real tree: what killed actions leave is found and removed, and nothing else is touched.

The trees are made by the real steps (clones, copies, in-place disks) and by planting what a kill leaves; oned
is a set of ids. Only libvirt is left out: its part is a unit test of the plan and the system suite's lab.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterable

import pytest

from semishared.model import answers
from semishared.model import steps as s
from semishared.model.leftover_steps import Discard, LookAround
from semishared.plan.care import gc
from semishared.tools import files
from tools.world import World

HEX = "0123456789abcdef" * 2
KNOWN = {5: "here", 6: "here"}


def snapshot(top: Path) -> set[str]:
    return {str(path.relative_to(top)) for path in top.rglob("*")}


def machine(world: World) -> gc.Machine:
    step = LookAround(str(world.location), (101, 103), (str(world.store),), False)
    (facts,) = world.on(step)
    return gc.Machine("here", str(world.location), answers.one("here", LookAround, facts), False)


def find(
    world: World, older_than: int = 0, vms: Iterable[int] = KNOWN, all_seen: bool = True
) -> list[gc.Finding]:
    sources = frozenset(str(path) for path in world.store.iterdir() if not path.name.startswith("."))
    past = frozenset((vm, 2, f"{world.store}/{HEX}") for vm in (5, 6, 70, 71, 72, 77))
    known = gc.Known({vm: "here" for vm in vms}, frozenset({(100, 7)}), sources, past=past)
    return gc.find([machine(world)], known, older_than, all_seen)


def collect(world: World, **how: object) -> list[gc.Finding]:
    found = find(world, **how)  # type: ignore[arg-type]
    for item in found:
        if not item.keep:
            world.on(*item.steps())
    return found


@pytest.fixture()
def busy(world: World, template: Path) -> World:
    """Two VMs that oned knows, with disks of each kind."""
    subprocess.run(["cp", "-a", "--sparse=always", f"{template}/.", str(world.top)], check=True)
    return world


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make that once; what gc looks at does not depend on where it lies."""
    world = World(tmp_path_factory.mktemp("template"))
    image, mine = world.image(HEX), world.image("f" * 32, pattern=0xB2)
    for vm in KNOWN:
        world.clone(image, world.disk(vm, 0))
        world.on(s.CopyImage(world.disk(vm, 1), image, 0), s.CloneOnStore(world.disk(vm, 2), image, 0))
        world.on(s.CreateVolatile(world.disk(vm, 3), 1 << 20, "raw", ""))
    world.link(mine, world.disk(5, 4))
    (world.system / "lost+found").mkdir()
    (world.store / "notes.txt").write_text("the operator's")
    (world.store / ".semishared" / "notes.txt").mkdir()
    (world.root / "bases" / "of-the-operator").mkdir()
    return world.top


def plant(world: World, kind: str, vm: int) -> None:
    """Leave what a kill of some action leaves, for VM `vm` (unknown to oned) or a known one where that makes
    no difference.
    """
    image = s.ImageRef(100, 7, "raw", str(world.store / HEX))
    side = world.store / ".semishared" / HEX
    (base,) = [path for path in world.bases() if path.name.startswith("100-7-")]
    if kind == "vm":
        world.clone(image, world.disk(vm, 0))
    elif kind == "lease":
        os.link(base / "image", base / "leases" / f"{vm}-8")
    elif kind == "lease of a known VM":
        os.link(base / "image", base / "leases" / "5-9")
    elif kind == "staging":
        (world.root / "staging" / f"100-{vm}" / "leases").mkdir(parents=True)
    elif kind in ("incoming", "outgoing", "removed"):
        (world.system / f".{kind}-{vm}-0123456789ab" / ".semishared").mkdir(parents=True)
    elif kind == "incoming of a known VM":
        (world.system / ".incoming-6-0123456789ab").mkdir()
    elif kind == "removed of a known VM":
        (world.system / ".removed-6-0123456789ab" / "disk.0.snap").mkdir(parents=True)
    elif kind == "incoming of a known VM, as of 0.1.0":
        (world.system / ".incoming-6").mkdir()
    elif kind == "outgoing of a known VM":
        (world.system / ".outgoing-6").mkdir()
    elif kind == "clone":
        (side / "clones" / f"{vm}-2").write_bytes(b"x" * 5000)
    elif kind == "side":
        (world.store / ".semishared" / f"{vm:032x}").mkdir()
    elif kind == "upload":
        (world.store / ".semishared" / ".uploads" / f"{vm:032x}").mkdir(parents=True)
    elif kind == "snapshots":
        (world.store / f"{vm:032x}.snap").mkdir()
    elif kind == "base":
        gone = world.root / "bases" / f"100-{vm}-{HEX}"
        (gone / "leases").mkdir(parents=True)
        (gone / "image").write_bytes(b"x")
    else:
        where = {
            "staged in a VM": world.system / "5",
            "staged record": world.system / "5" / ".semishared",
            "staged in a system datastore": world.system,
            "staged on the store": world.store,
            "staged beside an image": side,
            "staged clone": side / "clones",
            "staged layer": world.system / "6" / "disk.0.snap",
            "staged layer of a clone": side / "clones" / "5-2.snap",
            "staged lease": base / "leases",
        }[kind]
        (where / f".staged-thing.{vm}").write_bytes(b"x")


KINDS = [
    "vm",
    "lease",
    "lease of a known VM",
    "staging",
    "incoming",
    "outgoing",
    "incoming of a known VM",
    "outgoing of a known VM",
    "removed",
    "removed of a known VM",
    "incoming of a known VM, as of 0.1.0",
    "clone",
    "side",
    "upload",
    "snapshots",
    "base",
    "staged in a VM",
    "staged record",
    "staged in a system datastore",
    "staged on the store",
    "staged beside an image",
    "staged clone",
    "staged lease",
    "staged layer",
    "staged layer of a clone",
]


def without_locks(names: set[str]) -> set[str]:
    return {name for name in names if "/locks" not in name and not name.endswith("/staging")}


@pytest.mark.parametrize("kind", KINDS)
def test_leftover_of_each_kind_is_found_and_removed_and_nothing_else(busy: World, kind: str) -> None:
    assert find(busy) == []
    before = without_locks(snapshot(busy.top))
    plant(busy, kind, 77)
    assert without_locks(snapshot(busy.top)) != before
    assert find(busy, older_than=3600) == [], "what is young may be somebody's work"
    (found,) = collect(busy)
    assert not found.keep and found.reason
    left = without_locks(snapshot(busy.top))
    assert left - {"datastores/100/.semishared/.uploads"} == before
    assert find(busy) == []


@pytest.mark.parametrize("seed", range(6))
def test_random_mixture_of_leftovers_is_removed_and_nothing_else(busy: World, seed: int) -> None:
    dice = random.Random(seed)
    before = without_locks(snapshot(busy.top))
    planted = [
        (kind, vm) for kind in KINDS if "known" not in kind for vm in (70, 71, 72) if dice.random() < 0.4
    ]
    for kind, vm in planted:
        plant(busy, kind, vm)
    assert not [item for item in find(busy, vms={*KNOWN, 70, 71, 72}) if item.kind in ("vm", "clone")]
    found = collect(busy)
    assert len(found) <= len(planted)
    assert without_locks(snapshot(busy.top)) - {"datastores/100/.semishared/.uploads"} == before
    assert find(busy) == []


def test_what_is_in_use_is_left_alone(busy: World) -> None:
    for kind in ("upload", "staged on the store", "incoming", "staging", "vm", "clone"):
        plant(busy, kind, 77)
    uploaded = busy.store / ".semishared" / ".uploads" / f"{77:032x}"
    (busy.root / "locks" / "base-100-77").touch()
    with (
        open(uploaded / "lock", "w") as one,
        open(busy.root / "locks" / "base-100-77") as two,
        open(busy.store / ".staged-thing.77", "rb"),
        open(busy.system / ".incoming-77-0123456789ab" / "disk.0", "w"),
    ):
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(two, fcntl.LOCK_EX)
        found = {(item.kind, bool(item.keep)) for item in find(busy)}
    assert found == {("vm", False), ("clone", False)}
    assert ("clone", True) in {(item.kind, bool(item.keep)) for item in find(busy, all_seen=False)}


def test_what_changed_after_the_look_is_left_alone(busy: World) -> None:
    for kind in ("clone", "incoming", "lease", "side"):
        plant(busy, kind, 77)
    found = [item for item in find(busy) if item.kind != "vm"]
    assert {item.kind for item in found} == {"clone", "incoming", "lease", "side"}
    with open(busy.store / ".semishared" / HEX / "clones" / "77-2", "ab") as file:
        file.write(b"alive")
    (busy.system / ".incoming-77-0123456789ab" / "disk.1").write_bytes(b"alive")
    (busy.store / ".semishared" / f"{77:032x}" / "session").write_text("alive")
    (busy.system / "77").mkdir()
    (busy.system / "77" / ".staged-disk.8.abc").write_bytes(b"alive")
    before = without_locks(snapshot(busy.top))
    for item in found:
        assert busy.on(*item.steps()) == [{"removed": False}], item
    assert without_locks(snapshot(busy.top)) == before


def test_data_that_might_be_the_only_copy_is_kept_and_said(busy: World) -> None:
    os.rename(busy.system / "6", busy.system / ".outgoing-6")
    (busy.store / ("a" * 32)).write_bytes(b"somebody's")
    found = find(busy)
    assert {(item.kind, item.keep.split(" ")[0]) for item in found} == {("outgoing", "it")}
    known = gc.Known(
        KNOWN, frozenset({(100, 7)}), frozenset({str(busy.store / HEX), str(busy.store / ("f" * 32))})
    )
    kept = [item for item in gc.find([machine(busy)], known, 0, True) if item.kind == "image"]
    assert [(Path(item.path).name, item.vm) for item in kept] == [("a" * 32, -1)]
    assert kept[0].keep.startswith("it may hold")


def test_lock_of_an_unknown_vm_goes_after_two_days_and_not_before(busy: World) -> None:
    lock = busy.root / "locks" / "vm-88"
    lock.write_text("{}")
    assert find(busy) == []
    os.utime(lock, (1, 1))
    (found,) = collect(busy)
    assert (found.kind, lock.exists()) == ("lock", False)


def test_all_is_gone_when_the_vms_are_done(busy: World) -> None:
    collect(busy, vms=())
    assert not list(busy.system.glob("[0-9]*")) and busy.leases() == []
    assert not list((busy.store / ".semishared" / HEX / "clones").iterdir())
    assert (busy.store / HEX).exists() and (busy.store / ("f" * 32)).exists()
    shutil.rmtree(busy.root)
    assert find(busy, vms=()) == []


@pytest.mark.fault(38, "what a living process has staged is left alone, whatever the clocks say of its age")
def test_what_a_living_process_has_staged_is_left_alone(busy: World) -> None:
    """Between two files it has neither open; and its host's clock was set meanwhile."""
    living = [files.staged_name(f"{where}/disk.9") for where in (busy.system, busy.system / "5", busy.store)]
    gone = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from semishared.tools import files; print(files.staged_name(sys.argv[1]))",
            f"{busy.store}/x",
        ],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])},
    ).stdout.strip()
    for path in (*living, gone):
        Path(path).write_bytes(b"x")
        os.utime(path, (1, 1))
    assert {item.path for item in collect(busy, older_than=3600)} & {*living, gone} == {gone}
    assert [os.path.exists(path) for path in (*living, gone)] == [True, True, True, False]
    step = Discard("staged", living[2], str(busy.location), -1, str(10**9))
    assert busy.on(step) == [{"removed": False}], "nor by a plan that did not know"
