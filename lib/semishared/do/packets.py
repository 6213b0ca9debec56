# SPDX-License-Identifier: Apache-2.0
"""Extents on their way between hosts: packets that carry the id of their session, their number, and a MAC with its key.

    packet    magic, session, number, kind, codec, plain size, packed size, MAC, payload
    MAC       BLAKE2b with the session's key over all before it and the payload
    MANIFEST  the manifest's text
    EXTENTS   one or more extents: count, then (index, size, sha256) of each, then their contents

A receiver looks into a packet only if its MAC is right; so neither another session's bytes (two senders on one port) nor
forged or damaged ones reach a decompressor, and what came out is compared with the manifest, extent by extent.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from typing import Iterator, NamedTuple, Sequence

from ..errors import BadArguments, TransferCorrupt
from . import codec, extents

MANIFEST, EXTENTS = 1, 2
_HEAD = struct.Struct(">8s16sQBBQQ")
_MAGIC = b"semishp1"
_MAC = 32
_ENTRY = struct.Struct(">QI32s")
MOST = 16 * extents.EXTENT
"""No packet is larger than this, packed or not."""


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

    def mac(self, head: bytes, payload: bytes) -> bytes:
        """Return the MAC of a packet."""
        digest = hashlib.blake2b(head, key=self.key, digest_size=_MAC)
        digest.update(payload)
        return digest.digest()


class Extent(NamedTuple):
    """One extent of an image."""

    number: int
    sha256: str
    content: bytes


class Sealer:
    """Makes the packets of one stream."""

    def __init__(self, session: Session, compressor: str) -> None:
        self._session, self.compressor, self._number = session, compressor, 0

    def manifest(self, text: bytes) -> list[bytes]:
        """Return a manifest as one packet, in pieces."""
        return self._seal(MANIFEST, text)

    def extents(self, group: Sequence[Extent]) -> list[bytes]:
        """Return extents as one packet, in pieces."""
        head = [struct.pack(">I", len(group))]
        head += [_ENTRY.pack(item.number, len(item.content), bytes.fromhex(item.sha256)) for item in group]
        return self._seal(EXTENTS, b"".join([*head, *(item.content for item in group)]))

    def _seal(self, kind: int, plain: bytes) -> list[bytes]:
        name = self.compressor
        payload = codec.pack(name, plain)
        if len(payload) >= len(plain):
            name, payload = codec.NONE, plain
        head = _HEAD.pack(_MAGIC, self._session.id, self._number, kind, codec.NUMBERS[name], len(plain), len(payload))
        self._number += 1
        return [head, self._session.mac(head, payload), payload]


class Opener:
    """Takes the bytes of one stream as they come and yields what is in its packets; raises TransferCorrupt at the first
    byte that does not belong there."""

    def __init__(self, session: Session) -> None:
        self._session, self._number = session, 0
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield (kind, plain content) of each packet that is complete now."""
        self._buffer += chunk
        while len(self._buffer) >= _HEAD.size + _MAC:
            head = bytes(self._buffer[: _HEAD.size])
            magic, session, number, kind, compressor, plain, packed = _HEAD.unpack(head)
            if magic != _MAGIC or session != self._session.id:
                raise TransferCorrupt("a stream of another session")
            if number != self._number or not packed <= MOST or not plain <= MOST or compressor not in codec.NAMES:
                raise TransferCorrupt("a stream that is not whole")
            start = _HEAD.size + _MAC
            if len(self._buffer) < start + packed:
                return
            mac, payload = bytes(self._buffer[_HEAD.size : start]), bytes(self._buffer[start : start + packed])
            del self._buffer[: start + packed]
            if not hmac.compare_digest(mac, self._session.mac(head, payload)):
                raise TransferCorrupt("a stream that was forged or damaged")
            self._number += 1
            yield kind, codec.unpack(codec.NAMES[compressor], payload, plain)


def extents_in(plain: bytes) -> Iterator[Extent]:
    """Yield the extents of an EXTENTS packet; raise TransferCorrupt."""
    try:
        (count,) = struct.unpack_from(">I", plain)
        offset = 4 + count * _ENTRY.size
        for number in range(count):
            index, size, digest = _ENTRY.unpack_from(plain, 4 + number * _ENTRY.size)
            content = plain[offset : offset + size]
            offset += size
            if len(content) != size or size > extents.EXTENT:
                raise TransferCorrupt("a packet of extents that is not whole")
            yield Extent(index, digest.hex(), content)
    except struct.error:
        raise TransferCorrupt("not a packet of extents") from None
