# SPDX-License-Identifier: Apache-2.0
"""Shares on any file system, as plain directories: nothing holds them to their size.

The operator has said that this is meant.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ..errors import MissingImage, NotSupported
from ..model.share import names as share_names
from ..model.share.share import FIRST_UID, Share, Snapshot, Tree, Use
from ..tools import files
from ..tools.effects import point
from . import rights

MODE = 0o755
"""As of a new file system: the guest's root may change it. Other users of a host may look into it; what they
do not see is nobody's promise: guests see no more of the host than their share.
"""


BYTES_PER_FILE, LEAST_FILES = 16384, 1024


def most_files(size: int) -> int:
    """Return how many files a share may have: an empty one costs room that no size counts."""
    return max(LEAST_FILES, size // BYTES_PER_FILE)


class Directories:
    """Trees as plain directories of a root: made, given to their owner, set aside before they are removed."""

    def __init__(self, tree: Tree) -> None:
        self.root, self._fs = tree.root, tree.fs

    def commands(self) -> list[list[str]]:
        """Return, of share 0, the commands that take root."""
        return [rights.chown(self.path(0), FIRST_UID), rights.rm(self.gone(0))]

    def lacking(self) -> list[str]:
        """Return which of them sudo does not permit."""
        return rights.lacking(self.commands())

    def lapsed(self) -> tuple[str, str]:
        """Return that limits are kept, once they are on, or that none are meant."""
        return "", ""

    def path(self, image: int) -> str:
        """Return where the tree of a share is."""
        return f"{self.root}/{share_names.tree(image)}"

    def there(self, image: int) -> str:
        """Return that path if something is there, else ''."""
        return "" if files.is_absent(self.path(image)) else self.path(image)

    def gone(self, image: int) -> str:
        """Return where it is while it is removed."""
        return f"{self.root}/{share_names.gone(image)}"

    def new(self, path: str) -> None:
        """Make a tree: a directory, where a file system has nothing else for it."""
        os.mkdir(path, 0o700)

    def make(self, share: Share, uid: int) -> str:
        """Have a tree that is held to its size, and belongs to `uid`; return its path."""
        path, gone = self.path(share.image), self.gone(share.image)
        if not files.is_absent(gone):
            # Its removal was killed, and would count in what holds the new one to its size.
            self.drop(share.image, gone)
        if files.is_absent(path):
            self.new(path)
            point("tree made")
        self.hold(share.image, share.size)
        point("tree held to its size")
        # Last: who owns it then is nobody here.
        if os.lstat(path).st_uid != uid:
            os.chmod(path, MODE)
            rights.give(path, uid)
        files.fsync(self.root)
        point("tree given to its owner")
        return path

    def hold(self, image: int, size: int) -> None:
        """Hold a tree to a size, where a file system can."""

    def snapshot(self, image: int, name: str) -> None:
        """Raise NotSupported: few file systems keep what a directory was."""
        raise NotSupported(
            f"shares on {self._fs} have no snapshots: it keeps none of a single directory, as "
            f"btrfs and cephfs do"
        )

    def snapshot_names(self, image: int) -> list[str]:
        """Return none."""
        return []

    def known(self, image: int, name: str) -> Snapshot:
        """Raise MissingImage: there is none."""
        raise MissingImage(f"image {image} has no snapshot {name}")

    def forget(self, image: int, name: str) -> None:
        """Do nothing: there is none."""

    def drop(self, image: int, path: str) -> None:
        """Remove a tree that is out of the way, with all in it.

        One that is ours yet was given to nobody, so it is empty; and root may not remove it where giving it
        failed (NFS, root_squash).
        """
        if os.path.lexists(path) and os.lstat(path).st_uid == os.geteuid():
            with suppress(OSError):
                os.rmdir(path)
        rights.remove(path)

    def remove(self, image: int) -> None:
        """Remove a tree with all in it."""
        path, gone = self.path(image), self.gone(image)
        if not files.is_absent(path):
            if not files.is_absent(gone):
                self.drop(image, gone)
            os.rename(path, gone)
            files.fsync(self.root)
            point("tree out of the way")
        if not files.is_absent(gone):
            self.drop(image, gone)
            point("tree removed")


class Plain(Directories):
    """Directories and nothing more."""

    def check(self) -> None:
        """Ask nothing of the file system: that it is the root, its marker says."""

    def resize(self, image: int, size: int) -> None:
        """Do nothing: only the record says how large a share is."""

    def use(self, image: int) -> Use:
        """Return that nobody knows."""
        return Use(-1, -1)
