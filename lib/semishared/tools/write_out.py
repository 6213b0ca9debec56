# SPDX-License-Identifier: Apache-2.0
"""What was written to a file on its way to the disk, before fsync asks for it: sync_file_range(2)."""

from __future__ import annotations

import errno
import os
from functools import lru_cache
from typing import Any

from . import progress

WRITE, WAIT_WRITE_WAIT = 2, 7
"""Begin to write; what is being written, what is yet to be, and the end of both."""


def write_out(fd: int, size: int, piece: int) -> None:
    """Have an open file of `size` bytes written, with a sign of progress after each piece; raise OSError for
    a write that failed.
    """
    for offset in range(0, size, piece):
        if not _sync_file_range(fd, offset, piece, WAIT_WRITE_WAIT):
            return  # fsync does it at once
        progress.touch()


def begin(fd: int, offset: int, length: int) -> None:
    """Have what was written to a part of an open file go to its disk while more is written: fsync has less to
    wait for.
    """
    _sync_file_range(fd, offset, length, WRITE)


@lru_cache(maxsize=1)
def _call() -> Any:
    """Return the C library's function, None if it has none; to look it up takes longer than to call it."""
    try:
        import ctypes

        found = ctypes.CDLL(None, use_errno=True).sync_file_range
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        return found
    except (ImportError, AttributeError, OSError):
        return None


def _sync_file_range(fd: int, offset: int, length: int, how: int) -> bool:
    """Return whether there is such a call; raise OSError for what it finds."""
    call = _call()
    if call is None:
        return False
    if call(fd, offset, length, how):
        import ctypes

        number = ctypes.get_errno()
        if number in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
            return False
        # Now, not by fsync: a write that has failed is told of once.
        raise OSError(number, os.strerror(number))
    return True
