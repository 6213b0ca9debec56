# SPDX-License-Identifier: Apache-2.0
"""Stores of kind `dir`: a mounted tree, the same path on the front-end and all hosts (store.Store).

store/dir/image.py describes the layout. Every machine that mounts the store changes it: there is no bridge.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import Callable, Iterable, Iterator, Sequence

from ...errors import TransferCorrupt, UploadTooLarge
from ...model.refs import ImageRef
from ...model.store.access import Access
from ...named import NamedTuple
from ...tools import beneath, extents, files, inspection, progress, qemu_img
from ...tools.effects import point
from ...units import human
from .. import writers
from . import image as dir_image
from . import marker, upload
from . import snapshots as dir_snapshots
from .content import DirContent, DirDiffs
from .image import Stored


class DirDraft(NamedTuple):
    """New content, in a file beside its target."""

    path: str
    format: str
    size: int
    mode: int = 0o660

    def fill(self, source: str, format: str, *, share: bool = False) -> None:
        """Convert `source` into the file, grown to the draft's size."""
        with files.enough_space(os.path.dirname(self.path)), files.made(self.path, self.mode) as path:
            qemu_img.convert(source, format, path, self.format, share=share)
            if self.size and qemu_img.virtual_size(path, self.format) < self.size:
                qemu_img.resize(path, self.format, self.size)
            point("content made")
        progress.count("store_written", files.allocated(self.path))


class DirStore(DirDiffs):
    """A mounted store."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def _at(self, image: ImageRef) -> os.stat_result:
        """Settle a killed commit, and return the image's status in the right store."""
        self.settle(image)
        return dir_image.check(image.source, image.access.marker)

    # -- looking ------------------------------------------------------------------------------------

    def reach(self, where: str) -> None:
        """Raise StoreAbsent or OtherStore unless the store has the right marker."""
        marker.check(where, self._access.marker)

    def check(self, image: ImageRef) -> None:
        """Raise unless the image exists, has its format, and is not in layers of a stock driver."""
        # First: nothing may be written below a mount point without its mount.
        self._at(image)
        inspection.check(image.source, image.format)
        dir_snapshots.refuse(image.source, image.format)

    def content(self, image: ImageRef) -> DirContent:
        """Return the content of the image's file."""
        return DirContent(image.source, image.access.marker, image.format)

    @contextmanager
    def opened(self, image: ImageRef, snapshot: int = -1) -> Iterator[str]:
        """Yield a path to the open file, so that no header and no link on the store decides what is read."""
        self.settle(image)
        with (
            dir_image.opened(image.source)
            if snapshot == -1
            else dir_snapshots.opened(image.source, snapshot) as found
        ):
            inspection.check(found, image.format, beneath.readable(found))
            yield found

    def attach(self, image: ImageRef) -> tuple[str, None]:
        """Return the path of the image's link, made if missing."""
        stored = Stored(image.source)
        link = dir_image.make_link(stored)
        dir_image.check_link(stored)
        return link, None

    def writers(self, image: ImageRef) -> list[str]:
        """Raise AnotherWriter if a QEMU holds the write lock; other openers cannot be seen."""
        self.settle(image)
        writers.check_file(image.source)
        return []

    def snapshots(self, image: ImageRef) -> list[int]:
        """Return the numbers of the copies beside the image."""
        return dir_snapshots.numbers(image.source)

    def digest(self, image: ImageRef, kind: str) -> tuple[str, int]:
        import hashlib

        self.settle(image)
        dir_snapshots.refuse(image.source, image.format)
        digest, size = hashlib.new(kind), 0
        with dir_image.opened(image.source) as path, open(path, "rb") as file:
            for chunk in iter(lambda: file.read(extents.EXTENT), b""):
                digest.update(chunk)
                size += len(chunk)
                progress.touch()
        return digest.hexdigest(), size

    def capacity(self, where: str) -> tuple[int, int, int]:
        self.reach(where)
        return dir_image.capacity(where)

    def leftovers(self, root: str) -> list[str]:
        """Return the staged files and uploads."""
        from . import leftovers as dir_leftovers

        return dir_leftovers.unpublished(root)

    # -- images -------------------------------------------------------------------------------------

    @contextmanager
    def _uploading(self, image: ImageRef) -> Iterator[upload.Upload]:
        stored = Stored(image.source)
        self.reach(image.root)
        with upload.uploading(stored.datastore, stored.name) as up:
            yield up

    def publish(
        self, image: ImageRef, path: str, known: extents.Manifest | None = None, *, sparse: bool = True
    ) -> str:
        """Rename the file `path`, in an upload's directory, to the image."""
        return upload.publish(path, image.format, image.source, known, sparse=sparse)

    def receive(
        self, image: ImageRef, size: int, arriving: Iterable[tuple[int, bytes]], said: Callable[[], str]
    ) -> str:
        """Write the extents to a file of an upload, and publish it."""
        with self._uploading(image) as up:
            with extents.Copy(up.file("received"), size) as made:
                for index, content in arriving:
                    made.add(index, content)
            found = made.manifest(image.format)
            if found.generation != said():
                raise TransferCorrupt(
                    f"{image.source}: what arrived on {os.uname().nodename} is not what was sent"
                )
            point("image received")
            return self.publish(image, up.file("received"), found)

    def create(self, image: ImageRef, size: int, fs: str, fs_options: Sequence[str] = ()) -> None:
        """Make and publish the image in an upload's directory."""
        with self._uploading(image) as up:
            upload.create(image.format, size, fs, up, fs_options)

    def copy(self, image: ImageRef, source: str, snapshot: int = -1, most: int = 0) -> None:
        """Copy a file of this or another datastore, in the same format.

        The copy is inspected, not the source: other hosts can write to that.
        """
        with self.opened(image._replace(source=source), snapshot) as opened, self._uploading(image) as up:
            dir_snapshots.refuse(source, image.format)
            size, path = os.path.getsize(opened), up.file("copy")
            if most and size > most:
                raise UploadTooLarge(f"{source} has {human(size)}, and a disk of {human(most)} was approved")
            found = extents.copy(opened, path, image.format, "store_read", direct=True)
            point("copied in")
            inspection.check(path, image.format, source)
            # A raw image belongs to its guest and may have any content.
            if image.format != "raw":
                with inspection.content_of(path, source) as content:
                    inspection.judged(path, content, image.format, most or sys.maxsize, source)
            self.publish(image, path, found)

    @contextmanager
    def made(self, image: ImageRef, size: int) -> Iterator[DirDraft]:
        """Yield the draft of a staged file in the datastore's directory."""
        self.reach(image.root)
        files.remove_staged(*os.path.split(image.source))
        with files.published(image.source) as staged:
            yield DirDraft(staged, image.format, size)

    def remove(self, image: ImageRef, trash: bool = False) -> None:
        """Remove the file and its directory of semishared; a directory has no trash."""
        self.reach(image.root)
        upload.remove(image.source)

    def grow(self, image: ImageRef, size: int) -> None:
        """Grow the open file, not through the link that a guest has."""
        self._at(image)
        inspection.check(image.source, image.format)
        datastore, name = os.path.split(image.source)
        fd = beneath.open_file(datastore, name, os.O_RDWR)
        try:
            qemu_img.grow(beneath.path_of(fd), image.format, size)
        finally:
            os.close(fd)

    # -- diffs, but for what store/dir/content.py has ------------------------------------------------------

    def keyed(self) -> Access:
        return self._access

    def reached(self, image: ImageRef) -> None:
        self.check(image)

    def claimable(self, image: ImageRef) -> None:
        self.check(image)
        self.writers(image)

    def is_settled(self, image: ImageRef) -> bool:
        """Return True: this machine settles what it reads or changes."""
        return True

    def refuse_late(self, image: ImageRef, seq: int) -> None:
        """Do nothing: the VM directory beside it says so (disk/history.py), or the name of its clone."""

    # -- what its content is called -----------------------------------------------------------------

    def freeze(self, image: ImageRef) -> str:
        """Return the generation: a file needs no freezing, and its readers check for changes afterwards."""
        found = self.content(image)
        return found.generation(found.see())

    def name(self, image: ImageRef, snapshot: int, generation: str) -> None:
        """Do nothing: hosts publish generations themselves."""

    def begin_session(self, image: ImageRef) -> None:
        """Write a new token, which ends the generation."""
        self._at(image)
        dir_image.begin_session(Stored(image.source))

    def session(self, image: ImageRef) -> str:
        return dir_image.session(Stored(image.source))

    @contextmanager
    def replaced(self, image: ImageRef, size: int, session: str = "") -> Iterator[DirDraft]:
        """Yield the draft of a file that replaces the image by a rename; open readers keep the old file."""
        stored, mode = Stored(image.source), self._at(image).st_mode & 0o777
        session = session or dir_image.session(stored)
        writers.check_file(stored.source)
        # Only the image's VM replaces it (oned gives it to no other), and every session removes stale drafts.
        with dir_image.side(stored, make=True) as side:
            files.remove_staged(side, "restored")
            staged = files.staged_name(f"{side}/restored")
            try:
                yield DirDraft(staged, image.format, size, mode)
                dir_snapshots.put(staged, stored, session)
                point("image replaced")
            finally:
                files.unlink(staged)
        files.fsync(stored.datastore)

    # -- snapshots and clones -----------------------------------------------------------------------

    def keep(
        self,
        image: ImageRef,
        snapshot: int,
        fill: Callable[[str], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Publish a copy beside the image, made here or by the guest's QEMU (`fill`)."""
        self._at(image)
        session = self.session(image)
        with dir_snapshots.kept(image.source, snapshot) as staged:
            if fill:
                # libvirt opens it by name, as another user.
                fill(beneath.readable(staged))
                files.set_mode(staged, 0o660)
            else:
                with dir_image.opened(image.source) as path:
                    dir_snapshots.copy(path, staged)
            files.fsync(staged)
            if check:
                check()
            # A copy that overlaps with another guest's session is no consistent snapshot.
            dir_snapshots.refuse_newer(Stored(image.source), session)

    def _with_copies(self, image: ImageRef) -> None:
        """Raise unless the files beside the image are copies of ours."""
        dir_snapshots.refuse(image.source, image.format)
        self._at(image)

    def forget(self, image: ImageRef, snapshot: int, session: str = "") -> None:
        self._with_copies(image)
        if session:
            dir_snapshots.refuse_newer(Stored(image.source), session)
        dir_snapshots.drop_copy(image.source, snapshot)

    def revert(self, image: ImageRef, snapshot: int, size: int = 0, session: str = "") -> None:
        """Copy a snapshot back."""
        self._with_copies(image)
        dir_snapshots.copy_back(image.source, snapshot, image.format, size, session)

    def flatten(self, image: ImageRef, snapshot: int, size: int = 0) -> None:
        """Copy a snapshot back and remove all of them."""
        self._with_copies(image)
        dir_snapshots.flatten(image.source, snapshot, image.format, size)

    def clone_of(self, image: ImageRef, vm: int, disk: int) -> str:
        """Return a path in the image's directory of semishared."""
        return Stored(image.source).clone(vm, disk, image.access.cloud)

    def clone(self, image: ImageRef, clone: str, size: int) -> None:
        """Make a first layer over the image itself, which oned keeps in use."""
        from . import clones

        self.check(image)
        with clones.made(Stored(image.source), image.format, clone, size) as publish:
            publish()

    def remove_clone(self, image: ImageRef, clone: str) -> None:
        """Remove the clone's layers."""
        from . import clones

        # An unreachable clone would count as removed, and stay.
        self.reach(image.root)
        clones.remove(clone)

    def clone_found(self, image: ImageRef, vm: int, number: int) -> str:
        from . import clones

        self._at(image)
        return clones.active(Stored(image.source), vm, number, image.access.cloud)
