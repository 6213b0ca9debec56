# SPDX-License-Identifier: Apache-2.0
"""Small devices for pools, in memory, of which the kernel does not say so: a tmpfs itself is refused as
anything but memory.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

MOUNT = """
set -e
mkdir "$1.memory"
mount -t tmpfs -o "size=$2M,mode=755" pool "$1.memory"
mkdir "$1.memory/lower" "$1.memory/upper" "$1.memory/work"
mount -t overlay -o "lowerdir=$1.memory/lower,upperdir=$1.memory/upper,workdir=$1.memory/work" pool "$1"
umount -l "$1.memory"
rmdir "$1.memory"
"""
"""What sh does to mount one of so many MiB at a path: overlayfs, of which all lies in a tmpfs, which is there
as long as that is.
"""


def mounting(path: object, mib: int) -> list[str]:
    """Return the command that mounts one."""
    return ["sh", "-c", MOUNT, "sh", str(path), str(mib)]


_libc = ctypes.CDLL(None, use_errno=True)
LAZILY = 2


def _mount(kind: str, at: Path, options: str) -> None:
    if _libc.mount(b"pool", os.fsencode(at), kind.encode(), 0, os.fsencode(options)):
        raise OSError(ctypes.get_errno(), f"mount {kind} at {at}")


def unmount(path: Path) -> None:
    """Take what is mounted at a path away at once, whoever still has it open."""
    if _libc.umount2(os.fsencode(path), LAZILY):
        raise OSError(ctypes.get_errno(), f"umount {path}")


def mount(path: Path, mib: int) -> None:
    """Mount one here, as `mounting` does in a node: seven programs are 10 ms of processor, and a hundred
    tests have three of them.
    """
    memory = Path(f"{path}.memory")
    memory.mkdir()
    _mount("tmpfs", memory, f"size={mib}M,mode=755")
    for name in ("lower", "upper", "work"):
        (memory / name).mkdir()
    _mount("overlay", path, f"lowerdir={memory}/lower,upperdir={memory}/upper,workdir={memory}/work")
    unmount(memory)
    memory.rmdir()
