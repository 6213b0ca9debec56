# SPDX-License-Identifier: Apache-2.0
"""Shares on XFS: a directory with a project of its own, whose quota has limits.

Guests cannot change it: no ioctl crosses virtiofs.

`df` in the guest shows the limits. The limit of inodes holds empty files: inodes take space that XFS charges
to no project.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct

from ..errors import BadArguments, NoQuota, ToolFailed, here
from ..model.share.share import Use
from ..named import NamedTuple
from ..tools.effects import point
from ..tools.mounts import of
from ..units import human
from . import rights
from .plain import Directories, most_files

FIRST_PROJECT = 2_000_000_000
"""Images count from 0 to 2^31 - 1, projects to 2^32 - 2; sudo's rule knows ours by their ten digits."""
FSGETXATTR, FSSETXATTR = 0x801C581F, 0x401C5820
"""ioctl_xfs_fsgetxattr(2); the numbers are the same wherever struct fsxattr has 28 bytes."""
FSXATTR = struct.Struct("=IIIII8s")
PROJINHERIT = 0x200


class Held(NamedTuple):
    """What a project uses and may use, in bytes and inodes; a limit of 0 is none."""

    used: int = 0
    limit: int = 0
    files: int = 0
    most_files: int = 0


class Xfs(Directories):
    """Shares as directories with projects."""

    def check(self) -> None:
        """Raise StoreUnavailable if the root is on no XFS, NoQuota if projects have no enforced limits."""
        mount = rights.check_mounted(self.root, ("xfs",))
        if "prjquota" not in mount.options:
            raise NoQuota(f"{here(self.root)}: {mount.point} is not mounted with prjquota")
        if _project(self.root):
            raise NoQuota(
                f"{here(self.root)} is in project {_project(self.root)} itself, which "
                f"nothing may be renamed out of"
            )

    def commands(self) -> list[list[str]]:
        """Return the commands that need root, with share 0 as example."""
        return [*super().commands(), self._words(_limit(0, 0, 0)), self._words(_report(0))]

    def hold(self, image: int, size: int) -> None:
        """Put a tree in its project, and limit that; raise NoQuota if the project is in use.

        The tree is in the project before the limit is set: so a limit without the tree is not ours. The tree
        is still empty, and no user can write to it yet.
        """
        path, project = self.path(image), FIRST_PROJECT + image
        if _project(path) != project:
            self._require_free(image)
            _put(path, project)
            point("tree in its project")
        if self._held(image).limit != size:
            self.resize(image, size)

    def _require_free(self, image: int) -> None:
        held, project = self._held(image), FIRST_PROJECT + image
        if held.files or held.limit or held.most_files:
            whose = (
                f"in which {held.files} other files of the file system are"
                if held.files
                else "for which others have set a limit"
            )
            raise NoQuota(f"{here(self.path(image))} would be in project {project}, {whose}")

    def there(self, image: int) -> str:
        """Return the path of the tree, '' if there is none; raise NoQuota if its project is in use."""
        found = super().there(image)
        if not found:
            self._require_free(image)
        return found

    def resize(self, image: int, size: int) -> None:
        """Set other limits; raise NoQuota if they do not hold, BadArguments if there are too many files."""
        held = self._held(image)
        self._require_in(image, held)
        if held.files > most_files(size):
            raise BadArguments(
                f"{held.files} files are in the share of image {image}: held to {human(size)}, it "
                f"may have {most_files(size)}"
            )
        self._limit(image, size, most_files(size))
        found = self._held(image).limit
        if found != size:
            raise NoQuota(f"{here(self.path(image))} is held to {human(found)}, not to {human(size)}")

    def use(self, image: int) -> Use:
        held = self._held(image)
        self._require_in(image, held)
        return Use(held.used, held.limit or -1)

    def _require_in(self, image: int, held: Held) -> None:
        """Raise NoQuota if the project has no file: a tree in it counts as one, readable or not."""
        if held.files:
            return
        path, project = self.path(image), FIRST_PROJECT + image
        mend = f"xfs_quota -x -c 'project -s -p {path} {project}' {of(self.root).point}"
        raise NoQuota(
            f"{here(path)} is not in project {project}: no limit holds it (as root, "
            f"while no VM has it: {mend})"
        )

    def drop(self, image: int, path: str) -> None:
        """Remove a tree that was renamed away, after its project's limits: the image's id may be reused.

        If the tree was never in the project, the limits are not ours and stay.
        """
        if _was_held(path, FIRST_PROJECT + image) and self._held(image).limit:
            self._limit(image, 0, 0)
            point("limits removed")
        super().drop(image, path)

    def _limit(self, image: int, size: int, files: int) -> None:
        rights.run(self._words(_limit(image, size, files)))

    def _held(self, image: int) -> Held:
        return parse(rights.run(self._words(_report(image))), FIRST_PROJECT + image)

    def _words(self, command: str) -> list[str]:
        return ["xfs_quota", "-x", "-c", command, of(self.root).point]


def _limit(image: int, size: int, files: int) -> str:
    return f"limit -p bhard={size} ihard={files} {FIRST_PROJECT + image}"


def _report(image: int) -> str:
    project = FIRST_PROJECT + image
    return f"report -p -N -n -b -i -L {project} -U {project}"


def parse(text: str, project: int) -> Held:
    """Return a project's `xfs_quota -c 'report -p -N -n -b -i'`, zeros if not listed; raise ToolFailed."""
    if not text.strip():
        return Held()
    row = re.match(
        rf"#{project}\s+([0-9]+)\s+[0-9]+\s+([0-9]+)\s+[0-9]+\s+\[[^]]*\]\s+([0-9]+)\s+[0-9]+\s+([0-9]+)\s+[0-9]+\s+\[[^]]*\]\s*\Z",
        text,
    )
    if not row:
        raise ToolFailed(f"xfs_quota report: not understood: {text[-200:]!r}")
    used, limit, files, most = (int(number) for number in row.groups())
    return Held(used * 1024, limit * 1024, files, most)


def _flags(fd: int) -> tuple[int, int, int, int, int, bytes]:
    return FSXATTR.unpack(fcntl.ioctl(fd, FSGETXATTR, bytes(FSXATTR.size)))


def _project(path: str) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        return _flags(fd)[3]
    finally:
        os.close(fd)


def _was_held(path: str, project: int) -> bool:
    """Return True if a tree is in its project. One with an owner is; we cannot look into it any more."""
    return os.path.lexists(path) and (os.lstat(path).st_uid != os.geteuid() or _project(path) == project)


def _put(path: str, project: int) -> None:
    """Put a directory, and all that will be created in it, in a project."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        flags, extent, extents, _, copied, rest = _flags(fd)
        fcntl.ioctl(fd, FSSETXATTR, FSXATTR.pack(flags | PROJINHERIT, extent, extents, project, copied, rest))
        os.fsync(fd)
    finally:
        os.close(fd)
