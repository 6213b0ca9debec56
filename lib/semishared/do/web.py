# SPDX-License-Identifier: Apache-2.0
"""How large an image behind a URL will be as a disk. oned waits for the answer, so only its beginning is fetched."""

from __future__ import annotations

import bz2
import http.client
import lzma
import urllib.request
import zlib

from ..errors import MissingImage
from . import inspection
from .run import piped, run
from .source import HEAD, SSH, Source, decompressor


def size_of(source: Source) -> int:
    """Return the size in bytes, as a disk, of the image behind a URL: what its header or else the server says."""
    source.check_url()
    head, length = _first_bytes_by_ssh(*source.ssh) if source.ssh else _first_bytes(source.path)
    kind = decompressor(head) if source.decompress else ""
    size = inspection.size_in_header(_unpacked(head, kind))
    if size is None and kind:
        raise MissingImage(f"the size of the {kind} data at {source.path} is not known before it is here; upload it from a file")
    size = length if size is None else size
    if size is None:
        raise MissingImage(f"{source.path} does not tell its size")
    return size


def _first_bytes(url: str) -> tuple[bytes, int | None]:
    """Return how a file on a web server begins, and its length if the server tells."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            length = answer.headers.get("Content-Length", "")
            return answer.read(HEAD), int(length) if length.isascii() and length.isdigit() else None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise MissingImage(f"{url}: {getattr(e, 'reason', None) or e}") from None


def _first_bytes_by_ssh(destination: str, path: str) -> tuple[bytes, int | None]:
    """Return how a file on another machine begins, and its length."""
    with piped([*SSH, destination, f"head -c {HEAD} -- '{path}'"], feed=False) as stream:
        head = stream.read()
    return head, int(run([*SSH, destination, f"stat -L -c %s -- '{path}'"]))


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
