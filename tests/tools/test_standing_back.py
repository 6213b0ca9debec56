# SPDX-License-Identifier: Apache-2.0
"""What reads or writes as much as a disk holds does so in the idle class of I/O, and what comes before and
after does not.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Callable

import pytest

from semishared.errors import ToolFailed
from semishared.model import steps as s
from semishared.model.disk import commit_steps as c
from semishared.tools import qemu_img
from semishared.tools.rate_limit import standing_back
from semishared.tools.run import run
from tools.test_commit import active, attach
from tools.world import MiB, World

SIZE = 96 * MiB
IDLE = 3
GET = {"x86_64": 252, "aarch64": 31}.get(platform.machine())
"""ioprio_get(2), which libc does not have."""

pytestmark = pytest.mark.skipif(GET is None, reason="the number of ioprio_get is not known here")


def class_of(pid: int) -> int:
    """Return the class of I/O that a process is in; 0 for none, -1 if it is gone."""
    found = ctypes.CDLL(None, use_errno=True).syscall(GET, 1, pid)
    return found >> 13 if found >= 0 else -1


def test_whoever_stands_back_does_so_with_what_it_starts_and_comes_back() -> None:
    before = class_of(os.getpid())
    with standing_back():
        assert class_of(os.getpid()) == IDLE
        assert "idle" in run(["ionice"])
        with standing_back():
            assert class_of(os.getpid()) == IDLE
        assert class_of(os.getpid()) == IDLE, "who is inside of another one does not end it"
    assert class_of(os.getpid()) == before
    with pytest.raises(ToolFailed), standing_back():
        run(["false"])
    assert class_of(os.getpid()) == before


def test_who_stands_back_for_good_does_not_come_back() -> None:
    program = """if True:
        from semishared.tools.rate_limit import stand_back, standing_back
        from semishared.tools.run import run
        stand_back()
        with standing_back():
            pass
        print(run(["ionice"]))
    """
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "lib")}
    assert (
        "idle"
        in subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
        ).stdout
    )


class Watch:
    """Sees, within the block, in which classes of I/O the host side of this machine is, and programs that are
    called so.
    """

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            for pid, line in _below(os.getpid()):
                for name in ("hostside.py", "qemu-img\0convert", "tar\0--create"):
                    if name in line:
                        found = class_of(pid)
                        # Who is ending may have no class any more, but has lost its name before that.
                        if name in _called(pid):
                            self.seen.setdefault(name, set()).add(found)
            time.sleep(0.002)


def _called(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _below(pid: int) -> list[tuple[int, str]]:
    """Return the processes that one has started, with what they are called."""
    found = []
    try:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [(int(child), Path(f"/proc/{child}/cmdline").read_text()), *_below(int(child))]
    except OSError:
        pass
    return found


def filled(world: World) -> s.ImageRef:
    """Make an image that is full of data."""
    path = world.store / "full"
    path.write_bytes(os.urandom(MiB) * (SIZE // MiB))
    return s.ImageRef(100, 9, "raw", str(path))


def copied(world: World) -> s.DiskRef:
    disk = world.disk()
    world.on(s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, filled(world), 0))
    return disk


def staging(world: World) -> list[s.Step]:
    return [s.StageBase(str(world.root), filled(world))]


def copy(world: World) -> list[s.Step]:
    disk = world.disk()
    return [s.PrepareVm(5, disk.vm_dir), s.CopyImage(disk, filled(world), 0)]


def backup(world: World) -> list[s.Step]:
    disk = copied(world)
    return [s.BackUp(5, disk.vm_dir, f"{disk.vm_dir}/backup", ("1",), "", "NONE", "<VM/>")]


def save(world: World) -> list[s.Step]:
    return [s.SaveDisk(copied(world), str(world.store / "saved"), "qcow2", "")]


def commit(world: World) -> list[s.Step]:
    image, disk = world.image(size=SIZE), world.disk()
    attach(world, image, disk)
    subprocess.run(
        ["qemu-io", "-f", "qcow2", "-c", f"write -P 7 0 {SIZE}", active(disk)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return [c.FinishDisk(disk)]


def send(world: World) -> list[s.Step]:
    return [s.SendVm(5, copied(world).vm_dir)]


@pytest.mark.starts  # what is looked for is found by its name
@pytest.mark.parametrize(
    ("work", "who"),
    [
        (staging, "hostside.py"),
        (copy, "hostside.py"),
        (commit, "hostside.py"),
        (backup, "qemu-img\0convert"),
        (save, "qemu-img\0convert"),
        (send, "tar\0--create"),
    ],
)
def test_a_copy_stands_back_and_the_host_side_comes_back(
    world: World, work: Callable[[World], list[s.Step]], who: str
) -> None:
    steps, disk = work(world), world.disk(8)
    with Watch() as watch, world.begun(disk) as do:
        do(*steps)
        (pid,) = [pid for pid, line in _below(os.getpid()) if "hostside.py" in line]
        assert class_of(pid) != IDLE, "what comes next is not to wait for all others"
    if who == "hostside.py":
        assert IDLE in watch.seen[who]
    else:
        assert watch.seen[who] - {-1} == {IDLE}


def test_a_restored_disk_is_written_in_the_idle_class(world: World) -> None:
    disk = copied(world)
    path = world.top / "backup"
    qemu_img.convert(disk.path, "raw", str(path), "qcow2")
    data = path.read_bytes()
    with Watch() as watch:
        chunks = [data[at : at + MiB] for at in range(0, len(data), MiB)]
        world.on(s.RestoreDisk(disk, SIZE), data=chunks, sha256=hashlib.sha256(data).hexdigest())
    assert watch.seen["qemu-img\0convert"] - {-1} == {IDLE}
