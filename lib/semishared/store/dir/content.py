# SPDX-License-Identifier: Apache-2.0
"""The content of images in mounted stores, read past this machine's cache.

The first machine that hashes it names its generation.

No machine does while a guest has the image open for writing: size and time may not change with the guest's
next writes. On CephFS each client stamps a file by its own clock, and the metadata server keeps the later
time (Locker::_update_cap_fields): writes of a host whose clock is behind change neither.
"""

from __future__ import annotations

from typing import Iterable, Iterator

from ...errors import ImageChanged
from ...tools import extents, files, progress
from .. import writers
from . import diffs, image, marker, stock_layout
from .image import Seen, Stored


class DirContent:
    """The content of an image in a mounted store (store.Content)."""

    def __init__(self, source: str, marker_id: str = "", format: str = "raw") -> None:
        self._stored = Stored(source)
        self._marker = marker_id
        self._format = format

    def see(self) -> Seen:
        """Settle a commit and return the image's state."""
        diffs.settle(self._stored)
        found = image.see(self._stored, self._marker)
        stock_layout.refuse(self._stored.source, self._format)
        return found

    def generation(self, seen: Seen) -> str:
        """Return the generation of the state `seen`, '' while a process writes to the image."""
        return (
            ""
            if self._is_written()
            else image.generation(self._stored, seen, self._format) or self._read_again(seen)
        )

    def _read_again(self, seen: Seen) -> str:
        """Return the generation of an image whose inode or ctime changed, if its content still has that hash.

        An administrator may have renamed it, changed its mode, or copied it with its times: overlays over its
        bases stay valid.
        """
        name = image.generation(self._stored, seen, self._format, but=image.LATER)
        if not name:
            return ""
        with image.opened(self._stored.source) as path:
            found = extents.copy(path, None, self._format, "store_read", direct=True)
        if found.generation != name or self.see() != seen:
            return ""
        self.publish(found, seen)
        return name

    def _is_written(self) -> bool:
        with image.opened(self._stored.source) as path, open(path, "rb") as file:
            return writers.is_written(file.fileno())

    def allocated(self, seen: Seen) -> int:
        return files.allocated(self._stored.source)

    def copy(self, seen: Seen, target: str, format: str) -> extents.Manifest:
        """Copy the image with direct I/O."""
        with image.opened(self._stored.source) as path:
            return extents.copy(path, target, format, "store_read", direct=True)

    def read(self, wanted: Iterable[int], seen: Seen | None = None) -> Iterator[tuple[int, bytes]]:
        marker.check(self._stored.datastore, self._marker)
        with image.opened(self._stored.source) as path, open(path, "rb", buffering=0) as file:
            for index in wanted:
                with image.explained(self._stored.source):
                    content = extents.read_at(file.fileno(), index)
                progress.count("store_read", len(content))
                yield index, content

    def expected(self, generation_name: str) -> extents.Manifest | None:
        """Return the manifest of the current generation, None if the store has lost it."""
        try:
            return image.manifest(self._stored, generation_name)
        except ImageChanged:
            return None

    def publish(self, found: extents.Manifest, seen: Seen) -> None:
        """Publish the generation, unless a process has the image open for writing."""
        if not self._is_written():
            image.publish_generation(self._stored, found, seen)

    def unnamed(self) -> int:
        """Return -1: hosts publish generations themselves."""
        return -1

    def tidy(self) -> None:
        """Remove stale staged files."""
        try:
            with image.side(self._stored) as path:
                files.remove_stale(path)
        except FileNotFoundError:
            pass
