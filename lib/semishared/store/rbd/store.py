# SPDX-License-Identifier: Apache-2.0
"""Stores of kind `rbd`: pools of a Ceph cluster (store.Bridged).

The store's bridge changes images, as `bridge_user`; hosts read, and write to images that the bridge has made.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Callable, Iterable, Iterator, Sequence

from ...errors import Overtaken
from ...model.disk.network_disk import NetworkDisk
from ...model.refs import ImageRef
from ...model.store import rbd_names
from ...model.store.access import Access
from ...model.store.image_steps import (
    BegunChange,
    Dropped,
    LentContent,
    MadeClone,
    PassingSnapshots,
    SeenImage,
    StoredImage,
)
from ...tools import extents, qemu_img
from ...tools.effects import point
from .. import writers
from . import ceph, claim
from . import image as rbd_image
from . import pool as rbd_pool
from . import snapshots as rbd_snapshots
from .commit import RbdDiffs
from .content import RbdContent
from .marks import RbdMarks
from .pool import RbdDraft


class RbdStore(RbdDiffs, RbdMarks):
    """A pool of a Ceph cluster."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def _pool(self, root: str) -> ceph.Pool:
        return ceph.pool(self._access, self._access.bridge_user, root)

    # -- looking ------------------------------------------------------------------------------------

    def reach(self, where: str) -> None:
        """Connect to the cluster."""
        self._pool(where)

    def check(self, image: ImageRef) -> None:
        """Raise unless the image exists and is not of RBD format 1."""
        rbd_pool.check_supported(*self._settled(image))

    def content(self, image: ImageRef) -> RbdContent:
        """Return the frozen content."""
        return RbdContent(image)

    def look(self, image: ImageRef) -> SeenImage:
        """Return whether the present content is frozen, and its generation; as the user for bases."""
        found = RbdContent(image).look()
        return SeenImage(found is not None, found.generation if found else "")

    @contextmanager
    def opened(self, image: ImageRef, snapshot: int = -1) -> Iterator[str]:
        """Yield QEMU's name for the image, as the guests' user: QEMU opens no image with a read-only key."""
        at = "" if snapshot == -1 else f"@{snapshot}"
        yield qemu_img.rbd_name(f"{image.source}{at}", image.access.user, image.access.conf)

    def attach(self, image: ImageRef) -> tuple[str, NetworkDisk]:
        """Return the network disk by which libvirt opens the image."""
        return "", NetworkDisk.of(image.source, image.access)

    def writers(self, image: ImageRef) -> list[str]:
        """Raise AnotherWriter if a visible client has the exclusive lock; return the other watchers."""
        where, name = self._settled(image)
        # A read-only open is no watcher, and takes no lock.
        with ceph.opened(where, name, read_only=True) as opened:
            return writers.check_image(where.ioctx, opened, f"{where.name}/{name}")

    def snapshots(self, image: ImageRef) -> list[int]:
        """Return the numbers of the snapshots with stock's names."""
        return rbd_snapshots.numbers(*self._settled(image))

    def digest(self, image: ImageRef, kind: str) -> tuple[str, int]:
        return rbd_image.digest(*self._settled(image), kind)

    def capacity(self, where: str) -> tuple[int, int, int]:
        return rbd_pool.capacity(self._pool(where))

    def leftovers(self, root: str) -> list[str]:
        """Return the staged and hidden images."""
        return sorted(f"{root}/{name}" for name in self.names(root) if rbd_names.is_ours(name))

    def names(self, where: str) -> list[str]:
        return rbd_pool.names(self._pool(where))

    def describe(self, where: str, names: Iterable[str]) -> dict[str, StoredImage]:
        """Return what plan/care/gc_stores.py judges images by."""
        pool = self._pool(where)
        return {name: found for name in names for found in (rbd_pool.look(pool, name),) if found}

    def passing(self, where: str, names: Iterable[str]) -> dict[str, PassingSnapshots]:
        return rbd_snapshots.leftovers_of(self._pool(where), names)

    def drop_snapshot(self, image: ImageRef, snapshot: int) -> Dropped:
        return Dropped(rbd_snapshots.drop_leftover(*ceph.bridged(image), snapshot))

    # -- images -------------------------------------------------------------------------------------

    def publish(
        self, image: ImageRef, path: str, known: extents.Manifest | None = None, *, sparse: bool = True
    ) -> str:
        """Write the non-zero blocks of the file to a new image; RBD images are always sparse."""
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            return rbd_pool.received(
                *ceph.bridged(image), rbd_pool.made_for(image), size, extents.data(file.fileno(), size), None
            )

    def receive(
        self, image: ImageRef, size: int, arriving: Iterable[tuple[int, bytes]], said: Callable[[], str]
    ) -> str:
        """Write the extents straight to a new image."""
        return rbd_pool.received(*ceph.bridged(image), rbd_pool.made_for(image), size, arriving, said)

    def create(self, image: ImageRef, size: int, fs: str, fs_options: Sequence[str] = ()) -> None:
        """Make an image, and freeze it."""
        rbd_pool.empty(*ceph.bridged(image), rbd_pool.made_for(image), size, fs, fs_options)

    def copy(self, image: ImageRef, source: str, snapshot: int = -1, most: int = 0) -> None:
        """Have Ceph copy the allocated extents."""
        at = "" if snapshot == -1 else str(snapshot)
        rbd_pool.copied(
            *ceph.bridged(image),
            rbd_pool.made_for(image),
            *self._settled(image._replace(source=source)),
            at,
            most,
        )

    def hold(self, image: ImageRef) -> None:
        rbd_snapshots.hold(*ceph.bridged(image))

    def copy_held(self, image: ImageRef, source: str) -> None:
        """Copy the held snapshot, and remove it."""
        held = ceph.bridged(image._replace(source=source))
        try:
            rbd_pool.copied(*ceph.bridged(image), rbd_pool.made_for(image), *held, rbd_names.SAVED)
        finally:
            rbd_snapshots.let_go(*held)

    def stage(self, image: ImageRef, size: int) -> str:
        """Make an empty image under a staged name."""
        where, name = self._settled(image)
        rbd_pool.sweep(where, name)
        staged = rbd_names.staged(name, os.urandom(6).hex())
        rbd_pool.create(where, staged, size)
        return f"{where.name}/{staged}"

    def show(self, image: ImageRef, staged: str) -> None:
        """Freeze the staged image, and rename it."""
        where, name = ceph.bridged(image)
        rbd_pool.publish(
            where, ceph.bridged(image._replace(source=staged))[1], name, rbd_pool.made_for(image)
        )

    def draft(self, image: ImageRef) -> RbdDraft:
        """Return the draft of a staged or hidden image, opened as the guests' user."""
        return RbdDraft(qemu_img.rbd_name(image.source, image.access.user, image.access.conf))

    def _draft(self, source: str) -> RbdDraft:
        return RbdDraft(qemu_img.rbd_name(source, self._access.bridge_user, self._access.conf))

    @contextmanager
    def made(self, image: ImageRef, size: int) -> Iterator[RbdDraft]:
        """Stage an image and publish it."""
        staged = self.stage(image, size)
        try:
            yield self._draft(staged)
        except BaseException:
            self.remove(image._replace(source=staged))
            raise
        self.show(image, staged)

    def remove(self, image: ImageRef, trash: bool = False) -> None:
        """Remove the image, or move it to the trash, and remove what is staged for it."""
        rbd_pool.remove_all(*ceph.bridged(image), trash=trash)

    def take_back(self, image: ImageRef, made: str) -> None:
        rbd_pool.remove(*ceph.bridged(image), made=made)

    def refuse_late(self, image: ImageRef, seq: int) -> None:
        """Compare with the SEQ recorded on the image."""
        rbd_pool.refuse_late(*ceph.bridged(image), seq)

    def grow(self, image: ImageRef, size: int) -> None:
        claim.grow(*self._settled(image), size)

    # -- what its content is called -----------------------------------------------------------------

    def freeze(self, image: ImageRef) -> str:
        """Make a snapshot of the present content, unless there is one."""
        return rbd_image.freeze(*self._settled(image)).generation

    def lend(self, image: ImageRef) -> LentContent:
        """Give the snapshot a lasting name, and protect it from tools that remove unprotected snapshots."""
        return rbd_image.lend(*self._settled(image))

    def name(self, image: ImageRef, snapshot: int, generation: str) -> None:
        where, name = ceph.bridged(image)
        with ceph.opened(where, name) as opened:
            rbd_image.name_snapshot(opened, snapshot, generation)

    def begin_session(self, image: ImageRef) -> None:
        """End all generations, also the stock driver's, and record a new session token."""
        where, name = self._settled(image)
        with ceph.opened(where, name) as opened:
            rbd_image.end_generations(opened)
            rbd_image.drop(opened, rbd_image.STOCK_BASE)
            opened.metadata_set(rbd_names.SESSION, os.urandom(8).hex())
        point("session begun")

    def session(self, image: ImageRef) -> str:
        with ceph.opened(*self._settled(image), read_only=True) as opened:
            return rbd_snapshots.session(opened)

    def begin_change(self, image: ImageRef, size: int) -> BegunChange:
        """Hide the image and empty it."""
        where, name = ceph.bridged(image)
        hidden = claim.begin_change(where, name)
        with ceph.opened(where, hidden) as opened, ceph.long():
            size = max(opened.size(), size)
            # Emptied, so that the new content needs no zeros; the former content is in the snapshot for the
            # roll-back.
            opened.resize(0)
            opened.resize(size)
        point("image emptied")
        return BegunChange(f"{where.name}/{hidden}", claim.change_under_way(where, name))

    def end_change(self, image: ImageRef, whole: bool, change: str = "") -> None:
        """Publish the new content, or roll back."""
        where, name = ceph.bridged(image)
        if change and claim.change_under_way(where, name) != change:
            raise Overtaken(
                f"the change of {image.source} was undone since it was begun: another action has come to it"
            )
        if whole:
            claim.end_change(where, name)
        else:
            claim.settle_change(where, name)

    @contextmanager
    def replaced(self, image: ImageRef, size: int, session: str = "") -> Iterator[RbdDraft]:
        """Hide the image while the block fills it."""
        begun = self.begin_change(image, size)
        try:
            yield self._draft(begun.hidden)
        except Exception:
            self.end_change(image, False, begun.change)
            raise
        self.end_change(image, True, begun.change)

    # -- snapshots and clones -----------------------------------------------------------------------

    def keep(
        self,
        image: ImageRef,
        snapshot: int,
        fill: Callable[[str], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Make a snapshot, in place of one that a killed action has left; RBD needs no `fill`."""
        where, name = self._settled(image)
        if check:
            check()
        rbd_snapshots.keep(where, name, snapshot)

    def _with_snapshot(self, image: ImageRef, snapshot: int) -> tuple[ceph.Pool, str]:
        """Return pool and name of an image; raise NotSupported if that snapshot lies in another image."""
        where, name = ceph.bridged(image)
        rbd_pool.check_not_aside(where, name, snapshot)
        return where, name

    def forget(self, image: ImageRef, snapshot: int, session: str = "") -> None:
        rbd_snapshots.forget(*self._with_snapshot(image, snapshot), snapshot, session=session)

    def revert(self, image: ImageRef, snapshot: int, size: int = 0, session: str = "") -> None:
        """Roll the hidden image back."""
        rbd_snapshots.revert(*self._with_snapshot(image, snapshot), snapshot, size, session)

    def flatten(self, image: ImageRef, snapshot: int, size: int = 0) -> None:
        """Revert, then remove all numbered snapshots, that one last: a rerun must find it."""
        where, name = self._with_snapshot(image, snapshot)
        numbers = rbd_snapshots.numbers(where, name)
        if numbers:
            rbd_snapshots.revert(where, name, snapshot, size)
        rbd_snapshots.forget(where, name, *sorted(numbers, key=lambda number: number == snapshot))

    def clone_of(self, image: ImageRef, vm: int, disk: int) -> str:
        """Return the name that OpenNebula's own driver gives the clone."""
        return f"{image.source}-{vm}-{disk}"

    def clone(self, image: ImageRef, clone: str, size: int) -> None:
        """Clone the frozen content."""
        self.clone_for(image, clone, size)

    def clone_for(self, image: ImageRef, clone: str, size: int, seq: int = -1) -> MadeClone:
        """Clone the frozen content, and record the SEQ on the clone."""
        where, name = self._settled(image)
        made = image._replace(source=clone)
        _, target = ceph.bridged(made)
        frozen = rbd_image.freeze(where, name)
        rbd_pool.refuse_late(where, target, seq)
        # Made anew: an action that oned gave up may have left half of it.
        rbd_pool.remove(where, target)
        with rbd_pool.published(where, target, rbd_pool.made_for(made), seq) as staged:
            rbd_pool.clone(where, name, frozen.name, staged)
            if size > frozen.size:
                claim.grow(where, staged, size)
            found = rbd_pool.id_of(where, staged)
        return MadeClone(found)

    def remove_clone(self, image: ImageRef, clone: str) -> None:
        self.remove(image._replace(source=clone))

    def clone_found(self, image: ImageRef, vm: int, number: int) -> str:
        """Return the clone's name, after settling a change of it; '' if it is not there."""
        clone = self.clone_of(image, vm, number)
        where, name = self._settled(image._replace(source=clone))
        return clone if rbd_pool.look(where, name) else ""
