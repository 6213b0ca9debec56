# SPDX-License-Identifier: Apache-2.0
"""The data of a commit in a mounted store: written to a file, or to a journal (store/dir/journal.py).

It comes in extents, and several extents are processed in parallel.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import struct
import threading
from contextlib import ExitStack, contextmanager
from typing import IO, Callable, Iterable, Iterator, TypeVar

from ...errors import JournalDamaged
from ...model.store import dir_names
from ...tools import beneath, extents, files, progress, whole_pages
from ...tools.rate_limit import Pace
from ..commit.change import AT_ONCE, Change, Chunk, Part, in_order

RANGE = struct.Struct(">QQq")
"""Start and length in the image, and the offset in the journal's data, or ZERO."""
ZERO = -1
FICLONE = 0x40049409
PUNCH = 3
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE"""
ZEROS = bytes(1 << 20)
Heads = list[tuple[int, int, int]]
"""The journal's entries for one extent: a RANGE for each chunk."""
T = TypeVar("T")


def cloned(fd: int, directory: str) -> int:
    """Reflink the open image into a journal and return the open clone; -1 if the file system cannot."""
    path = dir_names.journal_image(directory)
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
    """Give the file that will replace the open image the image's owner and mode."""
    was = os.fstat(fd)
    if (was.st_uid, was.st_gid) != (os.fstat(new).st_uid, os.fstat(new).st_gid):
        try:
            os.fchown(new, was.st_uid, was.st_gid)
        except PermissionError:
            pass  # only root can keep the owner; the mode is kept
    os.fchmod(new, was.st_mode & 0o777)


def put(fd: int, size: int, sent: Iterable[int]) -> int:
    """Grow an open image to `size` bytes, consume the writes `sent` and fsync; return the bytes written."""
    if os.fstat(fd).st_size < size:
        os.ftruncate(fd, size)
    written = 0
    for count in sent:
        progress.count("store_written", count)
        written += count
    files.fsync_open(fd)
    return written


def write(file: whole_pages.File, part: Part) -> int:
    """Write a part of an image; return the bytes sent."""
    written = 0
    for start, length, content in part.chunks:
        if content is None:
            written += _zero(file.fd, start, length)
        else:
            file.write([content], start)
            written += length
    file.begin(part.start, part.end - part.start)
    return written


def _zero(fd: int, start: int, length: int) -> int:
    """Punch a hole, or write zeros where the file system cannot (NFSv3); return the bytes sent."""
    done = ctypes.CDLL(None, use_errno=True).fallocate(
        fd, PUNCH, ctypes.c_int64(start), ctypes.c_int64(length)
    )
    if not done:
        return 0
    for at in range(start, start + length, len(ZEROS)):
        extents.pwrite(fd, memoryview(ZEROS)[: start + length - at], at)
    return length


def note(directory: str, change: Change, pace: Pace) -> tuple[str, int]:
    """Write a change into a journal; return its digest and the bytes sent."""
    found, lock, end = hashlib.sha256(), threading.Lock(), 0
    with (
        open(dir_names.journal_ranges(directory), "xb") as ranges,
        open(dir_names.journal_data(directory), "xb", 0) as data,
    ):
        with whole_pages.opened(data.fileno()) as file:

            def append(part: Part) -> tuple[bytes, str, int]:
                nonlocal end
                size = sum(map(len, part.contents))
                with lock:
                    at, end = end, end + size
                file.write(part.contents, at)
                file.begin(at, size)
                return _packed(_heads(part, at)), part.digest, size

            for heads, digest, sent in change.each(append, pace):
                ranges.write(heads)
                found.update(heads + digest.encode())
                progress.count("store_written", sent)
        files.fsync_open(data.fileno())
        ranges.flush()
        files.fsync_open(ranges.fileno())
        return found.hexdigest(), end + ranges.tell()


def _heads(part: Part, at: int) -> Heads:
    """Return the journal's entries for a part whose data begins at offset `at` of the journal."""
    heads = []
    for start, length, content in part.chunks:
        heads.append((start, length, ZERO if content is None else at))
        at += 0 if content is None else length
    return heads


def _packed(heads: Heads) -> bytes:
    return b"".join(RANGE.pack(*head) for head in heads)


def replayed(directory: str, size: int, fd: int) -> Iterator[int]:
    """Write a journal to an open image of `size` bytes; yield the bytes sent for each extent.

    Raise JournalDamaged.
    """
    with whole_pages.opened(fd) as file:
        yield from _each(directory, size, lambda _, part: write(file, part))


def digest(directory: str, size: int) -> str:
    """Return the digest of a journal's ranges and data; raise JournalDamaged."""
    found = hashlib.sha256()
    for of_extent in _each(directory, size, lambda heads, part: _packed(heads) + part.digest.encode()):
        found.update(of_extent)
        progress.touch()
    return found.hexdigest()


def _each(directory: str, size: int, work: Callable[[Heads, Part], T]) -> Iterator[T]:
    """Yield the result of `work` for each extent in a journal, in order; `work` runs in parallel."""
    buffers = whole_pages.Buffers()
    with ExitStack() as stack:
        ranges, data = (
            stack.enter_context(_opened(of(directory)))
            for of in (dir_names.journal_ranges, dir_names.journal_data)
        )
        file = stack.enter_context(whole_pages.opened(data.fileno()))

        def carry(heads: Heads) -> T:
            with buffers.one() as memory:
                return work(heads, Part([_chunk(directory, file, head, size, memory) for head in heads]))

        yield from in_order(carry, _extents(ranges), AT_ONCE)


def _extents(ranges: IO[bytes]) -> Iterator[Heads]:
    """Yield the journal's entries, grouped by extent."""
    heads: Heads = []
    for head in iter(lambda: ranges.read(RANGE.size), b""):
        found = RANGE.unpack(head.ljust(RANGE.size, b"\xff"))
        if heads and found[0] // extents.EXTENT != heads[0][0] // extents.EXTENT:
            yield heads
            heads = []
        heads.append(found)
    if heads:
        yield heads


def _chunk(
    directory: str, data: whole_pages.File, head: tuple[int, int, int], size: int, memory: memoryview
) -> Chunk:
    """Return the chunk of a journal's entry, its data read into the extent's `memory`."""
    start, length, at = head
    view = memory[start % extents.EXTENT :][:length]
    if start + length > size or len(view) != length or (at != ZERO and data.read(view, max(at, 0)) != length):
        raise JournalDamaged(
            f"{beneath.readable(directory)} ends within a range, or names one that is not in the image"
        )
    return start, length, None if at == ZERO else view


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    # Every host can write there: follow no link.
    directory, name = os.path.split(path)
    try:
        fd = beneath.open_file(directory, name)
    except FileNotFoundError:
        raise JournalDamaged(f"{beneath.readable(path)} is not there") from None
    with open(fd, "rb") as file:
        yield file
