# SPDX-License-Identifier: Apache-2.0
"""What speaks against an image: its header is judged before any tool opens it, wherever it came from.

qemu-img would follow the names in a header (a backing file, a data file, extents), and so read any file of
the machine. Formats per QEMU's docs/interop/qcow2.txt and block/{vmdk,vdi,vhdx,vpc,qed}.c.
"""

from __future__ import annotations

import os
import re
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator

from ..errors import DamagedImage, EncryptedDisk, MissingImage, ToolFailed, UnsafeImage, WrongFormat, here
from ..units import human
from . import beneath, qemu_img

if TYPE_CHECKING:
    from .image_headers import Content

INCOMPATIBLE_DATA_FILE = 1 << 2
HEAD = 512 + 20 * 512
"""Bytes to inspect: QEMU reads a sparse VMDK's descriptor, with the parent's name, after the first sector."""
LUKS = b"LUKS\xba\xbe"


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


def refuse_header(content: Content, format: str, name: str) -> None:
    """Raise UnsafeImage or EncryptedDisk if the header of an image of `format` says that no VM gets its disk
    from this file alone.
    """
    from . import image_headers

    danger = names_other_files(content.at(0, image_headers.HEAD), format)
    if danger:
        raise UnsafeImage(f"{name} has {danger}")
    found = image_headers.facts(content, format)
    if found.parent:
        raise UnsafeImage(f"{name} has {found.parent}")
    if found.encryption:
        raise EncryptedDisk(
            f"qcow2 image encrypted inside ({found.encryption}), from which no VM starts: {name}"
        )


def refuse_damage(content: Content, format: str, name: str) -> None:
    """Raise DamagedImage if the file is marked as damaged, or ends before its tables say."""
    from . import image_headers

    damage = image_headers.facts(content, format).damage
    if damage:
        raise DamagedImage(f"image damaged: {damage}: {name}")
    refuse_cut_off(content, image_headers.missing(content, format), name)


def refuse_cut_off(content: Content, lacks: str, name: str) -> None:
    if lacks:
        raise DamagedImage(f"image cut off: its {content.length} bytes end before {lacks}: {name}")


@contextmanager
def content_of(path: str, name: str) -> Iterator[Content]:
    """Yield the content of a file; raise MissingImage."""
    from .image_headers import Content

    try:
        file = open(path, "rb", buffering=0)
    except OSError as e:
        raise MissingImage(f"{name}: {e.strerror}") from None
    with file:
        try:
            length = file.seek(0, os.SEEK_END)
        except OSError as e:
            raise MissingImage(f"{name}: {e.strerror}") from None
        # A hostile header may name any offset and size.
        most = max(length, 0)

        def at(offset: int, size: int) -> bytes:
            if not 0 <= offset < most or size <= 0:
                return b""
            return os.pread(file.fileno(), min(size, most - offset), offset)

        yield Content(at, length, whole=True)


def judged(path: str, content: Content, format: str, most: int, name: str) -> int:
    """Return the virtual size of the image in the file `path`, which is all there and stands alone.

    Raise as `refuse_header` and `refuse_damage`, UnsafeImage for a disk of more than `most` bytes, and
    DamagedImage if QEMU reads another size than the header says.
    """
    from . import image_headers

    refuse_header(content, format, name)
    said = image_headers.facts(content, format).size
    # First: qemu-img may refuse to open an image that is too large.
    check_claim(said or 0, most, name)
    refuse_damage(content, format, name)
    if format == "raw":
        return content.length or 0
    try:
        size = qemu_img.virtual_size(qemu_img.whole_disk(path, format), format, foreign=True)
    except ToolFailed as e:
        raise ToolFailed(e.detail.replace(path, name).replace(beneath.readable(path), name)) from None
    check_claim(size, most, name)
    if said is not None and -(-said // 512) != -(-size // 512):
        raise DamagedImage(f"image of {said} bytes by its header, {size} as qemu-img reads it: {name}")
    return size


def check_claim(size: int, most: int, name: str) -> None:
    """Raise UnsafeImage if an image claims a size beyond the site's limit."""
    if size > most:
        raise UnsafeImage(f"{name} claims a size of {human(size)}, more than the {human(most)} allowed")


def is_luks(path: str) -> bool:
    """Return True if a raw image begins with a LUKS header."""
    with open(path, "rb") as file:
        return file.read(len(LUKS)) == LUKS


def check_header(head: bytes, format: str, name: str) -> None:
    """Raise WrongFormat, UnsafeImage or EncryptedDisk if an image with this `head` must not be opened as
    `format`.

    A raw image belongs to its guest, and is never inspected.
    """
    if format == "raw":
        return
    found = detect(head)
    if found != format:
        raise WrongFormat(f"{name} is {format} for OpenNebula, but its header is that of {found}")
    from . import image_headers

    refuse_header(image_headers.beginning(head, None), format, name)


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
            from . import image_headers

            check_header(file.read(image_headers.HEAD) or b"", format, name)
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


def check(path: str, format: str, name: str = "") -> None:
    """Inspect an image that this or another program is about to open by its name; raise as `checked`."""
    with checked(path, format, name):
        pass
