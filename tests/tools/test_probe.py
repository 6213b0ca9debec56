# SPDX-License-Identifier: Apache-2.0
"""tm/monitor_ds, as the host's probe runs it."""

from __future__ import annotations

import base64
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def monitor(directory: Path) -> dict[int, list[str]]:
    done = subprocess.run(
        [str(ROOT / "tm" / "monitor_ds"), str(directory)], capture_output=True, check=True, timeout=30
    )
    assert done.stderr == b""
    lines = done.stdout.decode().splitlines()
    matches = [re.fullmatch(r'VM = \[ ID = (\d+), MONITOR = "([A-Za-z0-9+/=]+)" \]', line) for line in lines]
    assert all(matches), lines
    return {int(match[1]): base64.b64decode(match[2]).decode().split("\n") for match in matches if match}


def test_allocated_sizes_of_disks_and_snapshots_by_vm(tmp_path: Path) -> None:
    vm = tmp_path / "7"
    (vm / "disk.10.snap").mkdir(parents=True)
    (vm / "disk.1").write_bytes(b"x" * (3 << 20))
    with open(vm / "disk.10", "wb") as file:
        file.truncate(1 << 30)
    os.symlink("/no/such/mount/image", vm / "disk.2")
    os.symlink("disk.1", vm / "disk.3")
    for number in (0, 9, 10, 12):
        (vm / "disk.10.snap" / str(number)).write_bytes(b"y" * (number + 1) * (1 << 20))
    (vm / "disk.10.snap" / "current").write_bytes(b"y" * (1 << 20))
    (vm / "deployment.0").write_text("x")
    (vm / ".semishared").mkdir()
    (tmp_path / "8").mkdir()
    (tmp_path / ".monitor").write_text("semishared\n")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "disk.0").write_bytes(b"z" * 10)

    found = monitor(tmp_path)
    assert sorted(found) == [7, 12]
    assert found[12] == ["DISK_SIZE = [ ID=0, SIZE=1 ]"]
    assert set(found[7]) == {
        "DISK_SIZE = [ ID=1, SIZE=3 ]",
        "DISK_SIZE = [ ID=2, SIZE=0 ]",
        "DISK_SIZE = [ ID=3, SIZE=0 ]",
        "DISK_SIZE = [ ID=10, SIZE=0 ]",
        "SNAPSHOT_SIZE = [ ID=0, DISK_ID=10, SIZE=1 ]",
        "SNAPSHOT_SIZE = [ ID=9, DISK_ID=10, SIZE=10 ]",
        "SNAPSHOT_SIZE = [ ID=10, DISK_ID=10, SIZE=11 ]",
        "SNAPSHOT_SIZE = [ ID=12, DISK_ID=10, SIZE=13 ]",
    }
