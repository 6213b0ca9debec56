# SPDX-License-Identifier: Apache-2.0
"""Write a file's dirty pages to the disk before fsync does: sync_file_range(2)."""

from __future__ import annotations

import errno
import os
from functools import lru_cache
from typing import Any

from . import progress

WRITE, WAIT_WRITE_WAIT = 2, 7
"""Flags: begin to write; wait for writes before, write, and wait for all."""


def write_out(fd: int, size: int, piece: int) -> None:
    """Write out an open file of `size` bytes, with a sign of progress per piece; raise OSError."""
    for offset in range(0, size, piece):
        if not _sync_file_range(fd, offset, piece, WAIT_WRITE_WAIT):
            return  # fsync then writes it all at once
        progress.touch()


def begin(fd: int, offset: int, length: int) -> None:
    """Begin to write a part of an open file to the disk, so that fsync has less to wait for."""
    _sync_file_range(fd, offset, length, WRITE)


@lru_cache(maxsize=1)
def _call() -> Any:
    """Return the C library's function, None if it has none; cached, as the lookup is slow."""
    try:
        import ctypes

        found = ctypes.CDLL(None, use_errno=True).sync_file_range
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        return found
    except (ImportError, AttributeError, OSError):
        return None


def _sync_file_range(fd: int, offset: int, length: int, how: int) -> bool:
    """Call sync_file_range(2); return False if it is not available. Raise OSError for a failed write."""
    call = _call()
    if call is None:
        return False
    if call(fd, offset, length, how):
        import ctypes

        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
            return False
        # The kernel reports a failed write once: here, and not to fsync any more.
        raise OSError(number, os.strerror(number))
    return True
