# SPDX-License-Identifier: Apache-2.0
"""Block devices that are as slow as wanted: a control group that this process, and all that it starts, is in,
limits what they do.

Writes only of those who write past the page cache: what is written out later belongs to whoever writes it
out, which differs between the two versions of control groups.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import List, Optional, Protocol, Type

MiB = 1 << 20


class Numbered(Protocol):
    """What a control group can limit."""

    @property
    def number(self) -> str: ...


class Device:
    """A file system of its own on a loop device, mounted; cached by this machine, so that only the limit
    makes it slow.
    """

    def __init__(self, top: Path, name: str, mib: int) -> None:
        self.file, self.mount, self.loop = top / f"{name}.raw", top / name, ""
        self.mount.mkdir()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={self.file}", "bs=16M", f"count={mib // 16}", "status=none"],
            check=True,
        )
        subprocess.run(["mkfs.xfs", "-q", "-K", self.file], check=True)
        try:
            said = subprocess.run(
                ["losetup", "--find", "--show", self.file], check=True, capture_output=True, text=True
            )
            self.loop = said.stdout.strip()
            subprocess.run(["mount", self.loop, self.mount], check=True)
        except BaseException:
            self.end()
            raise

    @property
    def number(self) -> str:
        """Return what a control group knows it by."""
        found = os.stat(self.loop).st_rdev
        return f"{os.major(found)}:{os.minor(found)}"

    def past_the_cache(self) -> None:
        """Be as fast as the disk below, not as this machine's page cache."""
        subprocess.run(["losetup", "--direct-io=on", self.loop], check=True)

    def end(self) -> None:
        """Take it away."""
        for _ in range(100):
            # What a move that was ended had open has yet to be closed.
            if (
                not os.path.ismount(self.mount)
                or subprocess.run(["umount", self.mount], check=False).returncode == 0
            ):
                break
            time.sleep(0.1)
        if self.loop:
            subprocess.run(["losetup", "--detach", self.loop], check=True)
        self.file.unlink(missing_ok=True)
        self.mount.rmdir()


def sectors_read(device: Device) -> int:
    """Return the bytes that were read of a device."""
    return 512 * int(Path(f"/sys/block/{os.path.basename(device.loop)}/stat").read_text().split()[2])


class Throttle:
    """`with Throttle() as throttle: throttle.reads(device, bytes per second)`; None for no limit."""

    def __init__(self) -> None:
        self._mount, self._is_v2 = _hierarchy()
        self._group = self._mount / f"semishared-bench-{os.getpid()}"
        self._was: Path = self._mount

    def __enter__(self) -> Throttle:
        self._was = self._mount / _own(self._is_v2).lstrip("/")
        if self._is_v2:
            (self._mount / "cgroup.subtree_control").write_text("+io")
        self._group.mkdir()
        (self._group / "cgroup.procs").write_text("0")
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        (self._was / "cgroup.procs").write_text("0")
        for _ in range(100):
            try:
                self._group.rmdir()
                return
            except OSError:
                time.sleep(0.1)

    def reads(self, device: Numbered, rate: Optional[int]) -> None:
        """Let no more than `rate` bytes per second be read from a device."""
        if self._is_v2:
            (self._group / "io.max").write_text(f"{device.number} rbps={rate or 'max'}")
        else:
            (self._group / "blkio.throttle.read_bps_device").write_text(f"{device.number} {rate or 0}")

    def direct(self, device: Numbered, rate: int, operations: int) -> None:
        """Let no more than `rate` bytes and so many operations per second be read, and as much be written
        past the page cache.
        """
        limits = {"rbps": rate, "wbps": rate, "riops": operations, "wiops": operations}
        if self._is_v2:
            (self._group / "io.max").write_text(
                " ".join([device.number, *(f"{key}={value}" for key, value in limits.items())])
            )
            return
        for key, value in limits.items():
            name = f"blkio.throttle.{'read' if key[0] == 'r' else 'write'}_{key[1:]}_device"
            (self._group / name).write_text(f"{device.number} {value}")


def _hierarchy() -> "tuple[Path, bool]":
    """Return where the groups are that know block devices, and whether they are of version 2."""
    found: List[Path] = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        mount = Path(before.split()[4])
        if kind == "cgroup" and "blkio" in options.split(","):
            return mount, False
        if kind == "cgroup2" and "io" in (mount / "cgroup.controllers").read_text().split():
            found.append(mount)
    if not found:
        raise RuntimeError("no control group here limits block devices (blkio, or io of version 2)")
    return found[0], True


def _own(is_v2: bool) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (is_v2 and not controllers) or (not is_v2 and "blkio" in controllers.split(",")):
            return path
    return "/"
