# SPDX-License-Identifier: Apache-2.0
"""Is an upload the disk that it says it is? `stat` and `cp` ask the same questions here.

Headers are read before any tool opens the file: tools follow the names in them.
"""

from __future__ import annotations

import re

from ..errors import DamagedImage, NotADisk, NotSupported
from ..named import NamedTuple
from ..tools import image_headers, inspection
from ..tools.image_headers import Content
from ..units import MiB
from . import not_disks

FARTHEST = 32 * MiB
"""Bytes of a beginning that are fetched or unpacked for a size; VHDX as programs write it need 3 MiB."""

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


def file(path: str, taken: str, most: int, name: str, packed: bool) -> Judged:
    """Return what the file `path` is, if it may be `taken` so.

    `packed`: compressed data may be stored as it is.

    Raise NotADisk, UnsafeImage (it has a parent, or more than `most` bytes), EncryptedDisk, DamagedImage; and
    as inspection.judged.
    """
    with inspection.content_of(path, name) as content:
        if taken == DISK:
            return _disk(path, content, most, name, packed)
        if taken == DISC:
            _refuse_other(content, name, packed)
            inspection.refuse_cut_off(content, image_headers.cd_missing(content), name)
        size = content.length or 0
        inspection.check_claim(size, most, name)
        return Judged("raw", size, 0)


def _disk(path: str, content: Content, most: int, name: str, packed: bool) -> Judged:
    _refuse_other(content, name, packed)
    format = inspection.detect(content.head, content.tail)
    size = inspection.judged(path, content, format, most, name)
    if format == "raw" and "vhd" in name.lower() and re.search(VHD, name):
        raise DamagedImage(
            f"image called VHD without the footer of one: it is cut off, or a raw disk to be renamed: {name}"
        )
    return Judged(format, size, image_headers.facts(content, format).snapshots)


def needed(head: bytes, name: str) -> int:
    """Return how many bytes of its beginning tell the size of a disk that begins with `head`, if any do.

    Raise NotSupported if these are more than FARTHEST.
    """
    size = image_headers.needed(head)
    if size > FARTHEST:
        where = f"{size // MiB} MiB behind its beginning"
        raise NotSupported(f"VHDX whose size stands {where}: upload it unpacked from a file: {name}")
    return size


def beginning(
    head: bytes, length: int | None, taken: str, most: int, name: str, packed: bool = False
) -> int | None:
    """Return the virtual size in bytes of a file that begins with `head`, None if that does not tell it: of a
    raw disk, or fewer bytes than `needed`.

    `length`: of the whole file, None if it is unknown. Raise as `file`.
    """
    content = image_headers.beginning(head, length)
    if taken == DISC:
        _refuse_other(content, name, packed)
        inspection.refuse_cut_off(content, image_headers.cd_missing(content), name)
    if taken != DISK:
        return None
    _refuse_other(content, name, packed)
    format = inspection.detect(head)
    inspection.refuse_header(content, format, name)
    size = image_headers.facts(content, format).size
    inspection.check_claim(size or 0, most, name)
    inspection.refuse_damage(content, format, name)
    if format == "raw":
        return None
    if size is None and len(head) >= needed(head, name):
        raise DamagedImage(f"{format} image without its size among its tables: {name}")
    return size


def _refuse_other(content: Content, name: str, packed: bool) -> None:
    other = not_disks.kind(content.at(0, not_disks.HEAD), content.tail)
    if other and not (packed and other.packed):
        raise NotADisk(f"no disk but {other.name}: {name}")
