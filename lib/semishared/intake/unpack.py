# SPDX-License-Identifier: Apache-2.0
"""Compressed files from untrusted makers, unpacked piece by piece, and the private copy of an upload.

45 bytes of bz2 are 45 MB of zeros, and an xz header asks for any amount of memory. The inspected copy is the
one that is used.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Generator, Iterable, Iterator

from ..errors import SourceTooSlow, ToolFailed, UploadTooLarge
from ..named import NamedTuple
from ..tools import extents, files, progress
from ..units import MiB, human

if TYPE_CHECKING:
    from typing import Protocol
else:
    Protocol = object

PIECE = 1 << 20
MEMORY = 256 << 20
"""Most memory for an xz file; `xz -9` needs 65 MiB."""
LEAST_S = 3.0
PER_MIB_S = 1.0
"""CPU seconds that unpacking for a size may take: a minimum, and more per MiB that is unpacked.

An image with real data needs a tenth of that.
"""
MAGIC = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "lzma": b"\xfd7zXZ\0", "zstd": b"\x28\xb5\x2f\xfd"}
SKIPPED = b"\x2a\x4d\x18"
"""Bytes 1 to 3 of a frame that zstd skips: pzstd begins with one."""
UNZSTD = ["zstd", "-q", "-d", "-c"]
"""Python has no module for zstd before 3.14. It refuses windows of more than 128 MiB itself."""


def decompressor(head: bytes) -> str:
    """Return 'gzip', 'bz2', 'lzma', 'zstd' or '' by the first bytes."""
    if head[1:4] == SKIPPED and head[0] & 0xF0 == 0x50:
        return "zstd"
    return next((kind for kind, magic in MAGIC.items() if head.startswith(magic)), "")


class Work:
    """A limit of the CPU time of unpacking: at most `most_s` seconds."""

    def __init__(self, most_s: float) -> None:
        self._most_s, self._began, self._packed = most_s, time.process_time(), 0

    def came(self, packed: int) -> None:
        """Add packed bytes; raise SourceTooSlow if unpacking took too much CPU time so far."""
        self._packed += packed
        allowed = min(LEAST_S + PER_MIB_S * self._packed / (1 << 20), self._most_s)
        if time.process_time() - self._began > allowed:
            cost = f"{self._packed} bytes of it cost more than {allowed:.0f} s to unpack"
            raise SourceTooSlow(f"the compressed data does not tell its size, and {cost}")


class Spoiled(Exception):
    """The data is not of the announced format, is truncated, or needs too much memory."""


class Packed(Protocol):
    """What packed bytes are read from, an open file or a download."""

    def read(self, size: int, /) -> bytes:
        """Return some bytes, at most `size`; none at the end."""


def unpacked(file: Packed, kind: str, work: Work | None = None) -> Generator[bytes, None, None]:
    """Yield the unpacked content of `file` in pieces of at most a MiB; join streams, as the tools do.

    Raise Spoiled, or SourceTooSlow if `work` is used up.
    """
    if kind == "zstd":
        yield from _by_zstd(file, work)
        return
    data, streams = file.read(PIECE), 0
    # Other data behind a stream than another stream is ignored.
    while not streams or data.startswith(MAGIC[kind]):
        unpacker = _Unpacker(kind)
        while not unpacker.eof:
            if unpacker.needs_input and not data:
                data = file.read(PIECE)
                if not data:
                    raise Spoiled(f"the {kind} data cannot be decompressed: it is cut off")
            if work:
                work.came(len(data))
            piece, data = unpacker.unpack(data), b""
            if piece:
                yield piece
        streams += 1
        # Zeros may separate streams.
        data = unpacker.unused.lstrip(b"\0")
        while len(data) < len(MAGIC[kind]):
            more = file.read(PIECE)
            if not more:
                break
            data = (data + more).lstrip(b"\0")


def _by_zstd(file: Packed, work: Work | None) -> Generator[bytes, None, None]:
    from ..tools.filter import through

    def read() -> bytes:
        data = file.read(PIECE)
        if work:
            work.came(len(data))
        return data

    try:
        with closing(through(UNZSTD, read)) as pieces:
            for piece in pieces:
                if work:
                    work.came(0)
                yield piece
    except ToolFailed as e:
        said = re.sub(r"\A.*?: (?:zstd: )?(?:/\*stdin\*\\ *: )?", "", e.detail.partition(": ")[2])
        raise Spoiled(f"the zstd data cannot be decompressed: {said}") from None


class _Unpacker:
    """The decompressor of one stream, for each library."""

    def __init__(self, kind: str) -> None:
        self._kind, self._rest = kind, b""
        self._stream: Any
        self._errors: tuple[type[Exception], ...]
        if kind == "gzip":
            import zlib

            self._stream, self._errors = zlib.decompressobj(31), (zlib.error,)
        elif kind == "bz2":
            import bz2

            self._stream, self._errors = bz2.BZ2Decompressor(), (OSError, ValueError)
        else:
            import lzma

            self._stream, self._errors = lzma.LZMADecompressor(memlimit=MEMORY), (lzma.LZMAError, MemoryError)

    @property
    def eof(self) -> bool:
        return bool(self._stream.eof)

    @property
    def unused(self) -> bytes:
        """The data after the stream."""
        return bytes(self._stream.unused_data)

    @property
    def needs_input(self) -> bool:
        return not self._rest if self._kind == "gzip" else bool(self._stream.needs_input)

    def unpack(self, data: bytes) -> bytes:
        try:
            if self._kind != "gzip":
                return bytes(self._stream.decompress(data, PIECE))
            piece = self._stream.decompress(self._rest + data, PIECE)
            self._rest = self._stream.unconsumed_tail
            return bytes(piece)
        except self._errors as e:
            raise Spoiled(f"the {self._kind} data cannot be decompressed: {e}") from None


# An upload is first copied into a directory of its own and inspected there, so no later change of the
# original matters. The copy is sparse, is hashed as it is written, and is never larger than approved.


FORMAT_SHARE = 16
"""A format's own tables are at most this fraction of the disk."""
FORMAT_LEAST = 64 * MiB
"""Always allowed for them: VHDX allocates blocks of 32 MiB."""
CLUSTERS = 16
"""Clusters of a small qcow2 file that hold no data."""


class Bound(NamedTuple):
    """Limits of an upload in bytes: oned's approval for the disk (0 if unknown), and the site's limit."""

    approved: int
    most: int

    @property
    def disk(self) -> int:
        """Return the largest virtual size: SIZE is in MiB, and some callers do not round it up."""
        return min(self.approved + MiB - 1, self.most) if self.approved else self.most

    @property
    def file(self) -> int:
        """Return the largest file in any format."""
        return self.disk + self.disk // FORMAT_SHARE + FORMAT_LEAST

    def check_disk(self, size: int, name: str) -> None:
        """Raise UploadTooLarge if a disk of `size` bytes was not approved."""
        if size > self.disk:
            approved = human(self.approved or self.most)
            raise UploadTooLarge(f"{name} is a disk of {human(size)}, and {approved} were approved")

    def check_data(self, kept: Kept, format: str, name: str) -> None:
        """Raise UploadTooLarge if a file that is stored unconverted holds more than its disk can need."""
        most, size = self.disk, kept.manifest.size
        if format != "raw":
            with open(kept.path, "rb") as file:
                bits = int.from_bytes(file.read(24)[20:24], "big")
            most += most // FORMAT_SHARE + CLUSTERS * (1 << min(bits, 21)) + MiB
            # The file's length may include large holes.
            size = kept.written
        if size > most:
            raise UploadTooLarge(
                f"{name} holds {human(size)}, more than a disk of {human(self.approved or self.most)} needs "
                "(snapshots inside a qcow2 file are lost by qemu-img convert)"
            )


class Kept(NamedTuple):
    """A private copy: its path and manifest, and its bytes that are not zero."""

    path: str
    manifest: extents.Manifest
    written: int


def keep(chunks: Iterable[bytes], target: str, bound: Bound, name: str) -> Kept:
    """Write the chunks to the new sparse file `target`; raise UploadTooLarge once they exceed `bound`."""
    size, index, waiting = 0, 0, bytearray()
    with extents.Copy(target, 0) as made:
        for chunk in chunks:
            size += len(chunk)
            if size > bound.file:
                approved = f"a disk of {human(bound.disk)} was approved"
                raise UploadTooLarge(f"{name} is longer than {human(bound.file)}, and {approved}")
            waiting += chunk
            while len(waiting) >= extents.EXTENT:
                made.add(index, bytes(waiting[: extents.EXTENT]))
                del waiting[: extents.EXTENT]
                index += 1
        if waiting:
            made.add(index, bytes(waiting))
        made.end_at(size)
    return Kept(target, made.manifest("raw"), made.written)


def copy(source: str, target: str, bound: Bound, name: str) -> Kept:
    """Copy the file `source` to the new sparse file `target`; raise UploadTooLarge."""
    fd = os.open(source, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        size = os.fstat(fd).st_size
        if size > bound.file:
            raise UploadTooLarge(f"{name} has {human(size)}, and a disk of {human(bound.disk)} was approved")
        progress.expect(files.allocated(source))
        with extents.Copy(target, size) as made:
            for index, content in extents.data(fd, size):
                made.add(index, content)
                progress.reached(made.written, progress.goal.of)
    finally:
        os.close(fd)
    return Kept(target, made.manifest("raw"), made.written)


def paced(chunks: Iterator[bytes], least: float, window_s: float, name: str) -> Iterator[bytes]:
    """Yield `chunks`; raise SourceTooSlow below `least` bytes per second in a window of waiting."""
    waited, came = 0.0, 0
    while True:
        began = time.monotonic()
        chunk = next(chunks, None)
        # Without the time that the store takes to write.
        waited += time.monotonic() - began
        if chunk is None:
            return
        came += len(chunk)
        if waited >= window_s:
            if came < least * waited:
                speed = human(int(came / waited))
                raise SourceTooSlow(f"{name} came with {speed} per second, for {waited:.0f} s")
            waited, came = 0.0, 0
        yield chunk


@contextmanager
def within(limit_s: float, name: str) -> Iterator[None]:
    """Raise SourceTooSlow in the block after `limit_s` seconds, by SIGALRM."""

    def late(_signal: int, _frame: object) -> None:
        raise SourceTooSlow(f"the size of {name} is not known after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
