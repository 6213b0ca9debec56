# SPDX-License-Identifier: Apache-2.0
"""Is an upload the disk that it says it is? `stat` and `cp` ask the same questions here.

Headers are read before any tool opens the file: tools follow the names in them.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import Iterator

from ..errors import DamagedImage, EncryptedDisk, MissingImage, NotADisk, UnsafeImage
from ..named import NamedTuple
from ..tools import inspection
from . import headers, not_disks
from .headers import Content

VHD = r"(?i)\.a?vhd(?:\.[a-z0-9]{2,4})?\Z"
"""Names of VHDs, packed ones too. A fixed one has no header: cut off, it looks like a raw disk."""
DISK, DISC, ANYTHING = "disk", "disc", "anything"
"""What an upload is to be: a VM's disk, a CD-ROM, or a file of a file datastore, which may hold anything."""


class Judged(NamedTuple):
    """A disk that may be taken."""

    format: str
    virtual_size: int
    """In bytes."""
    snapshots: int
    """Internal ones of a qcow2."""


@contextmanager
def opened(path: str, name: str) -> Iterator[Content]:
    """Yield the content of a file; raise MissingImage."""
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


def file(path: str, taken: str, most: int, name: str, packed: bool) -> Judged:
    """Return what the file `path` is, if it may be `taken` so.

    `packed`: compressed data may be stored as it is.

    Raise NotADisk, UnsafeImage (it has a parent, or more than `most` bytes), EncryptedDisk, DamagedImage; and
    as inspection.inspect.
    """
    with opened(path, name) as content:
        if taken == DISK:
            return _disk(path, content, most, name, packed)
        if taken == DISC:
            _refuse_other(content, name, packed)
            _refuse_cut_off(name, content, headers.cd_missing(content))
        size = content.length or 0
        inspection.check_claim(size, most, name)
        return Judged("raw", size, 0)


def _disk(path: str, content: Content, most: int, name: str, packed: bool) -> Judged:
    format = _looked_at(content, most, name, packed)
    found = headers.facts(content, format)
    _refuse_cut_off(name, content, headers.missing(content, format))
    if format == "raw" and "vhd" in name.lower() and re.search(VHD, name):
        raise DamagedImage(
            f"image called VHD without the footer of one: it is cut off, or a raw disk to be renamed: {name}"
        )
    size = inspection.inspect(path, most, name).virtual_size
    if format != "raw" and found.size is not None and -(-found.size // 512) != -(-size // 512):
        raise DamagedImage(f"image of {found.size} bytes by its header, {size} as qemu-img reads it: {name}")
    return Judged(format, size, found.snapshots)


def beginning(
    head: bytes, length: int | None, taken: str, most: int, name: str, packed: bool = False
) -> int | None:
    """Return the virtual size in bytes of a file that begins with `head`, None if that does not tell it.

    `length`: of the whole file, None if it is unknown. Raise as `file`, NotSupported for a VHDX.
    """
    content = headers.beginning(head, length)
    if taken == DISC:
        _refuse_other(content, name, packed)
        _refuse_cut_off(name, content, headers.cd_missing(content))
    if taken != DISK:
        return None
    format = _looked_at(content, most, name, packed)
    _refuse_cut_off(name, content, headers.missing(content, format))
    return None if format == "raw" else inspection.size_in_header(head, name)


def _looked_at(content: Content, most: int, name: str, packed: bool) -> str:
    """Return the format by a header that says nothing against it; raise as `disk`."""
    _refuse_other(content, name, packed)
    head = content.head
    format = inspection.detect(head, content.tail)
    danger = inspection.names_other_files(head, format)
    if danger:
        raise UnsafeImage(f"{name} has {danger}")
    found = headers.facts(content, format)
    if found.parent:
        raise UnsafeImage(f"{name} has {found.parent}")
    if found.encryption:
        raise EncryptedDisk(
            f"qcow2 image encrypted inside ({found.encryption}), from which no VM starts: {name}"
        )
    if found.damage:
        raise DamagedImage(f"image damaged: {found.damage}: {name}")
    inspection.check_claim(found.size or 0, most, name)
    return format


def _refuse_other(content: Content, name: str, packed: bool) -> None:
    other = not_disks.kind(content.at(0, not_disks.HEAD), content.tail)
    if other and not (packed and other.packed):
        raise NotADisk(f"no disk but {other.name}: {name}")


def _refuse_cut_off(name: str, content: Content, lacks: str) -> None:
    if lacks:
        raise DamagedImage(f"image cut off: its {content.length} bytes end before {lacks}: {name}")
