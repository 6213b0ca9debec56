# SPDX-License-Identifier: Apache-2.0
"""A share: a directory for guests, an image of a datastore with DISK_TYPE = FILESYSTEM.

How a datastore makes them is a Tree, what an image asks for a Share; both cross the wire and stand in
records.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...errors import BadArguments, BadAttribute
from ...named import NamedTuple
from .. import attributes as a
from ..store import template
from ..store.access import STORED

if TYPE_CHECKING:
    from ..attributes import Holder as Datastore


class Backend(NamedTuple):
    """A file system, and what it can do with directories for guests."""

    carried_out_by: str
    """MODULE:CLASS in share/."""
    holds_to_size: bool = True
    """If False, nothing counts the bytes in a share."""
    has_manager: bool = False
    """Ceph's manager makes shares, not the file system: with owners, layouts, and keys for guests as clients.
    """
    is_one_hosts: bool = True
    """One host's own, unless it exports it: that others have no such root says nothing."""


BACKENDS = {
    "btrfs": Backend("btrfs:Btrfs"),
    "xfs": Backend("xfs:Xfs"),
    "cephfs": Backend("cephfs:CephFs", has_manager=True, is_one_hosts=False),
    "plain": Backend("plain:Plain", holds_to_size=False),
}
"""SEMISHARED_FS -> what makes the shares of such a datastore."""
FIRST_UID = 100000
UIDS = 65536
"""How many users a guest has.

Each owner of shares has as many in a row, in all datastores and for no other owner: the range's number is the
owner's id in OpenNebula. Roots of older versions number ranges by themselves (share/owners.py).
"""


class Tree(NamedTuple):
    """Where a datastore has its shares, and how they are made there."""

    fs: str
    root: str
    """The same path on the machine that makes them, and on all hosts."""
    marker: str = ""
    volume: str = ""
    """Of CephFS: FILE_SYSTEM/GROUP, whose subvolumes shares are."""
    user: str = ""
    """The Ceph user that asks the cluster's manager for them."""
    conf: str = ""
    cloud: str = ""
    """The OpenNebula of the datastore; '' if its root was made before roots said so."""

    @property
    def backend(self) -> Backend:
        """Return what makes them."""
        return BACKENDS[self.fs]

    @classmethod
    def from_data(cls, data: object) -> Tree:
        """Return the tree in JSON data; raise BadArguments."""
        if not isinstance(data, dict) or not {"fs", "root", "marker"} <= set(data) <= set(cls._fields):
            raise BadArguments(f"not a tree of shares: {str(data)[:200]}")
        if data["fs"] not in BACKENDS or not re.match(a.PATH, str(data["root"])):
            raise BadArguments(f"not a tree of shares: {str(data)[:200]}")
        if BACKENDS[data["fs"]].has_manager and not re.match(STORED, str(data.get("volume", ""))):
            raise BadArguments(f"not a tree of shares: {str(data)[:200]}")
        return cls(**data)

    def to_data(self) -> dict[str, object]:
        """Return the tree as JSON data: of its newer fields those that say something."""
        return {
            name: value
            for name, value in self._asdict().items()
            if value or name not in ("volume", "user", "conf", "cloud")
        }


NEWER = ("stripes", "object_size", "pool", "directory", "readonly")
TEXTS = ("pool", "directory")


class Share(NamedTuple):
    """The share that an image asks for."""

    image: int
    owner: int
    """The OpenNebula user that owns the image."""
    born: int
    """When, by oned: an oned whose database was restored uses ids again."""
    size: int
    """In bytes."""
    stripes: int = 0
    """The number of objects over which a file is striped, where the file system does that; 0: its default."""
    object_size: int = 0
    """Their size in bytes; 0: the file system's default."""
    pool: str = ""
    """The data pool of its content; '': that of others."""
    directory: str = ""
    """A directory that was there before, which guests get as it is; '': a new tree."""
    readonly: bool = False
    """As of the image when it was made. It holds for a VM without CONTEXT, for which oned is asked nothing.
    """

    @classmethod
    def from_data(cls, data: object) -> Share:
        """Return the share in JSON data; raise BadArguments."""
        known = isinstance(data, dict) and {"image", "owner", "born", "size"} <= set(data) <= set(cls._fields)
        if (
            not isinstance(data, dict)
            or not known
            or not all(isinstance(data[name], str if name in TEXTS else int) for name in data)
        ):
            raise BadArguments(f"not a share: {str(data)[:200]}")
        if data.get("directory") and not re.match(a.PATH, data["directory"]):
            raise BadArguments(f"not a share: {str(data)[:200]}")
        return cls(**data)

    def to_data(self) -> dict[str, object]:
        """Return the share as JSON data: of its newer fields those that say something."""
        return {name: value for name, value in self._asdict().items() if value or name not in NEWER}


class Use(NamedTuple):
    """How full a share is, in bytes; -1: the file system does not know."""

    used: int
    limit: int


def tree(datastore: Datastore) -> Tree:
    """Return where a datastore has its shares; raise BadAttribute."""
    fs = a.FS.parsed(a.FS.text(datastore), f"datastore {datastore.id}")
    root = a.FS_ROOT.of_store(datastore)
    if not root:
        raise BadAttribute(
            f"datastore {datastore.id} has no SEMISHARED_FS_ROOT: the directory that its shares are to be in"
        )
    quota = a.FS_QUOTA.of_store(datastore)
    if not BACKENDS[fs].holds_to_size and quota == "yes":
        raise BadAttribute(
            f"nothing would hold shares of datastore {datastore.id} to their size: SEMISHARED_FS "
            f"= plain needs SEMISHARED_FS_QUOTA = no"
        )
    if BACKENDS[fs].holds_to_size and quota == "no":
        raise BadAttribute(
            f"SEMISHARED_FS_QUOTA of datastore {datastore.id} is no, which only SEMISHARED_FS = plain knows"
        )
    marker, cloud = a.STORE.of_store(datastore), a.CLOUD.of_store(datastore)
    bridge(datastore)
    if not BACKENDS[fs].has_manager:
        if a.FS_VOLUME.text(datastore):
            raise BadAttribute(
                f"SEMISHARED_FS_VOLUME of datastore {datastore.id} is set, which only "
                f"SEMISHARED_FS = cephfs has"
            )
        return Tree(fs, root, marker, cloud=cloud)
    volume = a.FS_VOLUME.of_store(datastore)
    if not volume:
        raise BadAttribute(
            f"datastore {datastore.id} has no SEMISHARED_FS_VOLUME: FILE_SYSTEM/GROUP of its subvolumes"
        )
    user = template.ceph_user(datastore)
    return Tree(fs, root, marker, volume, user, a.CEPH_CONF.of_store(datastore), cloud)


def pools(datastore: Datastore) -> tuple[str, ...]:
    """Return the data pools that users may name for the content of a share; raise BadAttribute."""
    return a.FS_POOLS.words(datastore)


def bridge(datastore: Datastore) -> str:
    """Return the machine that makes shares: the only one of BRIDGE_LIST, or this one; raise BadAttribute."""
    found = template.bridges(datastore)
    if len(found) > 1:
        raise BadAttribute(
            f"BRIDGE_LIST of datastore {datastore.id} has {len(found)} machines: one makes all "
            f"shares of a root"
        )
    return found[0] if found else "localhost"


def first_uid(number: int) -> int:
    """Return the first user, and group, of a range: a guest's root on the hosts."""
    return FIRST_UID + UIDS * number
