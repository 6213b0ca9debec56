# SPDX-License-Identifier: Apache-2.0
"""What `semishared doctor` asks of shares, and changes nothing.

It asks the machine that makes them, and hosts whose guests have them.

And which programs give a directory to a guest.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from ..errors import SemisharedError, ToolMissing
from ..model.share.share import FIRST_UID, UIDS, Tree
from ..store.dir import marker
from ..tools import mounts
from ..tools.hung_store import LIMIT_S, unless_it_hangs
from . import life, owners
from .attached import SAFE

# The programs that give a directory to a guest.


QEMUS = "/usr/lib/qemu/virtiofsd"
DAEMONS = ("/usr/libexec/virtiofsd", QEMUS, "/usr/lib/virtiofsd/virtiofsd")
"""As VIRTIOFSD_BINARY_PATH of OpenNebula's kvmrc has them. All but QEMU's are the one in Rust."""


def daemon() -> str:
    """Return the daemon of this host; raise ToolMissing."""
    for path in DAEMONS:
        if os.access(path, os.X_OK):
            return path
    raise ToolMissing(f"no virtiofsd on {os.uname().nodename}: none of {', '.join(DAEMONS)}")


SUBIDS = ("/etc/subuid", "/etc/subgid")
NAMESPACES = "/proc/sys/user/max_user_namespaces"
PROFILE = "/etc/apparmor.d/local/usr.sbin.libvirtd"


def of_root(tree: Tree, clients: bool, images: tuple[int, ...]) -> dict[str, Any]:
    """Return which commands nobody lets us use there, of which cloud the root is, why no share is held to its
    size and what mends that, the bytes promised and in total, and where guests are `clients`, the pools of
    `images`.

    Raise what would end any action.
    """
    fs = life.checked(tree)
    lacking, pools = fs.lacking(), {}
    if clients and tree.backend.has_manager:
        from . import ceph_clients

        ceph = ceph_clients.of(tree)
        lacking, pools = lacking + ceph.lacking_for_keys(), ceph.pools(images)
    promised = [life.promised(tree), life.capacity(tree)[1]]
    return {
        "lacking": lacking,
        "cloud": marker.said(tree.root).cloud,
        "lapsed": fs.lapsed(),
        "promised": promised,
        "pools": pools,
    }


def of_host(roots: tuple[str, ...]) -> dict[str, Any]:
    """Return what this host has: each root, or why it cannot be looked at; the daemon, namespaces, whose
    users of guests also are.
    """
    hangs: dict[str, Any] = {"error": f"hangs: no answer within {LIMIT_S:.0f} s"}
    return {
        "roots": {root: unless_it_hangs(partial(_root, root), hangs) for root in roots},
        "daemon": _daemon(),
        "namespaces": int(_text(NAMESPACES) or 1),
        "profile": _text(PROFILE),
        "taken": [row for path in SUBIDS for row in taken(path, _text(path))],
    }


def _root(root: str) -> dict[str, Any]:
    if not os.path.isdir(root):
        return {"there": False}
    try:
        flags, found = os.statvfs(root).f_flag, marker.read(root)
        mount = mounts.of(root)
        lacks = [word for word, flag in SAFE.items() if not flags & flag]
        by_user = mount.type == "fuse.ceph-fuse" and "default_permissions" not in mount.options
        return {"there": True, "marker": found, "lacks": lacks, "judged_by_user": by_user}
    except SemisharedError as e:
        return {"error": e.detail}
    except OSError as e:
        return {"error": f"{root}: {e.strerror}"}


def _daemon() -> str:
    try:
        return daemon()
    except ToolMissing:
        return ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def taken(path: str, text: str) -> list[list[Any]]:
    """Return path, name, first and last user of each line of /etc/subuid or subgid, of the form `text`, that
    meets users of guests.
    """
    rows = []
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if first.isdigit() and count.isdigit() and int(count):
            last = int(first) + int(count) - 1
            if last >= FIRST_UID and int(first) < FIRST_UID + UIDS * owners.RANGES:
                rows.append([path, name, int(first), last])
    return rows
