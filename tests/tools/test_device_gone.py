# SPDX-License-Identifier: Apache-2.0
"""Devices that are unmounted, or let go of, while something is made on them: nothing is made where they are
not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Callable, Iterator

import pytest

from semishared.device import devices, hot, ledger
from semishared.disk import device_move, on_devices
from semishared.disk.epochs import Planned
from semishared.errors import BadPool, NoDevice, SemisharedError
from semishared.model import steps as s
from semishared.model.base.steps import EvictBase
from semishared.model.device import names as device_names
from semishared.model.device import steps as device_steps
from semishared.model.device.classes import MEMORY, Want
from semishared.plan.device import choose as plan
from semishared.pool import labels, moving
from semishared.stage.ensure import ensure
from semishared.tools import effects
from tools.test_pool import Pool, device_of, uuid_of
from tools.world import MiB, World


class Going:
    """Devices that are not there from the N-th moment on: each is behind a look at them, or where this
    process could be killed.
    """

    def __init__(self, world: World, paths: list[Path], how: str, at: int) -> None:
        self.devices, self.paths, self.how, self.at, self.seen = world.root / "devices", paths, how, at, 0
        self.links: dict[Path, str] = {}
        self.stray: list[str] = []
        """What was made where a device was not."""
        self.asides = [world.top / f"aside{number}" for number in range(len(paths))]

    def moment(self) -> bool:
        """Be there instead of crash_points.is_on: the points themselves do nothing."""
        self.seen += 1
        if self.seen == self.at and self.how == "unmounted":
            for path, aside in zip(self.paths, self.asides):
                aside.mkdir(exist_ok=True)
                subprocess.run(["mount", "--move", str(path), str(aside)], check=True)
        elif self.seen == self.at:
            # As pool/labels.py does, which has just seen that nothing is on them.
            links = {link: os.readlink(link) for link in self.devices.iterdir() if link.is_symlink()}
            self.links = {link: target for link, target in links.items() if Path(target).parent in self.paths}
            for link in self.links:
                link.unlink()
        return False

    def have_gone(self) -> bool:
        return self.at <= self.seen

    def back(self) -> None:
        entries = self.devices.iterdir() if self.devices.exists() else ()
        self.stray = [str(path) for path in entries if path.is_dir() and not path.is_symlink()]
        if self.have_gone() and self.how == "unmounted":
            self.stray += [f"{path}/{name}" for path in self.paths for name in os.listdir(path)]
        for path, aside in zip(self.paths, self.asides):
            if os.path.ismount(aside):
                subprocess.run(["mount", "--move", str(aside), str(path)], check=True)
        for link, target in self.links.items():
            link.symlink_to(target)


@contextlib.contextmanager
def going(world: World, paths: list[Path], how: str, at: int) -> Iterator[Going]:
    """Let devices go at a moment within the block, and be back behind it."""
    found, present, checked = Going(world, paths, how, at), devices.present, labels._checked

    def look(*words: object) -> list[plan.Device]:
        seen = present(*words)  # type: ignore[arg-type]
        found.moment()
        return seen

    def look_at_all(*words: object) -> dict[str, str]:
        seen = checked(*words)  # type: ignore[arg-type]
        found.moment()
        return seen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "present", look)
        patch.setattr(labels, "_checked", look_at_all)
        patch.setattr(effects, "is_on", found.moment)
        try:
            yield found
        finally:
            patch.undo()
            found.back()


def place(world: World, pool: Pool) -> None:
    disk = world.disk()
    os.makedirs(disk.vm_dir, exist_ok=True)
    folder = on_devices.place(disk.vm_dir, disk.vm, disk.disk, MiB)
    Path(folder.path if folder.uuid else disk.vm_dir, "0").touch()


def place_in_memory(world: World, pool: Pool) -> None:
    disk = world.disk()
    os.makedirs(disk.vm_dir, exist_ok=True)
    folder = on_devices.place(disk.vm_dir, disk.vm, disk.disk, MiB, want=Want((MEMORY,), MiB))
    Path(folder.path if folder.uuid else disk.vm_dir, "0").touch()


def stage(world: World, pool: Pool) -> None:
    ensure(str(world.root), image(world), None)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Things are moved by this process itself, which is not over when they are."""
    monkeypatch.setattr(moving, "stand_back", lambda _: None)


def move_base(world: World, pool: Pool) -> None:
    (base,) = world.bases()
    where = uuid_of(world, next(path for path in pool.paths if str(path) != device_of(base)))
    answer = moving.move_base(device_steps.MoveBase(str(world.root), base.name, where, 0), lambda **_: None)
    assert not answer.error, answer


def move_layers(world: World, pool: Pool) -> None:
    disk = world.disk()
    link = devices.link_of(f"{disk.path}.snap")
    assert link
    where = uuid_of(world, next(path for path in pool.paths if str(path) != device_of(f"{disk.path}.snap")))
    answer = device_move.move(
        device_steps.MoveLayers(disk, "", link.name, where, 0),
        Planned(),
        lambda **_: {"why": ""},
        lambda **_: None,
    )
    assert not answer.error, answer


def copy_base(world: World, pool: Pool) -> None:
    (base,) = world.bases()
    assert not hot.provide(str(world.root), base.name, f"{base}/leases/5-1", "raw")


def keep_spare(world: World, pool: Pool) -> None:
    found = [device.uuid for device in devices.present(str(world.root)) if device.device_class == MEMORY]
    assert found
    for uuid in found:
        ledger.keep_spare(device_names.device(str(world.root), uuid))


def label(world: World, pool: Pool) -> None:
    labels.declare(device_steps.SetDevices(str(world.root), (str(pool.paths[0]),)))


def image(world: World) -> s.ImageRef:
    return s.ImageRef(100, 7, "raw", str(world.store / "image"))


def forget_base(world: World) -> None:
    world.on(EvictBase(str(world.root), world.bases()[0].name))


def drop_copy(world: World) -> None:
    hot.drop(str(world.root), world.bases()[0].name)


def drop_spare(world: World) -> None:
    shutil.rmtree(world.top / "device2/.semishared/spare")


def remove(world: World) -> None:
    world.on(s.RemoveVm(5, world.disk().vm_dir))


def unlabel(world: World) -> None:
    (world.top / "device0/.semishared/device.json").unlink()


def nothing(world: World) -> None:
    pass


MOVED: dict[object, Callable[[World], object]] = {
    move_base: lambda world: world.bases()[0],
    move_layers: lambda world: f"{world.disk().path}.snap",
}
CASES = (
    (place, remove, 4),
    (place_in_memory, remove, 5),
    (stage, forget_base, 8),
    (move_base, nothing, 8),
    (move_layers, nothing, 6),
    (copy_base, drop_copy, 4),
    (keep_spare, drop_spare, 1),
)


@pytest.mark.parametrize(
    "act, undo, least, how",
    [
        *((*case, how) for case in CASES for how in ("unmounted", "let go of")),
        (label, unlabel, 4, "unmounted"),
    ],
)
def test_nothing_is_made_where_a_device_is_not(
    world: World,
    pool: Pool,
    act: Callable[[World, Pool], None],
    undo: Callable[[World], None],
    least: int,
    how: str,
) -> None:
    """From each moment of an action on all devices are gone, but for that from where something is moved: when
    they are back it is done.
    """
    in_memory = act in (place_in_memory, copy_base, keep_spare)
    if act is not label:
        pool.set(*map(str, pool.paths[:2]), f"{pool.paths[2]}={MEMORY if in_memory else 'fast'}")
    world.image(size=4 * MiB)
    if act in (move_base, move_layers, copy_base):
        world.clone(image(world), world.disk())
    for at in range(1, 60):
        stays = device_of(MOVED[act](world)) if act in MOVED else ""
        goes = [path for path in pool.paths if str(path) != stays]
        with (
            contextlib.suppress(SemisharedError, OSError, AssertionError),
            going(world, goes, how, at) as gone,
        ):
            act(world, pool)
        assert not gone.stray, f"{how} at moment {at}"
        act(world, pool)
        if not gone.have_gone():
            break
        undo(world)
    assert least < at < 59


def test_who_finds_devices_gone_says_so(world: World, pool: Pool) -> None:
    with (
        going(world, pool.paths, "unmounted", 1),
        pytest.raises(BadPool, match=f"{pool.paths[0]} on .* is not mounted"),
    ):
        label(world, pool)
    pool.set()
    with going(world, pool.paths[1:], "let go of", 1):
        place(world, pool)
        assert device_of(f"{world.disk().path}.snap") == str(pool.paths[0]), "that which is left takes it"
    remove(world)
    with (
        going(world, pool.paths, "unmounted", 1),
        pytest.raises(NoDevice, match=r"no device takes anything \(.*device0.* not there\)"),
    ):
        place(world, pool)
