# SPDX-License-Identifier: Apache-2.0
"""Count who opens or reads a file, whatever mount or namespace they come through: the kernel's own word."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Optional, Type

IN_ACCESS, IN_OPEN = 0x1, 0x20
HEADER = struct.Struct("iIII")


class Watch:
    """A watch on one file; use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0 or self._libc.inotify_add_watch(self._fd, os.fsencode(path), IN_ACCESS | IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), f"inotify on {path}")

    def count(self) -> "tuple[int, int]":
        """Return how many opens and how many reads there were since the last call; equal events in a row are
        one.
        """
        opens = reads = 0
        while True:
            try:
                data = os.read(self._fd, 65536)
            except BlockingIOError:
                return opens, reads
            at = 0
            while at < len(data):
                _, mask, _, length = HEADER.unpack_from(data, at)
                at += HEADER.size + length
                opens += bool(mask & IN_OPEN)
                reads += bool(mask & IN_ACCESS)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        os.close(self._fd)
