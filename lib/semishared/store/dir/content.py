# SPDX-License-Identifier: Apache-2.0
"""The content of images in mounted stores, read past this machine's cache.

The first machine that hashes it names its generation.

No machine does while a guest has the image open for writing: size and time may not change with the guest's
next writes. On CephFS each client stamps a file by its own clock, and the metadata server keeps the later
time (Locker::_update_cap_fields): writes of a host whose clock is behind change neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable, Iterator

from ...errors import ImageChanged
from ...model.refs import ImageRef
from ...model.store import dir_names
from ...tools import beneath, extents, files, progress
from .. import writers
from . import image, marker, snapshots
from . import image as dir_image
from .image import Seen, Stored

if TYPE_CHECKING:
    from ...model.refs import Owner
    from ..commit.claims import Committed, Diff


class DirContent:
    """The content of an image in a mounted store (store.Content)."""

    def __init__(self, source: str, marker_id: str = "", format: str = "raw") -> None:
        self._stored = Stored(source)
        self._marker = marker_id
        self._format = format

    def see(self) -> Seen:
        """Settle a commit and return the image's state."""
        settle(self._stored)
        found = image.see(self._stored, self._marker)
        snapshots.refuse(self._stored.source, self._format)
        return found

    def generation(self, seen: Seen) -> str:
        """Return the generation of the state `seen`, '' while a process writes to the image."""
        return (
            ""
            if self._is_written()
            else image.generation(self._stored, seen, self._format) or self._read_again(seen)
        )

    def glance(self) -> tuple[Seen, str]:
        """Return the image's state and its noted generation: '' before a commit is settled."""
        found = image.see(self._stored, self._marker)
        snapshots.refuse(self._stored.source, self._format)
        changes = is_begun(self._stored) or self._is_written()
        return found, "" if changes else image.generation(self._stored, found, self._format)

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


def is_begun(stored: Stored) -> bool:
    """Tell whether there is a commit that may be decided and not complete."""
    try:
        with dir_image.side(stored) as side:
            return not files.is_absent(dir_names.commit(side))
    except (FileNotFoundError, NotADirectoryError):
        return False


def settle(stored: Stored) -> None:
    """Complete a decided commit: every machine does so before it reads or changes the image."""
    if is_begun(stored):
        from . import journal

        journal.settle(stored)


class DirDiffs:
    """The methods of store.Store for diffs and epochs."""

    def settle(self, image: ImageRef) -> None:
        """Complete a decided journal."""
        settle(Stored(image.source))

    def claim(self, image: ImageRef, owner: Owner) -> Owner | None:
        """Write a record beside the image."""
        from . import commit as dir_commit

        return dir_commit.claim(image, owner)

    def owner(self, image: ImageRef) -> Owner | None:
        """Read the record beside the image."""
        stored = Stored(image.source)
        try:
            beneath.status(stored.datastore, dir_names.owner(stored.below))
        except FileNotFoundError:
            return None  # most images: import nothing more
        except OSError:
            pass
        from . import commit as dir_commit

        return dir_commit.owner(image)

    def disown(self, image: ImageRef, owner: Owner) -> None:
        """Remove the record beside the image."""
        from . import commit as dir_commit

        dir_commit.disown(image, owner)

    def may_commit(self, image: ImageRef, owner: Owner) -> None:
        """Compare the record and the image with `owner`."""
        from . import commit as dir_commit

        dir_commit.may_commit(image, owner)

    def commit(self, image: ImageRef, owner: Owner, diff: Diff) -> Committed:
        """Write the new content or a journal beside the image, then complete the commit."""
        from . import commit as dir_commit

        return dir_commit.commit(image, owner, diff)

    def note_epoch(self, image: ImageRef, vm: int, epoch: int) -> None:
        """Record the epoch in a file name, for the whole store."""
        from . import epochs

        marker.check(image.root, image.access.marker)
        epochs.note(image, vm, epoch)

    def epoch(self, image: ImageRef, vm: int) -> int:
        """Read the epoch from that file name."""
        from . import epochs

        return epochs.read(image, vm)
