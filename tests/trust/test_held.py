# SPDX-License-Identifier: Apache-2.0
"""What each transfer action does last on a host, held at each of its points while its VM is made anew: that
stays as it is.

The pairs come from the list of actions: one that is added says what it does, or why it cannot be held here
(test_late_pairs.py has the steps that begin too late).
"""

from __future__ import annotations

import hashlib
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Tuple

import pytest

from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.front.transfer import PLANNED
from semishared.model import steps as s
from semishared.model.disk import names as disk_names
from semishared.model.store import image_steps as i
from semishared.tools import layers
from semishared.wire.session import Session
from tools.world import MiB, World, make_image, qemu_io
from trust.test_late_pairs import PLACES as OF_ONE_MIB
from trust.test_late_pairs import seen
from trust.test_undo import descendants

Steps = Tuple[s.Step, ...]
SIZE = 4 * MiB
PLACES = {**OF_ONE_MIB, "volatile": lambda disk, image: s.CreateVolatile(disk, SIZE, "qcow2", "")}
STORED = ("in place", "clone on the store")
LAYERED = ("overlay", "clone on the store")


class Held(NamedTuple):
    """What an action has before it, and does then."""

    places: Tuple[str, ...]
    steps: Callable[[World, s.DiskRef, s.ImageRef], Steps]
    before: Callable[[World, s.DiskRef, s.ImageRef], Steps] = lambda world, disk, image: ()


def made(place: str) -> Callable[[World, s.DiskRef, s.ImageRef], Steps]:
    return lambda world, disk, image: (PLACES[place](disk, image),)


def second(world: World, disk: s.DiskRef, image: s.ImageRef) -> Steps:
    return (s.AddLayer(disk, 1, 0, "qcow2"), s.ActivateLayer(disk, 1, "qcow2"))


def merged(world: World, disk: s.DiskRef, image: s.ImageRef) -> Steps:
    below, format = layers.backing_of(f"{os.path.realpath(os.path.dirname(os.path.realpath(disk.path)))}/0")
    return (s.MergeLayer(disk, 1, below, format, False), s.DropLayer(disk, 0), s.DropStrays(disk, (1,), ""))


def kept(world: World, disk: s.DiskRef, image: s.ImageRef) -> Steps:
    return (s.CopyOut(disk, 0, "", ""),)


ACTIONS: Dict[str, Held] = {
    **{f"clone: {place}": Held((place,), made(place)) for place in (*LAYERED, "copy")},
    "ln": Held(("in place",), made("in place")),
    "mkimage": Held(("volatile",), made("volatile")),
    "mvds": Held(("in place",), lambda world, disk, image: (s.EndSession(disk),)),
    "cpds": Held(
        tuple(PLACES), lambda world, disk, image: (s.SaveDisk(disk, f"{world.store}/saved", "raw", ""),)
    ),
    "delete: disk": Held(tuple(PLACES), lambda world, disk, image: (s.RemoveDisk(disk, str(world.store)),)),
    "delete: vm": Held(tuple(PLACES), lambda world, disk, image: (s.RemoveVm(disk.vm, disk.vm_dir),)),
    "snap_create": Held(LAYERED, second),
    "snap_create: in place": Held(("in place",), kept),
    "snap_delete": Held(LAYERED, merged, second),
    "snap_delete: in place": Held(
        ("in place",), lambda world, disk, image: (i.ForgetSnapshot(image, 0),), kept
    ),
    "snap_revert": Held(LAYERED, second, second),
    "snap_revert: in place": Held(("in place",), lambda world, disk, image: (i.RevertImage(image, 0),), kept),
    "resize": Held(tuple(PLACES), lambda world, disk, image: (s.GrowDisk(disk, 2 * SIZE),)),
    "restore": Held(tuple(PLACES), lambda world, disk, image: (s.RestoreDisk(disk, SIZE),)),
    "prebackup": Held(
        tuple(PLACES),
        lambda world, disk, image: (
            s.BackUp(disk.vm, disk.vm_dir, f"{disk.vm_dir}/backup", (str(disk.disk),), "", "NONE", "<VM/>"),
        ),
    ),
    "postbackup": Held(
        tuple(PLACES),
        lambda world, disk, image: (s.EndBackup(disk.vm, disk.vm_dir, f"{disk.vm_dir}/backup", ""),),
    ),
    "mv": Held(
        tuple(PLACES),
        lambda world, disk, image: (
            s.RenameVm(
                disk.vm, disk.vm_dir, str(world.location / "103" / str(disk.vm)), True, "", (disk.disk,)
            ),
        ),
    ),
}
ELSEWHERE = {
    "mkswap": "as mkimage",
    "context": "a file that comes by ssh, as what is restored does",
    **dict.fromkeys(
        ("snap_create_live", "prebackup_live", "postbackup_live"),
        "of a guest that runs, whose turn ends another action's",
    ),
    **dict.fromkeys(
        ("premigrate", "postmigrate", "failmigrate"),
        "of two hosts (tests/tools/test_late.py, test_half_moved.py)",
    ),
}
CELLS = [(action, place) for action, held in ACTIONS.items() for place in held.places]


@pytest.mark.fault(46, "each transfer action is held while its VM is made anew, or it is said why not")
def test_all_actions_are_held() -> None:
    assert sorted({name.partition(":")[0] for name in ACTIONS} | set(ELSEWHERE)) == sorted(PLANNED)
    assert sorted({place for _, place in CELLS}) == sorted(PLACES)


def held_at(
    number: int, world: World, steps: Steps, pool: ThreadPoolExecutor
) -> Tuple[int, Future[List[object]]]:
    """Carry out steps at SEQ 0 until their process stops itself at that point; return it, or 0 if it has no
    such point.
    """
    make_image(world.top / "backup", "qcow2", SIZE, "write -P 0x11 1M 64k")
    data = (world.top / "backup").read_bytes() if isinstance(steps[0], s.RestoreDisk) else b""
    with pytest.MonkeyPatch.context() as env:
        env.setenv("SEMISHARED_STOP_AT", str(number))
        late = pool.submit(
            world.on,
            *steps,
            seq=0,
            data=[data] if data else (),
            sha256=hashlib.sha256(data).hexdigest() if data else "",
        )
        while not late.done():
            for pid in descendants():
                try:
                    if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                        return pid, late
                except OSError:
                    continue
            time.sleep(0.01)
    return 0, late


def anew_elsewhere(world: World, image: s.ImageRef, place: str) -> s.DiskRef:
    """Have the VM made anew on another host, which has the same store; its guest has written."""
    other = World(world.top / "another host")
    newer = other.disk()
    other.on(
        s.StageBase(str(other.root), image),
        s.PrepareVm(newer.vm, newer.vm_dir),
        PLACES[place](newer, image),
        seq=1,
    )
    return newer


def anew_here(world: World, image: s.ImageRef, place: str) -> s.DiskRef:
    """Have the VM made anew on the same host, which soon passes by who has stopped."""
    disk = world.disk()
    with Session("localhost", "test", Config(hosts_standstill_timeout_s=4)) as session:
        session.seq = 1
        session.run(
            (s.RemoveVm(disk.vm, disk.vm_dir), s.PrepareVm(disk.vm, disk.vm_dir), PLACES[place](disk, image))
        )
    return disk


FIRST = {"another host": anew_elsewhere, "the same host": anew_here}


def tried(top: Path, action: str, place: str, first: str, number: int) -> bool:
    """Try one cell at one point; tell whether the action has that."""
    world = World(top)
    image, disk, held = world.image(size=SIZE), world.disk(), ACTIONS[action]
    world.on(s.StageBase(str(world.root), image), s.PrepareVm(disk.vm, disk.vm_dir), seq=0)
    if action.partition(":")[0] not in ("clone", "ln", "mkimage"):
        world.on(PLACES[place](disk, image), seq=0)
        world.on(*held.before(world, disk, image), seq=0)
    with ThreadPoolExecutor(1) as pool:
        pid, late = held_at(number, world, held.steps(world, disk, image), pool)
        if not pid:
            return False
        try:
            newer = FIRST[first](world, image, place)
            qemu_io(newer.path, "raw" if place in ("in place", "copy") else "qcow2", "write -P 0x5a 2M 64k")
            before = seen(Path(newer.vm_dir), world.store)
        finally:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
        said = late.exception(60)
    after = seen(Path(newer.vm_dir), world.store)
    # A new token takes nothing from anybody: it says that the image's content is known to nobody.
    names = {
        path
        for path in before
        if not disk_names.is_staged(os.path.basename(path)) and os.path.basename(path) != "session"
    }
    changed = {path for path in names if before[path] != after.get(path)}
    assert changed == set(), f"held at point {number}: {said!r}"
    assert said is None or isinstance(said, SemisharedError)
    return True


USUAL = (
    ("restore", "in place"),
    ("clone: clone on the store", "clone on the store"),
    ("delete: disk", "clone on the store"),
)
"""The worst cells, on stores; the others run with `make test-full`."""
TABLE = [
    pytest.param(
        action,
        place,
        first,
        marks=() if (action, place) in USUAL and first == "another host" else pytest.mark.long,
    )
    for action, place in CELLS
    for first in FIRST
]


@pytest.mark.fault(
    46, "an action that is held in its midst while its VM is made anew changes nothing of the newer one"
)
@pytest.mark.parametrize(("action", "place", "first"), TABLE)
def test_held(tmp_path: Path, action: str, place: str, first: str) -> None:
    number = 1
    while tried(tmp_path / str(number), action, place, first, number):
        number += 1
    assert number > 1
