# SPDX-License-Identifier: Apache-2.0
"""Extents between files: through reused memory, past a disk's page cache, several side by side.

New memory costs a fault for each page; the page cache costs a copy, and a write in the kernel's own threads.
Beside a hash that is a third of a copy's processor time. Direct I/O also leaves the guests' caches alone.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from typing import Iterator, List

from . import beneath, extents, write_out

LARGE = 64 << 10
"""From so many bytes on it goes past the cache: a write there is not over before the disk has it, and small
ones are better collected.
"""
PARTS = 1024
"""Of one write: IOV_MAX."""


class Buffers:
    """Memory for one extent each, page-aligned, as direct I/O wants it; as many as are used at once."""

    def __init__(self) -> None:
        self._free: List[memoryview] = []

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """Yield one, for within the block only: whatever was in it before is there."""
        try:
            view = self._free.pop()
        except IndexError:
            import mmap  # here: not all actions copy images

            view = memoryview(mmap.mmap(-1, extents.EXTENT))
        try:
            yield view
        finally:
            self._free.append(view)


class File:
    """An open file: use within `opened`."""

    def __init__(self, fd: int, direct: int) -> None:
        self.fd, self._direct = fd, direct

    def read(self, memory: memoryview, offset: int) -> int:
        """Fill some memory; return how many bytes that were, fewer only at the end of the file."""
        got = 0
        if self._direct >= 0 and _fits([memory], offset):
            try:
                got = os.preadv(self._direct, [memory], offset)
            except OSError as e:
                if e.errno != errno.EINVAL:  # its blocks may be larger
                    raise
        while got < len(memory):
            count = os.preadv(self.fd, [memory[got:]], offset + got)
            if not count:
                break
            got += count
        return got

    def write(self, parts: List[memoryview], offset: int) -> None:
        """Write some pieces of memory, one after the other."""
        if self._direct >= 0 and len(parts) <= PARTS and _fits(parts, offset):
            try:
                if os.pwritev(self._direct, parts, offset) == sum(map(len, parts)):
                    return
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
        for part in parts:
            extents.pwrite(self.fd, part, offset)
            offset += len(part)

    def begin(self, offset: int, length: int) -> None:
        """Have what is in the page cache of a part of the file go to the disk."""
        write_out.begin(self.fd, offset, length)


def _fits(parts: List[memoryview], offset: int) -> bool:
    sizes = [len(part) for part in parts]
    return sum(sizes) >= LARGE and not any(size % extents.PAGE for size in [offset, *sizes])


@contextmanager
def opened(fd: int) -> Iterator[File]:
    """Yield an open file, to be read and written past the page cache where that is a disk's.

    A store on a network is reached through it: NFS would make each write durable before the next, and what is
    opened here has none of the locks of `fd`, which are what keeps a machine there that was cut off from
    writing.
    """
    direct = -1
    if os.major(os.fstat(fd).st_dev):  # else it is no disk's
        how = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        try:
            direct = os.open(beneath.path_of(fd), how | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            pass  # through the cache it goes, too
    try:
        yield File(fd, direct)
    finally:
        if direct >= 0:
            os.close(direct)
