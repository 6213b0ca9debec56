# SPDX-License-Identifier: Apache-2.0
"""Files that are no disk: archives, pages, and what other programs call an image. By their first bytes.

Any file could be a raw disk, and would be taken for one: a VM then finds no boot loader. A disk begins with a
boot sector, a label, a file system or zeros, and with none of these words.
"""

from __future__ import annotations

import re

from ..named import NamedTuple

HEAD = 4096
"""Bytes of the beginning that are looked at."""
TAIL = 512


class Kind(NamedTuple):
    """What a file is."""

    name: str
    packed: bool = False
    """One compressed file, which a datastore with NO_DECOMPRESS keeps as it is."""


CONVERT = "; export the disk in another format with the program that made it"
BEGINS: dict[bytes, str] = {
    # Compressed: what is unpacked here is in unpack.MAGIC, and inside of that once more in this table.
    b"\x1f\x8b\x08": "gzip data",
    b"BZh": "bzip2 data",
    b"\xfd7zXZ\0": "xz data",
    b"\x28\xb5\x2f\xfd": "zstd data",
    b"\x04\x22\x4d\x18": "lz4 data",
    b"\x02\x21\x4c\x18": "lz4 data (legacy)",
    b"LZIP": "lzip data",
    b"\x89LZO\0\r\n\x1a\n": "lzop data",
    b"\x1f\x9d\x90": "compress data (.Z)",
    # Archives.
    b"PK\3\4": "a zip archive",
    b"PK\5\6": "an empty zip archive",
    b"PK\7\x08": "a zip archive in parts",
    b"PK00PK\3\4": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
    b"MSCF\0\0\0\0": "a Windows cabinet",
    b"MSWIM\0\0\0": "a Windows image (WIM), which is installed and not booted",
    b"xar!": "a xar archive (.pkg)",
    b"!<arch>\n": "an ar archive (.deb, .a)",
    b"\xed\xab\xee\xdb": "an RPM package",
    b"070701": "a cpio archive",
    b"070702": "a cpio archive",
    b"070707": "a cpio archive",
    # Exports and backups of other platforms.
    b"VMA\0": "a backup of Proxmox VE (VMA); `vma extract` there unpacks its disks",
    b"rbd image v": "an export of `rbd export --export-format 2`; export it in format 1, which is raw",
    b"rbd diff v": "a difference of `rbd export-diff`, not a disk; use `rbd export`",
    b"btrfs-stream\0": "a stream of `btrfs send`, not a disk",
    b"LibvirtQemudSave": "the saved memory of a guest (virsh save), not its disk",
    b"LibvirtQemudPart": "the saved memory of a guest (virsh save), cut off, and not its disk",
    b"QEVM": "the saved memory of a guest (QEMU), not its disk",
    b"KDUMP   ": "a dump of memory, not a disk",
    b"partclone-image": "an image of Partclone; `partclone.restore` makes the file system of it",
    b"PaRtImAgE-VoLuMe": "an image of Partimage" + CONVERT,
    b"EVF\x09\x0d\x0a\xff\x00": "an EnCase image (EWF, .E01); `ewfexport` makes a raw disk of it",
    b"EVF2\x0d\x0a\x81": "an EnCase image (EWF 2, .Ex01); `ewfexport` makes a raw disk of it",
    b"AFF10\r\n": "an image of AFF" + CONVERT,
    # Formats of disks that nothing here takes.
    b"\xbe\xba\xfe\xca\0\0\0\0": "a VMware snapshot (SESparse), which needs its parent; clone the VM",
    b"WithoutFreeSpace": "an image of Parallels; `qemu-img convert -f parallels` makes a qcow2 of it",
    b"WithouFreSpacExt": "an image of Parallels; `qemu-img convert -f parallels` makes a qcow2 of it",
    b"Bochs Virtual HD Image": "an image of Bochs; `qemu-img convert -f bochs` makes a qcow2 of it",
    b"#!/bin/sh\n#V2.0 Format\n": "a cloop image; `qemu-img convert -f cloop` makes a qcow2 of it",
    b"\x3a\xff\x26\xed": "an Android sparse image; `simg2img` makes a raw disk of it",
    b"MComprHD": "an image of MAME (CHD); `chdman extracthd` makes a raw disk of it",
    b"sprs": "an Apple sparse image" + CONVERT,
    b"IsZ!": "a packed ISO (ISZ)" + CONVERT,
    # What a server sends in the place of a file, or a user by mistake.
    b"%PDF-": "a PDF",
    b"\x7fELF": "a program or a kernel (ELF); kernels belong into a file datastore",
    b"version https://git-lfs": "a pointer of Git LFS; get the file itself (git lfs pull)",
    b"-----BEGIN ": "a key, a signature or a certificate (PEM)",
    b"HTTP/1.": "an answer of a web server, with its headers",
    b"d8:announce": "a torrent",
    b"#!/": "a script, or an installer that begins with one",
    b"MIME-Version:": "a MIME message",
}
"""The longest that matches is meant."""
PACKED = (
    b"\x1f\x8b\x08",
    b"BZh",
    b"\xfd7zXZ\0",
    b"\x28\xb5\x2f\xfd",
    b"\x04\x22\x4d\x18",
    b"\x02\x21\x4c\x18",
    b"LZIP",
    b"\x89LZO\0\r\n\x1a\n",
    b"\x1f\x9d\x90",
)
"""Which of them are one compressed file."""
ENDS = {
    b"koly": "an Apple disk image (UDIF, .dmg); `dmg2img` makes a raw disk of it",
}
PAGES = (b"<!doctype", b"<html", b"<head", b"<body", b"<?xml", b"<error", b"<svg", b"<!--")
SUMS = rb"(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{40}|[0-9A-Fa-f]{64}|[0-9A-Fa-f]{128}) [ *][^\0\n]+\n"
"""A line of md5sum and its like."""
HEX = b"0123456789ABCDEFabcdef"
VISIBLE = b"\t\n\r\f" + bytes(range(32, 256))


def kind(head: bytes, tail: bytes = b"") -> Kind | None:
    """Return what a file is by its first HEAD and its last TAIL bytes, None for what may be a disk."""
    found = max((magic for magic in BEGINS if head.startswith(magic)), key=len, default=None)
    if found is not None:
        return Kind(BEGINS[found], packed=found in PACKED)
    for magic, name in ENDS.items():
        if tail.startswith(magic):
            return Kind(name)
    return _tar(head) or _lzma(head) or _text(head)


def _tar(head: bytes) -> Kind | None:
    """Return what a tar archive holds, by its first member: its checksum, since old ones have no magic."""
    if len(head) < 512 or not head[0]:
        return None
    field = head[148:156].strip(b" \0")
    if not field or len(field) > 7 or field.strip(b"01234567"):
        return None
    if int(field, 8) != sum(head[:148]) + 8 * ord(" ") + sum(head[156:512]):
        return None
    member = head[:100].split(b"\0")[0].lower()
    if member.endswith(b".ovf"):
        return Kind("an appliance (OVA, a tar archive); `tar xf` unpacks it: upload its .vmdk files")
    if member.endswith(b"ova.xml"):
        return Kind("an export of XenServer (XVA, a tar archive)" + CONVERT)
    return Kind("a tar archive")


def _lzma(head: bytes) -> Kind | None:
    """Return what an old .lzma is, which has no magic: properties, dictionary, size, a zero."""
    if len(head) < 14 or head[0] != 0x5D or head[13]:
        return None
    dictionary, size = int.from_bytes(head[1:5], "little"), int.from_bytes(head[5:13], "little")
    lowest = dictionary & -dictionary
    usual = dictionary >= 4096 and dictionary in (lowest, 3 * lowest)
    return Kind("lzma data", packed=True) if usual and (size == (1 << 64) - 1 or size < 1 << 48) else None


def _text(head: bytes) -> Kind | None:
    """Return what a page of text is."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        head = head[2:].replace(b"\0", b"")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text[:16].lower().startswith(PAGES):
        return Kind("a page of HTML or XML, as servers send it for an error or a login")
    # No pattern is compiled for what begins as neither does.
    if text[:1] in HEX and re.match(SUMS, text):
        return Kind("a list of checksums")
    if text[:1] in b"{[" and not text.translate(None, VISIBLE) and re.match(rb".\s*[\"{\[\]}]", text):
        return Kind("a text in JSON, as servers send it for an error")
    return None
