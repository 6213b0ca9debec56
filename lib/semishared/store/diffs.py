# SPDX-License-Identifier: Apache-2.0
"""What a diff makes of its image: which ranges are to be written, what the extents hold then, and how the new content is called.

qemu-img says which file of the chain holds which range (`map`), to the subcluster; the bytes are taken from there. `qemu-img
commit` would do, but writes 64 KiB for each 4 KiB of scattered writes: its mirror job knows no smaller piece.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterator, NamedTuple, Optional, Tuple

from ..errors import CommitRefused, ImageChanged, NotSupported
from ..tools import extents, files, progress, qemu_img
from ..tools.extents import EXTENT, Manifest
from ..tools.rate_limit import Pace
from . import writers
from .claims import Claim

HASHERS = 4
"""Extents that are hashed at once, beside the writing."""
HOLE = -1
"""In place of a file: zeros."""
MANIFEST_LIMIT = 256 << 20


class Diff(NamedTuple):
    """What a guest has written, in files of this machine, and what it lies over."""

    layers: Tuple[str, ...]
    """All qcow2 layers up to the one that is to be committed, the lowest first; nobody writes to them. Headers are not asked."""
    base: str
    """The image of generation `Owner.generation` that the lowest lies over."""
    format: str
    """Its format, which is the image's."""
    manifest: str
    """Path of its manifest."""
    last: str = ""
    """Path of a file that the commit writes and the next one reads: what the image has. '' for none: all is written each time."""
    rate: float = 0
    """Bytes per second to the store, 0 for no limit."""


class Committed(NamedTuple):
    """What a commit has done."""

    generation: str
    """What the image is now, '' if nobody knows the name of that."""
    size: int
    """In bytes, as a guest sees it."""
    dirty: int
    """Bytes that the diff holds, zeros and discards not counted."""
    written: int
    """Bytes that were sent to the store, journal and all."""
    seconds: float
    """Until all of it was sent."""
    hashed: int
    """Bytes that were read on this machine for the name of the generation, none from the store."""
    waited: float
    """Seconds more, for that."""
    how: str
    """reflink, journal, whole, rbd; '' if the image has it all already."""

    def to_data(self) -> dict[str, object]:
        """Return it as JSON data."""
        return self._asdict()


class Range(NamedTuple):
    """Bytes of the image, and where they are: in a file of the chain, from an offset on."""

    start: int
    length: int
    file: int
    offset: int

    def within(self, start: int, end: int) -> Range:
        """Return the part between two bytes of the image."""
        cut = max(start - self.start, 0)
        return Range(self.start + cut, min(self.start + self.length, end) - self.start - cut, self.file, self.offset + cut)


class Last(NamedTuple):
    """What an image was made by the last commit, as this machine has noted it."""

    manifest: Manifest
    ranges: list[Range]
    """Where it is not what the diff lies over."""

    @classmethod
    def of(cls, path: str, generation: str) -> Optional[Last]:
        """Return what a file says, None if there is none, or it is of another generation than what the image is now."""
        try:
            data = json.loads(files.read(path, 2 * MANIFEST_LIMIT)) if path else None
            if not data:
                return None
            ranges = [Range(start, length, HOLE, 0) for start, length in data["ranges"]]
            found = cls(extents.parse(data["manifest"].encode()), ranges)
        except (OSError, ValueError, KeyError, TypeError, ImageChanged):
            return None
        return found if found.manifest.generation == generation else None


class Change:
    """A diff, opened: use within `opened`."""

    def __init__(self, diff: Diff, fds: list[int], claim: Claim) -> None:
        self._diff, self._fds = diff, fds
        self.size = qemu_img.virtual_size(diff.layers[-1], "qcow2")
        self.own, below = _ranges(diff)
        self.dirty = sum(found.length for found in self.own if found.file != HOLE)
        self._ranges = sorted(self.own + below)
        self.extents = {index for found in self.own for index in _indexes(found)}
        """Those that are not what the base has."""
        self.last = Last.of(diff.last, claim.generation)
        was = self.last.ranges if self.last else [Range(index * EXTENT, EXTENT, HOLE, 0) for index in sorted(claim.touched)]
        self.writes = sorted(self.own + list(_common(below, was)))
        """What is to be written to the image, by offset: also what the base has, where the image has it not."""

    def content(self, index: int, parts: list[Range]) -> bytes:
        """Return what an extent of the image is to hold; `parts` of the chain are in it."""
        start, end = index * EXTENT, min((index + 1) * EXTENT, self.size)
        buffer = bytearray(end - start)
        for part in (found.within(start, end) for found in parts):
            if part.file != HOLE:
                at = part.start - start
                buffer[at : at + part.length] = self._read(part)
        return bytes(buffer)

    def _read(self, part: Range) -> bytes:
        found = os.pread(self._fds[part.file], part.length, part.offset)
        # A raw base may end within a page.
        return found.ljust(part.length, b"\0")

    def hashed(self, pool: Executor) -> tuple[Optional[Manifest], int]:
        """Return the manifest of the new content, None if that of the base is not known, and how many bytes were read for it."""
        base = manifest_at(self._diff.manifest)
        if base is None or self._diff.format != "raw":
            return None, 0
        wanted = set(self.extents)
        if base.size % EXTENT and base.size != self.size:
            wanted.add(base.size // EXTENT)  # which was shorter
        parts: dict[int, list[Range]] = {index: [] for index in sorted(wanted)}
        for found in self._ranges:
            for index in _indexes(found):
                if index in parts:
                    parts[index].append(found)
        digests = {index: digest for index, digest in base.extents.items() if index not in wanted}
        digests.update((index, digest) for index, digest in pool.map(self._hashed, parts.items()) if digest)
        return Manifest("raw", self.size, digests), sum(min(EXTENT, self.size - index * EXTENT) for index in wanted)

    def _hashed(self, extent: tuple[int, list[Range]]) -> tuple[int, str]:
        """Return the index of an extent and its digest, '' for zeros."""
        content = self.content(*extent)
        progress.touch()
        return extent[0], "" if extents.is_zero(content) else hashlib.sha256(content).hexdigest()

    def leave_out(self, new: Manifest, held: Manifest) -> None:
        """Do not write the extents that the image holds already."""
        parts = (found.within(index * EXTENT, (index + 1) * EXTENT) for found in self.writes for index in _indexes(found))
        self.writes = [part for part in parts if new.extents.get(part.start // EXTENT) != held.extents.get(part.start // EXTENT)]

    def chunks(self, pace: Pace) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield (offset, length, content) of what is to be written, None for zeros, in pieces of at most an extent, at a pace."""
        for found in self.writes:
            if found.file == HOLE:
                yield found.start, found.length, None
                continue
            for start in range(found.start, found.start + found.length, EXTENT):
                part = found.within(start, start + EXTENT)
                pace.wait(part.length)
                yield part.start, part.length, self._read(part)
                progress.touch()


def _indexes(found: Range) -> range:
    return range(found.start // EXTENT, (found.start + found.length - 1) // EXTENT + 1)


def _common(ranges: list[Range], others: list[Range]) -> Iterator[Range]:
    """Yield the parts of `ranges` that lie within `others`; both are sorted."""
    at = 0
    for found in ranges:
        end = found.start + found.length
        while at < len(others) and others[at].start + others[at].length <= found.start:
            at += 1
        for other in others[at:]:
            if other.start >= end:
                break
            yield found.within(other.start, other.start + other.length)


def _ranges(diff: Diff) -> tuple[list[Range], list[Range]]:
    """Return what the layers hold, and what is left of the base below them."""
    own: list[Range] = []
    below: list[Range] = []
    for entry in qemu_img.mapped(qemu_img.chain(diff.layers, diff.base, diff.format)):
        file = len(diff.layers) - 1 - int(entry["depth"])
        # What is not present lies behind the end of all that is below: the image has zeros there once it is grown.
        is_own = file >= 0 and bool(entry["present"])
        if diff.format != "raw" and not is_own:
            continue
        found = Range(int(entry["start"]), int(entry["length"]), HOLE, 0)
        if not entry["zero"]:
            if "offset" not in entry and diff.format == "raw":
                raise NotSupported(f"{diff.layers[file]} holds compressed or encrypted clusters, which no commit takes")
            found = found._replace(file=file if is_own else len(diff.layers), offset=int(entry.get("offset", 0)))
        (own if is_own else below).append(found)
    return own, below


def manifest_at(path: str) -> Optional[Manifest]:
    """Return the manifest in a file, None if there is none."""
    try:
        return extents.parse(files.read(path, MANIFEST_LIMIT)) if path else None
    except (OSError, ImageChanged):
        return None


@contextmanager
def opened(diff: Diff, claim: Claim, size: int) -> Iterator[Change]:
    """Yield what a diff changes in an image of `size` bytes, as a guest sees it; raise AnotherWriter if somebody writes to a layer."""
    for layer in diff.layers:
        writers.check_file(layer)
    with ExitStack() as stack:
        fds = []
        for path in (*diff.layers, diff.base):
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        change = Change(diff, fds, claim)
        if change.size < size:
            raise CommitRefused(f"{diff.layers[-1]} has {change.size} bytes, and its image {size}")
        yield change


def carry_out(change: Change, write: Callable[[Change], int]) -> tuple[Optional[Manifest], Committed]:
    """Have `write` write a change, and hash it meanwhile; return the manifest of the new content, and what was done.

    `write` returns how many bytes it has sent to the store.
    """
    began = time.monotonic()
    with ThreadPoolExecutor(1 + HASHERS) as beside:
        hashing = beside.submit(change.hashed, beside)
        if change.last:
            new = hashing.result()[0]
            if new:
                change.leave_out(new, change.last.manifest)
        written = write(change)
        done = time.monotonic()
        manifest, read = hashing.result()
    name, waited = manifest.generation if manifest else "", time.monotonic() - done
    return manifest, Committed(name, change.size, change.dirty, written, done - began, read, waited, "")


def remember(diff: Diff, change: Change, manifest: Optional[Manifest]) -> None:
    """Keep on this machine what the image now has."""
    if diff.last and manifest:
        ranges = [[found.start, found.length] for found in change.own]
        files.write_json(diff.last, {"manifest": manifest.text().decode(), "ranges": ranges})
    elif diff.last:
        files.unlink(diff.last)
