# SPDX-License-Identifier: Apache-2.0
"""What a datastore's template has lost.

oned writes DISK_TYPE into the template of each image and system datastore that it makes. Update in Sunstone
replaces a template by a form that does not know all of it, and takes that away. So a template without it was
replaced, and what else it had before may have gone too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Mapping

from .. import attributes as a
from . import template

if TYPE_CHECKING:
    from .template import Datastore

DISK_TYPE = "DISK_TYPE"
OF_ONED = (
    "NAME",
    "TYPE",
    "DS_MAD",
    "TM_MAD",
    "TM_MAD_SYSTEM",
    "SHARED",
    "LN_TARGET",
    "CLONE_TARGET",
    "ALLOW_ORPHANS",
    "PERSISTENT_SNAPSHOTS",
    "DS_MIGRATE",
    "DS_LIVE_MIGRATE",
    "DS_MIGRATE_SNAP",
    "ERROR",
)
"""Attributes that oned writes into a template by itself."""
WHICH = tuple(
    row.name
    for row in (
        a.STORE,
        a.CLOUD,
        a.POOL_NAME,
        a.EC_POOL_NAME,
        a.CEPH_USER,
        a.CEPH_SECRET,
        a.CEPH_HOST,
        a.CEPH_CONF,
        a.BRIDGE_LIST,
        a.CEPH_READER,
        a.CEPH_BRIDGE_USER,
        a.CEPH_FENCE_USER,
        a.CEPH_REMOTE,
        a.CEPH_REMOTE_SECRET,
        a.FS,
        a.FS_VOLUME,
        a.FS_POOLS,
        a.FS_ROOT,
    )
)
"""Attributes that say which store it is, and which user opens it: without one it may be another."""


def is_name(text: str) -> bool:
    """Tell whether a text is the name of an attribute."""
    return bool(re.match(r"[A-Z][A-Z0-9_]*\Z", text))


def to_note(attributes: Mapping[str, str]) -> dict[str, str]:
    """Return those attributes of a whole template that oned would not write by itself."""
    return {name: value for name, value in attributes.items() if value and name not in OF_ONED}


def lost(datastore: Datastore, noted: Mapping[str, str]) -> dict[str, str]:
    """Return what a template has lost of what was noted of it, and DISK_TYPE; {} for a whole one."""
    if template.is_whole(datastore):
        return {}
    kept = template.disk_type(datastore)
    gone = {name: value for name, value in noted.items() if not datastore.attribute(name)}
    return {**gone, DISK_TYPE: kept or noted.get(DISK_TYPE, "FILE")}
