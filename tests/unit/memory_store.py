# SPDX-License-Identifier: Apache-2.0
"""A kind of store in the memory of this process, for unit tests: all that a new kind has to bring.

It is known where kinds are: `model.stores.KINDS` (what it can do) and `store.KINDS` (who does it).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

from semishared.errors import (
    AnotherWriter,
    ImageInUse,
    MissingImage,
    Overtaken,
    StoreUnavailable,
    TransferCorrupt,
    UploadTooLarge,
)
from semishared.model.disk.network_disk import NetworkDisk
from semishared.model.refs import ImageRef
from semishared.model.store import access as store_access
from semishared.model.store.access import Access
from semishared.tools import extents
from semishared.tools.extents import Manifest

TOTAL = 1 << 30
KIND = store_access.Kind(
    "memory",
    disk_type="MEMORY",
    machine=store_access.HERE,
    image="{token}",
    epochs="source",
    formats=("raw",),
    source="memory/.+",
    source_is="memory/NAME",
)


class Image:
    """The content of an image, its snapshots, who writes to it, and which content of it is known by which
    generation.
    """

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = bytearray(data)
        self.snapshots: Dict[int, bytes] = {}
        self.clones: Dict[str, Image] = {}
        self.epochs: Dict[int, int] = {}
        self.guests = 0
        self.session = 0
        self.known = (-1, "")


class Draft(NamedTuple):
    """New content on its way."""

    path: str
    data: bytearray

    def fill(self, source: str, format: str, *, share: bool = False) -> None:
        """Take it from a raw file; it is as large as was wanted at least."""
        data = Path(source).read_bytes()
        self.data[: len(data)] = data


class Content:
    """The content of an image (store.Content)."""

    def __init__(self, image: Image) -> None:
        self._image = image

    def see(self) -> int:
        return self._image.session

    def generation(self, seen: int) -> str:
        session, generation = self._image.known
        return generation if session == seen == self._image.session else ""

    def glance(self) -> tuple[int, str]:
        return self.see(), self.generation(self.see())

    def allocated(self, seen: int) -> int:
        return len(self._image.data)

    def copy(self, seen: int, target: str, format: str) -> Manifest:
        with extents.Copy(target, len(self._image.data)) as made:
            for index, content in pieces(self._image.data):
                made.add(index, content)
        return made.manifest(format)

    def read(self, wanted: Iterable[int], seen: object = None) -> Iterator[tuple[int, bytes]]:
        found = dict(pieces(self._image.data))
        yield from ((index, found[index]) for index in wanted)

    def expected(self, generation: str) -> None:
        return None

    def publish(self, found: Manifest, seen: int) -> None:
        self._image.known = (seen, found.generation)

    def unnamed(self) -> int:
        return -1

    def tidy(self) -> None:
        pass


def pieces(data: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """Yield the extents of a content."""
    for offset in range(0, len(data), extents.EXTENT):
        yield offset // extents.EXTENT, bytes(data[offset : offset + extents.EXTENT])


class MemoryStore:
    """All images with one `conf` are one store."""

    worlds: Dict[str, Dict[str, Image]] = {}

    def __init__(self, access: Access) -> None:
        self._access = access

    def _images(self) -> Dict[str, Image]:
        try:
            return self.worlds[self._access.conf]
        except KeyError:
            raise StoreUnavailable(f"no store {self._access.conf!r} in memory") from None

    def image(self, source: str) -> Image:
        """Return an image, or a clone of one."""
        images = self._images()
        for image in (images, *(image.clones for image in images.values())):
            if source in image:
                return image[source]
        raise MissingImage(f"{source} is not in memory")

    def _make(self, source: str, data: bytes | bytearray) -> None:
        self._images()[source] = Image(data)

    # -- looking ------------------------------------------------------------------------------------

    def reach(self, where: str) -> None:
        self._images()

    def check(self, image: ImageRef) -> None:
        self.image(image.source)

    def content(self, image: ImageRef) -> Content:
        return Content(self.image(image.source))

    @contextmanager
    def opened(self, image: ImageRef, snapshot: int = -1) -> Iterator[str]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(self._at(image, snapshot))
            file.flush()
            yield file.name

    def _at(self, image: ImageRef, snapshot: int) -> bytes:
        found = self.image(image.source)
        if snapshot != -1 and snapshot not in found.snapshots:
            raise MissingImage(f"{image.source} has no snapshot {snapshot}")
        return bytes(found.data) if snapshot == -1 else found.snapshots[snapshot]

    def attach(self, image: ImageRef) -> Tuple[str, NetworkDisk]:
        return "", NetworkDisk(image.source, (), "", "")

    def writers(self, image: ImageRef) -> List[str]:
        if self.image(image.source).guests:
            raise AnotherWriter(f"{image.source} is written to")
        return []

    def snapshots(self, image: ImageRef) -> List[int]:
        return sorted(self.image(image.source).snapshots)

    def digest(self, image: ImageRef, kind: str) -> tuple[str, int]:
        data = self.image(image.source).data
        return hashlib.new(kind, data).hexdigest(), len(data)

    def capacity(self, where: str) -> tuple[int, int, int]:
        used = sum(len(image.data) for image in self._images().values())
        return used, TOTAL, TOTAL - used

    def leftovers(self, root: str) -> List[str]:
        return []  # what is under way is on the stack of whoever makes it

    # -- images -------------------------------------------------------------------------------------

    def publish(
        self, image: ImageRef, path: str, known: Manifest | None = None, *, sparse: bool = True
    ) -> str:
        data = Path(path).read_bytes()
        return self.receive(image, len(data), pieces(data), str)

    def receive(
        self, image: ImageRef, size: int, arriving: Iterable[tuple[int, bytes]], said: Callable[[], str]
    ) -> str:
        data, made = bytearray(size), extents.Copy(None, size)
        for index, content in arriving:
            made.add(index, content)
            data[index * extents.EXTENT : index * extents.EXTENT + len(content)] = content
        generation = made.manifest(image.format).generation
        if said() not in ("", generation):
            raise TransferCorrupt(f"{image.source} did not arrive whole")
        self._make(image.source, data)
        self.image(image.source).known = (0, generation)
        return generation

    def create(self, image: ImageRef, size: int, fs: str, fs_options: Sequence[str] = ()) -> None:
        self._make(image.source, bytes(size))

    def copy(self, image: ImageRef, source: str, snapshot: int = -1, most: int = 0) -> None:
        data = self._at(image._replace(source=source), snapshot)
        if most and len(data) > most:
            raise UploadTooLarge(source)
        self._make(image.source, data)

    @contextmanager
    def made(self, image: ImageRef, size: int) -> Iterator[Draft]:
        draft = Draft("", bytearray(size))
        yield draft
        self._make(image.source, draft.data)

    def remove(self, image: ImageRef, trash: bool = False) -> None:
        found = self._images().get(image.source)
        if found and found.clones:
            raise ImageInUse(f"{image.source} has clones")
        self._images().pop(image.source, None)

    def grow(self, image: ImageRef, size: int) -> None:
        found = self.image(image.source)
        if len(found.data) < size:
            self._replace(found, bytes(found.data).ljust(size, b"\0"))

    # -- what its content is called -----------------------------------------------------------------

    def freeze(self, image: ImageRef) -> str:
        found = self.content(image)
        return found.generation(found.see())

    def name(self, image: ImageRef, snapshot: int, generation: str) -> None:
        pass  # who hashes the content publishes its generation

    def begin_session(self, image: ImageRef) -> None:
        self.image(image.source).session += 1

    def session(self, image: ImageRef) -> str:
        return str(self.image(image.source).session)

    def _refuse_newer(self, image: ImageRef, session: str) -> None:
        if session not in ("", self.session(image)):
            raise Overtaken(f"{image.source} was given to a guest since")

    def _replace(self, found: Image, data: bytes | bytearray) -> None:
        found.session += 1
        found.data = bytearray(data)

    @contextmanager
    def replaced(self, image: ImageRef, size: int, session: str = "") -> Iterator[Draft]:
        self.writers(image)
        found = self.image(image.source)
        draft, session = Draft("", bytearray(max(size, len(found.data)))), session or self.session(image)
        yield draft
        self._refuse_newer(image, session)
        self._replace(found, draft.data)

    # -- snapshots and clones -----------------------------------------------------------------------

    def keep(
        self,
        image: ImageRef,
        snapshot: int,
        fill: Callable[[str], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        data = self._at(image, -1)
        if check:
            check()
        self.image(image.source).snapshots[snapshot] = data

    def forget(self, image: ImageRef, snapshot: int, session: str = "") -> None:
        self._refuse_newer(image, session)
        self.image(image.source).snapshots.pop(snapshot, None)

    def revert(self, image: ImageRef, snapshot: int, size: int = 0, session: str = "") -> None:
        self.writers(image)
        self._refuse_newer(image, session)
        self._replace(self.image(image.source), self._at(image, snapshot).ljust(size, b"\0"))

    def flatten(self, image: ImageRef, snapshot: int, size: int = 0) -> None:
        if self.snapshots(image):
            self.revert(image, snapshot, size)
        self.image(image.source).snapshots.clear()

    def clone_of(self, image: ImageRef, vm: int, disk: int) -> str:
        return f"{image.source}-{vm}-{disk}"

    def clone(self, image: ImageRef, clone: str, size: int) -> None:
        found = self.image(image.source)
        found.clones[clone] = Image(bytes(found.data).ljust(size, b"\0"))

    def remove_clone(self, image: ImageRef, clone: str) -> None:
        for found in self._images().values():
            found.clones.pop(clone, None)

    def clone_found(self, image: ImageRef, vm: int, number: int) -> str:
        name = self.clone_of(image, vm, number)
        return name if name in self.image(image.source).clones else ""

    def note_epoch(self, image: ImageRef, vm: int, epoch: int) -> None:
        epochs = self.image(image.source).epochs
        epochs[vm] = max(epoch, epochs.get(vm, -1))

    def epoch(self, image: ImageRef, vm: int) -> int:
        return self.image(image.source).epochs.get(vm, -1)


class MemoryBench:
    """A store that nothing else is in (tests/store/cases.py)."""

    outlives_processes = False

    def __init__(self) -> None:
        self.root, self.access = "memory", Access("memory", conf=f"/{os.urandom(8).hex()}")
        self._store = MemoryStore(self.access)
        MemoryStore.worlds[self.access.conf] = {}

    def write(self, source: str, offset: int, data: bytes) -> None:
        """Write."""
        self._store.image(source).data[offset : offset + len(data)] = data

    def read(self, source: str, offset: int, count: int) -> bytes:
        """Read."""
        return bytes(self._store.image(source).data[offset : offset + count])

    def through(self, name: str, target: Path) -> None:
        """Read what is opened: a raw file."""
        target.write_bytes(Path(name).read_bytes())

    @contextmanager
    def writing(self, source: str) -> Iterator[None]:
        """Have a guest."""
        self._store.image(source).guests += 1
        try:
            yield
        finally:
            self._store.image(source).guests -= 1

    def killed_replacing(self, image: ImageRef, size: int, path: Path) -> None:
        """Never asked: nothing of it outlives the process."""
        raise AssertionError
