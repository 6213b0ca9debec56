# SPDX-License-Identifier: Apache-2.0
"""Shares, where they are made: one module for each file system that holds a directory to its size.

life.py has what all of them do. A step's function (model/share/steps.py) gets the step's fields as arguments.
"""

from __future__ import annotations

from importlib import import_module

from ..errors import MissingImage, NotSupported
from ..model.share.share import Share, Tree, Use
from ..model.share.steps import ShareSnapshot


class FileSystem:
    """What each kind of file system does. Each call may be killed anywhere, and repeated."""

    def __init__(self, tree: Tree) -> None:
        self.root, self._tree = tree.root, tree

    def check(self) -> None:
        """Raise unless the root is on this file system, with quotas on."""

    def lacking(self) -> list[str]:
        """Return the commands that are needed there and not permitted; raise as `check`. Change nothing."""
        raise NotImplementedError

    def lapsed(self) -> tuple[str, str]:
        """Return why no share is held to its size now, and root's command that mends it; else ('', '')."""
        return "", ""

    def there(self, image: int) -> str:
        """Return the path of what exists of a share, '' if nothing does.

        Raise NoQuota if a new share would not be held to its size.
        """
        raise NotImplementedError

    def make(self, share: Share, uid: int) -> str:
        """Create an empty tree, held to its size and owned by user and group `uid`; return its path."""
        raise NotImplementedError

    def resize(self, image: int, size: int) -> None:
        """Hold a tree to another size in bytes."""

    def use(self, image: int) -> Use:
        """Return the bytes in a tree, and its limit; -1 for what is unknown."""
        return Use(-1, -1)

    def remove(self, image: int) -> None:
        """Remove a tree with its content and snapshots; it need not exist."""
        raise NotImplementedError

    def snapshot(self, image: int, name: str) -> None:
        """Take a snapshot of a tree, whole or not at all; raise NotSupported where there are none."""
        why = "it keeps none of a single directory, as btrfs and cephfs do"
        raise NotSupported(f"shares on {self._tree.fs} have no snapshots: {why}")

    def snapshot_names(self, image: int) -> list[str]:
        """Return the names of a tree's snapshots."""
        return []

    def known(self, image: int, name: str) -> ShareSnapshot:
        """Return what is known of a snapshot; raise ToolFailed, MissingImage."""
        raise MissingImage(f"image {image} has no snapshot {name}")

    def forget(self, image: int, name: str) -> None:
        """Remove a snapshot; it need not exist."""


def of(tree: Tree) -> FileSystem:
    """Return the file system of a root; its module is loaded on use."""
    module, _, name = tree.backend.carried_out_by.partition(":")
    made: FileSystem = getattr(import_module(f".{module}", __package__), name)(tree)
    return made
