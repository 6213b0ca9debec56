# SPDX-License-Identifier: Apache-2.0
"""Shares on any file system, as plain directories: nothing holds them to their size.

The administrator has chosen that.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ..model.share import names as share_names
from ..model.share.share import FIRST_UID, Share
from ..tools import files
from ..tools.effects import point
from . import FileSystem, rights

MODE = 0o755
"""The mode of a new file system; the guest's root may change it. Nothing hides a share from the host's users.

Guests see no more of the host than their share.
"""
BYTES_PER_FILE, LEAST_FILES = 16384, 1024


def most_files(size: int) -> int:
    """Return how many files a share may have: empty files take space that no size counts."""
    return max(LEAST_FILES, size // BYTES_PER_FILE)


class Directories(FileSystem):
    """Shares as plain directories of a root: created, given to their owner, renamed before removal."""

    def commands(self) -> list[list[str]]:
        """Return the commands that need root, with share 0 as example."""
        return [rights.chown(self.path(0), FIRST_UID), rights.rm(self.gone(0))]

    def lacking(self) -> list[str]:
        return rights.lacking(self.commands())

    def path(self, image: int) -> str:
        return f"{self.root}/{share_names.tree(image)}"

    def there(self, image: int) -> str:
        return "" if files.is_absent(self.path(image)) else self.path(image)

    def gone(self, image: int) -> str:
        return f"{self.root}/{share_names.gone(image)}"

    def new(self, path: str) -> None:
        """Create a tree: a directory, if the file system has no better kind."""
        os.mkdir(path, 0o700)

    def make(self, share: Share, uid: int) -> str:
        path, gone = self.path(share.image), self.gone(share.image)
        if not files.is_absent(gone):
            # The rest of a killed removal would count against the new tree's limit.
            self.drop(share.image, gone)
        if files.is_absent(path):
            self.new(path)
            point("tree made")
        self.hold(share.image, share.size)
        point("tree held to its size")
        # Last: the new owner is no user of this machine.
        if os.lstat(path).st_uid != uid:
            os.chmod(path, MODE)
            rights.give(path, uid)
        files.fsync(self.root)
        point("tree given to its owner")
        return path

    def hold(self, image: int, size: int) -> None:
        """Hold a tree to a size, if the file system can."""

    def drop(self, image: int, path: str) -> None:
        """Remove a tree that was renamed away, with its content.

        A tree that is still ours has no owner yet, so it is empty; where root cannot give it away (NFS with
        root_squash), root may not remove it either.
        """
        if os.path.lexists(path) and os.lstat(path).st_uid == os.geteuid():
            with suppress(OSError):
                os.rmdir(path)
        rights.remove(path)

    def remove(self, image: int) -> None:
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
    """Directories without limits: the marker says that this is the root, and only the record has the size."""
