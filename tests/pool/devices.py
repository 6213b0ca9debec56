# SPDX-License-Identifier: Apache-2.0
"""The devices of a lab host: file systems on block devices, which can go away, fail, and come back with what
they hold.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Optional

from lab import Node

MADE = {"xfs": ["mkfs.xfs", "-q"], "ext4": ["mkfs.ext4", "-q", "-F", "-e", "remount-ro"]}
"""How a file system is made. An ext4 of which something cannot be trusted becomes read-only, under all that
is open.
"""


def _run(*words: object) -> str:
    return subprocess.run(
        [str(word) for word in words], check=True, stdout=subprocess.PIPE, timeout=60, text=True
    ).stdout.strip()


class Disk:
    """A device of a host, mounted there: a loop device over a sparse file; one that can `fail` over a file
    that a process exports.
    """

    def __init__(
        self, node: Node, path: str, mib: int, folder: Path, kind: str = "xfs", can_fail: bool = False
    ) -> None:
        self.node, self.path, self.mib, self.kind = node, path, mib, kind
        self.file = folder / f"{node.name}{path.replace('/', '-')}"
        self.seen = self.file.with_suffix(".seen") if can_fail else self.file
        self.loop = ""
        self._export: Optional[subprocess.Popen[bytes]] = None
        self.file.touch()
        os.truncate(self.file, mib << 20)
        _run(*MADE[kind], self.file)
        self.mount()
        node.run(["chown", "oneadmin:oneadmin", path], user="root")

    def mount(self) -> None:
        """Mount it with what it holds, as after a start of the host."""
        if self.seen != self.file:
            self._serve()
        self.loop = _run("losetup", "--find", "--show", self.seen)
        try:
            number = os.stat(self.loop).st_rdev
            block = f"{self.loop}-{os.urandom(3).hex()}"
            make = f"mkdir -p {self.path} && mknod {block} b {os.major(number)} {os.minor(number)}"
            self.node.run(["sh", "-c", f"{make} && mount -t {self.kind} {block} {self.path}"], user="root")
        finally:
            _run("losetup", "--detach", self.loop)  # when it is unmounted

    def unmount(self) -> None:
        """Take it away, also from under what has it open."""
        self.node.run(["umount", "-l", self.path], user="root", check=False)

    def _serve(self) -> None:
        self.fail()
        self.seen.touch()
        file = f"driver=file,filename={self.file},node-name=file"
        export = f"type=fuse,id=seen,node-name=file,mountpoint={self.seen},writable=on"
        self._export = subprocess.Popen(["qemu-storage-daemon", "--blockdev", file, "--export", export])
        until = time.monotonic() + 60
        while self.seen.stat().st_size != self.mib << 20:
            assert time.monotonic() < until, "nothing is exported"
            time.sleep(0.02)

    def fail(self) -> None:
        """Let every read and write fail from now on; `mount` again has it whole."""
        if self._export:
            self._export.kill()
            self._export.wait(60)
        subprocess.run(["umount", "-l", str(self.seen)], check=False, stderr=subprocess.DEVNULL)

    def become_read_only(self) -> None:
        """Let ext4 find an error, which makes it read-only also for files that are open."""
        Path(f"/sys/fs/ext4/{os.path.basename(self.loop)}/trigger_fs_error").write_text("1")

    def close(self) -> None:
        if self.node.up:
            self.unmount()
        if self.seen != self.file:
            self.fail()
        self.file.unlink()
