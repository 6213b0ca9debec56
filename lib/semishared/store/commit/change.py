# SPDX-License-Identifier: Apache-2.0
"""Parallel work on a few items in memory, and how a store commits a diff.

A commit opens the diff, writes it while hashing it, and records the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Callable, Iterable, Iterator, List, Optional, Tuple, TypeVar

from ...errors import CommitRefused, DamagedLayer, ImageChanged, NoSpace, NotSupported, TooLarge
from ...named import NamedTuple
from ...tools import extents, files, layers, progress, qemu_img, whole_pages
from ...tools.extents import EXTENT, Manifest
from ...tools.rate_limit import Pace
from .. import writers
from .claims import Claim, Committed, Diff

Item = TypeVar("Item")
Found = TypeVar("Found")


def in_order(work: Callable[[Item], Found], items: Iterable[Item], at_once: int) -> Iterator[Found]:
    """Yield the results of `work` in the order of `items`, `at_once` in parallel; raise what it raises.

    It takes items only as the caller consumes results.
    """
    with ThreadPoolExecutor(at_once) as pool:
        waiting: deque[Future[Found]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * at_once:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


# What a commit writes of one extent of an image, and its hashes.


Chunk = Tuple[int, int, Optional[memoryview]]
"""Offset in the image, length (one extent at most) and content, None for zeros."""


class Part:
    """What a commit writes of one extent: chunks by offset."""

    def __init__(self, chunks: List[Chunk]) -> None:
        self.chunks = chunks
        self.contents = [content for _, _, content in chunks if content is not None]
        self.start, self.end = chunks[0][0], chunks[-1][0] + chunks[-1][1]
        self._digest: Optional[str] = None

    def is_all_of(self, content: memoryview) -> bool:
        """Return True if this part is one chunk with all of the extent's `content`."""
        return len(self.contents) == len(self.chunks) == 1 and len(self.contents[0]) == len(content)

    @property
    def digest(self) -> str:
        """Return the hash of the written bytes: the extent's hash, if the part is a whole extent."""
        if self._digest is None:
            self._digest = digest_of(*self.contents)
        return self._digest


def digest_of(*contents: memoryview) -> str:
    """Return the hash of consecutive pieces as a manifest has it for an extent: '' for all zeros."""
    if len(contents) == 1 and extents.is_zero(contents[0]):
        return ""
    found = hashlib.sha256()
    for content in contents:
        found.update(content)
    return found.hexdigest()


# What a diff changes in its image: the ranges to write, the content of their extents, and the hashes.
# `qemu-img map` says which file of the chain holds which range, down to the subcluster; the commit reads the
# bytes there. `qemu-img commit` would write 64 KiB for each 4 KiB of scattered writes: its mirror job knows
# no smaller piece.


AT_ONCE = 2
"""Extents that are read and sent in parallel: one is written while the next is read. More do not help."""
HASHERS = 4
"""Extents that are hashed in parallel."""
MOSTLY = EXTENT // 2
HOLE = -1
"""Instead of a file's index: zeros."""
LAST_LIMIT = 2 * extents.MANIFEST_LIMIT
"""Most bytes of the file that records the last commit."""
T = TypeVar("T")
_NOTHING = Manifest("raw", 0, {})


class Range(NamedTuple):
    """Bytes of the image, and their place: a file of the chain and an offset in it."""

    start: int
    length: int
    file: int
    offset: int

    def within(self, start: int, end: int) -> Range:
        """Return the part between two offsets of the image."""
        cut = max(start - self.start, 0)
        return Range(
            self.start + cut,
            min(self.start + self.length, end) - self.start - cut,
            self.file,
            self.offset + cut,
        )


class Last(NamedTuple):
    """The image's content after the last commit, as recorded on this machine."""

    manifest: Manifest
    ranges: list[Range]
    """The ranges in which the image differs from the base of the diff."""

    @classmethod
    def of(cls, path: str, generation: str) -> Optional[Last]:
        """Return the content of the record; None if there is none, or it is of another generation."""
        try:
            data = json.loads(files.read(path, LAST_LIMIT)) if path else None
            if not data:
                return None
            ranges = [Range(start, length, HOLE, 0) for start, length in data["ranges"]]
            found = cls(extents.parse(data["manifest"].encode()), ranges)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, ImageChanged):
            return None
        return found if found.manifest.generation == generation else None


class Change:
    """An open diff; use it within `opened`.

    It reads an extent that is mostly new once, and hashes what it sends. It hashes the other extents after
    the last write, while the store makes the writes durable.
    """

    def __init__(self, diff: Diff, fds: list[int], claim: Claim, beside: Executor) -> None:
        self._diff, self._fds, self._beside = diff, fds, beside
        self.own, below, self.size = _ranges(diff)
        self.dirty = sum(found.length for found in self.own if found.file != HOLE)
        self.extents = {index for found in self.own for index in _indexes(found)}
        """Indexes of the extents that differ from the base."""
        self.last = Last.of(diff.last, claim.generation)
        was = (
            self.last.ranges
            if self.last
            else [Range(index * EXTENT, EXTENT, HOLE, 0) for index in sorted(claim.touched)]
        )
        self.writes = sorted(self.own + list(_common(below, was)))
        """What to write to the image, by offset: also data of the base where the image has other data."""
        self._base = manifest_at(diff.manifest) if diff.format == "raw" else None
        self._unhashed = self._of_extents(sorted(self.own + below))
        self._digests = {
            index: found
            for index, found in (self._base or _NOTHING).extents.items()
            if index not in self._unhashed
        }
        self._hashing: Optional[Future[None]] = None
        self._buffers = whole_pages.Buffers()
        self.hashed = 0
        """Bytes that were read for hashes."""

    def _of_extents(self, ranges: list[Range]) -> dict[int, list[Range]]:
        """Return, by index, the parts of the chain in each extent whose hash differs from the base's."""
        if not self._base:
            return {}
        wanted = set(self.extents)
        if self._base.size % EXTENT and self._base.size != self.size:
            wanted.add(self._base.size // EXTENT)  # the base's last extent was shorter
        parts: dict[int, list[Range]] = {index: [] for index in sorted(wanted)}
        for found in ranges:
            for index in _indexes(found):
                if index in parts:
                    parts[index].append(found)
        return parts

    def each(self, work: Callable[[Part], T], pace: Pace) -> Iterator[T]:
        """Yield the result of `work` for each extent's writes, by offset, at a pace; `work` runs in parallel.

        The content that `work` gets is valid until it returns.
        """

        def tasks() -> Iterator[tuple[int, list[Range], list[Range]]]:
            for index, writes in _by_extent(self.writes):
                size = sum(found.length for found in writes if found.file != HOLE)
                pace.wait(size)
                yield index, writes, self._unhashed.get(index, []) if size >= MOSTLY else []

        def carry(task: tuple[int, list[Range], list[Range]]) -> tuple[int, Optional[str], T]:
            index, writes, parts = task
            with self._buffers.one() as memory:
                content = self._content(memory, index, parts) if parts else None
                part = Part(
                    [
                        (found.start, found.length, self._of(found, memory, content is not None))
                        for found in writes
                    ]
                )
                done = work(part)
                if content is None:
                    return index, None, done
                return index, part.digest if part.is_all_of(content) else digest_of(content), done

        progress.expect(sum(found.length for found in self.writes if found.file != HOLE), target="the store")
        for index, digest, done in in_order(carry, tasks(), AT_ONCE):
            if digest is not None:
                self._note(index, digest)
            yield done
        self._hashing = self._beside.submit(self._hash)

    def hash(self) -> None:
        """Compute the missing hashes."""
        if self._hashing:
            self._hashing.result()
        self._hash()

    def _hash(self) -> None:
        def of(extent: tuple[int, list[Range]]) -> tuple[int, str]:
            with self._buffers.one() as memory:
                return extent[0], digest_of(self._content(memory, *extent))

        for index, digest in in_order(of, list(self._unhashed.items()), HASHERS):
            self._note(index, digest)

    def _note(self, index: int, digest: str) -> None:
        self.hashed += min(EXTENT, self.size - index * EXTENT)
        del self._unhashed[index]
        if digest:
            self._digests[index] = digest
        progress.touch()

    def manifest(self) -> Optional[Manifest]:
        """Return the manifest of the new content, after `hash`; None if the base's is unknown."""
        return Manifest("raw", self.size, self._digests) if self._base else None

    def _content(self, memory: memoryview, index: int, parts: list[Range]) -> memoryview:
        """Return the new content of an extent, empty for zeros; `parts` are the chain's ranges in it."""
        start, end = index * EXTENT, min((index + 1) * EXTENT, self.size)
        within = [found.within(start, end) for found in parts if found.file != HOLE]
        content = memory[: end - start if within else 0]
        if sum(found.length for found in within) < len(content):
            content[:] = bytes(len(content))
        for found in within:
            self._of(found, memory, is_read=False)
        return content

    def _of(self, found: Range, memory: memoryview, is_read: bool) -> Optional[memoryview]:
        """Return a range's view in its extent's `memory`; read it there first unless `is_read`."""
        if found.file == HOLE:
            return None
        view = memory[found.start % EXTENT : found.start % EXTENT + found.length]
        at = len(view) if is_read else 0
        while at < len(view):
            got = os.preadv(self._fds[found.file], [view[at:]], found.offset + at)
            if not got:  # a raw base may end within a page
                view[at:] = bytes(len(view) - at)
                break
            at += got
        return view

    def leave_out(self, held: Manifest) -> None:
        """Drop the writes of extents that the image already holds; all extents are hashed."""
        parts = (part for _, found in _by_extent(self.writes) for part in found)
        self.writes = [
            part
            for part in parts
            if self._digests.get(part.start // EXTENT) != held.extents.get(part.start // EXTENT)
        ]


def _by_extent(ranges: list[Range]) -> Iterator[tuple[int, list[Range]]]:
    """Yield the index of each extent that sorted ranges touch, and their parts in it."""
    index = -1
    parts: list[Range] = []
    for found in ranges:
        for at in _indexes(found):
            if at != index and parts:
                yield index, parts
                parts = []
            index = at
            parts.append(found.within(at * EXTENT, (at + 1) * EXTENT))
    if parts:
        yield index, parts


def _indexes(found: Range) -> range:
    return range(found.start // EXTENT, (found.start + found.length - 1) // EXTENT + 1)


def _common(ranges: list[Range], others: list[Range]) -> Iterator[Range]:
    """Yield the parts of `ranges` that lie within `others`; both are sorted."""
    at = 0
    for found in ranges:
        end = found.start + found.length
        while at < len(others) and others[at].start + others[at].length <= found.start:
            at += 1
        # By index: copying the rest of the list for each range would dominate the time for many ranges.
        for index in range(at, len(others)):
            other = others[index]
            if other.start >= end:
                break
            yield found.within(other.start, other.start + other.length)


def _ranges(diff: Diff) -> tuple[list[Range], list[Range], int]:
    """Return the ranges of the layers, the rest of the base below them, and the disk's virtual size."""
    own: list[Range] = []
    below: list[Range] = []
    end, sizes = 0, [layers.end(layer) for layer in diff.layers]
    for entry in qemu_img.mapped(qemu_img.chain(diff.layers, diff.base, diff.format)):
        start, length, file = (
            int(entry["start"]),
            int(entry["length"]),
            len(diff.layers) - 1 - int(entry["depth"]),
        )
        end = start + length
        # A range that is not present lies past the end of all files below: the image reads zeros there once
        # it is grown. QEMU before 6.1 does not report `present`; the commit then writes those zeros.
        is_own = file >= 0 and bool(entry.get("present", True))
        if file >= 0 and "offset" in entry and int(entry["offset"]) + length > sizes[file]:
            # QEMU reads zeros there.
            raise DamagedLayer(
                f"{diff.layers[file]} on {os.uname().nodename} has {sizes[file]} bytes, and data "
                f"of it lie behind that"
            )
        if diff.format != "raw" and not is_own:
            continue
        if entry["zero"]:
            found = Range(start, length, HOLE, 0)
        elif "offset" not in entry and diff.format == "raw":
            raise NotSupported(
                f"{diff.layers[file]} holds compressed or encrypted clusters, which no commit takes"
            )
        else:
            found = Range(start, length, file if is_own else len(diff.layers), int(entry.get("offset", 0)))
        (own if is_own else below).append(found)
    return own, below, end


def manifest_at(path: str) -> Optional[Manifest]:
    """Return the manifest in a file, None if there is none or it is damaged."""
    try:
        return extents.parse(files.read(path, extents.MANIFEST_LIMIT)) if path else None
    except (OSError, ImageChanged):
        return None


# How any store commits a diff.


@contextmanager
def opened(diff: Diff, claim: Claim, size: int) -> Iterator[Change]:
    """Yield the changes of a diff to an image of `size` bytes (virtual size).

    Raise AnotherWriter if a process writes to a layer, CommitRefused if the disk is smaller than the image.
    """
    for layer in diff.layers:
        writers.check_file(layer)
    with ExitStack() as stack:
        fds = []
        for path in (*diff.layers, diff.base):
            fds.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, fds[-1])
        change = Change(diff, fds, claim, stack.enter_context(ThreadPoolExecutor(1)))
        if change.size < size:
            raise CommitRefused(f"{diff.layers[-1]} has {change.size} bytes, and its image {size}")
        yield change


def carry_out(change: Change, write: Callable[[Change], int]) -> tuple[Optional[Manifest], Committed]:
    """Write a change through `write`, which uses `Change.each`; return the new manifest and the result.

    `write` returns the bytes that it sent to the store.
    """
    began = time.monotonic()
    if change.last:
        change.hash()
        if change.manifest():
            change.leave_out(change.last.manifest)
    written = write(change)
    done = time.monotonic()
    change.hash()
    manifest = change.manifest()
    name, waited = manifest.generation if manifest else "", time.monotonic() - done
    return manifest, Committed(
        name, change.size, change.dirty, written, done - began, change.hashed, waited, ""
    )


def remember(diff: Diff, change: Change, manifest: Optional[Manifest]) -> None:
    """Record the new content on this machine, which saves the next commit work; ignore failures."""
    if not diff.last:
        return
    ranges = [[found.start, found.length] for found in change.own]
    try:
        files.remove_staged(*os.path.split(diff.last))
        if manifest:
            files.write_json(diff.last, {"manifest": manifest.text().decode(), "ranges": ranges}, LAST_LIMIT)
            return
    except (OSError, NoSpace, TooLarge):
        pass
    files.unlink(diff.last)
