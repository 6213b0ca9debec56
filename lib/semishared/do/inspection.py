# SPDX-License-Identifier: Apache-2.0
"""What an uploaded image really is, read from its header before any tool opens it.

qemu-img would follow what a header names (a backing file, a data file, extents): a way to read any file of the
machine. Formats per QEMU's docs/interop/qcow2.txt and block/{vmdk,vdi,vhdx,vpc,qed}.c.
"""

from __future__ import annotations

import os
import struct
from typing import NamedTuple

from ..errors import MissingImage, ToolFailed, UnsafeImage
from ..units import human
from . import qemu_img

INCOMPATIBLE_DATA_FILE = 1 << 2
HEAD = 512 + 20 * 512
"""Bytes to look at: QEMU reads the descriptor of a sparse VMDK behind its first sector, and the parent's name from it."""
READABLE = ("raw", "qcow2", "vmdk", "vdi", "vhdx", "vpc")


class Inspected(NamedTuple):
    """Format and size in bytes that a guest would see."""

    format: str
    virtual_size: int


def detect(head: bytes, tail: bytes = b"") -> str:
    """Return the format that the first (and for a fixed VHD the last) 512 bytes announce."""
    if head.startswith(b"QFI\xfb"):
        return "qcow2"
    if head.startswith((b"KDMV", b"COWD")) or head.lstrip()[:21].lower() == b"# disk descriptorfile":
        return "vmdk"
    if head[64:68] == b"\x7f\x10\xda\xbe":
        return "vdi"
    if head.startswith(b"vhdxfile"):
        return "vhdx"
    if head.startswith(b"conectix") or tail.startswith(b"conectix"):
        return "vpc"
    if head.startswith(b"QED\0"):
        return "qed"
    if head.startswith(b"json:"):
        return "json"
    return "raw"


def names_other_files(head: bytes, format: str) -> str:
    """Return what in the header makes `format` unsafe to open, '' if nothing does."""
    head = head.ljust(HEAD, b"\0")
    if format == "qcow2":
        version, backing = struct.unpack(">IQ", head[4:16])
        if version not in (2, 3):
            return f"qcow2 version {version}"
        if backing:
            return "a backing file"
        incompatible = struct.unpack(">Q", head[72:80])[0] if version == 3 else 0
        return "a data file of its own" if incompatible & INCOMPATIBLE_DATA_FILE else ""
    if format == "vmdk":
        capacity = struct.unpack("<Q", head[12:20])[0] if head.startswith(b"KDMV") else 0
        if not capacity:
            return "extents in other files"
        return "a parent image" if b"parentFileNameHint" in head[512:] else ""
    if format in ("qed", "json"):
        return f"a {format} description"
    return ""


def inspect(path: str, max_virtual_size: int, name: str = "") -> Inspected:
    """Return format and virtual size of the file `path`.

    Raise MissingImage if it is no readable file, UnsafeImage if it names other files or exceeds `max_virtual_size`
    bytes. `name` is what errors call it.
    """
    name = name or path
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 512, 0))
            tail = file.read(512)
    except OSError as e:
        raise MissingImage(f"{name}: {e.strerror}") from None
    format = detect(head, tail)
    danger = names_other_files(head, format)
    if danger:
        raise UnsafeImage(f"{name} has {danger}")
    # A size that is too much is told from the header: qemu-img may refuse to open such an image.
    virtual_size = size if format == "raw" else size_in_header(head) or 0
    if format != "raw" and virtual_size <= max_virtual_size:
        try:
            virtual_size = qemu_img.virtual_size(path, format)
        except ToolFailed as e:
            raise ToolFailed(e.detail.replace(path, name)) from None
    if virtual_size > max_virtual_size:
        raise UnsafeImage(f"{name} claims a size of {human(virtual_size)}, more than the {human(max_virtual_size)} allowed")
    return Inspected(format, virtual_size)


def size_in_header(head: bytes) -> int | None:
    """Return the virtual size that a qcow2 or VMDK header names, None for other formats."""
    head = head.ljust(512, b"\0")
    format = detect(head)
    if format == "qcow2":
        return int(struct.unpack(">Q", head[24:32])[0])
    if format == "vmdk" and head.startswith(b"KDMV"):
        return int(struct.unpack("<Q", head[12:20])[0]) * 512
    return None
