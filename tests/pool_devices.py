# SPDX-License-Identifier: Apache-2.0
"""Small devices for pools, in memory, of which the kernel does not say so: a tmpfs itself is refused as anything but memory."""

from __future__ import annotations

MOUNT = """
set -e
mkdir "$1.memory"
mount -t tmpfs -o "size=$2M,mode=755" pool "$1.memory"
mkdir "$1.memory/lower" "$1.memory/upper" "$1.memory/work"
mount -t overlay -o "lowerdir=$1.memory/lower,upperdir=$1.memory/upper,workdir=$1.memory/work" pool "$1"
umount -l "$1.memory"
rmdir "$1.memory"
"""
"""What sh does to mount one of so many MiB at a path: overlayfs, of which all lies in a tmpfs, which is there as long as that is."""


def mounting(path: object, mib: int) -> "list[str]":
    """Return the command that mounts one."""
    return ["sh", "-c", MOUNT, "sh", str(path), str(mib)]
