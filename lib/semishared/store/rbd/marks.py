# SPDX-License-Identifier: Apache-2.0
"""Marks for backups of disks on Ceph (model/disk/marks.py): snapshots of an image, made by the VM's host.

    one-35@semishared-backup-<vm>-<random>-<increment>

The host makes them itself, as the guests' user, while the guest rests. They are not protected, and no clone
is made of them: whatever removes the snapshots of an image removes them. What replaces the content of an
image removes them too (image.end_generations): so the next increment is whole. What changed is what Ceph
tells of two snapshots, object by object; that is right also after a roll-back.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Collection, Iterator, List, Tuple

from ...errors import CephRefused, MissingImage
from ...model.disk.network_disk import NetworkDisk
from ...model.refs import ImageRef
from ...model.store import rbd_names
from . import ceph
from . import image as rbd_image


class RbdMarks:
    """The methods of store.Bridged for marks."""

    @contextmanager
    def marking(self, image: ImageRef, vm: int, mark: str) -> Iterator[Callable[[], None]]:
        """Open the image before the guest rests: that takes longer than the snapshot."""
        name = rbd_names.backup(vm, mark)
        with ceph.opened(*_as_user(image)) as opened:
            yield lambda: rbd_image.create(opened, name)

    def refuses_marks(self, image: ImageRef) -> str:
        """Want the exclusive lock: its holder takes the snapshot between two of its writes.

        Without it a write that is under way may end up in the snapshot, and be told by no diff.
        """
        with ceph.opened(*_as_user(image), read_only=True) as opened:
            import rbd

            locks = opened.features() & rbd.RBD_FEATURE_EXCLUSIVE_LOCK
        return "" if locks else "its image lacks exclusive-lock (`rbd feature enable`)"

    def has_mark(self, image: ImageRef, vm: int, mark: str) -> bool:
        return rbd_names.backup(vm, mark) in rbd_image.names(*_as_user(image))

    def marked(self, network: NetworkDisk, vm: int, mark: str) -> NetworkDisk:
        return network._replace(snapshot=rbd_names.backup(vm, mark))

    def changed(self, image: ImageRef, vm: int, since: str, mark: str = "") -> List[Tuple[int, int]]:
        """Ask Ceph, which lists what was written or discarded; what is zero then is told by reading."""
        found: List[Tuple[int, int]] = []
        with ceph.opened(*_as_user(image), read_only=True) as opened:
            if mark:
                opened.set_snap(rbd_names.backup(vm, mark))
            with ceph.long():
                opened.diff_iterate(
                    0,
                    opened.size(),
                    rbd_names.backup(vm, since),
                    lambda offset, length, _is_data: found.append((offset, length)),
                    include_parent=True,
                )
        return found

    def drop_marks(self, image: ImageRef, vm: int, keep: Collection[str] = ()) -> None:
        """Do so with the key that this machine has: the front-end may have the bridge's alone."""
        kept = {rbd_names.backup(vm, mark) for mark in keep}
        try:
            where, name = _as_user(image)
        except CephRefused:
            where, name = ceph.bridged(image)
        try:
            gone = [
                one
                for one in rbd_image.names(where, name)
                if rbd_names.backed_up(one) == vm and one not in kept
            ]
            if gone:
                with ceph.opened(where, name) as opened:
                    for one in gone:
                        rbd_image.drop(opened, one)
        except MissingImage:
            pass  # its marks are gone with it


def _as_user(image: ImageRef) -> Tuple[ceph.Pool, str]:
    return ceph.pool_of(image, image.access.user)
