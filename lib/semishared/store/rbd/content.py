# SPDX-License-Identifier: Apache-2.0
"""The content of RBD images, as a stream of extents to hosts and from uploads, and its manifest.

A host copies a snapshot of ours, never the image itself: with a key that may only read, straight from RBD,
only what is allocated, and every extent is hashed as it arrives.
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
"""Characters in one value."""
MOST = 256
"""Pieces: of an image of some 700 GiB of random data; the hashes of a larger one are found out by reading
it.
"""


def write_manifest(image: Any, manifest: extents.Manifest) -> None:
    """Keep the manifest of an open image's content, in place of any other.

    It is kept in the image's metadata, which goes with the image and which every key may read: so hosts know
    what the image has in common with others. It is packed, and in pieces; a first key says of which
    generation it is, and of how many. A killed writer leaves a mixture: `read_manifest` takes only what
    hashes to the generation.
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
    """Return the manifest of a generation of an open image, None if it is not kept."""
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
    """A frozen content: the snapshot's id (names change when the hash becomes known) and size in bytes."""

    snapshot: int
    size: int


class RbdContent:
    """The content of an RBD image (store.Content), read as the hosts' user for bases."""

    def __init__(self, image: ImageRef) -> None:
        self._image = image
        self._generations: dict[int, str] = {}
        self._unnamed: dict[str, object] = {}

    def _place(self) -> tuple[ceph.Pool, str]:
        # Not before it is needed: a named generation whose base is here needs no cluster.
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
        """Return the frozen content; raise ImageChanged if there is none (any more)."""
        found = self.look()
        if found is None:
            wanted = f"as generation {self._image.generation}" if self._image.generation else "as it is now"
            raise ImageChanged(f"{self._image.source} has no snapshot of its content {wanted}")
        return Seen(found.id, found.size)

    def generation(self, seen: Seen) -> str:
        """Return the generation of what was seen."""
        return self._generations[seen.snapshot]

    def allocated(self, seen: Seen) -> int:
        """Return what the extents take that may hold data."""
        with ceph.opened(*self._place(), snapshot=seen.snapshot, read_only=True) as image:
            return len(allocated(image, seen.size)) * extents.EXTENT

    def copy(self, seen: Seen, target: str, format: str) -> extents.Manifest:
        """Stream what was seen into a new sparse file."""
        frozen = ceph.opened(*self._place(), snapshot=seen.snapshot, read_only=True)
        with (
            frozen as image,
            extents.Copy(target, seen.size) as made,
            closing(stream(image, seen.size)) as found,
        ):
            for index, content in found:
                progress.count("store_read", len(content))
                made.add(index, content)
        return made.manifest(format)

    def read(self, wanted: Iterable[int], seen: Seen | None = None) -> Iterator[tuple[int, bytes]]:
        """Yield (index, content) of the extents `wanted` of the frozen content, not in order."""
        seen = seen or self.see()
        frozen = ceph.opened(*self._place(), snapshot=seen.snapshot, read_only=True)
        with frozen as image, closing(several(image, seen.size, wanted)) as found:
            for index, content in found:
                progress.count("store_read", len(content))
                yield index, content

    def expected(self, generation: str) -> extents.Manifest | None:
        """Return the manifest of a generation from the image's metadata: of an upload, or a commit."""
        with ceph.opened(*self._place(), read_only=True) as image:
            return read_manifest(image, generation)

    def publish(self, found: extents.Manifest, seen: Seen) -> None:
        """Note that the bridge must name what was found, unless it has a name: this machine may only read."""
        if not self.generation(seen):
            self._unnamed = {"snapshot": seen.snapshot}

    def unnamed(self) -> dict[str, object]:
        """Return what the bridge must be told to name what was published."""
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
    """Yield (index, content) of the allocated extents of an open image; not in order."""
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
        # Whoever has enough, or has failed, closes the image next, into which these still come; what he has
        # failed on is what counts.
        with suppress(CephUnavailable):
            for _ in range(pending):
                answer()


class Writing:
    """Writes to an open image, several under way; `write` is for a new one: zeros stay holes."""

    def __init__(self, image: Any, at_once: int = AT_ONCE) -> None:
        self._image, self._at_once = image, at_once
        self._done: queue.Queue[int] = queue.Queue()
        self._pending = 0

    def write(self, offset: int, content: bytes) -> None:
        """Write what is not zero in `content`."""
        for at, data in extents.blocks(content):
            self.put(offset + at, bytes(data))

    def put(self, offset: int, content: bytes) -> None:
        """Write all of `content`."""
        self._image.aio_write(content, offset, self._ended)
        progress.count("store_written", len(content))
        self._begun()

    def zero(self, offset: int, length: int) -> None:
        """Make a range zero."""
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
        """Wait for all writes, and make them durable."""
        while self._pending:
            self._wait()
        self._image.flush()
