# SPDX-License-Identifier: Apache-2.0
"""Claim an RBD image for a diff, and commit the diff to it: on the host, as the guests' user.

The bridge rolls back a killed commit (store/rbd/claim.py).
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, Iterator

from ...errors import CephRefused, CommitRefused, NotSupported
from ...model.refs import ImageRef, Owner
from ...model.store import rbd_names
from ...model.store.access import Access
from ...tools import progress
from ...tools.effects import point
from ...tools.rate_limit import Pace
from ..commit import change as commit_change
from ..commit import claims
from ..commit.change import Change, Part
from ..commit.claims import Claim, Committed, Diff
from . import ceph, pool
from . import claim as rbd_claim
from . import content as rbd_content
from . import image as rbd_image
from .content import Writing

if TYPE_CHECKING:
    from ...model.refs import Owner
    from ..commit.claims import Committed, Diff

AT_ONCE = 32
"""Writes in flight: most are small."""


def _noted(image: ImageRef, opened: Any, owner: Owner) -> int:
    said = str(dict(opened.metadata_list()).get(rbd_names.epoch(owner.vm, image.access.cloud), ""))
    return int(said) if said.isdigit() else -1


def _may(image: ImageRef, opened: Any, owner: Owner) -> Claim:
    claims.check_epoch(image.source, owner, _noted(image, opened, owner))
    claim = _settled(image, opened)
    return claims.check(image.source, claim, owner, rbd_claim.now(opened, owner, claim))


def _settled(image: ImageRef, opened: Any) -> Claim | None:
    """Return the record of an image; raise CommitRefused if its last commit is not settled."""
    claim = rbd_claim.read(opened)
    if not rbd_claim.is_settled(claim):
        raise CommitRefused(f"the commit before to {image.source} was not settled on the store's bridge yet")
    return claim


@contextmanager
def _alone(image: ImageRef) -> Iterator[Any]:
    """Yield the image, open as the guests' user, with its exclusive lock; breaking it blocklists us."""
    with ceph.opened(*ceph.pool_of(image, image.access.user)) as opened:
        import rbd

        if not opened.features() & rbd.RBD_FEATURE_EXCLUSIVE_LOCK:
            raise NotSupported(
                f"{image.source} lacks exclusive-lock (`rbd feature enable`): a host that was cut "
                f"off could write to it"
            )
        rbd_image.wait_unused(opened, image.source)
        # Closing the image releases it.
        opened.lock_acquire(rbd.RBD_LOCK_MODE_EXCLUSIVE)
        yield opened


def claim(image: ImageRef, owner: Owner) -> Owner | None:
    """See store.Store.claim."""
    with _alone(image) as opened:
        claims.check_epoch(image.source, owner, _noted(image, opened, owner))
        before = _settled(image, opened)
        new = claims.claimed(image.source, before, rbd_claim.now(opened, owner, before))
        if new != before:
            rbd_claim.write(opened, new)
    return before.owner if before else None


def owner(image: ImageRef) -> Owner | None:
    """See store.Store.owner."""
    with ceph.opened(*ceph.pool_of(image, image.access.user), read_only=True) as opened:
        found = rbd_claim.read(opened)
    return found.owner if found else None


def disown(image: ImageRef, owner: Owner) -> None:
    """See store.Store.disown."""
    with ceph.opened(*ceph.pool_of(image, image.access.user), read_only=True) as opened:
        is_ours = _is_idle_of(opened, owner)
    if is_ours:
        # A claim takes the same lock: read the record again under it.
        with _alone(image) as opened:
            if _is_idle_of(opened, owner):
                rbd_claim.write(opened, None)


def _is_idle_of(opened: Any, owner: Owner) -> bool:
    found = rbd_claim.read(opened)
    return found is not None and claims.is_of(found, owner) and not found.changing


def may_commit(image: ImageRef, owner: Owner) -> None:
    """See store.Store.may_commit."""
    with _alone(image) as opened:
        _may(image, opened, owner)


def commit(image: ImageRef, owner: Owner, diff: Diff) -> Committed:
    """See store.Store.commit."""
    with _alone(image) as opened:
        before = _may(image, opened, owner)
        with commit_change.opened(diff, before, before.size) as change:
            writing = _Writing(opened, before, diff)
            manifest, done = commit_change.carry_out(change, writing.write)
            if not writing.begun:
                return done._replace(generation=before.generation)
            # A host that takes the VM over records its epoch without waiting for this lock.
            claims.check_epoch(image.source, owner, _noted(image, opened, owner))
            after = Claim(
                owner, done.generation, change.size, (), before.snapshots, frozenset(change.extents)
            )
            if manifest:
                rbd_content.write_manifest(opened, manifest)
                point("commit described")
            rbd_claim.write(opened, after, "commit decided")
            commit_change.remember(diff, change, manifest)
    return done._replace(how="rbd")


class _Writing:
    """A diff on its way into an open image."""

    def __init__(self, opened: Any, before: Claim, diff: Diff) -> None:
        self._opened, self._before, self._diff = opened, before, diff
        self.begun = False

    def write(self, change: Change) -> int:
        """Write a change; return the bytes sent."""
        if not change.writes and change.size == self._before.size:
            return 0
        self.begun = True
        rbd_claim.write(self._opened, self._before._replace(changing=True), "change noted")
        if change.size > self._before.size:
            self._opened.resize(change.size)
            point("image grown")
        sent, writing = progress.moved["store_written"], Writing(self._opened, AT_ONCE)
        for _ in change.each(partial(_send, writing, Lock()), Pace(self._diff.rate)):
            pass
        writing.finish()
        point("commit written")
        return progress.moved["store_written"] - sent


def _send(writing: Writing, lock: Lock, part: Part) -> None:
    with lock:
        for start, length, content in part.chunks:
            if content is None:
                writing.zero(start, length)
            else:
                writing.put(start, bytes(content))


class RbdDiffs:
    """The methods of store.Store for diffs and epochs."""

    _access: Access

    def _settled(self, image: ImageRef) -> tuple[ceph.Pool, str]:
        """Return pool and name of an image, after settling a killed change of it."""
        where, name = ceph.bridged(image)
        rbd_claim.settle_change(where, name)
        return where, name

    def settle(self, image: ImageRef) -> None:
        """Roll back a killed commit, or give a finished one's content its snapshot."""
        self._settled(image)

    def keyed(self) -> Access:
        """Return the access by the guests' user if its key is here, else the bridge's; raise CephRefused."""
        access = self._access
        try:
            ceph.cluster(access, access.user)
        except CephRefused as e:
            try:
                ceph.cluster(access, access.bridge_user)
            except CephRefused:
                raise e from None
            return access.by_bridge()
        return access

    def reached(self, image: ImageRef) -> None:
        """Do nothing: the bridge reports that itself."""

    def claimable(self, image: ImageRef) -> None:
        """Do nothing: the bridge has looked."""

    def is_settled(self, image: ImageRef) -> bool:
        """Read the record on the image, as the guests' user."""
        with ceph.opened(*ceph.pool_of(image, image.access.user), read_only=True) as opened:
            return rbd_claim.is_settled(rbd_claim.read(opened))

    def claim(self, image: ImageRef, owner: Owner) -> Owner | None:
        """Write a record on the image."""
        return claim(image, owner)

    def owner(self, image: ImageRef) -> Owner | None:
        """Read the record on the image."""
        return owner(image)

    def disown(self, image: ImageRef, owner: Owner) -> None:
        """Remove the record on the image."""
        disown(image, owner)

    def may_commit(self, image: ImageRef, owner: Owner) -> None:
        """Compare the record and the image with `owner`."""
        may_commit(image, owner)

    def commit(self, image: ImageRef, owner: Owner, diff: Diff) -> Committed:
        """Write to the image, then record its new state."""
        return commit(image, owner, diff)

    def note_epoch(self, image: ImageRef, vm: int, epoch: int) -> None:
        """Record the epoch in the image's metadata."""
        pool.note_epoch(image, *self._settled(image), vm, epoch)

    def epoch(self, image: ImageRef, vm: int) -> int:
        """Read the epoch from the image's metadata, as the guests' user."""
        return pool.epoch(image, *ceph.pool_of(image, image.access.user), vm)
