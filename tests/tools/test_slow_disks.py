# SPDX-License-Identifier: Apache-2.0
"""Disks that are slow and disks that hang: the host side, its limits scaled down, on file systems that are
really slow.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterator

import pytest

from semishared.config import Config
from semishared.errors import SemisharedError, ToolTimeout
from semishared.model import steps as s
from semishared.named import to_data
from semishared.wire import session as ssh
from semishared.wire.messages import Reader, Writer
from tools.slow_disk import SlowDisk, wait_until_copying
from tools.world import MiB, World

LIB = Path(__file__).resolve().parents[2] / "lib"
LIMIT_S = 4
"""In place of each limit there is, or was: half an hour without progress, two minutes, five minutes, six
hours.

A busy machine, which gives python seconds to start, is no slow disk.
"""
SCALED = """
import sys
sys.path.insert(0, {lib!r})
try:
    from semishared.host import service as hostside
except ImportError:  # an older version
    from semishared import hostside
from semishared.disk import create
from semishared.store.dir import snapshots
from semishared.tools import files, progress, qemu_img, run
for module in (run, create, snapshots, qemu_img):
    module.LONG_S = {limit}
run.run.__kwdefaults__["timeout_s"] = {limit}
hostside.STALLED_S, hostside.ALIVE_S = {limit}, 0.2
files.WINDOW = 1 << 20
progress.FLOOR = 1 << 30
sys.exit(hostside.main())
"""
HUNG = """
import os, subprocess, sys, time
sys.path.insert(0, {lib!r})
from semishared.host import service
from semishared.tools import progress
def hang(host, plan):
    progress.limit_s = 0.3
    with subprocess.Popen(["sleep", "60"]) as child:
        host._writer.send(pid=child.pid)
service.Host._carry_out = hang
service.ALIVE_S, progress.FLOOR = 0.1, 1 << 40
sys.exit(service.main())
"""
"""A host side whose every plan waits for a program that does nothing."""
RATE = 3 * MiB
SIZE = 4 * LIMIT_S * RATE // 2
"""Takes twice the limit at that rate."""


class SlowWorld(World):
    """A machine whose disk is slow, and whose limits are scaled down."""

    def __init__(self, disk: SlowDisk) -> None:
        super().__init__(disk.mount)
        self.disk_below = disk

    def on(self, *steps: s.Step, **more: object) -> list[object]:
        limit: dict[str, Any] = (
            {"hosts_standstill_timeout_s": LIMIT_S} if "hosts_standstill_timeout_s" in Config._fields else {}
        )
        with ssh.Session("localhost", "test", Config(**limit)) as session:
            return [to_data(one) for one in session.run(steps, **more)]  # type: ignore[arg-type]


@pytest.fixture()
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host sides that are started here patient for LIMIT_S."""
    script = tmp_path / "hostside.py"
    script.write_text(SCALED.format(lib=str(LIB), limit=LIMIT_S))
    monkeypatch.setattr(ssh, "HERE", str(script))


@pytest.fixture()
def slow_to_write(tmp_path: Path, scaled: None) -> Iterator[SlowWorld]:
    disk = SlowDisk(tmp_path, 400 * MiB, {"x-bps-write": RATE})
    try:
        yield SlowWorld(disk)
    finally:
        disk.end()


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended, or does so within a second."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def data(size: int) -> bytes:
    return os.urandom(MiB) * (size // MiB)


def chunks(content: bytes) -> list[bytes]:
    return [content[at : at + MiB] for at in range(0, len(content), MiB)]


@pytest.mark.fault(5, "a move between datastores takes as long as its disks need to be written out")
def test_a_move_may_take_as_long_as_its_bytes_need(slow_to_write: SlowWorld) -> None:
    world = slow_to_write
    source, target = world.system / "5", world.location / "103" / "5"
    target.parent.mkdir()
    world.on(s.PrepareVm(5, str(source)))
    content = data(SIZE)
    (source / "disk.0").write_bytes(content)
    os.sync()
    began = time.monotonic()
    world.on(s.RenameVm(5, str(source), str(target), True, ""))
    assert time.monotonic() - began > LIMIT_S, "that was not slow"
    assert (target / "disk.0").read_bytes() == content
    assert world.leftovers() == []


@pytest.mark.fault(5, "an fsync that takes long is no standstill")
def test_a_long_fsync_is_no_standstill(slow_to_write: SlowWorld) -> None:
    world, content = slow_to_write, data(SIZE)
    path, digest = world.system / "5" / "disk.0", hashlib.sha256(content).hexdigest()
    began = time.monotonic()
    world.on(
        s.PrepareVm(5, str(path.parent)),
        s.ReceiveFile(str(path), 5, len(content), digest),
        data=chunks(content),
        sha256=digest,
    )
    assert time.monotonic() - began > LIMIT_S, "that was not slow"
    assert path.read_bytes() == content


@pytest.mark.long
@pytest.mark.fault(5, "a save-as may take as long as it makes progress")
def test_a_save_as_may_take_as_long_as_it_reads(tmp_path: Path, scaled: None) -> None:
    disk = SlowDisk(tmp_path, 400 * MiB, {"x-bps-read": RATE})
    try:
        world = SlowWorld(disk)
        ref = world.disk(5, 0)
        world.on(s.PrepareVm(5, ref.vm_dir), s.CreateVolatile(ref, SIZE, "raw", ""))
        content = data(SIZE)
        Path(ref.path).write_bytes(content)
        disk.forget_cached()
        began = time.monotonic()
        world.on(s.SaveDisk(ref, str(world.store / "saved"), "raw", ""))
        assert time.monotonic() - began > LIMIT_S, "that was not slow"
        assert (world.store / "saved").read_bytes() == content
    finally:
        disk.end()


@pytest.mark.long
@pytest.mark.fault(5, "the removal of a VM may take as long as it makes progress")
def test_a_removal_may_take_as_long_as_it_goes_on(tmp_path: Path, scaled: None) -> None:
    # Without extents, the blocks of a file are found block by block.
    disk = SlowDisk(
        tmp_path, 200 * MiB, {"x-iops-read": 30}, "-b", "1024", "-O", "^extent,^64bit,^has_journal"
    )
    try:
        world = SlowWorld(disk)
        world.on(s.PrepareVm(5, str(world.system / "5")))
        (world.system / "5" / "disk.0").write_bytes(data(100 * MiB))
        disk.forget_cached()
        began = time.monotonic()
        world.on(s.RemoveVm(5, str(world.system / "5")))
        assert time.monotonic() - began > LIMIT_S, "that was not slow"
        assert not (world.system / "5").exists()
    finally:
        disk.end()


def test_a_hung_disk_ends_a_copy_with_one_clear_line(tmp_path: Path, scaled: None) -> None:
    disk = SlowDisk(tmp_path, 200 * MiB, {"x-bps-read": 4 * MiB})
    try:
        world = SlowWorld(disk)
        ref = world.disk(5, 0)
        world.on(s.PrepareVm(5, ref.vm_dir), s.CreateVolatile(ref, SIZE, "raw", ""))
        Path(ref.path).write_bytes(data(SIZE))
        disk.forget_cached()

        def hang() -> None:
            wait_until_copying(Path(ref.vm_dir))
            time.sleep(0.5)
            disk.hang()

        threading.Thread(target=hang).start()
        began = time.monotonic()
        with pytest.raises(
            ToolTimeout,
            match="has done nothing for .* is its storage hung|no progress on .* is its storage hung",
        ):
            world.on(s.SaveDisk(ref, str(world.store / "saved"), "raw", ""))
        assert time.monotonic() - began < 60
    finally:
        disk.end()


@pytest.mark.long
def test_a_hung_fsync_ends_too(slow_to_write: SlowWorld) -> None:
    world, content = slow_to_write, data(SIZE)
    path, digest = world.system / "5" / "disk.0", hashlib.sha256(content).hexdigest()
    world.on(s.PrepareVm(5, str(path.parent)))
    threading.Timer(1.0, world.disk_below.hang).start()
    began = time.monotonic()
    with pytest.raises(SemisharedError, match="is its storage hung"):
        world.on(s.ReceiveFile(str(path), 5, len(content), digest), data=chunks(content), sha256=digest)
    assert time.monotonic() - began < 60
    world.disk_below.go_on()
    assert subprocess.run(["ls", str(path)], check=False, stderr=subprocess.DEVNULL).returncode != 0


def test_who_stands_still_says_so_and_ends_with_all_that_he_has_started_though_nobody_hangs_up() -> None:
    words, pipe = ["/usr/bin/python3", "-I", "-c", HUNG.format(lib=str(LIB))], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True) as host:
        assert host.stdin and host.stdout
        try:
            Writer(host.stdin.fileno()).send(plan={})
            reader = Reader(host.stdout.fileno())
            started = reader.read(20)
            said = reader.read(20)
            while isinstance(said, dict) and said["event"] == "alive":
                said = reader.read(20)
            assert isinstance(said, dict) and (said["event"], said["id"]) == ("error", ToolTimeout.id)
            assert host.wait(20) == -signal.SIGKILL
            assert isinstance(started, dict) and is_gone(int(str(started["pid"])))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(host.pid, signal.SIGKILL)
