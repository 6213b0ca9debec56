# SPDX-License-Identifier: Apache-2.0
"""The unpacked size of a file by its own index: xz has one at its end, zstd a size in each frame's header.

gz and bz2 have none (the last four bytes of gz are the size modulo 4 GiB): they are unpacked. What unpacks xz
and zstd holds a file to that size. Sources: "The .xz File Format" 1.2, RFC 8878.
"""

from __future__ import annotations

from ..tools.image_headers import Content

XZ_FOOTER = 12
LARGEST_INDEX = 16 << 20
"""Bytes; a block of xz -T has 24 MiB and 6 to 12 bytes there."""
ZSTD, SKIPPED = 0xFD2FB528, 0x184D2A50
MOST_BLOCKS = 32 << 20
"""Blocks and frames, also those that are skipped: an upload says how many it has."""
MOST_PADDING = 64 << 10
"""Bytes of zeros behind a stream; each 4 of them are looked at, and xz itself writes none."""


def size(content: Content, kind: str) -> int | None:
    """Return the unpacked size of a file, None if it does not say it."""
    if content.length is None:
        return None
    if kind == "lzma":
        return _of_xz(content, content.length)
    return _of_zstd(content, content.length) if kind == "zstd" else None


def _of_xz(content: Content, end: int) -> int | None:
    """Return the sum of all streams, which stand one behind the other; read from the end."""
    total = padding = 0
    while end > 0:
        footer = content.at(end - XZ_FOOTER, XZ_FOOTER) if end >= XZ_FOOTER else b""
        if footer[-4:] == bytes(4):
            end, padding = end - 4, padding + 4
            if padding > MOST_PADDING:
                return None
            continue
        if footer[-2:] != b"YZ":
            return None
        length = (int.from_bytes(footer[4:8], "little") + 1) * 4
        start = end - XZ_FOOTER - length
        if length > LARGEST_INDEX or start < XZ_FOOTER:
            return None
        found = _records(content.at(start, length))
        if found is None:
            return None
        packed, plain = found
        end, total = start - packed - XZ_FOOTER, total + plain
        if content.at(end, 6) != b"\xfd7zXZ\0":
            return None
    return total


def _records(index: bytes) -> tuple[int, int] | None:
    """Return the packed (with padding) and the unpacked bytes of all blocks of a stream, by its index."""
    try:
        if index[0]:
            return None
        count, at = _number(index, 1)
        packed = plain = 0
        if count > len(index):
            return None
        for _ in range(count):
            unpadded, at = _number(index, at)
            size, at = _number(index, at)
            packed, plain = packed + (unpadded + 3) // 4 * 4, plain + size
    except IndexError:
        return None
    return packed, plain


def _number(index: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits a byte, and where the next begins; raise IndexError."""
    value = shift = 0
    while True:
        byte = index[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80 or shift > 63:
            return value, at


def _of_zstd(content: Content, length: int) -> int | None:
    """Return the sum of all frames; None if one of them does not say its own, as of what came from a pipe."""
    at = total = blocks = 0
    while at < length:
        head = content.at(at, 18).ljust(18, b"\0")
        magic = int.from_bytes(head[:4], "little")
        if magic & 0xFFFFFFF0 == SKIPPED:
            at, blocks = at + 8 + int.from_bytes(head[4:8], "little"), blocks + 1
            if blocks > MOST_BLOCKS:
                return None
            continue
        found = frame(head)
        if found is None:
            return None
        start, plain, checksum = found
        at, total = at + start, total + plain
        if not content.whole:
            return total
        last = False
        while not last:
            block = int.from_bytes(content.at(at, 3), "little")
            last, kind, size = bool(block & 1), block >> 1 & 3, block >> 3
            at += 3 + (1 if kind == 1 else size)
            blocks += 1
            if at > length or blocks > MOST_BLOCKS:
                return None
        at += checksum
    return total


def frame(head: bytes) -> tuple[int, int, int] | None:
    """Return the bytes of a frame's header, its unpacked size, and the bytes of its checksum."""
    if int.from_bytes(head[:4], "little") != ZSTD or len(head) < 18:
        return None
    flags = head[4]
    single = bool(flags & 0x20)
    dictionary, width = (0, 1, 2, 4)[flags & 3], (1 if single else 0, 2, 4, 8)[flags >> 6]
    at = 5 + (not single) + dictionary
    if not width:
        return None
    return (
        at + width,
        int.from_bytes(head[at : at + width], "little") + 256 * (width == 2),
        4 * bool(flags & 4),
    )
