# SPDX-License-Identifier: Apache-2.0
"""A file system on a disk that is as slow as wanted, or hangs: ext4 on a loop device over QEMU's own
throttle, through FUSE.

Not a cgroup's throttle: what is written out belongs to whoever writes it out, which differs between the two
versions.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path


def copying(directory: Path) -> list[int]:
    """Return the programs that copy what lies below a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"qemu-img\0convert" in (line := (entry / "cmdline").read_bytes()):
                found += [int(entry.name)] if str(directory).encode() in line else []
        except OSError:
            continue
    return found


def wait_until_copying(directory: Path) -> None:
    deadline = time.monotonic() + 60
    while not copying(directory):
        assert time.monotonic() < deadline
        time.sleep(0.02)


class SlowDisk:
    """A mounted file system of `size` bytes; `limits` as QEMU's throttle group has them (x-bps-write,
    x-iops-read...).
    """

    def __init__(self, top: Path, size: int, limits: dict[str, int], *mkfs: str) -> None:
        self.mount = top / "mounted"
        self._file, self._seen = top / "disk", top / "slow-disk"
        self.mount.mkdir()
        self._file.write_bytes(b"")
        os.truncate(self._file, size)
        # Made before it is slow.
        subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", *mkfs, str(self._file)], check=True)
        self._seen.touch()
        argv = [
            "qemu-storage-daemon",
            "--object",
            json.dumps({"qom-type": "throttle-group", "id": "limits", **limits}),
            "--blockdev",
            f"driver=file,filename={self._file},node-name=file",
            "--blockdev",
            "driver=throttle,node-name=slow,throttle-group=limits,file=file",
            "--export",
            f"type=fuse,id=seen,node-name=slow,mountpoint={self._seen},writable=on",
        ]
        self._daemon = subprocess.Popen(argv)
        self.device = ""
        try:
            deadline = time.monotonic() + 20
            while self._seen.stat().st_size != size:
                assert self._daemon.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            self._mount()
        except BaseException:
            self.end()
            raise

    def _mount(self) -> None:
        said = subprocess.run(
            ["losetup", "--find", "--show", str(self._seen)], check=True, stdout=subprocess.PIPE
        )
        self.device = said.stdout.decode().strip()
        subprocess.run(["mount", self.device, str(self.mount)], check=True)

    def forget_cached(self) -> None:
        """Let everything be read from the disk again; FUSE forgets what it knows of a file when that is
        opened.
        """
        subprocess.run(["umount", str(self.mount)], check=True)
        subprocess.run(["losetup", "--detach", self.device], check=True)
        self._mount()

    def hang(self) -> None:
        """Answer nothing from now on."""
        self._daemon.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Answer again."""
        self._daemon.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Take it all away."""
        self.go_on()
        for _ in range(100):
            # What was killed while the disk hung has yet to end.
            if (
                not os.path.ismount(self.mount)
                or subprocess.run(["umount", str(self.mount)], check=False).returncode == 0
            ):
                break
            time.sleep(0.1)
        if self.device:
            subprocess.run(["losetup", "--detach", self.device], check=True)
        self._daemon.terminate()
        self._daemon.wait(20)
