# SPDX-License-Identifier: Apache-2.0
"""What a restart of its host empties: zram, brd, tmpfs and ramfs, also with others in between. dm-crypt over
zram: tests/nfs.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from semishared.errors import BadPool
from semishared.pool import labels
from semishared.tools import mounts
from tools.test_pool import Pool
from tools.world import MiB, World

CONTROL = Path("/sys/class/zram-control")


def test_what_this_machine_has_mounted_is_told_apart(pool: Pool) -> None:
    assert labels.is_volatile(mounts.of("/dev/shm"))
    assert not any(labels.is_volatile(mounts.of(str(path))) for path in (*pool.paths, "/proc", "/sys"))


@pytest.mark.skipif(not CONTROL.is_dir(), reason="this kernel has no zram")
@pytest.mark.parametrize("mkfs", ["mkfs.ext4 -q", "mkfs.btrfs -q"])
def test_a_file_system_on_zram_is_a_device_of_class_ram_or_none(world: World, pool: Pool, mkfs: str) -> None:
    number = int((CONTROL / "hot_add").read_text())
    path, device = world.top / "memory", f"/dev/zram{number}"
    path.mkdir()
    try:
        Path(f"/sys/block/zram{number}/disksize").write_text(str(160 * MiB))
        subprocess.run([*mkfs.split(), device], check=True)
        subprocess.run(["mount", device, str(path)], check=True)
        for word in ("", "=slow"):
            with pytest.raises(BadPool, match=f"{path} on .* is memory, which a restart empties"):
                pool.set(*map(str, pool.paths), f"{path}{word}")
        assert not (path / ".semishared").exists() and not pool.rows()
        pool.set(*map(str, pool.paths), f"{path}=ram")
        assert pool.rows()[str(path)]["class"] == "ram"
    finally:
        subprocess.run(["umount", str(path)], check=False)
        (CONTROL / "hot_remove").write_text(str(number))


BLOCK = "devices/virtual/block"
# device: what it is on, as its directory of slaves has it; /p1: a partition.
DEVICES = {
    "zram0": (),
    "ram0": (),
    "ram0/ram0p1": (),
    "sda": (),
    "sda/sda1": (),
    "rambler0": (),
    "dm-0": ("zram0",),
    "dm-1": ("dm-0",),
    "md0": ("sda/sda1", "ram0/ram0p1"),
    "md0/md0p1": (),
    "dm-2": ("sda/sda1",),
    "loop0": (),
}
MEMORY = {"zram0", "ram0", "ram0/ram0p1", "dm-0", "dm-1", "md0", "md0/md0p1"}


def test_devices_over_devices_are_followed_down_to_what_they_are_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "SYSFS", str(tmp_path))
    (tmp_path / "dev/block").mkdir(parents=True)
    for number, name in enumerate(DEVICES):
        own = tmp_path / BLOCK / name
        own.mkdir(parents=True)
        if "/" in name:
            (own / "partition").write_text("1\n")
        os.symlink(own, tmp_path / f"dev/block/252:{number}")
    for name, below in DEVICES.items():
        if "/" not in name:
            (tmp_path / BLOCK / name / "slaves").mkdir()
        for other in below:
            os.symlink(tmp_path / BLOCK / other, tmp_path / BLOCK / name / "slaves" / os.path.basename(other))
    found = {
        name
        for number, name in enumerate(DEVICES)
        if labels.is_volatile(mounts.Mount("/mnt/a", "xfs", device=f"252:{number}"))
    }
    assert found == MEMORY


def test_what_has_no_block_device_or_is_gone_is_none() -> None:
    for mounted in (
        mounts.Mount("/mnt/a", "nfs4", device="0:61", source="h:/a"),
        mounts.Mount("/mnt/a", "xfs", device="252:9999"),
    ):
        assert not labels.is_volatile(mounted)
    assert not labels.is_volatile(
        mounts.Mount("/mnt/a", "btrfs", device="0:61", source="/dev/no-such-device")
    )
