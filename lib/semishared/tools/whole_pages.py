# SPDX-License-Identifier: Apache-2.0
"""Copy extents between files: through reused memory, with direct I/O on disks, several in parallel.

New memory costs a page fault per page. The page cache costs a copy, and kernel threads write it out. Together
these are a third of a copy's CPU time, beside the hash. Direct I/O also spares the guests' caches.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import contextmanager
from typing import Iterator, List

from . import beneath, extents, write_out

LARGE = 64 << 10
"""Least bytes of a direct write: it waits for the disk, so small writes are better left to the page cache."""
PARTS = 1024
"""Most pieces of one write: IOV_MAX."""


class Buffers:
    """Page-aligned buffers of one extent each, as direct I/O needs them; as many as are used at once."""

    def __init__(self) -> None:
        self._free: List[memoryview] = []

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        """Yield a buffer for the block; it holds old data."""
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
    """An open file; use it within `opened`."""

    def __init__(self, fd: int, direct: int) -> None:
        self.fd, self._direct = fd, direct

    def read(self, memory: memoryview, offset: int) -> int:
        """Fill `memory` from an offset; return the bytes read, fewer only at the end of the file."""
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
        """Write pieces of memory, one after the other, at an offset."""
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
        """Begin to write the page cache of a part of the file to the disk."""
        write_out.begin(self.fd, offset, length)


def _fits(parts: List[memoryview], offset: int) -> bool:
    sizes = [len(part) for part in parts]
    return sum(sizes) >= LARGE and not any(size % extents.PAGE for size in [offset, *sizes])


@contextmanager
def opened(fd: int) -> Iterator[File]:
    """Yield an open file, read and written with direct I/O if it is on a disk.

    Network stores use the page cache. NFS would make each direct write durable before the next one. And the
    second descriptor lacks the locks of `fd`, which keep a machine that was cut off from writing.
    """
    direct = -1
    if os.major(os.fstat(fd).st_dev):  # major 0: not on a block device
        how = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        try:
            direct = os.open(beneath.path_of(fd), how | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            pass  # use the page cache only
    try:
        yield File(fd, direct)
    finally:
        if direct >= 0:
            os.close(direct)
