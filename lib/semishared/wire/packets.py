# SPDX-License-Identifier: Apache-2.0
"""Extents between hosts: packets with their session's id, a number, and a MAC by the session's key.

    packet    magic, session, number, kind, codec, sizes of table, plain and packed payload; MAC;
              table; payload
    MAC       HMAC-SHA256 by the session's key of head and table, and of the payload's SHA-256 unless
              the table's hashes cover it
    MANIFEST  no table; the payload is the manifest's text
    EXTENTS   one or more extents: the table has (index, size, sha256) of each, the payload their contents

A receiver parses a packet only if its MAC is right: neither bytes of another session (two senders on one
port) nor forged ones reach a decompressor. Contents that are not packed are hashed once, not twice: the
receiver drops an extent that does not match the table (`Extent.sha256`), or that the manifest lacks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import TYPE_CHECKING, Iterator, Sequence

from ..errors import BadArguments, TooLarge, TransferCorrupt
from ..named import NamedTuple
from ..tools import compress, extents
from ..tools.compress import Bytes

if TYPE_CHECKING:
    import mmap

MANIFEST, EXTENTS = 1, 2
_HEAD = struct.Struct(">8s16sQBBIQQ")
_MAGIC = b"semishp2"
_MAC = 32
_ENTRY = struct.Struct(">QI32s")
MOST = {MANIFEST: extents.MANIFEST_LIMIT, EXTENTS: 16 * extents.EXTENT}
"""Most bytes of a packet's payload, packed or not, by its kind."""
_MOST_TABLE = 64 << 10


class Session(NamedTuple):
    """The id and key of a session's packets; the front-end makes them and sends them over ssh."""

    id: bytes
    """16 bytes"""
    key: bytes
    """32 bytes"""

    @classmethod
    def new(cls) -> Session:
        return cls(os.urandom(16), os.urandom(32))

    @property
    def text(self) -> str:
        """The session as text, ID:KEY in hexadecimal digits."""
        return f"{self.id.hex()}:{self.key.hex()}"

    @classmethod
    def of(cls, text: str) -> Session:
        """Return the session in `text`; raise BadArguments."""
        name, _, key = text.partition(":")
        try:
            session = cls(bytes.fromhex(name), bytes.fromhex(key))
        except ValueError:
            session = cls(b"", b"")
        if len(session.id) != 16 or len(session.key) != 32:
            raise BadArguments("not a session")
        return session

    def mac(self, head: Bytes, table: Bytes, payload: Bytes) -> bytes:
        """Return the MAC of a packet."""
        _, _, _, kind, compressor, _, _, _ = _HEAD.unpack(head)
        vouched = kind == EXTENTS and compressor == compress.NUMBERS[compress.NONE]
        parts = [head, table, b"" if vouched else hashlib.sha256(payload).digest()]
        return hmac.digest(self.key, b"".join(parts), "sha256")


class Extent(NamedTuple):
    """One extent of an image."""

    number: int
    sha256: str
    """The hash that the content must have."""
    content: Bytes


class Sealer:
    """Makes the packets of one stream."""

    def __init__(self, session: Session, compressor: str) -> None:
        self._session, self.compressor, self._number = session, compressor, 0

    def manifest(self, text: bytes) -> list[Bytes]:
        """Return a manifest as one packet, in pieces; raise TooLarge."""
        if len(text) > MOST[MANIFEST]:
            raise TooLarge(f"a manifest of {len(text)} bytes, and who receives it takes {MOST[MANIFEST]}")
        return self._seal(MANIFEST, b"", text)

    def extents(self, group: Sequence[Extent]) -> list[Bytes]:
        rows = ((item.number, len(item.content), bytes.fromhex(item.sha256)) for item in group)
        table = b"".join(_ENTRY.pack(*row) for row in rows)
        contents = [item.content for item in group]
        return self._seal(EXTENTS, table, contents[0] if len(contents) == 1 else b"".join(contents))

    def _seal(self, kind: int, table: bytes, plain: Bytes) -> list[Bytes]:
        name = self.compressor
        payload = compress.pack(name, plain)
        if len(payload) >= len(plain):
            name, payload = compress.NONE, plain
        sizes = (len(table), len(plain), len(payload))
        head = _HEAD.pack(_MAGIC, self._session.id, self._number, kind, compress.NUMBERS[name], *sizes)
        self._number += 1
        return [head, self._session.mac(head, table, payload), table, payload]


class Packet(NamedTuple):
    """A packet as it arrived, not verified yet. `payload` is page-aligned memory of the opener."""

    head: bytes
    mac: bytes
    table: memoryview
    payload: memoryview


def _extents(table: Bytes, content: memoryview) -> Iterator[Extent]:
    """Yield the extents of a payload; raise TransferCorrupt if it does not match the table's sizes."""
    offset = 0
    if len(table) % _ENTRY.size:
        raise TransferCorrupt("not a packet of extents")
    for index, size, digest in _ENTRY.iter_unpack(table):
        part = content[offset : offset + size]
        offset += size
        if len(part) != size or size > extents.EXTENT:
            raise TransferCorrupt("a packet of extents that is not whole")
        yield Extent(index, digest.hex(), part)
    if offset != len(content):
        raise TransferCorrupt("a packet of more than its extents")


class Opener:
    """Splits the bytes of one stream into packets, without copying them; raises TransferCorrupt.

    The interface is that of asyncio's BufferedProtocol: the caller writes to `get_buffer()`, then calls
    `buffer_updated`.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._number = session, 0
        self._start = bytearray(_HEAD.size + _MAC)
        self._spare: list[mmap.mmap] = []
        self._packet: Packet | None = None
        self._room = memoryview(self._start)
        self._rooms: list[memoryview] = []

    def get_buffer(self) -> memoryview:
        """Return the memory for the next bytes; it is never empty."""
        return self._room

    def buffer_updated(self, count: int) -> Packet | None:
        """Record that `count` bytes were written; return the packet that is complete now, or None."""
        self._room = self._room[count:]
        if self._room:
            return None
        if self._packet is None:
            self._packet = self._begun(bytes(self._start[: _HEAD.size]), bytes(self._start[_HEAD.size :]))
            self._rooms = [room for room in (self._packet.payload, self._packet.table) if room]
        if self._rooms:
            self._room = self._rooms.pop()
            return None
        packet, self._packet, self._room = self._packet, None, memoryview(self._start)
        self._number += 1
        return packet

    def _begun(self, head: bytes, mac: bytes) -> Packet:
        magic, session, number, kind, compressor, table, plain, packed = _HEAD.unpack(head)
        if magic != _MAGIC or session != self._session.id:
            raise TransferCorrupt("a stream of another session")
        is_known = kind in MOST and compressor in compress.NAMES
        if number != self._number or not is_known or max(packed, plain) > MOST[kind] or table > _MOST_TABLE:
            raise TransferCorrupt("a stream that is not whole")
        return Packet(head, mac, memoryview(bytearray(table)), self._memory(packed)[:packed])

    def _memory(self, size: int) -> memoryview:
        import mmap  # here: a process that only makes sessions does not need it

        if self._spare:
            spare = self._spare.pop()
            if len(spare) >= size:
                return memoryview(spare)
        return memoryview(mmap.mmap(-1, max(size, extents.EXTENT)))

    def open(self, packet: Packet) -> tuple[int, list[Extent], Bytes]:
        """Verify a packet; return (kind, extents of EXTENTS, plain payload) or raise TransferCorrupt."""
        _, _, _, kind, compressor, _, plain, _ = _HEAD.unpack(packet.head)
        if not hmac.compare_digest(packet.mac, self._session.mac(packet.head, packet.table, packet.payload)):
            raise TransferCorrupt("a stream that was forged or damaged")
        content = memoryview(compress.unpack(compress.NAMES[compressor], packet.payload, plain))
        return kind, list(_extents(packet.table, content)) if kind == EXTENTS else [], content

    def reuse(self, packet: Packet) -> None:
        """Take back the memory of a packet that is no longer used: new memory costs more than a copy."""
        if len(packet.payload) <= MOST[EXTENTS]:
            self._spare.append(packet.payload.obj)  # type: ignore[arg-type]
