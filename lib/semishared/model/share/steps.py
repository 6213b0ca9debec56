# SPDX-License-Identifier: Apache-2.0
"""Steps on shares, for the machine that makes the directories of a datastore (share/)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Tuple

from ...named import Named
from ..refs import Refusal, Step, looks
from .share import Share, Tree

if TYPE_CHECKING:
    from ..shapes import Count, Marker, Path


class MarkedRoot(Named):
    """The root of shares, by its marker."""

    marker: Marker


class FoundDirectory(Named):
    """The real path of a directory."""

    source: Path


class MadeShare(Named):
    """A share, by its path."""

    source: Path


class RemovedShare(Named):
    """Whether a share is gone, or was another one."""

    removed: bool = True


class ResizedShare(Named):
    """The size of a share until then."""

    before: int


class ListedShare(Named):
    """A share of a root, by its record (share.Share); -1 for each number of one that cannot be read."""

    image: int
    owner: int
    born: int
    size: int
    source: str
    """The share's path, '' until it is ready."""
    used: int
    """Bytes; -1: unknown, as of a directory that was there before."""
    stripes: Count = 0
    object_size: Count = 0
    pool: str = ""
    directory: str = ""
    readonly: bool = False
    snapshots: Optional[list[str]] = None
    """Their names; None where the file system was not asked for them."""
    wrong: Optional[Refusal] = None


class Shares(Named):
    """The shares of a root."""

    shares: list[ListedShare]
    cloud: str = ""
    """The OpenNebula that the root names, '' for none."""


class ShareSnapshot(Named):
    """A former state of a share."""

    name: str
    made: int
    """Seconds since 1970, -1 for a snapshot that does not say."""
    alone: int
    """Bytes that its removal would free, -1 for a file system that does not say."""
    path: str
    """The path on machines that have the root mounted."""
    in_guest: str
    """The path below a guest's mount of the share; '': the guest does not see it."""
    wrong: Optional[Refusal] = None


class ShareSnapshots(Named):
    """The snapshots of a share."""

    snapshots: list[ShareSnapshot]


class PoolOfShares(Named):
    """A data pool to which guests write by keys of their own (ceph_clients.Clients.pools)."""

    images: list[Count]
    lacks: list[str]
    """Quotas that it does not have."""
    beside: list[str]
    """What else writes to it."""


class SeenRoot(Named):
    """What doctor judges of a root."""

    lacking: list[str]
    """Commands that are not permitted there."""
    cloud: str
    """The OpenNebula that it names, '' for none."""
    lapsed: tuple[str, str]
    """Why no share is held to its size, and what mends that; '' where they are."""
    promised: tuple[int, int]
    """Bytes that all shares may hold together, and bytes that there are."""
    pools: dict[str, PoolOfShares]


class RootOnHost(Named):
    """What doctor judges of a root on a host whose guests have shares: nothing else if it is not `there`, or
    if there is an `error`.
    """

    there: bool = False
    marker: str = ""
    lacks: list[str] = []
    """Mount options that it has not, of those that keep guests' files from having power on the host."""
    judged_by_user: bool = False
    """Whether the mount's daemon judges what a user may do, and not the kernel."""
    error: str = ""


class SeenShareHost(Named):
    """What doctor judges of a host whose guests have shares."""

    roots: dict[str, RootOnHost]
    daemon: str
    """The path of virtiofsd, '' for none."""
    namespaces: int
    """How many user namespaces a user of the host may have."""
    profile: str
    """What the site lets libvirt do besides, by AppArmor."""
    taken: list[tuple[str, str, int, int]]
    """Users of guests that the host gives to its own users too: the file that says so, the user's name, the
    first and the last number.
    """


class GivenKey(Named):
    """A key of Ceph for a share, which is secret, and what else a client has to know."""

    monitors: str
    fs: str
    path: str
    user: str
    key: str
    access: str
    """ro or rw."""


class HeldKey(Named):
    """The holder of a key for a share (ceph_clients.Key); the key itself is not told."""

    image: int
    vm: int
    """-1: the holder is no VM."""
    readonly: bool
    seq: int
    user: str
    wrong: Optional[Refusal] = None


class HeldKeys(Named):
    """The keys for shares of a root."""

    keys: list[HeldKey]


class TakenKeys(Named):
    """How many keys were taken back."""

    taken: Count


class MarkRoot(Step[MarkedRoot]):
    """Make the root of `tree` one, unless it is: `new` is the marker if it has none. Report its marker."""

    tree: Tree
    new: str


@looks
class FindDirectory(Step[FoundDirectory]):
    """Report the real path of a directory that exists, below one of `safe` and in no datastore."""

    tree: Tree
    path: str
    safe: Tuple[str, ...]
    others: Tuple[str, ...] = ()
    """The directories of all datastores."""


class MakeShare(Step[MadeShare]):
    """Make the tree of a share, hold it to its size, and give it to its owner's users; report its path.

    Of a directory that was there before: an empty tree, which stands for it.
    """

    tree: Tree
    share: Share


class RemoveShare(Step[RemovedShare]):
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


class ResizeShare(Step[ResizedShare]):
    """Hold the share of an image to another size in bytes; report the one before."""

    tree: Tree
    number: int
    size: int


@looks
class ListShares(Step[Shares]):
    """Report all shares, with the bytes used of each, and of which cloud the root is."""

    tree: Tree


class MakeSnapshot(Step[ShareSnapshot]):
    """Keep what is in the share of an image now, as `name`; report the snapshot."""

    tree: Tree
    number: int
    name: str


@looks
class ListSnapshots(Step[ShareSnapshots]):
    """Report the snapshots of a share."""

    tree: Tree
    number: int


class RemoveSnapshot(Step[None]):
    """Remove one."""

    tree: Tree
    number: int
    name: str


@looks
class LookAtRoot(Step[SeenRoot]):
    """Report which commands that shares need there are `lacking`, once the root is one with its quotas on;
    with `clients` also of those by which guests are given keys, and the data `pools` that the shares of
    `images` are in (Clients.pools).
    """

    tree: Tree
    clients: bool = False
    images: Tuple[int, ...] = ()


@looks
class LookAtShareHost(Step[SeenShareHost]):
    """Report what a host has of what guests with shares need, and of each of `roots` whether it is there."""

    roots: Tuple[str, ...]


@looks
class MeasureRoot(Step["tuple[Count, Count, Count]"]):
    """Report bytes used, in total and free of the file system that shares are in."""

    tree: Tree


class GiveKey(Step[GivenKey]):
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


class ShowKey(Step[GivenKey]):
    """Report the key that a VM has for the share of an image, which is at `source`, as GiveKey does; none is
    given to one that has none.
    """

    tree: Tree
    number: int
    source: str
    vm: int


class TakeKeys(Step[TakenKeys]):
    """Take back the keys of VM `vm` (-1: of no VM) for the share of an image, or for all with number -1.

    Report how many were `taken`.
    """

    tree: Tree
    number: int
    vm: int
    seq: int = -1
    """Keys of a later SEQ of the VM's history stay: the VM runs again. -1: none stays."""


@looks
class ListKeys(Step[HeldKeys]):
    """Report the holders of `keys`: image, vm, readonly and user of each; not the keys."""

    tree: Tree
