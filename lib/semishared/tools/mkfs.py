# SPDX-License-Identifier: Apache-2.0
"""New images: empty, or with a file system or a swap area."""

from __future__ import annotations

import os

from . import files, qemu_img
from .run import work

MKFS = {
    "ext2": ["mkfs.ext2", "-q", "-F"],
    "ext3": ["mkfs.ext3", "-q", "-F"],
    "ext4": ["mkfs.ext4", "-q", "-F"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
    "swap": ["mkswap"],
}


def make_empty(path: str, format: str, size: int, fs: str, directory: str = "") -> None:
    """Create an empty image at `path` of `size` bytes, holding file system `fs` unless that is ''.

    Temporary files lie in `directory`, else beside the image.
    """
    if not fs:
        qemu_img.create(path, format, size)
        return
    raw = path if format == "raw" else files.staged_name(f"{directory or os.path.dirname(path)}/raw")
    try:
        qemu_img.create(raw, "raw", size)
        work([*MKFS[fs], raw])
        if raw != path:
            qemu_img.convert(raw, "raw", path, format)
    finally:
        if raw != path:
            files.unlink(raw)
