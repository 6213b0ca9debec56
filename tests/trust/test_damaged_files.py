# SPDX-License-Identifier: Apache-2.0
"""Each file that a removing action looks at, damaged, by the action: no uncommitted byte goes, and a line
says what and where.

A local disk of a persistent image with two layers, each of which holds something that its image does not; no
guest runs.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import pytest

from semishared.config import Config
from semishared.disk import report
from semishared.errors import DamagedLayer, SemisharedError
from semishared.model import steps as s
from semishared.model.base.steps import EvictBase
from semishared.model.device import steps as device_steps
from semishared.model.disk import commit_steps as c
from semishared.model.disk import names as disk_names
from semishared.tools import layers
from semishared.wire.session import Session
from tools.test_commit import attach, ended, frozen, kept
from tools.test_gc import collect
from tools.test_host_transfer import carry
from tools.test_pool import Pool
from tools.world import MiB, World, qemu_io


def zeroed(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def cut(path: Path) -> None:
    """Take half of the last bytes that a file has, and all that is behind them."""
    at, end = 0, 0
    with path.open("rb") as file:
        try:
            while True:
                at, end = (
                    end,
                    os.lseek(file.fileno(), os.lseek(file.fileno(), end, os.SEEK_DATA), os.SEEK_HOLE),
                )
        except OSError:
            pass
        at = os.lseek(file.fileno(), at, os.SEEK_DATA)
    os.truncate(path, (at + end) // 2)


def gone(path: Path) -> None:
    path.unlink()


def one_page(path: Path) -> None:
    os.truncate(path, min(4096, path.stat().st_size // 4))


DAMAGES: Dict[str, Callable[[Path], None]] = {
    "zeroed": zeroed,
    "cut": cut,
    "gone": gone,
    "one page": one_page,
}


class Case(NamedTuple):
    """A disk with two layers, of which the image has nothing yet."""

    world: World
    image: s.ImageRef
    disk: s.DiskRef

    def file(self, name: str) -> Path:
        """Return what is to be damaged."""
        side, base = self.world.store / ".semishared/image", self.world.bases()[0]
        own, layers = Path(self.disk.vm_dir, ".semishared"), Path(f"{self.disk.path}.snap")
        of = {
            "record": own / "disk.1.json",
            "history": own / "vm.json",
            "link": Path(self.disk.path),
            "active layer": layers / "1",
            "layer below": layers / "0",
            "claim": side / "owner.json",
            "generation": side / "generation.json",
            "manifest of the base": base / "manifest",
            "lease": base / "leases/5-1",
        }
        return of[name]


def delete_disk(case: Case) -> Any:
    return case.world.on(s.RemoveDisk(case.disk, str(case.world.store)), seq=0)


def delete_vm(case: Case) -> Any:
    return case.world.on(s.RemoveVm(case.disk.vm, case.disk.vm_dir), seq=0)


def mvds(case: Case) -> Any:
    return ended(case.world, case.disk)


def made_anew(case: Case) -> Any:
    return attach(case.world, case.image, case.disk, seq=1)


def commit(case: Case) -> Any:
    frozen(case.world, case.disk, 1)
    return case.world.on(c.CommitDisk(case.disk, 1))


def undeploy(case: Case) -> Any:
    return carry(case.disk.vm_dir, str(case.world.location / "103/5"), 5, arrived=False)


def gc(case: Case) -> Any:
    return collect(case.world)


def evict(case: Case) -> Any:
    return case.world.on(EvictBase(str(case.world.root), case.world.bases()[0].name))


ACTIONS: Dict[str, Callable[[Case], Any]] = {
    "mvds": mvds,
    "delete disk": delete_disk,
    "delete VM": delete_vm,
    "made anew": made_anew,
    "commit": commit,
    "undeploy": undeploy,
    "gc": gc,
    "evict": evict,
}
FILES = (
    "record",
    "history",
    "link",
    "active layer",
    "layer below",
    "claim",
    "generation",
    "manifest of the base",
    "lease",
)
CELLS = [
    cell for cell in itertools.product(FILES, DAMAGES, ACTIONS) if cell[0] != "link" or cell[1] == "gone"
]
USUAL = {
    *itertools.product(("active layer", "layer below"), DAMAGES, ("mvds",)),
    ("active layer", "gone", "delete VM"),
    ("layer below", "gone", "delete disk"),
    ("record", "gone", "mvds"),
    ("record", "zeroed", "made anew"),
    ("record", "gone", "made anew"),
    ("history", "zeroed", "delete VM"),
    ("claim", "zeroed", "mvds"),
    ("lease", "cut", "mvds"),
    ("manifest of the base", "cut", "commit"),
}


def made(world: World) -> Case:
    image, disk = world.image(size=8 * MiB), world.disk()
    attach(world, image, disk)
    qemu_io(f"{disk.path}.snap/0", "qcow2", "write -P 0x77 3M 64k")
    frozen(world, disk, 0)
    qemu_io(f"{disk.path}.snap/1", "qcow2", "write -P 0x78 5M 64k")
    return Case(world, image, disk)


def there(top: Path, number: int) -> List[bytes]:
    """Return what there is of a layer, wherever the disk is now."""
    return [path.read_bytes() for path in top.rglob(f"disk.1.snap/{number}") if path.is_file()]


def said(case: Case, action: str) -> str:
    """Carry an action out; return what a user is told."""
    try:
        return str(ACTIONS[action](case))
    except SemisharedError as e:
        return f"{e.id} {e.detail}"


def in_image(image: s.ImageRef, at: int, pattern: int) -> bool:
    with open(image.source, "rb") as file:
        found = os.pread(file.fileno(), 65536, at)
    assert len(set(found)) == 1, "a part of what the guest wrote"
    return found[0] == pattern


@pytest.mark.fault(
    30,
    "no uncommitted byte goes because a file that says of it is zeroed, cut or gone, and one line "
    "says what and where",
)
@pytest.mark.parametrize(
    ("file", "damage", "action"),
    [pytest.param(*cell, marks=[] if cell in USUAL else [pytest.mark.long]) for cell in CELLS],
    ids=["-".join(cell).replace(" ", "_") for cell in CELLS],
)
def test_each_file_by_each_action(world: World, file: str, damage: str, action: str) -> None:
    case = made(world)
    path = case.file(file)
    DAMAGES[damage](path)
    before = [there(world.location, number) for number in (0, 1)]
    # What lies behind the end of a layer only a commit sees, which reads it; and a note that is gone may
    # never have been there.
    if (
        file in ("record", "history", "active layer", "layer below")
        and (file, damage) != ("history", "gone")
        and not (damage == "cut" and "layer" in file)
    ):
        assert path.name in " ".join(report.listed(case.disk.vm_dir))
    line = said(case, action)
    done = [in_image(case.image, at, pattern) for at, pattern in ((3 * MiB, 0x77), (5 * MiB, 0x78))]
    for number in (0, 1):
        is_left = before[number] == [] or before[number][0] in there(world.location, number)
        assert done[number] or is_left, f"layer {number}: {line}"
    assert in_image(case.image, MiB, 0xA1)
    if action in ("mvds", "delete disk", "delete VM") and not all(done):
        assert path.name in line or "kept" in line, line
    for found in kept(world):
        assert found["bytes"] > 0


@pytest.mark.fault(
    30, "a disk with a layer that is shorter than its header says is neither saved nor started from"
)
@pytest.mark.parametrize("file", ["active layer", "layer below"])
def test_a_layer_that_ends_early(world: World, file: str) -> None:
    case = made(world)
    one_page(case.file(file))
    with pytest.raises(DamagedLayer, match=str(case.file(file))):
        world.on(s.SaveDisk(case.disk, f"{world.store}/saved", "raw", ""))
    assert not os.path.exists(f"{world.store}/saved")
    with pytest.raises(DamagedLayer, match=str(case.file(file))):
        layers.below(f"{case.disk.path}.snap/1", "qcow2")


@pytest.mark.fault(
    30,
    "a layer that says it lies over itself, over what lies over it or over no name of ours hides "
    "none below it",
)
@pytest.mark.parametrize("over", ["2", "3", "q"])
def test_a_layer_that_says_something_else_of_what_is_below(world: World, over: str) -> None:
    case = made(world)
    frozen(world, case.disk, 1)
    if over == "3":
        frozen(world, case.disk, 2)
    subprocess.run(
        ["qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", over, "2"],
        check=True,
        cwd=f"{case.disk.path}.snap",
    )
    wrong = report.listed(case.disk.vm_dir)
    delete_vm(case)
    assert len(there(world.location, 0)) == len(there(world.location, 1)) == 1
    assert "lies over" in " ".join(wrong)


def drain(case: Case) -> Any:
    """Move the disk to another device of the pool, as oned has its VM off."""
    vm_dir = case.disk.vm_dir
    link = os.readlink(disk_names.layers(case.disk.path))
    devices = case.world.on(device_steps.ListDevices(str(case.world.root)))[0]["devices"]  # type: ignore[index]
    target = next(row["uuid"] for row in devices if row["uuid"] not in link)
    step = device_steps.MoveLayers(case.disk, "", os.path.basename(link), target, 0)
    with Session("localhost", "pool", Config()) as session:
        answer = session.ask(step, answer=lambda _question: {"why": "", "is_off": True})
    assert os.path.isdir(vm_dir)
    return answer.error


ON_DEVICES = {"drain": drain, "delete VM": delete_vm, "mvds": mvds}
POOL_CELLS = list(itertools.product(("record", "active layer", "layer below"), DAMAGES, ON_DEVICES))


@pytest.mark.fault(
    30, "no uncommitted byte of a disk on a device goes because a file of it is zeroed, cut or gone"
)
@pytest.mark.parametrize(
    ("file", "damage", "action"),
    [
        pytest.param(*cell, marks=[] if cell == ("active layer", "gone", "drain") else [pytest.mark.long])
        for cell in POOL_CELLS
    ],
    ids=["-".join(cell).replace(" ", "_") for cell in POOL_CELLS],
)
def test_of_a_disk_on_a_device(world: World, pool: Pool, file: str, damage: str, action: str) -> None:
    pool.set()
    case = made(world)
    path = case.file(file)
    assert os.path.islink(disk_names.layers(case.disk.path))
    DAMAGES[damage](path)
    before = [everywhere(world, pool, number) for number in (0, 1)]
    try:
        line = str(ON_DEVICES[action](case))
    except SemisharedError as e:
        line = f"{e.id} {e.detail}"
    done = [in_image(case.image, at, pattern) for at, pattern in ((3 * MiB, 0x77), (5 * MiB, 0x78))]
    for number in (0, 1):
        is_left = before[number] == [] or before[number][0] in everywhere(world, pool, number)
        assert done[number] or is_left, f"layer {number}: {line}"
    assert in_image(case.image, MiB, 0xA1)
    assert not [name for name in pool.leftovers() if "/layers/" in name]


def everywhere(world: World, pool: Pool, number: int) -> List[bytes]:
    """Return what there is of a layer on devices."""
    return [
        found.read_bytes()
        for found in (Path(folder, str(number)) for folder in pool.layers())
        if found.is_file()
    ]


@pytest.mark.fault(30, "a kept diff that is damaged is named, and hides no other")
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_kept_and_damaged(world: World, damage: str) -> None:
    places = {}
    for vm in (5, 6):
        image, disk = world.image(f"image{vm}", size=8 * MiB)._replace(id=vm), world.disk(vm)
        attach(world, image, disk)
        qemu_io(disk.path, "qcow2", "write -P 0x77 3M 64k")
        (places[vm],) = world.on(s.RemoveVm(vm, disk.vm_dir), seq=0)[0]["kept"]  # type: ignore[index]
    DAMAGES[damage](Path(places[5].split(" on ")[0], "disk.1.snap/0"))
    (answer,) = world.on(c.FindKept(-1, str(world.location), (101,)))
    rows = {row["vm"]: row for row in answer["kept"]}  # type: ignore[index]
    assert rows[6]["bytes"] > 0 and "error" not in rows[6]
    # One of which nothing is left holds nothing; one that is cut behind its tables says so when it is
    # committed.
    assert damage in ("gone", "cut") or "disk.1.snap/0" in rows[5]["error"]
