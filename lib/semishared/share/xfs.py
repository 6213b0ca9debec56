# SPDX-License-Identifier: Apache-2.0
"""Shares on XFS: a directory with a project of its own, whose quota has limits.

Guests cannot change it: no ioctl crosses virtiofs.

`df` in the guest shows the limits. What is empty is held by their second half: inodes cost the file system
room that no project is charged for.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct

from ..errors import BadArguments, NoQuota, ToolFailed
from ..model.share.share import Tree, Use
from ..named import NamedTuple
from ..tools.effects import point
from ..tools.mounts import of
from ..units import human
from . import rights
from .plain import Directories, most_files

FIRST_PROJECT = 2_000_000_000
"""Images count from 0 to 2^31 - 1, projects to 2^32 - 2: the rule for sudoers knows ours by their ten
digits.
"""
FSGETXATTR, FSSETXATTR = 0x801C581F, 0x401C5820
"""ioctl_xfs_fsgetxattr(2); the same numbers on all that has a 28 byte struct fsxattr."""
FSXATTR = struct.Struct("=IIIII8s")
PROJINHERIT = 0x200


class Held(NamedTuple):
    """What a project uses and may use, in bytes and inodes; a limit of 0 is none."""

    used: int = 0
    limit: int = 0
    files: int = 0
    most_files: int = 0


class Xfs(Directories):
    """Directories with projects."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._where = os.uname().nodename

    def check(self) -> None:
        """Raise StoreUnavailable where it is no XFS, NoQuota where projects are not held to their limits."""
        mount = rights.check_mounted(self.root, ("xfs",))
        if "prjquota" not in mount.options:
            raise NoQuota(f"{self.root} on {self._where}: {mount.point} is not mounted with prjquota")
        if _project(self.root):
            raise NoQuota(
                f"{self.root} on {self._where} is in project {_project(self.root)} itself, which "
                f"nothing may be renamed out of"
            )

    def commands(self) -> list[list[str]]:
        """Return, of share 0, the commands that take root."""
        return [*super().commands(), self._words(_limit(0, 0, 0)), self._words(_report(0))]

    def hold(self, image: int, size: int) -> None:
        """Put a tree in its project, and limit that; raise NoQuota if others have it.

        A limit is ours if the tree is in the project, so it is in there first. Empty, it is nobody's to write
        to yet.
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
            raise NoQuota(f"{self.path(image)} on {self._where} would be in project {project}, {whose}")

    def there(self, image: int) -> str:
        """Return where the tree is, '' if there is none; raise NoQuota if others have its project."""
        found = super().there(image)
        if not found:
            self._require_free(image)
        return found

    def resize(self, image: int, size: int) -> None:
        """Give the project other limits; raise NoQuota if it has not got them, BadArguments if it has more
        files than it may have then.
        """
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
            raise NoQuota(
                f"{self.path(image)} on {self._where} is held to {human(found)}, not to {human(size)}"
            )

    def use(self, image: int) -> Use:
        """Return what the project has, and may have."""
        held = self._held(image)
        self._require_in(image, held)
        return Use(held.used, held.limit or -1)

    def _require_in(self, image: int, held: Held) -> None:
        """Raise NoQuota where the project has no file: a tree that is in it is one itself, also one that
        nobody may look into.
        """
        if held.files:
            return
        path, project = self.path(image), FIRST_PROJECT + image
        mend = f"xfs_quota -x -c 'project -s -p {path} {project}' {of(self.root).point}"
        raise NoQuota(
            f"{path} on {self._where} is not in project {project}: no limit holds it (as root, "
            f"while no VM has it: {mend})"
        )

    def drop(self, image: int, path: str) -> None:
        """Remove a tree that is out of the way, and before it the limits of its project: the id of an image
        may be given anew.

        Those of a project that the tree never came to be in are others'.
        """
        if _was_held(path, FIRST_PROJECT + image) and self._held(image).limit:
            self._limit(image, 0, 0)
            point("limits removed")
        super().drop(image, path)

    def _limit(self, image: int, size: int, files: int) -> None:
        self._quota(_limit(image, size, files))

    def _held(self, image: int) -> Held:
        return parse(self._quota(_report(image)), FIRST_PROJECT + image)

    def _quota(self, command: str) -> str:
        return rights.run(self._words(command))

    def _words(self, command: str) -> list[str]:
        return ["xfs_quota", "-x", "-c", command, of(self.root).point]


def _limit(image: int, size: int, files: int) -> str:
    return f"limit -p bhard={size} ihard={files} {FIRST_PROJECT + image}"


def _report(image: int) -> str:
    project = FIRST_PROJECT + image
    return f"report -p -N -n -b -i -L {project} -U {project}"


def parse(text: str, project: int) -> Held:
    """Return what `xfs_quota -c 'report -p -N -n -b -i'` says of a project, nothing of one that it does not
    list; raise ToolFailed.
    """
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
    """Tell whether a tree is in its project. What was given to its owner is: we may not look into it any
    more.
    """
    return os.path.lexists(path) and (os.lstat(path).st_uid != os.geteuid() or _project(path) == project)


def _put(path: str, project: int) -> None:
    """Put a directory, and all that is made in it from now on, in a project."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        flags, extent, extents, _, copied, rest = _flags(fd)
        fcntl.ioctl(fd, FSSETXATTR, FSXATTR.pack(flags | PROJINHERIT, extent, extents, project, copied, rest))
        os.fsync(fd)
    finally:
        os.close(fd)
