# SPDX-License-Identifier: Apache-2.0
"""How large an image behind a URL will be as a disk. oned waits for the answer, so only its beginning is fetched.

But for a compressed raw image, whose size nothing tells: that is read through, as far as the time allows.
"""

from __future__ import annotations

import bz2
import gzip
import http.client
import lzma
import time
import urllib.request
import zlib
from typing import IO, Callable, ContextManager

from ..errors import NotSupported, SourceUnavailable, ToolFailed
from . import inspection
from .run import piped, run
from .source import HEAD, SSH, Source, decompressor

READ_S = 45
"""oned gives up after 90 s."""
OPENERS: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
    "gzip": lambda file: gzip.GzipFile(fileobj=file),  # type: ignore[dict-item, return-value]
    "bz2": lambda file: bz2.BZ2File(file),
    "lzma": lambda file: lzma.LZMAFile(file),
}


def size_of(source: Source) -> int:
    """Return the size in bytes, as a disk, of the image behind a URL: what its header or else the server says."""
    source.check_url()
    head, length = _first_bytes_by_ssh(*source.ssh) if source.ssh else _first_bytes(source.path)
    kind = decompressor(head) if source.decompress else ""
    size = inspection.size_in_header(_unpacked(head, kind))
    if size is None and kind:
        return _size_unpacked(source, kind)
    size = length if size is None else size
    if size is None:
        raise NotSupported(f"{source.path} does not tell its size: upload it from a file")
    return size


def _size_unpacked(source: Source, kind: str) -> int:
    """Return the size of what the compressed file unpacks to."""
    deadline, size = time.monotonic() + READ_S, 0
    try:
        with _opened(source) as packed, OPENERS[kind](packed) as file:
            for chunk in iter(lambda: file.read(1 << 20), b""):
                size += len(chunk)
                if time.monotonic() > deadline:
                    raise NotSupported(f"the size of the {kind} data at {source.path} is not known in {READ_S} s: upload a file")
    except (EOFError, OSError, http.client.HTTPException, zlib.error, lzma.LZMAError) as e:
        raise SourceUnavailable(f"{source.path}: {getattr(e, 'reason', None) or e}") from None
    return size


def _opened(source: Source) -> ContextManager[IO[bytes]]:
    if source.ssh:
        return piped([*SSH, source.ssh[0], f"cat -- '{source.ssh[1]}'"], feed=False)
    opened: ContextManager[IO[bytes]] = urllib.request.urlopen(source.path, timeout=60)
    return opened


def _first_bytes(url: str) -> tuple[bytes, int | None]:
    """Return how a file on a web server begins, and its length if the server tells."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            length = answer.headers.get("Content-Length", "")
            return answer.read(HEAD), int(length) if length.isascii() and length.isdigit() else None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise SourceUnavailable(f"{url}: {getattr(e, 'reason', None) or e}") from None


def _first_bytes_by_ssh(destination: str, path: str) -> tuple[bytes, int | None]:
    """Return how a file on another machine begins, and its length."""
    try:
        with piped([*SSH, destination, f"head -c {HEAD} -- '{path}'"], feed=False) as stream:
            head = stream.read()
        return head, int(run([*SSH, destination, f"stat -L -c %s -- '{path}'"]))
    except ToolFailed as e:
        raise SourceUnavailable(f"{path} on {destination}: {e.detail}") from None


def _unpacked(head: bytes, kind: str) -> bytes:
    """Return the beginning of a file that begins with `head`, compressed by `kind` or not."""
    try:
        if kind == "gzip":
            return zlib.decompressobj(31).decompress(head, HEAD)
        if kind:
            unpacker = bz2.BZ2Decompressor() if kind == "bz2" else lzma.LZMADecompressor(memlimit=256 << 20)
            return unpacker.decompress(head, HEAD)
    except (OSError, ValueError, zlib.error, lzma.LZMAError):
        return b""
    return head
