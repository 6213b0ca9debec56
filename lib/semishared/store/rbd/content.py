# SPDX-License-Identifier: Apache-2.0
"""The content of RBD images, as a stream of extents to hosts and from uploads, and its manifest.

A host copies a snapshot of semishared, never the image itself: with a read-only key, straight from RBD,
allocated extents only. It hashes every extent as it arrives.
"""

from __future__ import annotations

import base64
import errno
import os
import queue
import zlib
from contextlib import closing, suppress
from typing import Any, Generator, Iterable, Iterator

from ...errors import CephUnavailable, ImageChanged, NoSpace
from ...model.disk import names as disk_names
from ...model.steps import ImageRef
from ...model.store import rbd_names
from ...named import NamedTuple
from ...tools import extents, progress
from . import ceph
from . import image as rbd_image

PIECE = 32 << 10
"""Characters in one metadata value."""
MOST = 256
"""Most pieces: that of about 700 GiB of random data. Hosts hash larger images by reading them."""


def write_manifest(image: Any, manifest: extents.Manifest) -> None:
    """Store the manifest of an open image's content in its metadata, in place of any other.

    Metadata is removed with the image, and every key may read it: so hosts learn which extents an image
    shares with others. The manifest is packed and split into pieces; the first key holds the generation and
    the number of pieces. A killed writer leaves a mixture: `read_manifest` accepts only a text that hashes to
    the generation.
    """
    packed = base64.b64encode(zlib.compress(manifest.text(), 9)).decode("ascii")
    pieces = [packed[at : at + PIECE] for at in range(0, len(packed), PIECE)]
    if len(pieces) > MOST:
        return
    before = [key for key in dict(image.metadata_list()) if rbd_names.is_manifest(key)]
    for number, piece in enumerate(pieces):
        image.metadata_set(rbd_names.manifest(number), piece)
    image.metadata_set(rbd_names.MANIFEST, f"{manifest.generation} {len(pieces)}")
    for key in set(before) - {rbd_names.MANIFEST, *map(rbd_names.manifest, range(len(pieces)))}:
        image.metadata_remove(key)


def read_manifest(image: Any, generation: str) -> extents.Manifest | None:
    """Return the manifest of a generation of an open image, None if the metadata does not have it."""
    found = dict(image.metadata_list())
    name, _, count = str(found.get(rbd_names.MANIFEST, "")).partition(" ")
    if (
        name != generation
        or not disk_names.is_number(count)
        or len(count) > len(str(MOST))
        or int(count) > MOST
    ):
        return None
    try:
        packed = "".join(str(found[rbd_names.manifest(number)]) for number in range(int(count)))
        inflating = zlib.decompressobj()
        text = inflating.decompress(base64.b64decode(packed, validate=True), MOST * PIECE * 4)
        return extents.parse(text) if extents.generation_of(text) == generation else None
    except (KeyError, ValueError, zlib.error, ImageChanged):
        return None


AT_ONCE = 8
"""Extents (4 MiB) in flight."""


class Seen(NamedTuple):
    """A frozen content: the snapshot's id (its name may change) and its size in bytes."""

    snapshot: int
    size: int


class RbdContent:
    """The content of an RBD image (store.Content), read as the user for bases."""

    def __init__(self, image: ImageRef) -> None:
        self._image = image
        self._generations: dict[int, str] = {}
        self._unnamed = -1

    def _place(self) -> tuple[ceph.Pool, str]:
        # On first use only: a named generation with a base on this host needs no cluster.
        return ceph.pool_of(self._image, self._image.access.reader)

    def look(self) -> rbd_image.Snapshot | None:
        """Return the snapshot of the image's present content (or of its named generation), or None."""
        with ceph.opened(*self._place(), read_only=True) as image:
            if self._image.generation:
                found = rbd_image.find(image, rbd_names.frozen(self._image.generation))
            else:
                found = rbd_image.content(image)
        if found:
            self._generations[found.id] = found.generation
        return found

    def see(self) -> Seen:
        """Return the frozen content; raise ImageChanged if there is none."""
        found = self.look()
        if found is None:
            wanted = f"as generation {self._image.generation}" if self._image.generation else "as it is now"
            raise ImageChanged(f"{self._image.source} has no snapshot of its content {wanted}")
        return Seen(found.id, found.size)

    def generation(self, seen: Seen) -> str:
        """Return the generation of the frozen content."""
        return self._generations[seen.snapshot]

    def glance(self) -> tuple[Seen | None, str]:
        """Return the frozen content, None where its bridge has to freeze it first."""
        found = self.look()
        return (Seen(found.id, found.size), found.generation) if found else (None, "")

    def allocated(self, seen: Seen) -> int:
        """Return the bytes of the extents that may hold data."""
        with ceph.opened(*self._place(), snapshot=seen.snapshot, read_only=True) as image:
            return len(allocated(image, seen.size)) * extents.EXTENT

    def copy(self, seen: Seen, target: str, format: str) -> extents.Manifest:
        """Stream the frozen content into a new sparse file."""
        frozen = ceph.opened(*self._place(), snapshot=seen.snapshot, read_only=True)
        with (
            frozen as image,
            extents.Copy(target, seen.size) as made,
            closing(stream(image, seen.size)) as found,
        ):
            progress.expect(len(allocated(image, seen.size)) * extents.EXTENT, "the store")
            for index, content in found:
                progress.count("store_read", len(content))
                made.add(index, content)
        return made.manifest(format)

    def read(self, wanted: Iterable[int], seen: Seen | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (index, content) of the extents `wanted` of the frozen content, unordered."""
        seen = seen or self.see()
        frozen = ceph.opened(*self._place(), snapshot=seen.snapshot, read_only=True)
        with frozen as image, closing(several(image, seen.size, wanted)) as found:
            for index, content in found:
                progress.count("store_read", len(content))
                yield index, content

    def expected(self, generation: str) -> extents.Manifest | None:
        """Return a generation's manifest from the image's metadata, where an upload or commit wrote it."""
        with ceph.opened(*self._place(), read_only=True) as image:
            return read_manifest(image, generation)

    def publish(self, found: extents.Manifest, seen: Seen) -> None:
        """Note that the bridge must name an unnamed snapshot: this machine's key is read-only."""
        if not self.generation(seen):
            self._unnamed = seen.snapshot

    def unnamed(self) -> int:
        """Return the snapshot of the published content, if the bridge must name it."""
        return self._unnamed

    def tidy(self) -> None:
        """Do nothing: a host leaves nothing beside an image."""


def allocated(image: Any, size: int) -> list[int]:
    """Return the indexes of the extents of an open image that may hold data."""
    found: set[int] = set()

    def note(offset: int, length: int, is_there: bool) -> None:
        if is_there:
            found.update(range(offset // extents.EXTENT, (offset + length - 1) // extents.EXTENT + 1))

    with ceph.long():
        image.diff_iterate(0, size, None, note, include_parent=True, whole_object=True)
    return sorted(found)


def stream(image: Any, size: int) -> Generator[tuple[int, bytes], None, None]:
    """Yield (index, content) of the allocated extents of an open image, unordered."""
    return several(image, size, allocated(image, size))


def several(image: Any, size: int, indices: Iterable[int]) -> Generator[tuple[int, bytes], None, None]:
    """Yield (index, content) of extents of an open image of `size` bytes, read in parallel, unordered."""
    arrived: queue.Queue[tuple[int, bytes | None]] = queue.Queue()
    wanted = (index for index in indices if index * extents.EXTENT < size)
    pending, patience_s = 0, 2 * ceph.ANSWER_S

    def ask() -> int:
        index = next(wanted, None)
        if index is None:
            return 0
        length = min(extents.EXTENT, size - index * extents.EXTENT)
        image.aio_read(
            index * extents.EXTENT, length, lambda _, content, at=index: arrived.put((at, content))
        )
        return 1

    def answer() -> tuple[int, bytes | None]:
        nonlocal patience_s
        try:
            return arrived.get(timeout=patience_s)
        except queue.Empty:
            said, patience_s = f"reads are not answered within {patience_s} s", 0
            raise CephUnavailable(said) from None

    try:
        while pending < AT_ONCE and ask():
            pending += 1
        while pending:
            index, content = answer()
            pending -= 1
            if content is None:
                raise CephUnavailable(f"extent {index} cannot be read")
            pending += ask()
            yield index, content.ljust(min(extents.EXTENT, size - index * extents.EXTENT), b"\0")
    finally:
        # The caller closes the image next: wait for the reads in flight. The caller's own error is the one to
        # report.
        with suppress(CephUnavailable):
            for _ in range(pending):
                answer()


class Writing:
    """Writes to an open image, several in flight; `write` is for a new image: zeros stay holes."""

    def __init__(self, image: Any, at_once: int = AT_ONCE) -> None:
        self._image, self._at_once = image, at_once
        self._done: queue.Queue[int] = queue.Queue()
        self._pending = 0

    def write(self, offset: int, content: bytes) -> None:
        """Write the blocks of `content` that are not zero."""
        for at, data in extents.blocks(content):
            self.put(offset + at, bytes(data))

    def put(self, offset: int, content: bytes) -> None:
        """Write all of `content`, zeros too."""
        self._image.aio_write(content, offset, self._ended)
        progress.count("store_written", len(content))
        self._begun()

    def zero(self, offset: int, length: int) -> None:
        self._image.aio_write_zeroes(offset, length, self._ended)
        self._begun()

    def _ended(self, completion: Any) -> None:
        self._done.put(completion.get_return_value())

    def _begun(self) -> None:
        self._pending += 1
        while self._pending > self._at_once:
            self._wait()

    def _wait(self) -> None:
        try:
            result = self._done.get(timeout=2 * ceph.ANSWER_S)
        except queue.Empty:
            raise CephUnavailable(
                f"writes are not answered within {2 * ceph.ANSWER_S} s: is the cluster full?"
            ) from None
        self._pending -= 1
        if -result in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"writing to the pool: {os.strerror(-result)}")
        if result < 0:
            raise CephUnavailable(f"a write failed: {os.strerror(-result)}")

    def finish(self) -> None:
        """Wait for all writes, and flush the image."""
        while self._pending:
            self._wait()
        self._image.flush()
