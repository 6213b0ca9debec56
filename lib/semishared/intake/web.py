# SPDX-License-Identifier: Apache-2.0
"""The virtual size of an image behind a URL. oned waits for it, so only the beginning is fetched.

A compressed raw image has no header with a size. Of xz the index is asked for, of zstd the first frame tells;
others are read to their end, within the time limit.
"""

from __future__ import annotations

import io
import re
from contextlib import closing, contextmanager
from typing import Generator, Iterator

from ..errors import NotSupported, SourceTooSlow, SourceUnavailable, ToolFailed, ToolTimeout
from ..named import NamedTuple
from ..tools import curl, image_headers, inspection
from ..tools.run import piped, run, stream
from . import judge, packed_size
from .source import SSH, Source, refuse_greeting, unpacked_size
from .unpack import Packed, Spoiled, Work, decompressor, unpacked

SILENT_S = 60.0
LONGEST_HEADER = 256 << 10
TAIL = 1 << 20
"""Bytes of the end of an xz file that are asked for: the index of a terabyte."""


def size_of(source: Source, max_virtual_size: int, most_s: float) -> int:
    """Return the virtual size in bytes of the image behind a URL, by its header or else by the server.

    The caller limits the total time (unpack.within). Raise as `judge.beginning`, SourceUnavailable,
    NotSupported if the size is unknown, SourceTooSlow if unpacking takes too much CPU time.
    """
    source.check_url()
    head, length = (
        _first_bytes_by_ssh(source, *source.ssh) if source.ssh else _first_bytes(source, max_virtual_size)
    )
    kind = decompressor(head) if source.decompress else ""
    if kind:
        plain = _unpacked(head, kind)
        whole = len(head) < image_headers.HEAD
        # What is shorter than its head is known wholly, and then it has an end.
        told = judge.beginning(plain, None, source.taken, max_virtual_size, source.name) if plain else None
        # What the index says of a file with a header is no disk's size.
        if told is None and not whole and _needed(plain, source) == image_headers.HEAD:
            told = _by_index(source, kind, head, length)
        if told is None:
            return _size_unpacked(source, kind, max_virtual_size, most_s)
        inspection.check_claim(told, max_virtual_size, source.name)
        return told
    packed = not source.decompress
    size = judge.beginning(head, length, source.taken, max_virtual_size, source.name, packed)
    size = length if size is None else size
    if size is None:
        raise NotSupported(f"{source.name} does not tell its size: upload it from a file")
    inspection.check_claim(size, max_virtual_size, source.name)
    return size


def _by_index(source: Source, kind: str, head: bytes, length: int | None) -> int | None:
    """Return the unpacked size by the file's own word, None if it has none or the server does not send it."""
    if length is None or source.ssh:
        return None
    content = image_headers.beginning(head, length)
    if kind == "lzma":
        try:
            with _answered(source, f"{max(length - TAIL, 0)}-") as answer:
                tail = _at_most(TAIL, answer.chunks) if answer.status == 206 else b""
        except SourceUnavailable:
            return None
        if len(tail) != min(TAIL, length):
            return None
        start = length - len(tail)

        def at(offset: int, size: int) -> bytes:
            if offset >= start:
                return tail[offset - start : offset - start + size]
            # The beginning of the stream, which is read only where the file is one.
            return head[offset : offset + size]

        content = image_headers.Content(at, length, whole=False)
    return packed_size.size(content, kind)


def _at_most(size: int, chunks: Iterator[bytes]) -> bytes:
    """Return what comes, or a chunk more than `size` bytes of it: a server may send whatever it wants."""
    found = b""
    for chunk in chunks:
        found += chunk
        if len(found) > size:
            break
    return found


def _size_unpacked(source: Source, kind: str, max_virtual_size: int, most_s: float) -> int:
    """Return the virtual size of a compressed image; only one without a header is read to its end."""
    try:
        with _opened(source) as packed, closing(unpacked(packed, kind, Work(most_s))) as pieces:
            return unpacked_size(pieces, source, max_virtual_size)
    except (OSError, Spoiled) as e:
        raise SourceUnavailable(f"{source.name}: {e}") from None


def _unpacked(head: bytes, kind: str) -> bytes:
    """Return the beginning of the unpacked file, given its packed `head`."""
    found = b""
    try:
        with closing(unpacked(io.BytesIO(head), kind)) as pieces:
            for piece in pieces:
                found += piece
                if len(found) >= image_headers.HEAD:
                    break
    except Spoiled:
        pass
    return found


class _Answer(NamedTuple):
    """What a web server has sent, behind all redirections."""

    status: int
    length: int | None
    """Of the content, if the server says it."""
    chunks: Iterator[bytes]


class _Download:
    """Chunks as a file to read from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def read(self, size: int, /) -> bytes:
        data = self._rest or next(self._chunks, b"")
        self._rest = data[size:]
        return data[:size]


@contextmanager
def _opened(source: Source) -> Iterator[Packed]:
    if source.ssh:
        destination, path = source.ssh
        with _sent(source, [*SSH, destination, f"cat -- '{path}'"]) as chunks:
            yield _Download(chunks)
        return
    with _answered(source) as answer:
        yield _Download(answer.chunks)


@contextmanager
def _sent(source: Source, argv: list[str], stdin: bytes = b"") -> Iterator[Generator[bytes, None, None]]:
    """Yield what a program fetches, and end it with the block, for which the beginning may be enough.

    Raise SourceUnavailable, SourceTooSlow.
    """
    try:
        with closing(stream(argv, stdin=stdin, silence_s=SILENT_S)) as chunks:
            yield chunks
    except ToolFailed as e:
        why = curl.reason(e.detail, source.path) if stdin else e.detail
        raise SourceUnavailable(f"{source.name}: {why}") from None
    except ToolTimeout:
        raise SourceTooSlow(f"{source.name} has sent nothing for {SILENT_S:.0f} s") from None


@contextmanager
def _answered(source: Source, range: str = "") -> Iterator[_Answer]:
    """Ask for a file on a web server, or for a range of it ("FIRST-LAST").

    Raise SourceUnavailable, SourceTooSlow.
    """
    words = ["--include", "--suppress-connect-headers", *(["--range", range] if range else [])]
    with _sent(source, [*curl.argv(source.trusting), *words], curl.config(source.path)) as chunks:
        yield _answer(chunks)


def _answer(chunks: Generator[bytes, None, None]) -> _Answer:
    """Return the last answer in what curl prints: the header of each one comes before its content."""
    data = b""
    while True:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            chunk = next(chunks, b"")
            if not chunk or len(data) > LONGEST_HEADER:
                return _Answer(0, None, iter(()))
            data += chunk
            continue
        first = re.match(rb"HTTP/[0-9.]+ ([0-9]{3})", head)
        status = int(first.group(1)) if first else 0
        fields = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
        }
        if 100 <= status < 200 or (300 <= status < 400 and b"location" in fields):
            data = rest
            continue
        length = fields.get(b"content-length", b"")
        return _Answer(
            status, int(length) if re.fullmatch(rb"[0-9]{1,19}", length) else None, _behind(rest, chunks)
        )


def _behind(rest: bytes, chunks: Iterator[bytes]) -> Iterator[bytes]:
    if rest:
        yield rest
    yield from chunks


def _needed(head: bytes, source: Source) -> int:
    """Return how many bytes of a file's beginning tell its size; raise as `judge.needed`."""
    return judge.needed(head, source.name) if source.taken == judge.DISK else image_headers.HEAD


def _first_bytes(source: Source, most: int) -> tuple[bytes, int | None]:
    """Return the beginning of a file on a web server, and its length if that is known.

    Raise UnsafeImage for more than `most` bytes, NotSupported as `judge.needed`.
    """
    with _answered(source) as answer:
        inspection.check_claim(answer.length or 0, most, source.name)
        head, needed = bytearray(), image_headers.HEAD
        for chunk in answer.chunks:
            head += chunk
            while len(head) >= needed:
                wanted = _needed(bytes(head[:needed]), source)
                if wanted == needed:
                    return bytes(head[:needed]), answer.length
                needed = wanted
        return bytes(head), len(head) if answer.length is None else answer.length


def _first_bytes_by_ssh(source: Source, destination: str, path: str) -> tuple[bytes, int | None]:
    """Return the beginning of a file on another machine, and its length; raise as `judge.needed`."""
    refuse_greeting(destination)
    try:
        head, needed, wanted = b"", 0, image_headers.HEAD
        while len(head) == needed < wanted:
            needed = wanted
            with piped([*SSH, destination, f"head -c {needed} -- '{path}'"], feed=False) as stream:
                head = stream.read()
            wanted = _needed(head, source)
        return head, int(run([*SSH, destination, f"stat -L -c %s -- '{path}'"]))
    except ToolFailed as e:
        raise SourceUnavailable(f"{path} on {destination}: {e.detail}") from None
