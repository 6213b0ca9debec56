# SPDX-License-Identifier: Apache-2.0
"""The virtual size of an image behind a URL. oned waits for it, so only the beginning is fetched.

A compressed raw image has no header with a size: it is read to its end, within the time limit.
"""

from __future__ import annotations

import http.client
import io
import urllib.request
from contextlib import closing
from typing import IO, ContextManager

from ..errors import NotSupported, SourceUnavailable, ToolFailed
from ..tools import inspection
from ..tools.run import piped, run
from .source import HEAD, SSH, Source, refuse_greeting, unpacked_size
from .unpack import Spoiled, Work, decompressor, unpacked


def size_of(source: Source, max_virtual_size: int, most_s: float) -> int:
    """Return the virtual size in bytes of the image behind a URL, by its header or else by the server.

    The caller limits the total time (unpack.within). Raise UnsafeImage beyond `max_virtual_size`,
    SourceUnavailable, NotSupported if the size is unknown, SourceTooSlow if unpacking takes too much CPU
    time.
    """
    source.check_url()
    head, length = _first_bytes_by_ssh(*source.ssh) if source.ssh else _first_bytes(source.path)
    kind = decompressor(head) if source.decompress else ""
    if kind:
        told = inspection.size_in_header(_unpacked(head, kind), source.path)
        if told is None:
            return _size_unpacked(source, kind, max_virtual_size, most_s)
        inspection.check_claim(told, max_virtual_size, source.path)
        return told
    size = inspection.size_in_header(head, source.path)
    size = length if size is None else size
    if size is None:
        raise NotSupported(f"{source.path} does not tell its size: upload it from a file")
    inspection.check_claim(size, max_virtual_size, source.path)
    return size


def _size_unpacked(source: Source, kind: str, max_virtual_size: int, most_s: float) -> int:
    """Return the virtual size of a compressed image; only one without a header is read to its end."""
    try:
        with _opened(source) as packed, closing(unpacked(packed, kind, Work(most_s))) as pieces:
            return unpacked_size(pieces, max_virtual_size, source.path)
    except (OSError, http.client.HTTPException, Spoiled) as e:
        raise SourceUnavailable(f"{source.path}: {getattr(e, 'reason', None) or e}") from None


def _unpacked(head: bytes, kind: str) -> bytes:
    """Return the beginning of the unpacked file, given its packed `head`."""
    found = b""
    try:
        for piece in unpacked(io.BytesIO(head), kind):
            found += piece
            if len(found) >= HEAD:
                break
    except Spoiled:
        pass
    return found


def _opened(source: Source) -> ContextManager[IO[bytes]]:
    if source.ssh:
        return piped([*SSH, source.ssh[0], f"cat -- '{source.ssh[1]}'"], feed=False)
    opened: ContextManager[IO[bytes]] = urllib.request.urlopen(source.path, timeout=60)
    return opened


def _first_bytes(url: str) -> tuple[bytes, int | None]:
    """Return the beginning of a file on a web server, and its length if the server sends it."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            length = answer.headers.get("Content-Length", "")
            return answer.read(HEAD), int(length) if length.isascii() and length.isdigit() else None
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise SourceUnavailable(f"{url}: {getattr(e, 'reason', None) or e}") from None


def _first_bytes_by_ssh(destination: str, path: str) -> tuple[bytes, int | None]:
    """Return the beginning of a file on another machine, and its length."""
    refuse_greeting(destination)
    try:
        with piped([*SSH, destination, f"head -c {HEAD} -- '{path}'"], feed=False) as stream:
            head = stream.read()
        return head, int(run([*SSH, destination, f"stat -L -c %s -- '{path}'"]))
    except ToolFailed as e:
        raise SourceUnavailable(f"{path} on {destination}: {e.detail}") from None
