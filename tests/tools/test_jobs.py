# SPDX-License-Identifier: Apache-2.0
"""What this machine moves, seen while it is moved: a commit that is held to a rate, by a real host side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterator, List

import pytest

from semishared.cli import command, main
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.model.disk import commit_steps as c
from semishared.opennebula.xml import Host
from semishared.tools import jobs as notes
from tools.test_commit import active, attach, frozen
from tools.world import MiB, World, qemu_io

SIZE, RATE = 24 * MiB, 3 * MiB
SOON_S = 60
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="a /run/one is mounted")


class Cloud:
    """What the command asks oned for: this machine is the only host, and the front-end."""

    def hosts(self) -> List[Host]:
        return [Host.parse(f"<HOST><NAME>{os.uname().nodename}</NAME></HOST>")]

    def front_ends(self) -> List[List[str]]:
        return []


@pytest.fixture
def run_one() -> Iterator[Path]:
    """The directory that OpenNebula's packages make, for this test alone (conftest.py: own mounts)."""
    at = Path(notes.RUN)
    is_made = not at.exists()
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "one", at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)
        if is_made:
            with suppress(OSError):
                at.rmdir()


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what `semishared jobs --json` says."""
    monkeypatch.setattr(command, "administrator", Cloud)
    monkeypatch.setattr(command, "refuse_root", lambda why="": None)

    def jobs() -> List[Any]:
        assert main.main(["jobs", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["errors"] == []
        found: List[Any] = said["jobs"]
        return found

    return jobs


@pytest.fixture
def commit(world: World) -> Iterator[threading.Thread]:
    """A commit under way, of SIZE bytes at RATE; one that is killed says so to no one here."""
    image, disk = world.image(), world.disk()
    attach(world, image, disk)
    qemu_io(active(disk), "qcow2", f"write -P 0x77 4M {SIZE // MiB}M")
    frozen(world, disk, 0)

    def work() -> None:
        with suppress(SemisharedError):
            world.on(s.PrepareVm(disk.vm, disk.vm_dir), c.CommitDisk(disk, 0, RATE))

    thread = threading.Thread(target=work)
    thread.start()
    yield thread
    thread.join()


def in_the_middle(listed: Any) -> Any:
    """Return the one job, as soon as it is listed with bytes done."""
    until = time.monotonic() + SOON_S
    while time.monotonic() < until:
        found = listed()
        if found and found[0]["done"]:
            (job,) = found
            return job
        time.sleep(0.2)
    raise AssertionError("nothing was listed")


@pytest.mark.fault(75, "what an action moves is seen while it moves it, and not after")
def test_a_commit_is_listed_while_it_works_and_not_after(
    run_one: Path, commit: threading.Thread, listed: Any
) -> None:
    job = in_the_middle(listed)
    assert (job["vm"], job["disk"], job["step"], job["target"]) == (5, 1, "commit", "the store")
    assert 0 < job["done"] < job["of"] == SIZE
    assert 0 < job["rate"] < 3 * RATE
    assert job["host"] == os.uname().nodename and job["action"] == "test"
    assert abs(job["since"] - time.time()) < SOON_S
    assert [path.name for path in (run_one / notes.FOLDER).iterdir()] == [f"{job['pid']}.json"]
    commit.join()
    assert listed() == []
    assert list((run_one / notes.FOLDER).iterdir()) == []


@pytest.mark.fault(75, "what an action moves is seen while it moves it, and not after")
def test_what_a_killed_process_moved_is_no_job(run_one: Path, commit: threading.Thread, listed: Any) -> None:
    job = in_the_middle(listed)
    os.kill(job["pid"], signal.SIGKILL)
    commit.join()
    assert list((run_one / notes.FOLDER).iterdir()), "nothing has listed since: the note is still there"
    assert listed() == []
    assert list((run_one / notes.FOLDER).iterdir()) == []


def test_short_work_notes_nothing(run_one: Path, world: World, listed: Any) -> None:
    world.clone(world.image(), world.disk())
    assert listed() == []
    assert not (run_one / notes.FOLDER).exists()


def test_without_the_directory_work_goes_on_unseen(
    world: World, listed: Any, run_one: Path, commit: threading.Thread
) -> None:
    os.chown(run_one, 1, 1)
    commit.join()
    assert listed() == []
    assert list(run_one.iterdir()) == []
    qemu_io(world.store / "image", "raw", f"read -P 0x77 4M {SIZE // MiB}M")
