# SPDX-License-Identifier: Apache-2.0
"""Steps on shares, for the machine that makes the directories of a datastore (share/)."""

from __future__ import annotations

from typing import Any, Tuple

from ..refs import Step, looks
from .share import Share, Tree


class MarkRoot(Step[Any]):
    """Make the root of `tree` one, unless it is: `new` is the marker if it has none. Report its marker."""

    tree: Tree
    new: str


@looks
class FindDirectory(Step[Any]):
    """Report the real path of a directory that exists, below one of `safe` and in no datastore."""

    tree: Tree
    path: str
    safe: Tuple[str, ...]
    others: Tuple[str, ...] = ()
    """The directories of all datastores."""


class MakeShare(Step[Any]):
    """Make the tree of a share, hold it to its size, and give it to its owner's users; report its path.

    Of a directory that was there before: an empty tree, which stands for it.
    """

    tree: Tree
    share: Share


class RemoveShare(Step[Any]):
    """Remove the share of an image with all that is in it; `source`, its SOURCE, may also be a directory that
    was there before.

    `born`: as the share was that was seen not to be ready. Report that it is not `removed` if it is ready by
    now, or another one.
    """

    tree: Tree
    number: int
    source: str
    born: int = -1
    """-1: whatever it is."""


class ResizeShare(Step[Any]):
    """Hold the share of an image to another size in bytes; report the one before."""

    tree: Tree
    number: int
    size: int


@looks
class ListShares(Step[Any]):
    """Report all shares, with the bytes used of each, and of which cloud the root is."""

    tree: Tree


class MakeSnapshot(Step[Any]):
    """Keep what is in the share of an image now, as `name`; report the snapshot (shares.Snapshot)."""

    tree: Tree
    number: int
    name: str


@looks
class ListSnapshots(Step[Any]):
    """Report the snapshots of a share."""

    tree: Tree
    number: int


class RemoveSnapshot(Step[None]):
    """Remove one."""

    tree: Tree
    number: int
    name: str


@looks
class LookAtRoot(Step[Any]):
    """Report which commands that shares need there are `lacking`, once the root is one with its quotas on;
    with `clients` also of those by which guests are given keys, and the data `pools` that the shares of
    `images` are in (Clients.pools).
    """

    tree: Tree
    clients: bool = False
    images: Tuple[int, ...] = ()


@looks
class LookAtShareHost(Step[Any]):
    """Report what a host has of what guests with shares need, and of each of `roots` whether it is there."""

    roots: Tuple[str, ...]


@looks
class MeasureRoot(Step[Any]):
    """Report bytes used, in total and free of the file system that shares are in."""

    tree: Tree


class GiveKey(Step[Any]):
    """Get VM `vm` (-1: a client that is no VM) a Ceph key for the share of an image at `source`, and no more.

    Report it, with what else a client has to know (ceph_clients.Clients.give): it is secret.
    """

    tree: Tree
    number: int
    source: str
    vm: int
    readonly: bool
    seq: int = -1
    """SEQ of the VM's last history record; refused if a key was given at a later one. -1: for no boot."""


class ShowKey(Step[Any]):
    """Report the key that a VM has for the share of an image, which is at `source`, as GiveKey does; none is
    given to one that has none.
    """

    tree: Tree
    number: int
    source: str
    vm: int


class TakeKeys(Step[Any]):
    """Take back the keys of VM `vm` (-1: of no VM) for the share of an image, or for all with number -1.

    Report how many were `taken`.
    """

    tree: Tree
    number: int
    vm: int
    seq: int = -1
    """Keys of a later SEQ of the VM's history stay: the VM runs again. -1: none stays."""


@looks
class ListKeys(Step[Any]):
    """Report the holders of `keys`: image, vm, readonly and user of each; not the keys."""

    tree: Tree
