# SPDX-License-Identifier: Apache-2.0
"""Shares on CephFS: subvolumes of one group, made by the cluster's manager.

Each share's objects are in a RADOS namespace of its own.

The root is the mounted group (/volumes/GROUP), so a subvolume is at <root>/share-<image>/<uuid> on all hosts.
The manager gives it to its owner: no step needs root. This suite sets layout, namespace and limit of files
while it owns the empty tree. The key of its mount needs the cap `p` for that, which no host with guests may
have; nor can guests use names in ceph.* (vmm/virtiofsd.py). The manager would name the namespace after the
subvolume alone: two groups may each have a share-42, and a key for one would open the objects of both.
Clients hold themselves to quotas, by what they know of other clients: for seconds a share may hold more.
"""

from __future__ import annotations

import errno
import json
import os
from datetime import datetime, timezone
from typing import Any

from ..errors import (
    CephRefused,
    CephUnavailable,
    MissingImage,
    NotPermitted,
    ShareRefused,
    StoreUnavailable,
    ToolFailed,
    here,
)
from ..model.share import names as share_names
from ..model.share.share import Share, Tree, Use
from ..model.share.steps import ShareSnapshot
from ..model.store.access import MOUNTED
from ..store.rbd import ceph
from ..tools.effects import point
from . import FileSystem, rights
from .plain import MODE, most_files

ERRORS = {
    errno.ENOENT: MissingImage,
    errno.EPERM: CephRefused,
    errno.EACCES: CephRefused,
    errno.ETIMEDOUT: CephUnavailable,
    errno.ENXIO: CephUnavailable,
}
UNIT = 65536
"""CephFS's least stripe unit in bytes."""
OBJECT = 4 << 20
"""CephFS's default object size in bytes."""


class CephFs(FileSystem):
    """Shares as subvolumes of CephFS."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._volume, self._group = tree.volume.split("/")
        self._user, self._access = tree.user, MOUNTED._replace(conf=tree.conf)

    def check(self) -> None:
        """Raise StoreUnavailable if the root is on no CephFS, ShareRefused if mounted without nosuid,nodev.

        No host checks the mount of a guest that is a client itself, and its files may belong to root.
        """
        rights.check_mounted(self.root, ("ceph", "fuse.ceph-fuse"))
        flags = os.statvfs(self.root).f_flag
        if not (flags & os.ST_NOSUID and flags & os.ST_NODEV):
            raise ShareRefused(
                f"{here(self.root)} is mounted without nosuid,nodev: guests' files would have power here"
            )

    def lacking(self) -> list[str]:
        """Return []; raise CephRefused, CephUnavailable if the manager refuses us subvolumes.

        The manager reports which verbs it refuses only when they are used.
        """
        try:
            self._info(0)
        except MissingImage:
            pass
        return []

    def make(self, share: Share, uid: int) -> str:
        path = self.there(share.image)
        if not path or os.lstat(path).st_uid != uid:
            self._create(share, os.geteuid())
            point("subvolume made")
            path = self.there(share.image)
            _lay_out(path, share, share_names.namespace(self._tree.marker, share.image))
            point("subvolume laid out")
        self._create(share, uid)
        point("subvolume given to its owner")
        return path

    def resize(self, image: int, size: int) -> None:
        """Hold a tree to another size in bytes; the limit of files stays."""
        self._ask("resize", image, new_size=str(size))

    def use(self, image: int) -> Use:
        """Return bytes, as of some seconds ago, and quota."""
        info = self._info(image)
        quota = str(info["bytes_quota"])
        return Use(int(info["bytes_used"]), int(quota) if quota.isdigit() else -1)

    def remove(self, image: int) -> None:
        """Remove a subvolume with its snapshots; the manager deletes the content later."""
        try:
            names = self._names(image)
        except MissingImage:
            return
        for name in names:
            self.forget(image, name)
        self._ask("rm", image, force=True)
        point("subvolume removed")

    def _names(self, image: int) -> list[str]:
        return [str(row["name"]) for row in json.loads(self._ask("snapshot ls", image))]

    def snapshot(self, image: int, name: str) -> None:
        """Have the manager take a snapshot of what clients have written so far."""
        self._ask("snapshot create", image, snap_name=name)

    def snapshot_names(self, image: int) -> list[str]:
        """Return all snapshots, whatever made them, except those with names that ours cannot have."""
        return sorted(name for name in self._names(image) if share_names.may_be_snapshot(name))

    def known(self, image: int, name: str) -> ShareSnapshot:
        """Return a snapshot: its path below the subvolume, and its name below the content, which guests see.

        CephFS does not report the bytes that it alone keeps.
        """
        info = json.loads(self._ask("snapshot info", image, snap_name=name))
        top = f"{self.root}/{share_names.tree(image)}"
        inside = share_names.inside(name, os.lstat(top).st_ino)
        made = parse_time(str(info["created_at"]))
        return ShareSnapshot(name, made, -1, f"{top}/{share_names.below(name)}", inside)

    def forget(self, image: int, name: str) -> None:
        self._ask("snapshot rm", image, snap_name=name, force=True)
        point("snapshot removed")

    def _create(self, share: Share, uid: int) -> None:
        """Create a subvolume, or set the properties of an existing one; its namespace stays."""
        pool = {"pool_layout": share.pool} if share.pool else {}
        self._ask("create", share.image, size=share.size, uid=uid, gid=uid, mode=f"{MODE:o}", **pool)

    def _info(self, image: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._ask("info", image))
        return found

    def there(self, image: int) -> str:
        """Return where a subvolume is mounted, '' if it does not exist.

        Raise StoreUnavailable if the root is not the mounted group.
        """
        try:
            path = str(self._info(image)["path"])
        except MissingImage:
            return ""
        group = f"/volumes/{self._group}/"
        mounted = f"{self.root}/{path[len(group) :]}"
        if not path.startswith(group) or not os.path.isdir(mounted):
            raise StoreUnavailable(
                f"{path} of CephFS {self._volume} is not at {here(mounted)}: "
                f"is {group[:-1]} what is mounted there?"
            )
        return mounted

    def _ask(self, verb: str, image: int, **words: object) -> str:
        """Send the manager a command on a subvolume.

        Raise MissingImage, CephRefused, CephUnavailable, ToolFailed.
        """
        name = share_names.tree(image)
        asked = {
            "prefix": f"fs subvolume {verb}",
            "vol_name": self._volume,
            "group_name": self._group,
            "sub_name": name,
            "format": "json",
        }
        what = f"fs subvolume {verb} {self._volume}/{self._group}/{name}"
        connected = ceph.cluster(self._access, self._user)
        with ceph.understood(what, self._user):
            code, out, said = connected.mgr_command(
                json.dumps({**asked, **words}), b"", timeout=ceph.ANSWER_S
            )
        if code:
            error = ERRORS.get(abs(code), ToolFailed)
            raise error(
                f"{what} as client.{self._user} on {os.uname().nodename}: {said or os.strerror(abs(code))}"
            )
        return str(out.decode())


def parse_time(text: str) -> int:
    """Return the manager's UTC time as seconds since 1970; -1 if it has another format."""
    try:
        found = datetime.strptime(text.partition(".")[0], "%Y-%m-%d %H:%M:%S")
        return int(found.replace(tzinfo=timezone.utc).timestamp())
    except ValueError:
        return -1


def layout(share: Share) -> str:
    """Return a share's layout in CephFS's format, '' for the default."""
    if not share.stripes and not share.object_size:
        return ""
    stripes, size = share.stripes or 1, share.object_size or OBJECT
    return f"stripe_unit={max(UNIT, size // stripes)} stripe_count={stripes} object_size={size}"


def _lay_out(path: str, share: Share, namespace: str) -> None:
    wanted = {
        "ceph.quota.max_files": str(most_files(share.size)),
        "ceph.dir.layout": layout(share),
        "ceph.dir.layout.pool_namespace": namespace,
    }
    try:
        for name, value in wanted.items():
            if value:
                os.setxattr(path, name, value.encode())
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.EACCES):
            raise
        raise NotPermitted(
            f"{name} of {here(path)}: the key by which the root is mounted "
            f"there has no `p` (rwp) in its caps of the MDS"
        ) from None
