# SPDX-License-Identifier: Apache-2.0
"""Extents of this host's bases by hash: images made from one another share most of them.

The host copies, or reflinks, an extent that another base already has, instead of receiving it.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Callable, Iterable

from ..base.room import names
from ..errors import ImageChanged
from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..tools import extents, locks, progress
from . import partial
from .bases_in_progress import Targets

if TYPE_CHECKING:
    import mmap


class Held:
    """Finds the extents `wanted` in this host's bases; call `close` when done."""

    def __init__(self, root: str, wanted: Iterable[str]) -> None:
        self._root, self._wanted = root, set(wanted)
        self._where: dict[str, tuple[str, int]] = {}
        self._files: dict[str, int] = {}
        self._pairs: dict[str, list[tuple[int, str]] | None] = {}
        """By directory: index and hash of each wanted extent of the base; None if its manifest is unknown."""
        self._generations: dict[str, str] = {}
        self.coming: set[str] = set()
        """Hashes that no base has yet, but that a base in progress is receiving."""
        self.is_beginning = False
        """A base is in progress whose manifest is unknown."""

    def __contains__(self, digest: str) -> bool:
        return digest in self._where

    def look(self, *, arriving: bool = False) -> None:
        """Index the bases that are here now; with `arriving` also those in progress."""
        self.coming, self.is_beginning = set(), False
        for name in names(base_names.bases(self._root)):
            directory = base_names.base(self._root, name)
            if directory not in self._pairs and base_names.named(name):
                self._note(directory, name.rpartition("-")[2], None)
        for prefix in names(base_names.all_staging(self._root)) if arriving else ():
            directory = base_names.staging(self._root, prefix)
            self._note(directory, partial.generation_in(directory), partial.have(directory))
        # An action that has just begun a base holds the lock, and has written nothing yet.
        for name in names(disk_names.locks(self._root)) if arriving else ():
            image = base_names.locked_image(name)
            if image and locks.is_held(base_names.image_lock(self._root, image)):
                pairs = self._pairs.get(base_names.staging(self._root, image))
                self.coming.update(digest for _, digest in pairs or ())
                self.is_beginning = self.is_beginning or pairs is None
        self.coming -= self._where.keys()

    def _note(self, directory: str, generation: str, have: set[int] | None) -> None:
        """Index a base; `have` lists the extents of one in progress, None of a published one."""
        pairs = self._pairs.get(directory)
        if pairs is None or self._generations[directory] != generation:
            # The staging directory of an image may have held another generation before.
            self._forget(directory)
            self._pairs[directory] = pairs = self._wanted_in(directory, generation)
            self._generations[directory] = generation
        if pairs is None or not os.path.exists(base_names.image(directory)):
            return
        for index, digest in pairs:
            if digest not in self._where and (have is None or index in have):
                self._where[digest] = (directory, index)

    def _wanted_in(self, directory: str, generation: str) -> list[tuple[int, str]] | None:
        """Return the wanted extents of a base; read its manifest once, not at each look."""
        manifest = manifest_in(directory, generation)
        return manifest and [pair for pair in manifest.extents.items() if pair[1] in self._wanted]

    def place(self, digest: str) -> tuple[int, int] | None:
        """Return an open file that has the extent, and its index there; None if the base has gone."""
        if digest not in self._where:
            return None  # `place` has forgotten its base
        directory, index = self._where[digest]
        if directory not in self._files:
            try:
                self._files[directory] = os.open(base_names.image(directory), os.O_RDONLY)
            except OSError:
                # The base was published or evicted meanwhile, or its device has died.
                self._forget(directory)
                return None
        return self._files[directory], index

    def _forget(self, directory: str) -> None:
        """Forget a directory that is gone, or holds another content."""
        self._where = {key: value for key, value in self._where.items() if value[0] != directory}
        if directory in self._files:
            os.close(self._files.pop(directory))

    def read(self, digest: str, memory: mmap.mmap) -> memoryview | None:
        """Read an extent into `memory`, unverified; return None if it is gone or unreadable."""
        place = self.place(digest)
        try:
            return extents.read_into(memory, *place) if place else None
        except OSError:
            return None

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files = {}


def manifest_in(directory: str, generation: str) -> extents.Manifest | None:
    """Return the manifest of the base in `directory`; None if unreadable or of another generation."""
    try:
        with open(base_names.manifest(directory), "rb") as file:
            text = file.read()
        return extents.parse(text) if extents.generation_of(text) == generation else None
    except (OSError, ImageChanged):
        return None


def reuse(root: str, targets: Targets, came: Callable[[int, int], None]) -> dict[str, list[int]]:
    """Copy missing extents from other bases of this host; call `came` with (extents, bytes).

    Return the extents whose content no longer has its hash, by the directory of their base.
    """
    rotten: dict[str, list[int]] = {}
    held = Held(root, targets.digests((target, target.partial.missing()) for target in targets.all))
    try:
        held.look()
        for digest in [digest for digest in held._wanted if digest in held]:
            place = held.place(digest)
            if place is None:
                continue
            try:
                content = extents.read_at(*place)
            except OSError:
                continue  # the device has died
            taken = targets.put_from(*place, digest, content)
            if not taken and hashlib.sha256(content).hexdigest() != digest:
                rotten.setdefault(held._where[digest][0], []).append(place[1])
            if taken:
                came(taken, taken * len(content))
                progress.count("reused", taken * len(content))
    finally:
        held.close()
    return rotten
