# SPDX-License-Identifier: Apache-2.0
"""What a machine may say of itself when it is examined (install/preflight.py), which needs nothing of ours
there.
"""

from __future__ import annotations

from typing import Any

ERROR = {"error": "text"}
STORE = {
    "empty": "flag",
    "same": "flag",
    "writable": "flag",
    "marker": "text",
    "passable": "flag",
    "reason?": ("text", None),
    "mount": {"point?": "text", "type?": "text", "options?": ["text"]},
}
LOCAL = {
    "where": "text",
    "free": "count",
    "total": "count",
    "inodes": "count",
    "no_inodes": "flag",
    "writable": "flag",
    "read_only": "flag",
}
LIBVIRT = {
    "libvirt": "text",
    "qemu": "text",
    "secrets": ["text"],
    "virtiofs": ("flag", None),
    "confines": ["text"],
}
SIGNED = {"place": "text", "machine?": "text", "count?": "number", "seen?": {"*": "number"}}

ANSWER: Any = {
    "programs": {"*": ("text", None)},
    "lacks": {"needed": ["text"], "wanted": ["text"]},
    "python": ["count"],
    "user": "text",
    "boot": "text",
    "up_s": "real",
    "tree?": {"version": "text", "parts": {"*": "text"}},
    "libvirt?": (ERROR, LIBVIRT),
    "local?": (ERROR, LOCAL),
    "signed?": {"*": (ERROR, SIGNED)},
    "stores?": {"*": (ERROR, STORE)},
    "ceph": {"*": ERROR},
}
"""As shapes.py has it."""
