# SPDX-License-Identifier: Apache-2.0
"""What `semishared doctor` asks of shares; it changes nothing.

It asks the machine that makes them, and the hosts whose guests have them. Also here: the daemons that serve a
directory to a guest.
"""

from __future__ import annotations

import os
from functools import partial

from ..errors import SemisharedError, ToolMissing
from ..model.share.share import FIRST_UID, UIDS, Tree
from ..model.share.steps import PoolOfShares, RootOnHost, SeenRoot, SeenShareHost
from ..store.dir import marker
from ..tools import mounts, os_release
from ..tools.hung_store import LIMIT_S, unless_it_hangs
from . import life, owners
from .attached import SAFE

QEMUS = "/usr/lib/qemu/virtiofsd"
DAEMONS = ("/usr/libexec/virtiofsd", QEMUS, "/usr/lib/virtiofsd/virtiofsd")
"""As in VIRTIOFSD_BINARY_PATH of OpenNebula's kvmrc. All but QEMU's are the daemon in Rust."""


def daemon() -> str:
    """Return the path of this host's daemon; raise ToolMissing."""
    for path in DAEMONS:
        if os.access(path, os.X_OK):
            return path
    raise ToolMissing(f"no virtiofsd on {os.uname().nodename}: none of {', '.join(DAEMONS)}")


SUBIDS = ("/etc/subuid", "/etc/subgid")
NAMESPACES = "/proc/sys/user/max_user_namespaces"
PROFILE = "/etc/apparmor.d/local/usr.sbin.{}"
"""What an administrator adds to the profile of libvirt's daemon."""


def of_root(tree: Tree, clients: bool, images: tuple[int, ...]) -> SeenRoot:
    """Return what doctor judges of a root; raise what would end any action there.

    That is the commands not permitted there, the root's cloud, why no share is held to its size and what
    mends that, bytes promised and in total, and, where guests are `clients`, the pools of `images`.
    """
    fs = life.checked(tree)
    lacking, pools = fs.lacking(), dict[str, PoolOfShares]()
    if clients and tree.backend.has_manager:
        from . import ceph_clients

        ceph = ceph_clients.of(tree)
        lacking, pools = lacking + ceph.lacking_for_keys(), ceph.pools(images)
    promised = life.promised(tree), life.capacity(tree)[1]
    return SeenRoot(lacking, marker.said(tree.root).cloud, fs.lapsed(), promised, pools)


def of_host(roots: tuple[str, ...]) -> SeenShareHost:
    """Return what doctor judges of this host.

    That is each root, or why it is unreadable; the daemon; namespaces; and overlaps with guests' users.
    """
    hangs = RootOnHost(error=f"hangs: no answer within {LIMIT_S:.0f} s")
    return SeenShareHost(
        {root: unless_it_hangs(partial(_root, root), hangs) for root in roots},
        _daemon(),
        int(_text(NAMESPACES) or 1),
        _text(PROFILE.format(os_release.daemon() or "libvirtd")),
        [row for path in SUBIDS for row in taken(path, _text(path))],
    )


def _root(root: str) -> RootOnHost:
    if not os.path.isdir(root):
        return RootOnHost()
    try:
        flags, found = os.statvfs(root).f_flag, marker.read(root)
        mount = mounts.of(root)
        lacks = [word for word, flag in SAFE.items() if not flags & flag]
        by_user = mount.type == "fuse.ceph-fuse" and "default_permissions" not in mount.options
        return RootOnHost(True, found, lacks, by_user)
    except SemisharedError as e:
        return RootOnHost(error=e.detail)
    except OSError as e:
        return RootOnHost(error=f"{root}: {e.strerror}")


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


def taken(path: str, text: str) -> list[tuple[str, str, int, int]]:
    """Return path, name, first and last user of each line of /etc/subuid or subgid within guests' users."""
    rows = []
    for line in text.splitlines():
        name, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if first.isdigit() and count.isdigit() and int(count):
            last = int(first) + int(count) - 1
            if last >= FIRST_UID and int(first) < FIRST_UID + UIDS * owners.RANGES:
                rows.append((path, name, int(first), last))
    return rows
