# SPDX-License-Identifier: Apache-2.0
"""Who has a lock and has been stopped: it is ended, or passed by, with a line, and publishes nothing when it
is let go on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Iterator

import pytest

from semishared.config import Config
from semishared.errors import SemisharedError
from semishared.model import steps as s
from semishared.tools import files, locks
from semishared.wire.session import Session
from tools.unreadable import dead
from tools.world import World
from trust.test_undo import points, stopped

LIB = str(Path(__file__).resolve().parents[2] / "lib")


@pytest.mark.fault(
    37,
    "a filling that was stopped holds up no other clone of its image, and publishes nothing when it goes on",
)
def test_filling_that_was_stopped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    image, disk, other = world.image(), world.disk(5), world.disk(6)
    elsewhere = world.image("other")._replace(id=8)
    number = (
        points(world, disk, s.StageBase(str(world.root), elsewhere), monkeypatch).index("base staged") + 1
    )
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as env:
            env.setenv("SEMISHARED_STOP_AT", str(number))
            hangs = pool.submit(world.on, *world.cloning(image, disk))
            pid = stopped()
        with Session("localhost", "test", Config(hosts_standstill_timeout_s=4)) as session:
            session.run(world.cloning(image, other))
            said = session.warnings
        assert [
            text
            for text in said
            if f"process {pid} on " in text and "has shown no life for 4 s: it is killed" in text
        ]
        base = next(path for path in world.bases() if "-7-" in path.name)
        inode = (base / "image").stat().st_ino
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(SemisharedError):
            hangs.result(60)
    assert ((base / "image").stat().st_ino, world.leases()) == (inode, [f"{base.name}/6-1"])
    assert world.leftovers() == []


HOLDER = """
import sys
from semishared.tools import files, locks
with locks.exclusive(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
    try:
        files.write(sys.argv[2], b"late")
        print("published", flush=True)
    except Exception as e:
        print(e.id, e.detail, flush=True)
"""
PASSER = """
import os, sys
os.setgid(65534), os.setuid(65534)
from semishared.tools import lock_holders, locks
lock_holders.SILENT_S, lock_holders.STIRRED_S, lock_holders.DYING_S, locks.LONG_S = 2.0, 0.5, 1.0, 0.1
with locks.exclusive(sys.argv[1], 1.6) as file:
    print("held", locks.noted(file), flush=True)
    sys.stdin.readline()
"""
SAME = PASSER.replace("os.setgid(65534), os.setuid(65534)", "")


@contextmanager
def started(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    pipe, env = subprocess.PIPE, {**os.environ, "PYTHONPATH": LIB}
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", program, *words], env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(file: IO[str] | None) -> str:
    assert file
    return file.readline()


@pytest.fixture()
def for_all() -> Iterator[Path]:
    """A directory that all users may write to: pytest closes its own whenever one more of it starts."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.fault(
    37,
    "a stopped holder that cannot be ended is passed by: its lock has another generation, and it "
    "publishes nothing",
)
def test_holder_of_another_user_that_was_stopped(for_all: Path) -> None:
    lock, late = for_all / "lock", for_all / "late"
    lock.write_text('{"epochs": {"": 3}}')
    lock.chmod(0o666)
    with started(HOLDER, str(lock), str(late)) as holder:
        assert line(holder.stdout) == "held\n"
        holder.send_signal(signal.SIGSTOP)
        with started(PASSER, str(lock)) as passer:
            got = line(passer.stdout)
            assert got == "held {'epochs': {'': 3}, 'generation': 1}\n", passer.communicate()[1]
            assert f"process {holder.pid} on " in line(passer.stderr)
            assert "was taken over from who does not end" in line(passer.stderr)
            holder.send_signal(signal.SIGCONT)
            said = holder.communicate("go on\n", timeout=20)[0]
            assert said.startswith("SS188 ") and "lost" in said
            assert sorted(os.listdir(for_all)) == ["lock"]
            passer.communicate("\n", timeout=20)


@pytest.mark.fault(
    37,
    "who was passed by publishes nothing, and removes nothing, when the other has done its work "
    "and removed the lock",
)
@pytest.mark.parametrize("late", ["publishes", "removes a disk", "removes the lock"])
def test_lock_that_is_gone_when_its_holder_goes_on(for_all: Path, late: str) -> None:
    lock, disk = for_all / "lock", for_all / "100/5/disk.1"
    lock.touch(0o666)
    lock.chmod(0o666)
    disk.parent.mkdir(parents=True)
    disk.write_text("of the VM made anew")
    does = {
        "removes a disk": f"from semishared.disk import vm_dir; vm_dir._unlink_disk(vm_dir.DiskRef(5, 1, "
        f"{str(disk.parent)!r}))",
        "removes the lock": "locks.remove(sys.argv[1]); files.refuse(); print('nothing was published', "
        "flush=True)",
    }.get(late, 'files.write(sys.argv[2], b"late")')
    program, passes = HOLDER.replace('files.write(sys.argv[2], b"late")', does), PASSER.replace("1.6)", "30)")
    if late != "removes the lock":
        passes += (
            "    import os; os.unlink(sys.argv[1])\n    print('gone', flush=True)\n    sys.stdin.readline()\n"
        )
    with started(program, str(lock), str(for_all / "late")) as holder:
        assert line(holder.stdout) == "held\n"
        holder.send_signal(signal.SIGSTOP)
        with started(passes, str(lock)) as passer:
            assert line(passer.stdout).startswith("held "), passer.communicate()[1]
            assert passer.stdin
            if late != "removes the lock":
                passer.stdin.write("\n")
                passer.stdin.flush()
                assert line(passer.stdout) == "gone\n"
            holder.send_signal(signal.SIGCONT)
            said = holder.communicate("go on\n", timeout=20)[0]
            if late == "removes the lock":
                assert said.startswith("nothing was published") and lock.exists()
            else:
                assert said.startswith("SS188 ") and not lock.exists()
            assert disk.read_text() == "of the VM made anew" and not (for_all / "late").exists()
            passer.communicate("\n", timeout=20)


@pytest.mark.fault(37, "whose lock cannot be looked at publishes nothing")
def test_lock_that_cannot_be_looked_at(tmp_path: Path) -> None:
    with started(
        HOLDER.replace("e.id, e.detail", "e"), str(tmp_path / "lock"), str(tmp_path / "late")
    ) as holder:
        assert line(holder.stdout) == "held\n"
        with dead(tmp_path / "lock"):
            said = holder.communicate("go on\n", timeout=20)[0]
    assert "Transport endpoint" in said and not (tmp_path / "late").exists()


@pytest.mark.fault(37, "who has removed its own lock, or given it back, publishes as before")
def test_lock_that_its_holder_has_removed(tmp_path: Path) -> None:
    kept, own = str(tmp_path / "kept"), str(tmp_path / "own")
    with locks.exclusive(own):
        locks.remove(own)
        files.write(f"{tmp_path}/one", b"1")
    with locks.exclusive(kept):
        pass
    os.unlink(kept)
    with locks.exclusive(own):
        files.write(f"{tmp_path}/two", b"2")
    assert locks.forget(own)
    files.write(f"{tmp_path}/three", b"3")
    assert sorted(os.listdir(tmp_path)) == ["one", "three", "two"]


@pytest.mark.fault(37, "a holder that is only slow is waited for")
def test_holder_that_lives(tmp_path: Path) -> None:
    slow = HOLDER.replace(
        "    sys.stdin.readline()\n", "    import time\n    for _ in range(40): time.sleep(0.1)\n", 1
    )
    assert slow != HOLDER
    with started(slow, str(tmp_path / "lock"), str(tmp_path / "late")) as holder:
        assert line(holder.stdout) == "held\n"
        with started(SAME.replace("1.6)", "30)"), str(tmp_path / "lock")) as passer:
            assert line(passer.stdout) == "held {}\n"
            assert passer.communicate("\n", timeout=20)[1] == ""
        assert (line(holder.stdout), (tmp_path / "late").read_text()) == ("published\n", "late")


@pytest.mark.fault(
    37, "who moves between devices and was stopped makes the pool busy for minutes, not for ever"
)
def test_who_is_refused_at_once_waits_for_who_was_stopped(tmp_path: Path) -> None:
    asks = SAME.partition("with ")[0] + "print(locks.unless_busy(sys.argv[1]) is not None)"
    with started(HOLDER, str(tmp_path / "lock"), str(tmp_path / "late")) as holder:
        assert line(holder.stdout) == "held\n"
        with started(asks, str(tmp_path / "lock")) as refused:
            assert line(refused.stdout) == "False\n"
        holder.send_signal(signal.SIGSTOP)
        with started(asks, str(tmp_path / "lock")) as waits:
            assert line(waits.stdout) == "True\n"


@pytest.mark.fault(
    37, "a lock that a process of another machine, or in a container, has is said to be, within minutes"
)
def test_holder_that_is_not_seen_is_named(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    argv = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "/usr/bin/python3",
        "-c",
        SAME.replace("1.6)", "30)"),
        str(lock),
    ]
    pipe = subprocess.PIPE
    holder = ["flock", str(lock), "sh", "-c", "echo held; read line"]
    with subprocess.Popen(holder, stdin=pipe, stdout=pipe, text=True) as has:
        assert line(has.stdout) == "held\n"
        with subprocess.Popen(
            argv, env={**os.environ, "PYTHONPATH": LIB}, stdin=pipe, stdout=pipe, stderr=pipe, text=True
        ) as waits:
            assert "is held, since 2 s, by a process that" in line(waits.stderr)
            has.communicate("\n", timeout=20)
            assert line(waits.stdout) == "held {}\n"
            waits.communicate("\n", timeout=20)
