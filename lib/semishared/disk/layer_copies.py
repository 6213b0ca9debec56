# SPDX-License-Identifier: Apache-2.0
"""Copies of the layers of a disk, on another device of their host's pool (moved_layers.py, moved_live.py)."""

from __future__ import annotations

import os

from ..base import device_dirs
from ..base.moving import Copying
from ..model import layout, layout_delta
from ..tools import files
from ..tools.crash_points import point


def copy(source: str, target: str, copying: Copying, empty: str = "") -> None:
    """Copy layers that nobody writes to into a new directory; one with several names stays one, a delta is
    none of them.

    `empty`: one that is only made there, of its size.
    """
    device_dirs.make(target)
    point("layers being copied")
    names: dict[int, str] = {}
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if layout.is_staged(entry.name) or entry.name == str(layout_delta.NUMBER):
            continue
        inode = entry.inode()
        if inode in names:
            os.link(f"{target}/{names[inode]}", f"{target}/{entry.name}")
        elif entry.name == empty:
            _make(entry, f"{target}/{entry.name}")
        else:
            copying.copy(entry.path, f"{target}/{entry.name}")
            names[inode] = entry.name
    files.fsync(target)
    files.fsync(os.path.dirname(target))
    point("layers copied")


def _make(entry: os.DirEntry[str], path: str) -> None:
    status = entry.stat()
    with open(path, "xb") as file:
        file.truncate(status.st_size)
    os.chmod(path, status.st_mode & 0o7777)
    files.fsync(path)


def seen(folder: str) -> list[tuple[str, int, int, int, int]]:
    """Return what tells whether anything in a directory of layers was changed, but for a delta."""
    own = (entry for entry in os.scandir(folder) if entry.name != str(layout_delta.NUMBER))
    found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in own]
    return sorted(
        (name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found
    )
