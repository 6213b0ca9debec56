# SPDX-License-Identifier: Apache-2.0
"""The real format and size of an uploaded image, read from its header before any tool opens it.

qemu-img would follow the names in a header (a backing file, a data file, extents), and so read any file of
the machine. Formats per QEMU's docs/interop/qcow2.txt and block/{vmdk,vdi,vhdx,vpc,qed}.c.
"""

from __future__ import annotations

import os
import re
import struct
from contextlib import contextmanager
from typing import Iterator

from ..errors import MissingImage, NotSupported, ToolFailed, UnsafeImage, WrongFormat, here
from ..named import NamedTuple
from ..units import human
from . import beneath, qemu_img

INCOMPATIBLE_DATA_FILE = 1 << 2
HEAD = 512 + 20 * 512
"""Bytes to inspect: QEMU reads a sparse VMDK's descriptor, with the parent's name, after the first sector."""
AGAIN = 64 << 10
"""Bytes to inspect before an open: the largest qcow2 header."""
LUKS = b"LUKS\xba\xbe"


class Inspected(NamedTuple):
    """Format, and virtual size in bytes."""

    format: str
    virtual_size: int


def detect(head: bytes, tail: bytes = b"") -> str:
    """Return the format of an image by its first 512 bytes (and, for a fixed VHD, its last ones)."""
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
    """Return what makes an image of `format` unsafe to open, '' for nothing."""
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

    Raise MissingImage if it is no readable file, UnsafeImage if it names other files or exceeds
    `max_virtual_size` bytes. Errors name it `name`.
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
    # Check the header's size first: qemu-img may refuse to open an image that is too large.
    virtual_size = size if format == "raw" else 0 if format == "vhdx" else size_in_header(head) or 0
    if format != "raw" and virtual_size <= max_virtual_size:
        try:
            whole = qemu_img.whole_disk(path, format)
            virtual_size = qemu_img.virtual_size(whole, format, foreign=True)
        except ToolFailed as e:
            raise ToolFailed(e.detail.replace(path, name).replace(beneath.readable(path), name)) from None
    check_claim(virtual_size, max_virtual_size, name)
    return Inspected(format, virtual_size)


def check_claim(size: int, most: int, name: str) -> None:
    """Raise UnsafeImage if an image claims a size beyond the site's limit."""
    if size > most:
        raise UnsafeImage(f"{name} claims a size of {human(size)}, more than the {human(most)} allowed")


def size_in_header(head: bytes, name: str = "") -> int | None:
    """Return the virtual size in a qcow2, VMDK, VDI or dynamic VHD header, None for a raw image.

    Raise NotSupported for a VHDX, whose size is too far behind its beginning.
    """
    head = head.ljust(512, b"\0")
    format = detect(head)
    if format == "qcow2":
        return int(struct.unpack(">Q", head[24:32])[0])
    if format == "vmdk" and head.startswith(b"KDMV"):
        return int(struct.unpack("<Q", head[12:20])[0]) * 512
    if format == "vdi":
        return int(struct.unpack("<Q", head[368:376])[0])
    if format == "vpc":
        return int(struct.unpack(">Q", head[48:56])[0])
    if format == "vhdx":
        raise NotSupported(
            f"{name or 'a VHDX image'} does not tell its size at its beginning: convert it to "
            f"qcow2 (qemu-img convert)"
        )
    return None


def is_luks(path: str) -> bool:
    """Return True if a raw image begins with a LUKS header."""
    with open(path, "rb") as file:
        return file.read(len(LUKS)) == LUKS


def check_header(head: bytes, format: str, name: str) -> None:
    """Raise WrongFormat or UnsafeImage if an image with this `head` must not be opened as `format`.

    A raw image belongs to its guest, and is never inspected.
    """
    if format == "raw":
        return
    found = detect(head)
    if found != format:
        raise WrongFormat(f"{name} is {format} for OpenNebula, but its header is that of {found}")
    danger = names_other_files(head, format)
    if danger:
        raise UnsafeImage(f"{name} has {danger}")


@contextmanager
def checked(path: str, format: str, name: str = "") -> Iterator[str]:
    """Inspect an image that is about to be opened, and yield a path to the very file that was inspected.

    Child processes can use the path too. Images reach a store not only by uploads: other hosts, stock
    datastores and an administrator's SOURCE put them there as well. Raise as `check_header`, or MissingImage.
    No byte of a raw image is read.
    """
    name = name or path
    try:
        beneath.refuse_link(path)
        itself = 0 if re.fullmatch(beneath.OPENED, path) else os.O_NOFOLLOW
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | itself), "rb", buffering=0)
    except OSError as e:
        raise MissingImage(f"{here(name)}: {e.strerror}") from None
    with file:
        if format != "raw":
            check_header(file.read(AGAIN) or b"", format, name)
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def check(path: str, format: str, name: str = "") -> None:
    """Inspect an image that this or another program is about to open by its name; raise as `checked`."""
    with checked(path, format, name):
        pass
