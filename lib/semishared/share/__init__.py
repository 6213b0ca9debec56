# SPDX-License-Identifier: Apache-2.0
"""Shares, where they are made: one module for each file system that holds a directory to its size.

What concerns all of them is in life.py. A function that carries out a step (model/share/steps.py) has its
fields as arguments.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from ..model.share.share import Share, Snapshot, Tree, Use


class FileSystem(Protocol):
    """What each kind does. All of it may be killed anywhere, and done again."""

    def check(self) -> None:
        """Raise unless the root is on such a file system, and quotas are on."""

    def lacking(self) -> list[str]:
        """Return what is needed there and not permitted, as commands; raise as `check`. Nothing is done."""

    def lapsed(self) -> tuple[str, str]:
        """Return why no share is held to its size at the moment, and the command of root that mends it; ''
        and '' where they are.
        """

    def there(self, image: int) -> str:
        """Return where something of a share is, '' if there is nothing; raise NoQuota if a new one would not
        be held to its size.
        """

    def make(self, share: Share, uid: int) -> str:
        """Have an empty tree, held to its size, that belongs to user and group `uid`; return its path."""

    def resize(self, image: int, size: int) -> None:
        """Hold a tree to another size."""

    def use(self, image: int) -> Use:
        """Return how full a tree is."""

    def remove(self, image: int) -> None:
        """Remove a tree with all in it, and its snapshots; it need not be there."""

    def snapshot(self, image: int, name: str) -> None:
        """Keep what is in a tree, whole or not at all; raise NotSupported where there is no such thing."""

    def snapshot_names(self, image: int) -> list[str]:
        """Return what the snapshots of a tree are called."""

    def known(self, image: int, name: str) -> Snapshot:
        """Return what is known of one; raise ToolFailed, MissingImage."""

    def forget(self, image: int, name: str) -> None:
        """Remove one; it need not be there."""


def of(tree: Tree) -> FileSystem:
    """Return the kind of a tree, loaded when it is used."""
    module, _, name = tree.backend.carried_out_by.partition(":")
    made: FileSystem = getattr(import_module(f".{module}", __package__), name)(tree)
    return made
