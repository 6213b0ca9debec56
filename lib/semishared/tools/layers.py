# SPDX-License-Identifier: Apache-2.0
"""The layers of a disk that can have snapshots: files beside it, and a link to the active layer.

    disk.N      -> disk.N.snap/2
    disk.N.snap/0  a snapshot; over the base, or (a raw copy) over nothing
               /1  a snapshot, over 0
               /2  the active layer, over 1; every backing name inside is relative, so the directory may move

The store has the same layout: clones/VM-DISK -> VM-DISK.snap/2. A disk has this layout from the beginning:
after a live snapshot, every path that libvirt holds must still mean the same layer.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from typing import Any, BinaryIO

from ..errors import BrokenChain, DamagedLayer, MissingImage, here
from ..model.disk import names as disk_names
from . import beneath, files
from .effects import point

MAGIC = b"QFI\xfb"
BACKING_FORMAT = 0xE2792ACA
"""Type of the header extension with the backing format (QEMU's docs/interop/qcow2.txt)."""
DATA_FILE = 1 << 2
"""Incompatible feature bit: the data is in another file."""
OFFSET = (1 << 56) - (1 << 9)
"""Bits of an L1 entry that hold the offset of its table."""
FORMATS = ("raw", "qcow2")
NONE = -1
"""Instead of a layer's number."""
PROTOCOL = r"[^/]*:"
"""A name that QEMU takes for a protocol (`json:`, `nbd://`), see path_has_protocol in its block.c."""
LARGEST = 1 << 53
"""Bytes: a header that speaks of more is damaged."""
DEEPEST = 200
"""Most layers below a disk; QEMU itself opens that many, slowly."""


def publish_first(path: str, staged: str) -> None:
    """Make the file `staged` the only layer of the disk `path`; the caller holds the disk's lock, if any.

    `staged` may already lie in the directory of the layers; only then may that be a link, to a device of the
    host's pool.
    """
    where, name = os.path.split(path)
    root, below = where, disk_names.layers(name)
    if disk_names.are_layers(os.path.dirname(staged)):
        root, below = os.path.dirname(staged), ""
    with beneath.directory(root, below, make=True) as directory:
        others = set(os.listdir(directory)) - {"0", os.path.basename(staged)}
        older = [entry for entry in others if disk_names.is_number(entry) or disk_names.is_staged(entry)]
        if older:
            # A recreated disk: remove the old active layer's link before the layers.
            files.unlink(path)
            for entry in older:
                files.unlink(f"{directory}/{entry}")
        os.rename(staged, f"{directory}/0")
        point(f"{name} layer renamed")
        files.fsync(directory)
    files.symlink(disk_names.layer(name, 0), path)


def remove(path: str) -> bool:
    """Remove the disk `path` with all of its layers; return False if there was none."""
    files.refresh(os.path.dirname(path))
    found = files.unlink(path)
    folder = disk_names.layers(path)
    if os.path.islink(folder):
        return files.unlink(folder)  # a link there belongs to nothing of ours, wherever it leads
    if os.path.isdir(folder):
        point("disk unlinked")
        # It follows no link: it opens each directory beneath its parent.
        files.remove_folder(folder)
        found = True
    return found


def backing_of(path: str) -> tuple[str, str]:
    """Return backing name and format in a qcow2 header, ('', '') for none or for another file."""
    head = files.read(path, 64 << 10)
    if head[:4] != MAGIC or len(head) < 104:
        return "", ""
    version, offset, size = struct.unpack_from(">IQI", head, 4)
    if not offset or offset + size > len(head):
        return "", ""
    at, format = (struct.unpack_from(">I", head, 100)[0] if version >= 3 else 72), ""
    while at + 8 <= offset:
        kind, length = struct.unpack_from(">II", head, at)
        if not kind:
            break
        if kind == BACKING_FORMAT:
            format = head[at + 8 : at + 8 + length].decode("ascii", "replace")
        at += 8 + -(-length // 8) * 8
    return head[offset : offset + size].decode("utf-8", "surrogateescape"), format


def is_empty(path: str) -> bool:
    """Return True if a qcow2 file holds no data of its own: it has no L2 table.

    Raise DamagedLayer if the file is unreadable or truncated: QEMU reads zeros past its end.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(48)
            if head[:4] != MAGIC or len(head) < 48:
                raise _damaged(path, "has no header of a layer")
            return not any(_tables(path, file, head))
    except OSError as e:
        raise _damaged(path, f"cannot be read: {e.strerror}") from None


def _tables(path: str, file: BinaryIO, head: bytes) -> bytes:
    """Return the L1 table of a qcow2 file; raise DamagedLayer if the file ends within one of its tables."""
    size = os.fstat(file.fileno()).st_size
    entries, offset = struct.unpack_from(">IQ", head, 36)
    file.seek(offset)
    text = file.read(8 * entries)
    tables = [entry & OFFSET for entry in struct.unpack(f">{len(text) // 8}Q", text[: len(text) // 8 * 8])]
    cluster = 1 << struct.unpack_from(">I", head, 20)[0]
    if max(offset + 8 * entries, max(tables) + cluster if any(tables) else 0) > size:
        raise _damaged(path, f"has {size} bytes, and its header speaks of more")
    return text


def virtual_size(path: str) -> int:
    """Return how large a guest sees a qcow2 or raw file, by its header alone; 0 if that cannot be read.

    For reports: what decides by a size has QEMU say it (qemu_img.virtual_size).
    """
    try:
        # What lies there may be anything: no FIFO is waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            head = file.read(32) or b""
            if head[:4] != MAGIC:
                return os.fstat(file.fileno()).st_size
    except OSError:
        return 0
    size: int = struct.unpack_from(">Q", head, 24)[0] if len(head) == 32 else 0
    return size if size < LARGEST else 0


def end(path: str) -> int:
    """Return the length of a qcow2 file in whole clusters: QEMU need not write its last cluster whole."""
    with open(path, "rb") as file:
        head = file.read(24)
        cluster = 1 << struct.unpack_from(">I", head, 20)[0] if head[:4] == MAGIC and len(head) == 24 else 1
        return -(-os.fstat(file.fileno()).st_size // cluster) * cluster


def _damaged(path: str, what: str) -> DamagedLayer:
    return DamagedLayer(f"{here(beneath.readable(path))} {what}")


def reaches_out(path: str) -> str:
    """Return what a layer's header names outside of its directory, '' for nothing."""
    head = files.read(path, 104)
    if head[:4] != MAGIC:
        return ""
    if struct.unpack_from(">I", head, 4)[0] >= 3 and struct.unpack_from(">Q", head, 72)[0] & DATA_FILE:
        return "a data file of its own"
    name = backing_of(path)[0]
    if not name and struct.unpack_from(">Q", head, 8)[0]:
        return "a backing file that cannot be told"
    return "" if not name or disk_names.is_number(name) else outside(name)


def outside(name: str) -> str:
    """Return the text of `reaches_out` for a backing file that is no layer."""
    return f"the backing file {name}"


def below(path: str, format: str, *, over_network: bool = False) -> list[tuple[str, str]]:
    """Return path and format of each file below the active layer `path`, from the headers, topmost first.

    With `over_network` the chain ends at a layer whose header names no file; only the disk's record names the
    image below. Raise MissingImage if a file is missing, BrokenChain if a header is ambiguous: a shortened
    chain would show the guest zeros instead of its data.
    """
    found: list[tuple[str, str]] = []
    while format == "qcow2":
        name, format = _named(path, over_network)
        if over_network and not name:
            raise BrokenChain(f"{path} does not lie over an image on the network")
        if not name or (over_network and re.match(PROTOCOL, name)):
            break
        path = os.path.join(os.path.dirname(path), name)
        if not os.path.exists(path):
            raise MissingImage(f"{path}, which a disk lies over, is not there on {os.uname().nodename}")
        if len(found) == DEEPEST:
            raise BrokenChain(f"{found[0][0]} lies over more than {DEEPEST} files, or over itself")
        found.append((path, format))
    return found


def _named(path: str, over_network: bool) -> tuple[str, str]:
    """Return backing name and format in a qcow2 header, ('', '') for none; raise BrokenChain."""
    try:
        # Do not block on a FIFO.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            head = file.read(80) if is_file else b""
            if head[:4] == MAGIC and len(head) == 80 and disk_names.layer_of(path):
                # One of ours: past a missing end QEMU would read zeros, or the layer below.
                _tables(path, file, head)
    except OSError as e:
        raise BrokenChain(f"{here(path)}: {e.strerror}") from None
    if not is_file:
        raise BrokenChain(f"{here(path)} is no regular file")
    if head[:4] != MAGIC or len(head) < 80:
        return "", ""
    version, offset = struct.unpack_from(">IQ", head, 4)
    if version >= 3 and struct.unpack_from(">Q", head, 72)[0] & DATA_FILE:
        raise BrokenChain(f"{path} has a data file of its own")
    if not offset:
        return "", ""
    name, format = backing_of(os.path.realpath(path))
    if not name or (re.match(PROTOCOL, name) and not over_network) or "\0" in name:
        raise BrokenChain(f"{path} does not lie over a file: its header names {name!r}")
    if format not in FORMATS:
        raise BrokenChain(
            f"{path} lies over {name}, but does not name a known format of that ({format or 'none'})"
        )
    return name, format


def explicit(path: str, format: str, node: dict[str, object]) -> str:
    """Return a `json:` name for the layer `path` and its chain down to the network disk `node`.

    It includes the user to open `node` with, which QEMU and libvirt leave out of the names in headers.
    """
    for name, kind in reversed([(path, format), *below(path, format, over_network=True)]):
        node = {"driver": kind, "file": {"driver": "file", "filename": name}, "backing": node}
    return f"json:{json.dumps(node)}"


def numbered(folder: str) -> list[int]:
    """Return the numbers of the files in a directory; two names of one file count as the higher."""
    found: dict[int, int] = {}
    files.refresh(os.path.dirname(folder))
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    for number in sorted(int(name) for name in names if disk_names.is_number(name)):
        found[os.lstat(f"{folder}/{number}").st_ino] = number
    return sorted(found.values())


def topmost(folder: str, number: int) -> int:
    """Return the topmost layer over `number`, itself if there is none; raise BrokenChain if ambiguous."""
    top = number
    while True:
        over = [other for other in numbered(folder) if _lies_over(folder, other, top)]
        if not over:
            return top
        if len(over) > 1:
            both = f"{over[0]} and {over[1]} in {beneath.readable(folder)}"
            raise BrokenChain(f"both {both} lie over {top}: which of them the guest wrote to cannot be told")
        top = over[0]


def _lies_over(folder: str, number: int, below: int) -> bool:
    name = backing_of(f"{folder}/{number}")[0]
    if not disk_names.is_number(name) or not os.path.exists(f"{folder}/{name}"):
        return False
    return os.path.samefile(f"{folder}/{name}", f"{folder}/{below}")


def tree(folder: str, active: int, active_format: str, raw_layer: object = None) -> dict[int, dict[str, Any]]:
    """Return every layer's parent, format and backing name, from the headers of the files.

    `raw_layer`, which a record names, is raw even if no header says so any more.
    """
    numbers = numbered(folder)
    if active not in numbers:
        same = [number for number in numbers if os.path.samefile(f"{folder}/{number}", f"{folder}/{active}")]
        numbers = sorted({*numbers, active} - set(same))
    found = {}
    for number in numbers:
        # A raw layer's first bytes belong to its guest; it has no backing file.
        raw = number == active and active_format == "raw"
        found[number] = ("", "") if raw else backing_of(f"{folder}/{number}")
    below = {number: int(name) for number, (name, _) in found.items() if disk_names.is_number(name)}
    raws: set[object] = {raw_layer}
    raws |= {layer for number, layer in below.items() if found[number][1] == "raw" and number != raw_layer}
    described: dict[int, dict[str, Any]] = {}
    for number in numbers:
        format = active_format if number == active else "raw" if number in raws else "qcow2"
        name, name_format = ("", "") if format == "raw" else found[number]
        described[number] = {
            "parent": below.get(number, NONE) if name else NONE,
            "format": format,
            "backing": name,
            "backing_format": name_format,
        }
    return described
