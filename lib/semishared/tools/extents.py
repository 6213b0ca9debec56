# SPDX-License-Identifier: Apache-2.0
"""Images as extents of 4 MiB, each with its hash; an all-zero extent is a hole and has no entry.

A manifest is the text form of these. The hash of the manifest names the generation: the same content is the
same generation on every machine.

    semishared-manifest 1
    format qcow2
    size 67108864
    extent 4194304
    0 2f5c...
    7 91aa...
"""

from __future__ import annotations

import errno
import os
from types import TracebackType
from typing import TYPE_CHECKING, Iterator

from ..errors import ImageChanged
from ..named import NamedTuple
from . import files, progress

if TYPE_CHECKING:
    import mmap

EXTENT = 4 << 20
FLUSH = 64
"""Extents between two flushes: a single flush at the end could exceed the standstill limit."""
BLOCK = 64 << 10
"""Zero blocks of this size are left out of copies."""
DIGEST = 32
"""Bytes of a hash."""
HEADER = "semishared-manifest 1"
MANIFEST_LIMIT = 256 << 20
"""Most bytes of a manifest's text: that of 14 TiB of data. A longer one is neither kept nor sent."""
PAGE = 4096
PEEK = 16
_ZERO = bytes(EXTENT)


class Manifest(NamedTuple):
    """Format, file size in bytes, and the hash of each extent that is not a hole."""

    format: str
    size: int
    extents: dict[int, str]

    def text(self) -> bytes:
        lines = [HEADER, f"format {self.format}", f"size {self.size}", f"extent {EXTENT}"]
        lines += [f"{index} {digest}" for index, digest in sorted(self.extents.items())]
        return ("\n".join(lines) + "\n").encode()

    @property
    def generation(self) -> str:
        return generation_of(self.text())


def generation_of(text: bytes) -> str:
    """Return the generation named by a manifest's text."""
    import hashlib

    return hashlib.sha256(text).hexdigest()[:32]


def parse(text: bytes) -> Manifest:
    """Return the manifest in `text`; raise ImageChanged if it is malformed or has extents past its end."""
    lines = text.decode("ascii", "replace").splitlines()
    try:
        if lines[0] != HEADER or lines[3] != f"extent {EXTENT}":
            raise ValueError("header")
        extents = {}
        for line in lines[4:]:
            index, digest = line.split(" ")
            if not index.isdigit() or len(bytes.fromhex(digest)) != DIGEST:
                raise ValueError("line")
            extents[int(index)] = digest
        size = int(lines[2].split(" ")[1])
        if size < 0 or max(extents, default=-1) * EXTENT >= max(size, 1):
            raise ValueError("size")
        return Manifest(lines[1].split(" ")[1], size, extents)
    except (ValueError, IndexError):
        raise ImageChanged("a manifest cannot be read") from None


def offsets(fd: int, size: int) -> Iterator[int]:
    """Yield the offset of each extent with data; skip holes where the file system reports them."""
    offset = 0
    while offset < size:
        try:
            offset = os.lseek(fd, offset, os.SEEK_DATA) // EXTENT * EXTENT
        except OSError as e:
            if e.errno == errno.ENXIO:
                return
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        yield offset
        offset += EXTENT


def held(path: str) -> tuple[tuple[int, int], int]:
    """Return (device, inode) of a file, and the bytes of a copy, without holes and preallocated space."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found, data, offset = os.fstat(fd), 0, 0
        try:
            while offset < found.st_size:
                start = os.lseek(fd, offset, os.SEEK_DATA)
                offset = os.lseek(fd, start, os.SEEK_HOLE)
                data += offset - start
        except OSError as e:
            if e.errno != errno.ENXIO:  # behind the last data
                data = found.st_size
        return (found.st_dev, found.st_ino), min(data, found.st_blocks * 512)
    finally:
        os.close(fd)


def data(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (index, content) of each extent with data; `fd` may be open for direct I/O."""
    import mmap  # here: not all actions read images

    with mmap.mmap(-1, EXTENT) as buffer, memoryview(buffer) as view:  # page-aligned, as direct I/O wants it
        for offset in offsets(fd, size):
            wanted = min(EXTENT, size - offset)
            got = 0
            while got < wanted:
                # After a short read, direct I/O has to go on at a page boundary.
                start = got // PAGE * PAGE
                with view[start:] as rest:
                    count = os.preadv(fd, [rest], offset + start)
                if start + count <= got:
                    break
                got = start + count
            if not got:
                return
            yield offset // EXTENT, bytes(view[: min(got, wanted)])


def read_at(fd: int, index: int) -> bytes:
    """Return the content of an extent, shorter at the end of the file."""
    offset, parts, left = index * EXTENT, [], EXTENT
    while left:
        part = os.pread(fd, left, offset)
        if not part:
            break
        parts.append(part)
        offset, left = offset + len(part), left - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(memory: mmap.mmap, fd: int, index: int) -> memoryview:
    """Read an extent into reused `memory`, which is cheaper than new memory, and return it there."""
    got, view = 0, memoryview(memory)
    while got < EXTENT:
        count = os.preadv(fd, [view[got:EXTENT]], index * EXTENT + got)
        if not count:
            break
        got += count
    return view[:got]


def is_zero(content: bytes | bytearray | memoryview) -> bool:
    """Tell whether `content`, of at most an extent, is all zero."""
    # bytes compare by memcmp; memoryviews compare item by item. Most data has a non-zero byte at its
    # beginning.
    if any(content[:PEEK]):
        return False
    return bytes(content) == _ZERO[: len(content)]


def blocks(content: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, data) of what is not zero in an extent, in blocks of 64 KiB."""
    view = memoryview(content)
    start = None
    for at in range(0, len(view), BLOCK):
        if is_zero(view[at : at + BLOCK]):
            if start is not None:
                yield start, view[start:at]
                start = None
        elif start is None:
            start = at
    if start is not None:
        yield start, view[start:]


def pwrite(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view`, also where pwrite(2) writes less."""
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


class Copy:
    """A copy in the making: takes extents in any order into a new sparse file, or none, and hashes them."""

    def __init__(self, target: str | None, size: int) -> None:
        self.size = size
        self.written = 0
        """Bytes that are not in holes."""
        self._extents: dict[int, str] = {}
        self._fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) if target else -1
        if target:
            os.ftruncate(self._fd, size)

    def __enter__(self) -> Copy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._fd >= 0:
            try:
                if error is None:
                    files.fsync_open(self._fd)
            finally:
                os.close(self._fd)

    def add(self, index: int, content: bytes) -> None:
        """Hash an extent, and write it to the file."""
        if is_zero(content):
            return
        import hashlib

        self._extents[index] = hashlib.sha256(content).hexdigest()
        if self._fd < 0:
            return
        from . import write_out  # here: not all actions write images

        for offset, data in blocks(content):
            pwrite(self._fd, data, index * EXTENT + offset)
            self.written += len(data)
        # Begin the write-out here: the kernel's own write-back belongs to no I/O class.
        write_out.begin(self._fd, index * EXTENT, EXTENT)
        if len(self._extents) % FLUSH == 0:
            # Not by pieces as at the end: that would walk through the whole file each time.
            os.fdatasync(self._fd)

    def end_at(self, size: int) -> None:
        """Set the file's size, if it was unknown at the beginning."""
        self.size = size
        os.ftruncate(self._fd, size)

    def manifest(self, format: str) -> Manifest:
        return Manifest(format, self.size, self._extents)


def open_direct(path: str, flags: int = os.O_RDONLY) -> int:
    """Open a file with O_DIRECT, or without where its file system refuses that."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return os.open(path, flags)


SOURCES = {"store_read": "the store", "base_read": "the base"}
"""Counters -> where the bytes of a copy come from."""


def copy(source: str, target: str | None, format: str, counted: str, *, direct: bool = False) -> Manifest:
    """Copy `source` to the new sparse file `target` (None: only read) and return the manifest.

    The bytes read are counted as `counted` (see progress). `direct` bypasses this machine's page cache: QEMU
    does so too, and on a shared file system (seen with ceph-fuse) cached data may be older than the guest's
    writes.
    """
    source_fd = open_direct(source) if direct else os.open(source, os.O_RDONLY)
    try:
        if not direct:
            os.posix_fadvise(source_fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        size = os.fstat(source_fd).st_size
        progress.expect(min(size, os.fstat(source_fd).st_blocks * 512), SOURCES.get(counted, ""))
        with Copy(target, size) as made:
            for index, content in data(source_fd, size):
                progress.count(counted, len(content))
                made.add(index, content)
        return made.manifest(format)
    finally:
        os.close(source_fd)
