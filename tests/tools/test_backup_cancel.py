# SPDX-License-Identifier: Apache-2.0
"""A backup that is cancelled or refused: the real prebackup and host side, and a stand-in for OpenNebula's
backup_cancel.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Dict, Iterator

import pytest

from semishared.errors import Overtaken
from semishared.front import backup
from semishared.guest import job_lock
from semishared.model import steps as s
from semishared.model.exchange import On
from semishared.opennebula import args
from tools.slow_disk import SlowDisk, copying, wait_until_copying
from tools.world import MiB, World

ROOT = Path(__file__).resolve().parents[2]
CANCEL = Path(__file__).resolve().parents[1] / "lab/stock/datastore/rsync/backup_cancel"
VM = 5


def vm_xml(bridge: str = "") -> bytes:
    config = f"<MODE>FULL</MODE><LAST_DATASTORE_ID>110</LAST_DATASTORE_ID>{bridge}"
    disk = "<DISK><DISK_ID>0</DISK_ID><TM_MAD>semishared</TM_MAD></DISK>"
    return f"<VM><ID>{VM}</ID><TEMPLATE>{disk}</TEMPLATE><BACKUPS><BACKUP_CONFIG>{config}</BACKUP_CONFIG></BACKUPS></VM>".encode()  # noqa: E501


def told(said: bytes) -> list[bytes]:
    """Return what the user is told: all lines but those for the log."""
    return [
        line for line in said.splitlines() if not line.startswith((b"INFO:", b"WARN:", b"DEBUG:", b"ERROR:"))
    ]


class Backup:
    """A VM that is off, and the actions of its backup as OpenNebula calls them."""

    def __init__(self, world: World) -> None:
        self.world = world
        ref = world.disk(VM, 0)
        self.directory = Path(ref.vm_dir)
        world.on(s.PrepareVm(VM, ref.vm_dir), s.CreateVolatile(ref, 64 * MiB, "raw", ""))
        Path(ref.path).write_bytes(os.urandom(MiB) * 64)

    def begin(self, action: str, bridge: str = "") -> subprocess.Popen[bytes]:
        argv = [
            str(ROOT / "tm" / action),
            f"localhost:{self.directory}",
            "0",
            f"one-{VM}",
            "-",
            str(VM),
            "101",
        ]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdin
        process.stdin.write(vm_xml(bridge))
        process.stdin.close()
        process.stdin = None
        return process


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Backup]:
    """A disk that takes 64 s to read."""
    disk = SlowDisk(tmp_path, 300 * MiB, {"x-bps-read": 1 * MiB})
    try:
        backup = Backup(World(disk.mount))
        disk.forget_cached()
        yield backup
    finally:
        disk.end()


@pytest.mark.fault(17, "backup_cancel ends the copying at once, leaves nothing, and the next backup works")
def test_a_cancelled_backup_ends_and_the_next_one_works(slow: Backup) -> None:
    process = slow.begin("prebackup")
    wait_until_copying(slow.directory)
    began = time.monotonic()
    argv = [str(CANCEL), f"localhost:{slow.directory}", f"one-{VM + 50}"]
    assert subprocess.run(argv, input=vm_xml(), check=False).returncode == 0
    time.sleep(0.2)
    assert copying(slow.directory) and process.poll() is None, "another VM's backup is none of theirs"
    assert subprocess.run([*argv[:2], f"one-{VM}"], input=vm_xml(), check=False).returncode == 0
    try:
        _, said = process.communicate(timeout=25)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise AssertionError("the backup goes on after it was cancelled") from None
    (line,) = told(said)
    assert process.returncode == 1 and b"the backup was cancelled" in line, said
    # What oned's driver does after a prebackup that failed.
    after = slow.begin("postbackup")
    assert told(after.communicate(timeout=40)[1]) == [] and after.returncode == 0
    assert time.monotonic() - began < 50
    assert not copying(slow.directory)
    assert not (slow.directory / "backup").exists() and slow.world.leftovers() == []
    (slow.directory / "disk.0").write_bytes(b"x" * MiB)
    again = slow.begin("prebackup")
    assert told(again.communicate(timeout=60)[1]) == [] and again.returncode == 0
    assert (slow.directory / "backup" / "disk.0.0").exists()


@pytest.mark.fault(17, "a backup datastore with BRIDGE_LIST is refused before anything is copied")
def test_a_bridge_that_has_not_the_disks_is_refused(world: World) -> None:
    backup = Backup(world)
    process = backup.begin("prebackup", "<LAST_BRIDGE>other</LAST_BRIDGE>")
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert b"backup datastore 110 has a BRIDGE_LIST" in said and b"from other" in said
    assert not (backup.directory / "backup").exists()
    # The VM's own host as the bridge is where the disks are.
    process = backup.begin("prebackup", "<LAST_BRIDGE>localhost</LAST_BRIDGE>")
    assert told(process.communicate(timeout=60)[1]) == [] and process.returncode == 0


def test_a_backup_that_was_planned_before_the_end_does_not_begin_after_it(world: World) -> None:
    ref = world.disk(VM, 0)
    world.on(s.PrepareVm(VM, ref.vm_dir), s.CreateVolatile(ref, MiB, "raw", ""))
    lock = job_lock.lock_path(VM, ref.vm_dir)

    def begins(known: Dict[str, Dict[str, object]]) -> None:
        assert job_lock.take_if_free(VM, ref.vm_dir)
        try:
            job_lock.check_not_ended(VM, ref.vm_dir, known)
        finally:
            job_lock.leave(VM, ref.vm_dir)

    begins({})
    for _ in range(2):
        known = {lock: json.loads(Path(lock).read_text())}
        begins(known)
        world.on(s.EndBackup(VM, ref.vm_dir, f"{ref.vm_dir}/backup", ""))
        with pytest.raises(Overtaken, match="was ended before it began"):
            begins(known)


def test_a_backup_is_called_as_it_was_when_it_is_over() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from semishared.front.backup import cancellable\n"
        "name = lambda: open('/proc/self/comm').read().strip()\n"
        "was = name()\n"
        "with cancellable(): print(name())\n"
        "print(name() == was)"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-c", code, str(ROOT / "lib")], check=True, stdout=subprocess.PIPE
    )
    assert done.stdout == b"ruby\nTrue\n"


def test_only_a_backup_of_a_running_vm_ends_a_job_of_its_guest() -> None:
    vm_dir = f"/var/lib/one/datastores/101/{VM}"
    asked = args.Backup.parse([f"h1:{vm_dir}", "0", f"one-{VM}", "-", str(VM), "101"])
    for plan, domain in ((backup.postbackup, ""), (backup.postbackup_live, f"one-{VM}")):
        assert list(plan(asked)) == [On("h1", (s.EndBackup(VM, vm_dir, f"{vm_dir}/backup", domain),))]
