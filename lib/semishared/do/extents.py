# SPDX-License-Identifier: Apache-2.0
"""Images as extents of 4 MiB, each with its hash; what is all zero is a hole and is named nowhere.

A manifest is the text form of that, and a generation is named by the hash of its manifest: the same content is
the same generation, whoever computed it.

    semishared-manifest 1
    format qcow2
    size 67108864
    extent 4194304
    0 2f5c...
    7 91aa...
"""

from __future__ import annotations

import errno
import hashlib
import os
from typing import Iterator, NamedTuple

from ..errors import ImageChanged
from . import progress

EXTENT = 4 << 20
FLUSH = 64
"""Extents written between two flushes: one at the end could take longer than a standstill is allowed to."""
BLOCK = 64 << 10
"""Zero blocks of this size are left out of copies."""
HEADER = "semishared-manifest 1"
_ZERO = bytes(EXTENT)


class Manifest(NamedTuple):
    """Format, file size in bytes, and the hash of each extent that is not a hole."""

    format: str
    size: int
    extents: dict[int, str]

    def text(self) -> bytes:
        """Return the canonical text."""
        lines = [HEADER, f"format {self.format}", f"size {self.size}", f"extent {EXTENT}"]
        lines += [f"{index} {digest}" for index, digest in sorted(self.extents.items())]
        return ("\n".join(lines) + "\n").encode()

    @property
    def generation(self) -> str:
        """Return the name of the generation with this content."""
        return generation_of(self.text())


def generation_of(text: bytes) -> str:
    """Return the generation named by a manifest's text."""
    return hashlib.sha256(text).hexdigest()[:32]


def parse(text: bytes) -> Manifest:
    """Return the manifest in `text`; raise ImageChanged if it is none."""
    lines = text.decode("ascii", "replace").splitlines()
    try:
        if lines[0] != HEADER or lines[3] != f"extent {EXTENT}":
            raise ValueError("header")
        extents = {}
        for line in lines[4:]:
            index, digest = line.split(" ")
            extents[int(index)] = digest
        return Manifest(lines[1].split(" ")[1], int(lines[2].split(" ")[1]), extents)
    except (ValueError, IndexError):
        raise ImageChanged("a manifest cannot be read") from None


def offsets(fd: int, size: int) -> Iterator[int]:
    """Yield the offset of each extent that holds data; holes are skipped where the file system tells them."""
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


def _data(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    for offset in offsets(fd, size):
        content = os.pread(fd, min(EXTENT, size - offset), offset)
        if not content:
            return
        while len(content) < min(EXTENT, size - offset):
            more = os.pread(fd, min(EXTENT, size - offset) - len(content), offset + len(content))
            if not more:
                break
            content += more
        yield offset // EXTENT, content


def is_zero(content: bytes) -> bool:
    """Tell whether `content`, of at most an extent, is all zero."""
    # bytes compare by memcmp; memoryviews compare item by item.
    return content == _ZERO[: len(content)]


def _write_blocks(fd: int, offset: int, content: bytes) -> None:
    view = memoryview(content)
    start = None
    for at in range(0, len(view), BLOCK):
        if is_zero(content[at : at + BLOCK]):
            if start is not None:
                _pwrite(fd, view[start:at], offset + start)
                start = None
        elif start is None:
            start = at
    if start is not None:
        _pwrite(fd, view[start:], offset + start)


def _pwrite(fd: int, view: memoryview, offset: int) -> None:
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def copy(source: str, target: str | None, format: str, counted: str) -> Manifest:
    """Copy `source` to the new sparse file `target` (None: only read) and return the manifest of what was read.

    The bytes read are counted as `counted` (see progress).
    """
    source_fd = os.open(source, os.O_RDONLY)
    try:
        os.posix_fadvise(source_fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        size = os.fstat(source_fd).st_size
        target_fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) if target else -1
        extents: dict[int, str] = {}
        try:
            if target:
                os.ftruncate(target_fd, size)
            for index, content in _data(source_fd, size):
                progress.count(counted, len(content))
                if is_zero(content):
                    continue
                extents[index] = hashlib.sha256(content).hexdigest()
                if target:
                    _write_blocks(target_fd, index * EXTENT, content)
                    if len(extents) % FLUSH == 0:
                        os.fdatasync(target_fd)
            if target:
                os.fsync(target_fd)
        finally:
            if target:
                os.close(target_fd)
        return Manifest(format, size, extents)
    finally:
        os.close(source_fd)
