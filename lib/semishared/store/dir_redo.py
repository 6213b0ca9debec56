# SPDX-License-Identifier: Apache-2.0
"""The data of a commit to an image in a mounted store: written to a file, or noted in a journal to be written later (dir_journal.py).

A chunk is (offset in the image, length, content), None for zeros.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import struct
from contextlib import contextmanager
from typing import IO, Iterator

from ..errors import JournalDamaged
from ..model import layout_store
from ..tools import beneath, extents, files, progress

RANGE = struct.Struct(">QQq")
"""Start and length in the image, and 1 for zeros."""
FICLONE = 0x40049409
PUNCH = 3
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE"""
ZEROS = bytes(1 << 20)


def cloned(fd: int, directory: str) -> int:
    """Make a clone of the open image in a journal that shares its blocks, and return it open; -1 where the file system has no such."""
    path = layout_store.journal_image(directory)
    new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.ioctl(new, FICLONE, fd)
    except OSError as e:
        os.close(new)
        os.unlink(path)
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return -1
    return new


def as_before(fd: int, new: int) -> None:
    """Give a file that is to replace the open image its owner and mode."""
    was = os.fstat(fd)
    if (was.st_uid, was.st_gid) != (os.fstat(new).st_uid, os.fstat(new).st_gid):
        try:
            os.fchown(new, was.st_uid, was.st_gid)
        except PermissionError:
            pass  # whose it was may not be said by us; what may be done with it is
    os.fchmod(new, was.st_mode & 0o777)


def put(fd: int, chunks: Iterator[tuple[int, int, bytes | None]], size: int) -> int:
    """Write chunks into an open image of `size` bytes; return how many were sent."""
    written = 0
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)
    for start, length, content in chunks:
        if content is None:
            written += _zero(fd, start, length)
        else:
            extents.pwrite(fd, memoryview(content), start)
            written += length
            progress.count("store_written", length)
    files.fsync_open(fd)
    return written


def _zero(fd: int, start: int, length: int) -> int:
    """Make a hole, or write zeros where the file system makes none (NFSv3); return how many bytes were sent."""
    done = ctypes.CDLL(None, use_errno=True).fallocate(fd, PUNCH, ctypes.c_int64(start), ctypes.c_int64(length))
    if not done:
        return 0
    for at in range(start, start + length, len(ZEROS)):
        part = min(len(ZEROS), start + length - at)
        extents.pwrite(fd, memoryview(ZEROS)[:part], at)
        progress.count("store_written", part)
    return length


def note(directory: str, chunks: Iterator[tuple[int, int, bytes | None]]) -> tuple[str, int]:
    """Write chunks into a journal; return their digest, and how many bytes were sent."""
    found, size = hashlib.blake2b(), 0
    with open(layout_store.journal_ranges(directory), "xb") as ranges, open(layout_store.journal_data(directory), "xb", 0) as data:
        for start, length, content in chunks:
            head = RANGE.pack(start, length, content is None)
            found.update(head)
            ranges.write(head)
            size += len(head)
            if content is not None:
                found.update(content)
                extents.pwrite(data.fileno(), memoryview(content), data.tell())
                data.seek(length, os.SEEK_CUR)
                size += length
                progress.count("store_written", length)
        ranges.flush()
        files.fsync_open(ranges.fileno())
        files.fsync_open(data.fileno())
    return found.hexdigest(), size


def noted(directory: str, size: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield the chunks in a journal, of an image of `size` bytes; raise JournalDamaged for what is none."""
    with _opened(layout_store.journal_ranges(directory)) as ranges, _opened(layout_store.journal_data(directory)) as data:
        while True:
            head = ranges.read(RANGE.size)
            if not head:
                return
            start, length, is_zero = RANGE.unpack(head.ljust(RANGE.size, b"\xff"))
            content = None if is_zero else data.read(min(length, extents.EXTENT))
            if start + length > size or (content is not None and len(content) != length):
                raise JournalDamaged(f"{beneath.readable(directory)} ends within a range, or names one that is not in the image")
            yield start, length, content
            progress.touch()


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    # Every host can write there: no link is followed.
    directory, name = os.path.split(path)
    try:
        fd = beneath.open_file(directory, name)
    except FileNotFoundError:
        raise JournalDamaged(f"{beneath.readable(path)} is not there") from None
    with open(fd, "rb") as file:
        yield file


def digest(directory: str, size: int) -> str:
    """Return the digest of the chunks in a journal; raise JournalDamaged."""
    found = hashlib.blake2b()
    for start, length, content in noted(directory, size):
        found.update(RANGE.pack(start, length, content is None))
        found.update(content or b"")
    return found.hexdigest()
