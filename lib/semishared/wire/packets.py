# SPDX-License-Identifier: Apache-2.0
"""Extents between hosts: packets with the id of their session, a number, and a MAC with its key.

    packet    magic, session, number, kind, codec, sizes of table, plain and packed payload; MAC; table;
    payload
    MAC       HMAC-SHA256 with the session's key over head and table, and over the payload's SHA-256 if
    nothing else
              vouches for it
    MANIFEST  no table; the payload is the manifest's text
    EXTENTS   one or more extents: the table has (index, size, sha256) of each, the payload their contents

A receiver looks into a packet only if its MAC is right; so neither another session's bytes (two senders on
one port) nor forged ones reach a decompressor. Contents that are not packed are hashed once, not twice: what
is not what the table says (`Extent.sha256`) is not taken by who gets it, and neither is what the manifest
does not have.
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
"""No packet's payload is larger than this, by its kind, packed or not."""
_MOST_TABLE = 64 << 10


class Session(NamedTuple):
    """What the packets of a session have in common; both are made by the front-end and travel over ssh."""

    id: bytes
    """16 bytes"""
    key: bytes
    """32 bytes"""

    @classmethod
    def new(cls) -> Session:
        """Return a session that nobody else has."""
        return cls(os.urandom(16), os.urandom(32))

    @property
    def text(self) -> str:
        """The session in its text form, ID:KEY in hexadecimal digits."""
        return f"{self.id.hex()}:{self.key.hex()}"

    @classmethod
    def of(cls, text: str) -> Session:
        """Return the session of a text; raise BadArguments."""
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
    """What the content is to be."""
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
        """Return extents as one packet, in pieces."""
        table = b"".join(
            _ENTRY.pack(item.number, len(item.content), bytes.fromhex(item.sha256)) for item in group
        )
        return self._seal(
            EXTENTS, table, group[0].content if len(group) == 1 else b"".join(item.content for item in group)
        )

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
    """A packet as it came; nobody has looked into it yet. `payload` is the opener's memory, and begins at a
    page of it.
    """

    head: bytes
    mac: bytes
    table: memoryview
    payload: memoryview


def _extents(table: Bytes, content: memoryview) -> Iterator[Extent]:
    """Yield the extents of a payload; raise TransferCorrupt if there are not those that the table names."""
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
    """Takes the bytes of one stream as they come, without copying them, and finds its packets; raises
    TransferCorrupt where something begins that does not belong there.

    As asyncio's BufferedProtocol: what comes is to be written to `get_buffer()`, and then `buffer_updated` to
    be told.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._number = session, 0
        self._start = bytearray(_HEAD.size + _MAC)
        self._spare: list[mmap.mmap] = []
        self._packet: Packet | None = None
        self._room = memoryview(self._start)
        self._rooms: list[memoryview] = []

    def get_buffer(self) -> memoryview:
        """Return where the next bytes are to be written; never empty."""
        return self._room

    def buffer_updated(self, count: int) -> Packet | None:
        """Take note that `count` bytes were written; return the packet that is complete now."""
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
        import mmap  # here: it is not needed by who only makes sessions

        if self._spare:
            spare = self._spare.pop()
            if len(spare) >= size:
                return memoryview(spare)
        return memoryview(mmap.mmap(-1, max(size, extents.EXTENT)))

    def open(self, packet: Packet) -> tuple[int, list[Extent], Bytes]:
        """Return (kind, extents of an EXTENTS packet, plain payload); raise TransferCorrupt."""
        _, _, _, kind, compressor, _, plain, _ = _HEAD.unpack(packet.head)
        if not hmac.compare_digest(packet.mac, self._session.mac(packet.head, packet.table, packet.payload)):
            raise TransferCorrupt("a stream that was forged or damaged")
        content = memoryview(compress.unpack(compress.NAMES[compressor], packet.payload, plain))
        return kind, list(_extents(packet.table, content)) if kind == EXTENTS else [], content

    def reuse(self, packet: Packet) -> None:
        """Take back the memory of a packet of which nothing is looked at any more: new memory costs more than
        a copy.
        """
        if len(packet.payload) <= MOST[EXTENTS]:
            self._spare.append(packet.payload.obj)  # type: ignore[arg-type]
