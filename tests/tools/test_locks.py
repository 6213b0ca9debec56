# SPDX-License-Identifier: Apache-2.0
"""Lock files: held ones stay, whoever removes what; the host side is the real one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from pathlib import Path
from typing import List

import pytest

from semishared.errors import PassedBy
from semishared.model import steps as s
from semishared.tools import files, locks
from tools.world import World

LONG_AGO_S = 3 * 86400


def old_lock(world: World, name: str) -> str:
    path = world.root / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    os.utime(path, (time.time() - LONG_AGO_S,) * 2)
    return str(path)


@pytest.mark.fault(
    14, "the removal of one VM leaves the lock file of another that an action holds, however old it is"
)
@pytest.mark.parametrize("name", ["vm-9", "vm-9-disks"])
def test_removing_a_vm_leaves_the_held_lock_of_another(world: World, name: str) -> None:
    held, unused = old_lock(world, name), old_lock(world, "vm-8")
    with open(held, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        world.on(s.PrepareVm(5, str(world.system / "5")), s.RemoveVm(5, str(world.system / "5")))
        assert os.path.exists(held), "the lock was taken from under its holder"
        assert os.path.samestat(os.stat(held), os.fstat(file.fileno()))
        # Whoever comes next waits for the holder, instead of working beside it on a new file.
        second = subprocess.run(["flock", "--nonblock", held, "true"], check=False)
        assert second.returncode == 1
    assert not os.path.exists(unused)


def test_forgotten_are_locks_that_nobody_holds(world: World) -> None:
    free, held = old_lock(world, "vm-1"), old_lock(world, "vm-2")
    with locks.exclusive(held):
        assert locks.forget(free)
        assert not locks.forget(held)
        assert os.listdir(world.root / "locks") == ["vm-2"]


def test_who_waited_on_a_forgotten_lock_takes_the_new_file(world: World) -> None:
    path = old_lock(world, "vm-1")
    holder = locks.attempt(path)
    assert holder
    with holder:
        waiting = subprocess.Popen(
            [
                "/usr/bin/python3",
                "-c",
                "import sys; from semishared.tools import locks\n"
                "with locks.exclusive(sys.argv[1]) as f: print('held', locks.is_held(sys.argv[1]))",
                path,
            ],
            env={**os.environ, "PYTHONPATH": "lib"},
            stdout=subprocess.PIPE,
        )
        time.sleep(0.2)
        os.unlink(path)
    assert waiting.communicate(timeout=20)[0] == b"held True\n"
    assert os.path.exists(path)


def test_a_lock_that_another_thread_releases_meanwhile_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two looks of one thread another may release, remove or take a lock, of the same number too."""
    path, inner = str(tmp_path / "lock"), files.is_at
    looks: List[str] = []

    def released(fd: int, _: object) -> bool:
        locks._held.pop(fd, None)
        return False

    def removed(name: str, found: os.stat_result) -> bool:
        looks.append(name)
        if len(looks) == 1:
            locks.remove(name)
        return inner(name, found)

    with locks.attempt(path) or pytest.fail(), monkeypatch.context() as patched:
        patched.setattr(locks, "_has", released)
        locks.refuse_if_passed()
    with locks.attempt(path) or pytest.fail(), monkeypatch.context() as patched:
        patched.setattr(files, "is_at", removed)
        locks.refuse_if_passed()
        assert len(looks) == 2
    with locks.attempt(path) or pytest.fail():
        os.unlink(path)
        with pytest.raises(PassedBy):
            locks.refuse_if_passed()
