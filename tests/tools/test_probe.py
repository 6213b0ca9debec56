# SPDX-License-Identifier: Apache-2.0
"""What the host's monitoring says: tm/monitor_ds as the probe of OpenNebula runs it, and our own probe."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Iterator, Optional

import pytest

from semishared.host import probe, store_sizes, vm_sizes
from semishared.model.disk import names as disk_names
from tools.oned_site import HERE, STORE, ActionSite
from tools.world import World, allocated, qemu_io

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
        "DISK_SIZE = [ ID=3, SIZE=0 ]",
        "DISK_SIZE = [ ID=10, SIZE=0 ]",
        "SNAPSHOT_SIZE = [ ID=0, DISK_ID=10, SIZE=1 ]",
        "SNAPSHOT_SIZE = [ ID=9, DISK_ID=10, SIZE=10 ]",
        "SNAPSHOT_SIZE = [ ID=10, DISK_ID=10, SIZE=11 ]",
        "SNAPSHOT_SIZE = [ ID=12, DISK_ID=10, SIZE=13 ]",
    }


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up:
        yield up


@pytest.mark.fault(57, "the size of a disk on a store is what the store has of it, and so are its snapshots'")
def test_disks_on_a_mounted_store_have_their_true_sizes(site: ActionSite) -> None:
    kept = site.vm(site.image("kept", persistent=True))
    cloned = site.vm(site.image("cloned", SEMISHARED_PLACE="shared"))
    site.make("ln", kept)
    site.make("clone", cloned)
    qemu_io(site.disk(kept).resolve(), "raw", "write -P 0xa2 2M 3M")
    qemu_io(site.disk(cloned).resolve(), "qcow2", "write -P 0xa2 2M 4M")
    for vm in (kept, cloned):
        site.tm("snap_create", f"{HERE}:{site.disk(vm)}", 0, vm, STORE)
    qemu_io(site.disk(cloned).resolve(), "qcow2", "write -P 0xa3 2M 1M")
    found = monitor(site.system)

    def sizes(vm: int) -> tuple[int, int]:
        text = "\n".join(found[vm])
        disk, snapshot = (re.findall(rf"{kind}_SIZE = .*SIZE=(\d+)", text) for kind in ("DISK", "SNAPSHOT"))
        return int(disk[0]), int(snapshot[0])

    whole = -(-allocated(site.disk(kept).resolve()) >> 20)
    assert 3 <= whole <= 5 and sizes(kept)[0] == whole and sizes(kept)[1] in (whole, whole + 1)
    disk, snapshot = sizes(cloned)
    assert 1 <= disk <= 3 and 4 <= snapshot <= 6, found[cloned]


def test_a_store_that_hangs_has_no_line_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = tmp_path / "101" / "7"
    vm.mkdir(parents=True)
    for disk, store in enumerate(("hung", "well")):
        (tmp_path / store / ".semishared").mkdir(parents=True)
        (tmp_path / store / ".semishared" / "image").write_bytes(b"x" * (2 << 20))
        (vm / f"disk.{disk}").symlink_to(tmp_path / store / ".semishared" / "image")
    (vm / "disk.5").write_bytes(b"x" * (3 << 20))

    def slow(link: str) -> Optional[store_sizes.Sizes]:
        if "hung" in os.readlink(link):
            time.sleep(60)
        return real(link)

    real = store_sizes._of_file
    monkeypatch.setattr(store_sizes, "_of_file", slow)
    monkeypatch.setattr(store_sizes, "MOUNTED_S", 0.5)
    text = vm_sizes.report(str(tmp_path / "101"))
    lines = base64.b64decode(text.split('"')[1]).decode().split("\n")
    assert lines == ["DISK_SIZE = [ ID=5, SIZE=3 ]", "DISK_SIZE = [ ID=1, SIZE=2 ]"]


def test_a_disk_that_goes_meanwhile_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"x" * (2 << 20))
    (tmp_path / "disk.0").symlink_to(tmp_path / "image")
    links = [str(tmp_path / "gone"), str(tmp_path / "disk.0")]
    assert store_sizes.of_files(links) == {links[1]: (2 << 20, {})}


def told(location: Path) -> dict[str, str]:
    """Return what a host's probe has in its vector, and its health."""
    return dict(re.findall(r'([A-Z_]+) = "([^"]*)"', probe.report(str(location))))


@pytest.mark.fault(
    77, "a host's monitoring counts what waits there for an operator; its health stays OK for that"
)
def test_what_waits_for_an_operator_is_counted_and_is_no_fault_of_the_host(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(disk_names.monitor(str(world.system))).write_text("semishared\n")
    world.clone(world.image(), world.disk())
    share = os.statvfs(world.location)
    is_full = share.f_bavail * 10 <= share.f_blocks
    assert (told(world.location)["HEALTH"], told(world.location)["WAITING"]) == ("OK", str(int(is_full)))
    for kind, vm in (("kept", 7), ("kept", 8), ("removed", 9)):
        (world.system / f".{kind}-{vm}-{'a' * 16}").mkdir()
    (base,) = world.bases()
    (base / "image").rename(base / "damaged")
    assert told(world.location)["WAITING"] == str(3 + is_full)
    monkeypatch.setattr(probe, "FULL_PERCENT", 0 if not is_full else 100)
    said = told(world.location)
    assert said["WAITING"] == str(3 + (not is_full))
    assert (said["HEALTH"], said["HEALTH_SEMISHARED"]) == ("OK", "OK")
