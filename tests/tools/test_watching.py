# SPDX-License-Identifier: Apache-2.0
"""Who looks after memory, as a program: it notices that the drivers are others by now, and that a round
hangs. With guests: tests/pool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Callable

import pytest

from semishared.device import memory
from semishared.disk import device_move, recovery
from semishared.errors import PoolBusy
from semishared.guest import go_over, job_lock
from semishared.host import watch
from semishared.model.device import names as device_names
from semishared.model.device.steps import MoveLayers
from semishared.pool import moving
from semishared.tools import locks, progress
from tools.test_pool import Pool
from tools.world import World

PACKAGE = Path(watch.__file__).parents[1]
ROUND = "    def carry_out(self) -> bool:\n"


@pytest.fixture
def lock(world: World) -> Iterator[str]:
    path = device_names.watch_lock(str(world.root))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    yield path


@contextmanager
def drivers(world: World) -> Iterator[Path]:
    """Yield what is run as the program, of drivers that others may change, and that look more often."""
    lib = shutil.copytree(
        PACKAGE, world.top / "lib" / "semishared", ignore=shutil.ignore_patterns("__pycache__")
    )
    program = Path(lib, "host", "watch.py")
    program.write_text(
        program.read_text()
        .replace("\nIDLE_S = 10.0\n", "\nIDLE_S = 0.5\n")
        .replace("\nLOOK_S = 1.0\n", "\nLOOK_S = 0.1\n")
    )
    words = ["/usr/bin/python3", "-IS", str(program), str(world.location), "0"]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as watcher:
        try:
            yield program
        finally:
            watcher.kill()


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)


def test_the_next_round_is_one_of_the_drivers_as_they_are_by_then(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set(*map(str, pool.paths[:2]), f"{pool.paths[2]}=ram:2")
    root, marker = str(world.root), world.top / "marker"
    with drivers(world) as program:
        until(lambda: memory.is_watched(root), "watcher")
        until(pool.paths[2].joinpath(".semishared", "spare", "3").exists, "round")
        program.write_text(
            program.read_text().replace(ROUND, f"{ROUND}        open({str(marker)!r}, 'w').close()\n")
        )
        until(marker.exists, "round of the other drivers")
        assert memory.is_watched(root)
        monkeypatch.setattr(memory, "STUCK_S", 2.0)
        time.sleep(2.5)
        assert memory.is_watched(root), "it is said again and again"
        program.write_text(
            program.read_text().replace(ROUND, f"{ROUND}        raise OSError('none of it works')\n")
        )
        until(lambda: not memory.is_watched(root), "sign that it fails each time")
        assert locks.is_held(device_names.watch_lock(root))
    assert not memory.is_watched(root)


def test_nobody_watches_who_has_said_nothing_for_long(
    world: World, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(world.root)
    assert not memory.is_watched(root)
    file = locks.attempt(lock)
    assert file
    assert not memory.is_watched(root), "one that never said anything, as of drivers before"
    memory.note_watch(file)
    assert memory.is_watched(root)
    later = time.monotonic() + memory.STUCK_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert not memory.is_watched(root)
    monkeypatch.undo()
    file.close()
    assert not memory.is_watched(root), "what is noted is of one that has ended"


def test_who_moves_one_thing_after_the_other_lets_a_disk_leave_memory_in_between(
    world: World, pool: Pool, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set(*map(str, pool.paths[:2]), f"{pool.paths[2]}=ram:2")
    root, path = str(world.root), device_names.moving_lock(str(world.root))
    monkeypatch.setattr(moving, "stand_back", lambda _: None)
    monkeypatch.setattr(moving, "GIVE_WAY_S", 1.0)
    had: list[bool] = []

    def other() -> None:
        """Try as a round does, which comes by now and then."""
        for _ in range(8):
            time.sleep(0.2)
            file = locks.attempt(path)
            if file:
                time.sleep(2)
                had.append(path not in moving._mine)
                file.close()
                return

    def again(*, is_urgent: bool = False) -> list[bool]:
        had.clear()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(other)
            moving.begin(root, is_urgent=is_urgent)
        assert locks.is_held(path) and path in moving._mine
        return list(had)

    moving.begin(root)
    try:
        assert again() == [], "memory has room"
        (pool.paths[2] / "full").write_bytes(bytes(210 << 20))
        assert again() == [], "nobody watches"
        file = locks.attempt(lock)
        assert file
        memory.note_watch(file)
        assert again(is_urgent=True) == []
        assert again() == [True], "it had the lock, and was waited for"
        monkeypatch.setattr(moving, "OTHERS_S", 0.5)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(other)
            with pytest.raises(PoolBusy):
                moving.begin(root)
        file.close()
    finally:
        for held in list(moving._mine):
            moving._mine.pop(held).close()


def test_a_round_that_could_not_move_one_disk_goes_on_to_the_next_at_once(
    world: World, pool: Pool, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set(*map(str, pool.paths[:2]), f"{pool.paths[2]}=ram:2")
    root, path = str(world.root), device_names.moving_lock(str(world.root))
    for name, seconds in (("GIVE_WAY_S", 0.1), ("LOOK_S", 0.05)):
        monkeypatch.setattr(moving, name, seconds)
    monkeypatch.setattr(moving, "stand_back", lambda _: None)
    (pool.paths[2] / "full").write_bytes(bytes(210 << 20))
    file = locks.attempt(lock)
    assert file
    memory.note_watch(file)
    try:
        moving.begin(root, is_urgent=True)
        had = moving._mine[path]
        assert memory.is_urgent(root)
        disk, uuid = world.disk(), str(pool.rows()[str(pool.paths[0])]["uuid"])
        with locks.exclusive(job_lock.lock_path(disk.vm, disk.vm_dir)):
            step = MoveLayers(disk, "one-5", device_names.layers_name(5, 1, "0" * 12), uuid, 0)
            assert "is being acted upon" in device_move.spill(step, lambda **_: None).error
        assert moving._mine[path] is had, "it lets nobody else move things meanwhile"
    finally:
        file.close()
        for held in list(moving._mine):
            moving._mine.pop(held).close()


def test_a_round_that_hangs_is_ended_and_one_that_outlives_the_watcher_watches(
    world: World, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, told = world.top / "round.py", world.top / "told"
    program.write_text(
        f"import sys, time\nopen({str(told)!r}, 'w').write(' '.join(sys.argv[1:]))\ntime.sleep(100)\n"
    )
    monkeypatch.setattr(watch, "__file__", str(program))
    monkeypatch.setattr(progress, "limit_s", 2.0)
    file = locks.attempt(lock)
    assert file
    started = time.monotonic()
    assert watch._beside(str(world.root), 7, file) == -9
    assert 2 < time.monotonic() - started < 60 and told.read_text() == f"{world.location} 7 round"
    program.write_text("import time\ntime.sleep(3)\n")
    pid = os.fork()
    if not pid:
        watch._beside(str(world.root), 7, file)
        os._exit(0)
    file.close()
    time.sleep(1)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert locks.is_held(lock)
    until(lambda: not locks.is_held(lock), "end of the round")


def test_a_round_without_need_ends_what_a_killed_one_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm_dir, ended = world.disk().vm_dir, list[tuple[str, str]]()
    monkeypatch.setattr(go_over, "moves", lambda _: True)
    monkeypatch.setattr(recovery, "recover", lambda *words: ended.append(words))
    monkeypatch.setattr(watch.Round, "_may_go_on", lambda *_: False)
    one = watch.Round(str(world.root), 0)
    assert not one._settled(5, vm_dir, undo=False) and ended == [], "a round that has moved a disk"
    assert not one._settled(5, vm_dir, undo=True) and ended == [(vm_dir, "one-5")]
