# SPDX-License-Identifier: Apache-2.0
"""What the header of an image says: its size, parent, encryption, damage, and where the file must not end.

Tools believe the file: qemu-img reads zeros for what lies behind its end, and for what lies in a parent that
it does not know of. Sources: QEMU's docs/interop/qcow2.txt; VMware's "Virtual Disk Format 5.0"; VirtualBox'
VDICore.h; Microsoft's "Virtual Hard Disk Image Format Specification" and [MS-VHDX]; ECMA-119; UEFI 5.3.
All functions are pure but for what `Content.at` reads.
"""

from __future__ import annotations

import struct
from sys import byteorder
from typing import TYPE_CHECKING, Callable, Iterable

from ..named import NamedTuple

if TYPE_CHECKING:
    from array import array

SECTOR = 512
MiB = 1 << 20
HEAD = 64 << 10
"""Bytes of the beginning: the largest header of a qcow2; of a VHDX not all (`needed`)."""
MOST_ENTRIES = 32 << 20
"""Entries of a table that are read; QEMU refuses larger ones."""


class Content(NamedTuple):
    """A file, or what is known of it."""

    at: Callable[[int, int], bytes]
    """Returns so many bytes at an offset; fewer at the end."""
    length: int | None
    """None: unknown."""
    whole: bool
    """False: only the beginning can be read."""

    @property
    def head(self) -> bytes:
        return self.at(0, HEAD)

    @property
    def tail(self) -> bytes:
        return self.at(max(self.length - SECTOR, 0), SECTOR) if self.whole and self.length else b""

    def ends_before(self, offset: int) -> bool:
        """Return True if the file is known to have fewer than `offset` bytes."""
        return self.length is not None and self.length < offset


class Facts(NamedTuple):
    """What a header says."""

    size: int | None = None
    """The virtual size in bytes; None: it says nothing of it."""
    parent: str = ""
    """What other file holds a part of the disk."""
    encryption: str = ""
    damage: str = ""
    snapshots: int = 0


def beginning(head: bytes, length: int | None) -> Content:
    """Return the content of which only the beginning is known."""
    return Content(lambda offset, size: head[offset : offset + size], length, whole=False)


def facts(content: Content, format: str) -> Facts:
    """Return what the header of an image of `format` says."""
    return FORMATS[format][0](content) if format in FORMATS else Facts()


def needed(head: bytes) -> int:
    """Return how many bytes of its beginning tell what `facts` says of an image that begins with `head`.

    As far as `head` says it: ask again with so many.
    """
    return _vhdx_needed(head) if head.startswith(VHDX) else HEAD


def missing(content: Content, format: str) -> str:
    """Return what lies behind the end of the file by its own tables, '' for nothing.

    As with QEMU, a table may name a piece that is only partly there: the last one of a file is often short.
    """
    return FORMATS[format][1](content) if format in FORMATS else ""


def _table(content: Content, offset: int, entries: int, code: str) -> array[int]:
    """Return a table of little-endian numbers ('I', 'Q') or big-endian ones ('>I', '>Q')."""
    from array import array

    found = array(code[-1])
    raw = content.at(offset, entries * found.itemsize)
    found.frombytes(raw[: len(raw) // found.itemsize * found.itemsize])
    if (byteorder == "little") == code.startswith(">"):
        found.byteswap()
    return found


# -- qcow2

OFFSET = 0x00FFFFFFFFFFFE00
COMPRESSED = 1 << 62
CORRUPT, EXTENDED = 1 << 1, 1 << 4
CIPHERS = {1: "AES", 2: "LUKS"}


def _qcow2_header(content: Content) -> tuple[int, ...]:
    """Return the fields from version to the offset of the snapshots, and the incompatible features."""
    head = content.at(0, 112).ljust(112, b"\0")
    fields: tuple[int, ...] = struct.unpack(">IQIIQIIQQIIQ", head[4:72])
    return (*fields, struct.unpack(">Q", head[72:80])[0] if fields[0] >= 3 else 0)


def _qcow2(content: Content) -> Facts:
    _, _, _, _, size, cipher, _, _, _, _, snapshots, _, incompatible = _qcow2_header(content)
    encryption = CIPHERS.get(cipher, f"method {cipher}") if cipher else ""
    damage = "QEMU has marked it as corrupt" if incompatible & CORRUPT else ""
    return Facts(size, "", encryption, damage, snapshots)


def _qcow2_missing(content: Content) -> str:
    _, _, _, bits, size, _, l1_entries, l1, _, _, _, _, incompatible = _qcow2_header(content)
    cluster, entry = 1 << min(bits, 21), 16 if incompatible & EXTENDED else 8
    if content.ends_before(l1 + 8 * l1_entries):
        return "its L1 table"
    covered = cluster * (cluster // entry)
    if not content.whole or not 9 <= bits <= 21 or content.length is None:
        return ""
    entries = min(l1_entries, -(-size // covered), MOST_ENTRIES)
    seen = {0}
    for l2 in (word & OFFSET for word in _table(content, l1, entries, ">Q")):
        if l2 in seen:
            continue
        seen.add(l2)
        if l2 % cluster:
            return ""  # QEMU refuses it
        if l2 >= content.length:
            return "tables of its clusters"
        words = _table(content, l2, cluster // 8, ">Q")[:: entry // 8]
        if _highest_cluster(words, bits) >= content.length:
            return "clusters with data"
    return ""


def _highest_cluster(words: Iterable[int], bits: int) -> int:
    """Return the highest offset in the file that an L2 table names, 0 for none."""
    packed_offset = (1 << (62 - (bits - 8))) - 1
    return max(word & packed_offset if word & COMPRESSED else word & OFFSET for word in words)


# -- VMDK (sparse extents)

AT_END = (1 << 64) - 1
PACKED = 1 << 16


def _vmdk(content: Content) -> Facts:
    head = content.at(0, SECTOR).ljust(SECTOR, b"\0")
    if not head.startswith(b"KDMV"):
        return Facts()
    return Facts(int(struct.unpack("<Q", head[12:20])[0]) * SECTOR)


def _vmdk_missing(content: Content) -> str:
    head = content.at(0, SECTOR).ljust(SECTOR, b"\0")
    if not content.whole or content.length is None or not head.startswith(b"KDMV"):
        return ""
    if struct.unpack("<Q", head[56:64])[0] == AT_END:
        # streamOptimized: a second header stands behind all that was streamed.
        head = content.at(max(content.length - 2 * SECTOR, 0), SECTOR).ljust(SECTOR, b"\0")
        if not head.startswith(b"KDMV"):
            return "the footer of a streamOptimized VMDK"
    capacity, grain, _, _, per_table, _, directory = struct.unpack("<QQQQIQQ", head[12:64])
    if not grain or not per_table:
        return ""  # QEMU refuses it
    tables = -(-capacity // (grain * per_table))
    if content.ends_before(directory * SECTOR + 4 * tables):
        return "its grain directory"
    if tables > MOST_ENTRIES or per_table > MOST_ENTRIES:
        return ""
    seen, length = {0}, content.length
    packed = struct.unpack("<I", head[8:12])[0] & PACKED
    for number, sector in enumerate(_table(content, directory * SECTOR, tables, "I")):
        if sector in seen:
            continue
        seen.add(sector)
        if sector * SECTOR >= length:
            return "tables of its grains"
        words = _table(content, sector * SECTOR, per_table, "I")
        highest = max(words, default=0) * SECTOR
        if highest >= length:
            return "grains with data"
        # The last grain of a disk may be short, and a packed one is of any size.
        covered = (number * per_table + words.index(highest // SECTOR)) * grain
        if highest and not packed and highest + min(grain, capacity - covered) * SECTOR > length:
            return "grains with data"
    return ""


# -- VDI

VDI_BLOCK = MiB
VDI_FREE = 0xFFFFFFFE
"""From here on an entry names no block."""


def _vdi(content: Content) -> Facts:
    head = content.at(0, SECTOR).ljust(SECTOR, b"\0")
    kind = struct.unpack("<I", head[76:80])[0]
    linked = any(head[424:456])
    parent = "a parent image (differencing VDI)" if kind in (3, 4) or linked else ""
    return Facts(struct.unpack("<Q", head[368:376])[0], parent)


def _vdi_missing(content: Content) -> str:
    head = content.at(0, SECTOR).ljust(SECTOR, b"\0")
    table, data = struct.unpack("<II", head[340:348])
    block, _, blocks = struct.unpack("<III", head[376:388])
    if content.ends_before(table + 4 * blocks):
        return "its table of blocks"
    if not content.whole or content.length is None or block != VDI_BLOCK or blocks > MOST_ENTRIES:
        return ""
    last = max((entry for entry in _table(content, table, blocks, "I") if entry < VDI_FREE), default=-1)
    return "blocks with data" if last >= 0 and content.ends_before(data + (last + 1) * block) else ""


# -- VHD

COOKIE = b"conectix"
DIFFERENCING = 4
VHD_FREE = 0xFFFFFFFF


def _vhd_footer(content: Content) -> bytes:
    """Return the copy of the footer at the beginning, or else the footer of a fixed VHD."""
    head = content.at(0, SECTOR)
    return (head if head.startswith(COOKIE) else content.tail).ljust(SECTOR, b"\0")


def _vhd(content: Content) -> Facts:
    footer = _vhd_footer(content)
    size, kind = struct.unpack(">Q", footer[48:56])[0], struct.unpack(">I", footer[60:64])[0]
    return Facts(size, "a parent image (differencing VHD)" if kind == DIFFERENCING else "")


def _vhd_missing(content: Content) -> str:
    head, length = content.at(0, SECTOR), content.length
    if not content.whole or length is None:
        return ""
    if not head.startswith(COOKIE):
        return "a part of its data" if content.ends_before((_vhd(content).size or 0) + SECTOR) else ""
    # Virtual PC before 2004 wrote 511 bytes.
    if COOKIE not in (content.tail[:8], content.tail[1:9]):
        return "the footer of a dynamic VHD"
    offset = struct.unpack(">Q", head[16:24])[0]
    header = content.at(offset, 1024) if offset < length else b""
    if len(header) < 1024:
        return "its dynamic header"
    table, _, entries = struct.unpack(">QII", header[16:32])
    if content.ends_before(table + 4 * entries):
        return "its table of blocks"
    if entries > MOST_ENTRIES:
        return ""
    last = max((entry for entry in _table(content, table, entries, ">I") if entry != VHD_FREE), default=0)
    return "blocks with data" if last * SECTOR >= length - SECTOR else ""


# -- VHDX

VHDX = b"vhdxfile"
REGIONS = (192 << 10, 256 << 10)
REGION_TABLE = 64 << 10
METADATA = bytes.fromhex("06a27c8b90479a4bb8fe575f050f886e")
BAT = bytes.fromhex("6677c22d23f600429d64115e9bfd4a08")
FILE_PARAMETERS = bytes.fromhex("3767a1ca36fa434db3b633f0aa44e76b")
VIRTUAL_DISK_SIZE = bytes.fromhex("2442a52f1bcd7648b2115dbed83bf4b8")
"""GUIDs as they are on disk: the first three fields are little-endian."""
HAS_PARENT = 1 << 1
PRESENT, PARTLY = 6, 7


def _vhdx_places(content: Content) -> dict[bytes, tuple[int, int]]:
    """Return offset and length of the regions."""
    table = b""
    for at in REGIONS:
        table = content.at(at, REGION_TABLE)
        if table.startswith(b"regi"):
            break
    count = int.from_bytes(table[8:12], "little")
    return {
        table[at : at + 16]: struct.unpack("<QI", table[at + 16 : at + 28])
        for at in range(16, 16 + 32 * min(count, 2047), 32)
        if len(table) >= at + 32
    }


def _vhdx_items(content: Content) -> dict[bytes, bytes]:
    """Return the items of the metadata region that are looked at."""
    offset, _ = _vhdx_places(content).get(METADATA, (0, 0))
    table = content.at(offset, 64 << 10) if offset else b""
    if not table.startswith(b"metadata"):
        return {}
    found = {}
    for at in range(32, 32 + 32 * min(int.from_bytes(table[10:12], "little"), 1023), 32):
        if table[at : at + 16] in (FILE_PARAMETERS, VIRTUAL_DISK_SIZE):
            found[table[at : at + 16]] = content.at(
                offset + int.from_bytes(table[at + 16 : at + 20], "little"), 8
            )
    return found


def _vhdx_needed(head: bytes) -> int:
    """Return where the metadata region ends, which may stand anywhere: the programs put it at 2 MiB."""
    tables = REGIONS[-1] + REGION_TABLE
    if len(head) < tables:
        return tables
    # What the region may have beyond what its items take, 1 MiB, is empty.
    offset, length = _vhdx_places(beginning(head, None)).get(METADATA, (0, 0))
    return max(tables, offset + min(length, MiB))


def _vhdx(content: Content) -> Facts:
    items = _vhdx_items(content)
    headers = [content.at(at, 80).ljust(80, b"\0") for at in (64 << 10, 128 << 10)]
    current = max(
        (head for head in headers if head.startswith(b"head")),
        key=lambda head: int.from_bytes(head[8:16], "little"),
        default=bytes(80),
    )
    damage = (
        "it was not closed: changes are in its log, which Hyper-V (or `qemu-img check -r all`) replays"
        if any(current[48:64])
        else ""
    )
    flags = int.from_bytes(items.get(FILE_PARAMETERS, b"")[4:8], "little")
    parent = "a parent image (differencing VHDX)" if flags & HAS_PARENT else ""
    size = items.get(VIRTUAL_DISK_SIZE, b"")
    return Facts(int.from_bytes(size, "little") if len(size) == 8 else None, parent, "", damage)


def _vhdx_missing(content: Content) -> str:
    if content.length is None:
        return ""
    places = _vhdx_places(content)
    for offset, length in places.values():
        if content.ends_before(offset + length):
            return "one of its regions"
    # Of which only the beginning is known: the tables may be behind that.
    if not content.whole and not content.ends_before(REGIONS[-1] + REGION_TABLE):
        return ""
    if BAT not in places or METADATA not in places:
        return "its tables"
    if not content.whole:
        return ""
    offset, length = places[BAT]
    words = _table(content, offset, min(length // 8, MOST_ENTRIES), "Q")
    # Blocks with bitmaps stand among them, of 1 MiB, the least that a block may have.
    highest = max(((word >> 20) * MiB for word in words if word & 7 in (PRESENT, PARTLY)), default=0)
    return "blocks with data" if highest and content.ends_before(highest + MiB) else ""


# -- raw: a CD, or a disk with a partition table

ISO_PADDING = 150 * 2048
"""Bytes of padding that programs write behind a CD, and copies of it often leave out."""


def cd_missing(content: Content) -> str:
    """Return what a CD image (ISO 9660) lacks, by the size in its volume descriptor."""
    volume = content.at(32768, 2048)
    if len(volume) < 132 or volume[:6] != b"\1CD001":
        return ""
    blocks, block = struct.unpack("<I", volume[80:84])[0], struct.unpack("<H", volume[128:130])[0]
    short = content.ends_before(blocks * block - ISO_PADDING)
    return f"a part of its volume of {blocks * block} bytes" if short else ""


def _raw(content: Content) -> Facts:
    return Facts(content.length)


def _raw_missing(content: Content) -> str:
    lacks = cd_missing(content)
    if lacks:
        return lacks
    for sector in (512, 4096):
        label = content.at(sector, 92)
        if label.startswith(b"EFI PART") and len(label) == 92:
            last = struct.unpack("<Q", label[48:56])[0]
            # Linux and UEFI refuse such a table: no partition would be seen.
            if content.ends_before((last + 1) * sector):
                return f"the end of its partitions ({(last + 1) * sector}, by its GPT)"
    return ""


FORMATS: dict[str, tuple[Callable[[Content], Facts], Callable[[Content], str]]] = {
    "qcow2": (_qcow2, _qcow2_missing),
    "vmdk": (_vmdk, _vmdk_missing),
    "vdi": (_vdi, _vdi_missing),
    "vpc": (_vhd, _vhd_missing),
    "vhdx": (_vhdx, _vhdx_missing),
    "raw": (_raw, _raw_missing),
}
"""What a header says, and what lies behind the end of the file by its tables."""
