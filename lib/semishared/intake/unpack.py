# SPDX-License-Identifier: Apache-2.0
"""Compressed files, unpacked piece by piece, since their makers are not trusted.

45 bytes of bz2 are 45 MB of zeros, and an xz header asks for as much memory as it likes.
"""

from __future__ import annotations

import time
from typing import IO, Any, Generator

from ..errors import SourceTooSlow

PIECE = 1 << 20
MEMORY = 256 << 20
"""What an xz file may have us keep in memory; `xz -9` wants 65 MiB."""
LEAST_S = 3.0
PER_MIB_S = 1.0
"""CPU seconds that unpacking may cost to find out a size: so many, and so many more for each MiB that is
unpacked. An image with anything in it needs a tenth of that.
"""
MAGIC = {"gzip": b"\x1f\x8b", "bz2": b"BZh", "lzma": b"\xfd7zXZ\0"}


def decompressor(head: bytes) -> str:
    """Return 'gzip', 'bz2', 'lzma' or '' for what the first bytes announce."""
    return next((kind for kind, magic in MAGIC.items() if head.startswith(magic)), "")


class Work:
    """CPU time that unpacking may cost, at most `most_s`; SourceTooSlow beyond that."""

    def __init__(self, most_s: float) -> None:
        self._most_s, self._began, self._packed = most_s, time.process_time(), 0

    def came(self, packed: int) -> None:
        """Note that so many bytes are to be unpacked; raise SourceTooSlow if it has cost too much already."""
        self._packed += packed
        allowed = min(LEAST_S + PER_MIB_S * self._packed / (1 << 20), self._most_s)
        if time.process_time() - self._began > allowed:
            raise SourceTooSlow(
                f"the compressed data does not tell its size, and {self._packed} bytes of it cost "
                f"more than {allowed:.0f} s to unpack"
            )


class Spoiled(Exception):
    """Data that is not what its first bytes announce, or not all of it, or that wants too much memory."""


def unpacked(file: IO[bytes], kind: str, work: Work | None = None) -> Generator[bytes, None, None]:
    """Yield what `file` unpacks to, in pieces of at most a MiB; several streams in a row are one file, as
    their tools have it.

    Raise Spoiled, or SourceTooSlow if `work` is used up.
    """
    data, streams = file.read(PIECE), 0
    while not streams or _follows(data, kind):
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
        # Between streams there may be zeros.
        data = unpacker.unused.lstrip(b"\0")
        while len(data) < len(MAGIC[kind]):
            more = file.read(PIECE)
            if not more:
                break
            data = (data + more).lstrip(b"\0")


def _follows(data: bytes, kind: str) -> bool:
    """Tell whether a further stream begins; what is none belongs to nobody."""
    return data.startswith(MAGIC[kind])


class _Unpacker:
    """One stream, whichever library is for it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._rest = b""
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
        """What follows the stream."""
        return bytes(self._stream.unused_data)

    @property
    def needs_input(self) -> bool:
        return not self._rest if self._kind == "gzip" else bool(self._stream.needs_input)

    def unpack(self, data: bytes) -> bytes:
        """Return the next piece; raise Spoiled."""
        try:
            if self._kind != "gzip":
                return bytes(self._stream.decompress(data, PIECE))
            piece = self._stream.decompress(self._rest + data, PIECE)
            self._rest = self._stream.unconsumed_tail
            return bytes(piece)
        except self._errors as e:
            raise Spoiled(f"the {self._kind} data cannot be decompressed: {e}") from None
