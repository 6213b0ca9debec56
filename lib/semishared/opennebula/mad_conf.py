# SPDX-License-Identifier: Apache-2.0
"""What oned.conf says of this driver (docs/explanation/contract.md), for install.sh and doctor."""

from __future__ import annotations

# Key, value, and whether it must have that value: else an administrator's other choice stays.
TM_CONF = (
    ("LN_TARGET", "NONE", True),
    ("CLONE_TARGET", "SYSTEM", True),
    ("SHARED", "NO", True),
    ("DS_MIGRATE", "YES", False),
    ("DS_LIVE_MIGRATE", "YES", False),
    ("DS_MIGRATE_SNAP", "YES", False),
    ("ALLOW_ORPHANS", "YES", True),
)
DS_CONF = (
    ("REQUIRED_ATTRS", "", False),
    ("PERSISTENT_ONLY", "NO", False),
    ("MARKETPLACE_ACTIONS", "export", False),
)
RESTRICTED = (
    "SEMISHARED_PLACE",
    "SEMISHARED_LOCAL",
    "SEMISHARED_STAGE",
    "SEMISHARED_DETACH",
    "SEMISHARED_ON_HOST_FAILURE",
    "SEMISHARED_IO_CLASS",
    "SEMISHARED_CLASS",
    "SEMISHARED_BASES",
    "SEMISHARED_SHARE_ACCESS",
)
"""Attributes of images that only administrators may set: where disks live, what goes to hosts, what may be
lost, who gets a key.
"""
INHERITED = {
    "INHERIT_DATASTORE_ATTR": (
        "DISK_TYPE",
        "ALLOW_ORPHANS",
        "CEPH_HOST",
        "CEPH_SECRET",
        "CEPH_USER",
        "CEPH_CONF",
        "POOL_NAME",
        "SEMISHARED_SHARE_ACCESS",
    ),
    "INHERIT_IMAGE_ATTR": ("SEMISHARED_SHARE_ACCESS",),
}
"""Attributes of datastores and images that oned copies into a VM's disk: what it looks for there itself,
which all stock files have, and what deploy has to (plan/libvirt/filesystems.py).
"""
