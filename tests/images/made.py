# SPDX-License-Identifier: Apache-2.0
"""Images written as other programs write them, from the published specifications.

VMware, "Virtual Disk Format 5.0"; Microsoft, "Virtual Hard Disk Image Format Specification" and [MS-VHDX];
VirtualBox' VDICore.h. No tool of this project reads them back first: qemu-img does (test_formats.py).
"""

from __future__ import annotations

import struct
import uuid
import zlib

SECTOR = 512
MiB = 1 << 20
GRAIN = 128 * SECTOR
PER_TABLE = 512


def pieces(disk: bytes, size: int) -> list[bytes]:
    """Return a disk in pieces of `size` bytes, the last one padded; b"" for a piece of zeros."""
    found = [disk[at : at + size].ljust(size, b"\0") for at in range(0, len(disk), size)]
    return [piece if piece.strip(b"\0") else b"" for piece in found]


# -- VHD


def geometry(sectors: int) -> tuple[int, int, int]:
    """Return cylinders, heads and sectors per track by the specification's appendix."""
    sectors = min(sectors, 65535 * 16 * 255)
    if sectors >= 65535 * 16 * 63:
        return sectors // 255 // 16, 16, 255
    track, rest = 17, sectors // 17
    heads = max((rest + 1023) // 1024, 4)
    if rest >= heads * 1024 or heads > 16:
        track, heads, rest = 31, 16, sectors // 31
    if rest >= heads * 1024:
        track, heads, rest = 63, 16, sectors // 63
    return rest // heads, heads, track


def _summed(block: bytes, at: int) -> bytes:
    """Return a block with its checksum, the complement of the sum of its bytes, at an offset."""
    block = block[:at] + bytes(4) + block[at + 4 :]
    return block[:at] + struct.pack(">I", ~sum(block) & 0xFFFFFFFF) + block[at + 4 :]


def vhd_footer(size: int, kind: int, creator: bytes, *, offset: int = (1 << 64) - 1) -> bytes:
    footer = struct.pack(
        ">8sIIQI4sII", b"conectix", 2, 0x10000, offset, 0x2A2A2A2A, creator, 0x50003, 0x5769326B
    )
    footer += struct.pack(">QQ", size, size) + struct.pack(">HBB", *geometry(size // SECTOR))
    footer += struct.pack(">II", kind, 0) + uuid.UUID(int=7).bytes + b"\0"
    return _summed(footer.ljust(SECTOR, b"\0"), 64)


def vhd_fixed(disk: bytes, creator: bytes = b"win ") -> bytes:
    return disk + vhd_footer(len(disk), 2, creator)


def vhd(disk: bytes, creator: bytes = b"win ", *, parent: str = "", block: int = 2 * MiB) -> bytes:
    """Return a dynamic VHD, or a differencing one."""
    footer = vhd_footer(len(disk), 4 if parent else 3, creator, offset=SECTOR)
    parts = pieces(disk, block)
    table_size = -(-4 * len(parts) // SECTOR) * SECTOR
    header = struct.pack(">8sQQIII", b"cxsparse", (1 << 64) - 1, 3 * SECTOR, 0x10000, len(parts), block)
    header = header.ljust(40, b"\0") + (uuid.UUID(int=8).bytes if parent else bytes(16))
    header = header.ljust(64, b"\0") + parent.encode("utf-16-be").ljust(512, b"\0")
    bitmap = b"\xff" * (block // SECTOR // 8)
    at, table, data = 3 * SECTOR + table_size, [], b""
    for part in parts:
        table.append((at + len(data)) // SECTOR if part else 0xFFFFFFFF)
        data += bitmap.ljust(-(-len(bitmap) // SECTOR) * SECTOR, b"\0") + part if part else b""
    words = struct.pack(f">{len(table)}I", *table).ljust(table_size, b"\xff")
    return footer + _summed(header.ljust(1024, b"\0"), 36) + words + data + footer


# -- VDI


def vdi(disk: bytes, *, static: bool = False, parent: bool = False) -> bytes:
    """Return a VDI 1.1, or a differencing one, as VirtualBox writes it."""
    parts = pieces(disk, MiB)
    data_at = 2 * MiB
    table, data = [], b""
    for part in parts:
        used = bool(part) or static
        table.append(len(data) // MiB if used else 0xFFFFFFFF)
        data += part.ljust(MiB, b"\0") if used else b""
    head = b"<<< Oracle VM VirtualBox Disk Image >>>\n".ljust(64, b"\0")
    kind = 4 if parent else 2 if static else 1
    head += struct.pack("<IIIII", 0xBEDA107F, 0x00010001, 0x190, kind, 0) + bytes(256)
    head += struct.pack("<II", MiB, data_at) + struct.pack("<IIII", 0, 0, 0, SECTOR) + bytes(4)
    head += struct.pack("<QIIII", len(disk), MiB, 0, len(parts), len(data) // MiB)
    head += uuid.UUID(int=1).bytes_le + uuid.UUID(int=2).bytes_le
    head += (uuid.UUID(int=3).bytes_le if parent else bytes(16)) + bytes(16)
    words = struct.pack(f"<{len(table)}I", *table)
    return (head.ljust(MiB, b"\0") + words).ljust(data_at, b"\0") + data


# -- VMDK


def descriptor(kind: str, extents: str, parent: str = "") -> bytes:
    hint = f'parentFileNameHint="{parent}"\n' if parent else ""
    return (
        "# Disk DescriptorFile\nversion=1\nCID=fffffffe\nparentCID=ffffffff\n"
        f'createType="{kind}"\n{hint}\n# Extent description\n{extents}\n\n# The Disk Data Base\n#DDB\n\n'
        'ddb.virtualHWVersion = "4"\nddb.adapterType = "lsilogic"\n'
    ).encode()


def _vmdk_head(capacity: int, text: bytes, directory: int, overhead: int, *, stream: bool) -> bytes:
    head = b"KDMV" + struct.pack("<II", 3 if stream else 1, 0x30001 if stream else 1)
    head += struct.pack("<QQQQI", capacity, GRAIN // SECTOR, 1, 20, PER_TABLE)
    head += struct.pack("<QQQB", 0, directory, overhead, 0) + b"\n \r\n" + struct.pack("<H", int(stream))
    return head.ljust(SECTOR, b"\0") + text.ljust(20 * SECTOR, b"\0")


def vmdk(disk: bytes, *, parent: str = "") -> bytes:
    """Return a monolithicSparse VMDK."""
    capacity = len(disk) // SECTOR
    text = descriptor("monolithicSparse", f'RW {capacity} SPARSE "disk.vmdk"', parent)
    parts = pieces(disk, GRAIN)
    tables = -(-len(parts) // PER_TABLE)
    directory, first = 21, 22
    data_at = -(-(first + 4 * tables) // 128) * 128
    words, data = [], b""
    for part in parts:
        words.append(data_at + len(data) // SECTOR if part else 0)
        data += part
    words += [0] * (tables * PER_TABLE - len(words))
    made = _vmdk_head(capacity, text, directory, data_at, stream=False)
    made += struct.pack(f"<{tables}I", *(first + 4 * number for number in range(tables))).ljust(SECTOR, b"\0")
    made += struct.pack(f"<{len(words)}I", *words)
    return made.ljust(data_at * SECTOR, b"\0") + data


def _padded(data: bytes) -> bytes:
    return data.ljust(-(-len(data) // SECTOR) * SECTOR, b"\0")


def vmdk_stream(disk: bytes) -> bytes:
    """Return a streamOptimized VMDK, as appliances have it: grains packed, tables behind them."""
    capacity = len(disk) // SECTOR
    text = descriptor("streamOptimized", f'RW {capacity} SPARSE "disk.vmdk"')
    made = _vmdk_head(capacity, text, (1 << 64) - 1, 128, stream=True).ljust(128 * SECTOR, b"\0")
    words = []
    parts = pieces(disk, GRAIN)
    for number, part in enumerate(parts):
        words.append(len(made) // SECTOR if part else 0)
        if part:
            packed = zlib.compress(part)
            made += _padded(struct.pack("<QI", number * 128, len(packed)) + packed)
    tables = []
    for at in range(0, len(words), PER_TABLE):
        made += struct.pack("<QII", 4, 0, 1).ljust(SECTOR, b"\0")
        tables.append(len(made) // SECTOR)
        table = words[at : at + PER_TABLE]
        made += struct.pack(f"<{PER_TABLE}I", *table, *[0] * (PER_TABLE - len(table)))
    made += struct.pack("<QII", 1, 0, 2).ljust(SECTOR, b"\0")
    directory = len(made) // SECTOR
    made += struct.pack(f"<{len(tables)}I", *tables).ljust(SECTOR, b"\0")
    made += struct.pack("<QII", 1, 0, 3).ljust(SECTOR, b"\0")
    made += _vmdk_head(capacity, text, directory, 128, stream=True)[:SECTOR]
    return made + bytes(SECTOR)


# -- VHDX


def _crc32c(data: bytes) -> int:
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _crc_row(number: int) -> int:
    for _ in range(8):
        number = (number >> 1) ^ (0x82F63B78 if number & 1 else 0)
    return number


_CRC = [_crc_row(number) for number in range(256)]


def _checked(block: bytes) -> bytes:
    return block[:4] + struct.pack("<I", _crc32c(block[:4] + bytes(4) + block[8:])) + block[8:]


def _guid(text: str) -> bytes:
    return uuid.UUID(text).bytes_le


def vhdx(
    disk: bytes, *, parent: bool = False, log: bool = False, block: int = MiB, metadata_at: int = 2 * MiB
) -> bytes:
    """Return a dynamic VHDX, a differencing one, or one that was not closed; its regions begin at any MiB."""
    heads = b""
    for sequence in (1, 2):
        head = struct.pack("<4sIQ", b"head", 0, sequence) + uuid.UUID(int=1).bytes + uuid.UUID(int=2).bytes
        head += (uuid.UUID(int=3).bytes if log else bytes(16)) + struct.pack("<HHIQ", 0, 1, MiB, MiB)
        heads += _checked(head.ljust(4096, b"\0")).ljust(64 << 10, b"\0")
    parts = pieces(disk, block)
    table_at, data_at = metadata_at + MiB, metadata_at + 2 * MiB
    regions = struct.pack("<4sIII", b"regi", 0, 2, 0)
    for name, at in (
        ("2DC27766-F623-4200-9D64-115E9BFD4A08", table_at),
        ("8B7CA206-4790-4B9A-B8FE-575F050F886E", metadata_at),
    ):
        regions += _guid(name) + struct.pack("<QII", at, MiB, 1)
    regions = _checked(regions.ljust(64 << 10, b"\0"))
    items = [
        ("CAA16737-FA36-4D43-B3B6-33F0AA44E76B", struct.pack("<II", block, 2 if parent else 0), 4),
        ("2FA54224-CD1B-4876-B211-5DBED83BF4B8", struct.pack("<Q", len(disk)), 6),
        ("BECA12AB-B2E6-4523-93EF-C309E000C746", uuid.UUID(int=5).bytes_le, 6),
        ("8141BF1D-A96F-4709-BA47-F233A8FAAB5F", struct.pack("<I", 512), 6),
        ("CDA348C7-445D-4471-9CC9-E9885251C556", struct.pack("<I", 512), 6),
    ]
    metadata, values = struct.pack("<8sHH20x", b"metadata", 0, len(items)), b""
    for name, value, flags in items:
        metadata += _guid(name) + struct.pack("<IIII", (64 << 10) + len(values), len(value), flags, 0)
        values += value
    metadata = metadata.ljust(64 << 10, b"\0") + values
    table, data = b"", b""
    ratio = (1 << 23) * 512 // block
    assert len(parts) <= ratio, "bitmaps stand between the blocks then"
    for part in parts:
        table += struct.pack("<Q", data_at + len(data) | 6 if part else 0)
        data += part
    made = b"vhdxfile" + "made by hand".encode("utf-16-le")
    made = made.ljust(64 << 10, b"\0") + heads + regions + regions
    made = made.ljust(metadata_at, b"\0") + metadata
    return made.ljust(table_at, b"\0") + table.ljust(MiB, b"\0") + data


# -- GPT


def gpt(size: int) -> bytes:
    """Return a disk with one partition and both tables (UEFI 2.10, 5.3)."""
    last = size // SECTOR - 1
    entry = uuid.UUID("0FC63DAF-8483-4772-8E79-3D69D8477DE4").bytes_le + uuid.UUID(int=9).bytes_le
    entries = (entry + struct.pack("<QQQ", 2048, last - 33, 0)).ljust(128 * 128, b"\0")

    def header(own: int, other: int, table: int) -> bytes:
        def packed(checksum: int) -> bytes:
            head = struct.pack(
                "<8sIIIIQQQQ", b"EFI PART", 0x10000, 92, checksum, 0, own, other, 34, last - 33
            )
            return (
                head + uuid.UUID(int=6).bytes_le + struct.pack("<QIII", table, 128, 128, zlib.crc32(entries))
            )

        return packed(zlib.crc32(packed(0))).ljust(SECTOR, b"\0")

    mbr = bytes(446) + struct.pack("<BBBBBBBBII", 0, 0, 2, 0, 0xEE, 255, 255, 255, 1, last)
    mbr = mbr.ljust(510, b"\0") + b"\x55\xaa"
    disk = (mbr + header(1, last, 2) + entries).ljust((last - 32) * SECTOR, b"\0")
    return disk + entries + header(last, 1, last - 32)
