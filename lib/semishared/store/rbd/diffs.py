# SPDX-License-Identifier: Apache-2.0
"""Claims, commits and epochs in a pool (store.Bridged).

Hosts claim, commit and disown as the guests' user; the bridge settles killed commits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import CephRefused
from ...model.refs import ImageRef
from ...model.store.access import Access
from . import ceph, pool
from . import claim as rbd_claim

if TYPE_CHECKING:
    from ...model.refs import Owner
    from ..commit.claims import Committed, Diff


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
        from . import commit as rbd_commit

        return rbd_commit.claim(image, owner)

    def owner(self, image: ImageRef) -> Owner | None:
        """Read the record on the image."""
        from . import commit as rbd_commit

        return rbd_commit.owner(image)

    def disown(self, image: ImageRef, owner: Owner) -> None:
        """Remove the record on the image."""
        from . import commit as rbd_commit

        rbd_commit.disown(image, owner)

    def may_commit(self, image: ImageRef, owner: Owner) -> None:
        """Compare the record and the image with `owner`."""
        from . import commit as rbd_commit

        rbd_commit.may_commit(image, owner)

    def commit(self, image: ImageRef, owner: Owner, diff: Diff) -> Committed:
        """Write to the image, then record its new state."""
        from . import commit as rbd_commit

        return rbd_commit.commit(image, owner, diff)

    def note_epoch(self, image: ImageRef, vm: int, epoch: int) -> None:
        """Record the epoch in the image's metadata."""
        pool.note_epoch(image, *self._settled(image), vm, epoch)

    def epoch(self, image: ImageRef, vm: int) -> int:
        """Read the epoch from the image's metadata, as the guests' user."""
        return pool.epoch(image, *ceph.pool_of(image, image.access.user), vm)
