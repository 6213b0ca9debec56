# SPDX-License-Identifier: Apache-2.0
"""Name what each Ceph key of an image datastore may do, and no more.

One key per role, since they lie in several places:

    bridge  where datastore actions run (front-end or BRIDGE_LIST): makes, clones, renames and removes images
    hosts   CEPH_USER: QEMU on the hosts reads and writes the persistent disks; makes and removes no image
    bases   SEMISHARED_CEPH_READER: hosts read the images whose copies they keep; writes nothing
    remote  SEMISHARED_CEPH_REMOTE: QEMU on the hosts reads what remote-first disks lie over; writes no data
    fence   SEMISHARED_CEPH_FENCE_USER: the front-end shuts a dead host out (`semishared fence`); reads
            images, writes none

A role without a user of its own uses CEPH_USER, whose key then can what both roles need. Only the fence role
has no such fallback.
"""

from __future__ import annotations

import re
from typing import Dict, List, Sequence, Tuple

from ...errors import BadAttribute
from ...model import attributes as a
from ...model.store.access import POOL
from ...model.store.template import ADMIN
from ...named import NamedTuple

WRITABLE = ("rbd_data.", "rbd_header.", "rbd_object_map.")
"""Objects of an existing image. Making, renaming or removing one also writes rbd_id.* and rbd_directory."""


class Key(NamedTuple):
    """One Ceph user; `caps` are (daemon type, capability)."""

    roles: Tuple[str, ...]
    user: str
    caps: Tuple[Tuple[str, str], ...]

    def command(self) -> str:
        """Return the command with which the cluster's admin makes this key."""
        words = [f"{daemon} '{cap}'" for daemon, cap in self.caps]
        return f"ceph auth get-or-create client.{self.user} {' '.join(words)}"


def _profile(name: str, pools: List[str]) -> str:
    return ", ".join(f"profile {name} pool={pool}" for pool in pools)


def _caps(roles: Tuple[str, ...], pools: List[str]) -> Tuple[Tuple[str, str], ...]:
    if "bridge" in roles:
        return ("mon", "profile rbd"), ("mgr", _profile("rbd", pools)), ("osd", _profile("rbd", pools))
    if "hosts" in roles:
        # mon: a host that takes over the exclusive lock of a dead one puts that one on the blocklist.
        writes = [f"allow rwx pool={pool} object_prefix {prefix}" for pool in pools for prefix in WRITABLE]
        return ("mon", "profile rbd"), ("osd", ", ".join([_profile("rbd-read-only", pools), *writes]))
    # QEMU watches the header of what it opens, and that is a write.
    watches = [f"allow rwx pool={pool} object_prefix rbd_header." for pool in pools if "remote" in roles]
    return ("mon", "profile rbd-read-only"), ("osd", ", ".join([_profile("rbd-read-only", pools), *watches]))


def fence(user: str, pools: Sequence[str]) -> Key:
    """Return the key that shuts hosts out of the cluster of `pools` and lists clients; raise BadAttribute."""
    for name in (user, *pools):
        if not re.match(POOL, name) or name == ADMIN:
            raise BadAttribute(f"{name!r} is no name for a user or a pool")
    mon = 'profile rbd-read-only, allow command "osd blocklist"'
    return Key(
        ("fence",), user, (("mon", mon), ("osd", _profile("rbd-read-only", list(dict.fromkeys(pools)))))
    )


def keys(
    user: str, pool: str, reader: str = "", bridge: str = "", data_pool: str = "", remote: str = ""
) -> List[Key]:
    """Return the keys for a datastore with CEPH_USER `user` in `pool`, and EC_POOL_NAME `data_pool` if it has
    one.

    Raises BadAttribute for a name that is none, or that is the admin's.
    """
    for attribute, name in (
        (a.CEPH_USER, user),
        (a.POOL_NAME, pool),
        (a.CEPH_READER, reader or user),
        (a.CEPH_BRIDGE_USER, bridge or user),
        (a.CEPH_REMOTE, remote or user),
        (a.EC_POOL_NAME, data_pool or pool),
    ):
        if not re.match(attribute.form, name) or (name == ADMIN and not attribute.name.endswith("_NAME")):
            raise BadAttribute(f"{attribute.name} is {name!r}, which is no name for it")
    roles: Dict[str, List[str]] = {}
    for role, name in (
        ("bridge", bridge or user),
        ("hosts", user),
        ("bases", reader or user),
        ("remote", remote),
    ):
        if name:
            roles.setdefault(name, []).append(role)
    pools = list(dict.fromkeys([pool, data_pool or pool]))
    return [Key(tuple(had), name, _caps(tuple(had), pools)) for name, had in roles.items()]
