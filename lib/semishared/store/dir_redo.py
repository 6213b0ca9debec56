# SPDX-License-Identifier: Apache-2.0
"""The data of a commit to an image in a mounted store: written to a file, or noted in a journal to be written later (dir_journal.py).

Chunks come by the extent, and several extents are worked on side by side.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import struct
import threading
from contextlib import contextmanager
from typing import IO, Iterable, Iterator

from ..errors import JournalDamaged
from ..model import layout_store
from ..tools import beneath, extents, files, progress, write_out
from ..tools.rate_limit import Pace
from .change import Change, Chunk

RANGE = struct.Struct(">QQq")
"""Start and length in the image, and where in the journal's data that is, or ZERO."""
ZERO = -1
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


def put(fd: int, size: int, sent: Iterable[int]) -> int:
    """Make an open image of `size` bytes of what `write` sends; return how many bytes that were, as it said."""
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)
    written = 0
    for count in sent:
        progress.count("store_written", count)
        written += count
    files.fsync_open(fd)
    return written


def write(fd: int, chunks: list[Chunk]) -> int:
    """Write chunks into an open image; return how many bytes were sent."""
    written = 0
    for start, length, content in chunks:
        if content is None:
            written += _zero(fd, start, length)
        else:
            extents.pwrite(fd, memoryview(content), start)
            written += length
    begin, (last, length, _) = chunks[0][0], chunks[-1]
    write_out.begin(fd, begin, last + length - begin)
    return written


def _zero(fd: int, start: int, length: int) -> int:
    """Make a hole, or write zeros where the file system makes none (NFSv3); return how many bytes were sent."""
    done = ctypes.CDLL(None, use_errno=True).fallocate(fd, PUNCH, ctypes.c_int64(start), ctypes.c_int64(length))
    if not done:
        return 0
    for at in range(start, start + length, len(ZEROS)):
        extents.pwrite(fd, memoryview(ZEROS)[: start + length - at], at)
    return length


def note(directory: str, change: Change, pace: Pace) -> tuple[str, int]:
    """Write a change into a journal; return its digest, and how many bytes were sent."""
    found, lock, end = hashlib.blake2b(), threading.Lock(), 0
    with open(layout_store.journal_ranges(directory), "xb") as ranges, open(layout_store.journal_data(directory), "xb", 0) as data:

        def append(chunks: list[Chunk]) -> tuple[list[bytes], bytes, int]:
            nonlocal end
            content = b"".join(content for _, _, content in chunks if content is not None)
            with lock:
                at, end = end, end + len(content)
            extents.pwrite(data.fileno(), memoryview(content), at)
            write_out.begin(data.fileno(), at, len(content))
            return _heads(chunks, at), hashlib.blake2b(content).digest(), len(content)

        for heads, digest, sent in change.each(append, pace):
            ranges.writelines(heads)
            found.update(b"".join([*heads, digest]))
            progress.count("store_written", sent)
        files.fsync_open(data.fileno())
        ranges.flush()
        files.fsync_open(ranges.fileno())
        return found.hexdigest(), end + ranges.tell()


def _heads(chunks: list[Chunk], at: int) -> list[bytes]:
    """Return what the journal says of the chunks of an extent, whose data it has from an offset on."""
    heads = []
    for start, length, content in chunks:
        heads.append(RANGE.pack(start, length, ZERO if content is None else at))
        at += 0 if content is None else length
    return heads


def noted(directory: str, size: int) -> Iterator[list[Chunk]]:
    """Yield the chunks in a journal, extent by extent, of an image of `size` bytes; raise JournalDamaged for what is none."""
    for _, chunks in _extents(directory, size):
        yield chunks


def digest(directory: str, size: int) -> str:
    """Return the digest of the chunks in a journal; raise JournalDamaged."""
    found = hashlib.blake2b()
    for heads, chunks in _extents(directory, size):
        content = b"".join(content for _, _, content in chunks if content is not None)
        found.update(heads + hashlib.blake2b(content).digest())
        progress.touch()
    return found.hexdigest()


def _extents(directory: str, size: int) -> Iterator[tuple[bytes, list[Chunk]]]:
    """Yield what a journal says of each extent, and its chunks."""
    heads, index = b"", -1
    chunks: list[Chunk] = []
    with _opened(layout_store.journal_ranges(directory)) as ranges, _opened(layout_store.journal_data(directory)) as data:
        for head in iter(lambda: ranges.read(RANGE.size), b""):
            start, length, at = RANGE.unpack(head.ljust(RANGE.size, b"\xff"))
            if chunks and start // extents.EXTENT != index:
                yield heads, chunks
                heads, chunks = b"", []
            index = start // extents.EXTENT
            content = None if at == ZERO else os.pread(data.fileno(), min(length, extents.EXTENT), max(at, 0))
            if start + length > size or (content is not None and len(content) != length):
                raise JournalDamaged(f"{beneath.readable(directory)} ends within a range, or names one that is not in the image")
            heads += head
            chunks.append((start, length, content))
        if chunks:
            yield heads, chunks


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
