# SPDX-License-Identifier: Apache-2.0
"""What is wrong with shares, and the command that mends it: from machines' answers (share/inspection.py)."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional, Sequence

from ...errors import BadAttribute
from ...model.share import share
from ...model.share.share import FIRST_UID, UIDS, Tree
from ...named import NamedTuple
from ...opennebula.xml import Datastore, Image
from ...units import human
from ..image import placement
from .diagnosis import BROKEN, WARNING, Finding

PAGE = "docs/how-to/shares.md"
HARM = f"{PAGE}, What bounds a client that means harm"
ONE_HOSTS = ("btrfs", "xfs", "plain")
"""File systems that are one host's own, if nobody exports them: that others have no such root says
nothing.
"""
WRAPPER = "vmm/semishared/virtiofsd"


class Made(NamedTuple):
    """A datastore of shares, and what the machine that makes them answered."""

    store: Datastore
    tree: Tree
    machine: str
    lacking: Sequence[str] = ()
    wrong: str = ""
    mend: str = ""
    by_hosts: bool = True
    """A guest may have one by its host."""
    has_cloud: bool = True
    """The root says of which OpenNebula it is."""
    lapsed: Sequence[str] = ("", "")
    """Why no share is held to its size at the moment, and what mends it."""
    promised: Sequence[int] = (0, 0)
    """How many bytes all shares may hold together, and how many there are."""
    images: Sequence[Image] = ()
    pools: Mapping[str, Mapping[str, Any]] = {}
    """Which data pools their shares are in, where guests are clients themselves (Clients.pools)."""


def ways(store: Datastore, images: Sequence[Image]) -> tuple[bool, bool]:
    """Return whether guests may have shares of a datastore by their hosts, and whether as clients
    themselves.
    """
    found = {
        _is_client(image, store)
        for image in (None, *(image for image in images if image.store_id == store.id))
    }
    return False in found, True in found


def _is_client(image: Optional[Image], store: Datastore) -> Optional[bool]:
    """Tell whether guests are clients themselves, None where the attribute is wrong: that, others tell."""
    try:
        return placement.is_client(image, store)
    except BadAttribute:
        return None


def of_roots(made: Sequence[Made], front_end: str) -> list[Finding]:
    """Judge datastores, where their shares are made."""
    found = []
    for one in made:
        name = f"datastore {one.store.id} ({one.store.name})"
        if not one.tree.marker:
            what = f"{name}: {one.tree.root} is no root of shares yet, so none can be made"
            found.append(Finding(WARNING, front_end, what, f"semishared share init {one.store.id}"))
        elif one.wrong:
            found.append(Finding(BROKEN, one.machine, f"{name}: {one.wrong}", one.mend))
        elif not one.has_cloud:
            what = (
                f"{name}: {one.tree.root} does not say of which OpenNebula it is: another one may "
                f"take it, and gc removes nothing there"
            )
            found.append(Finding(WARNING, one.machine, what, f"semishared share init {one.store.id}"))
        if one.lapsed[0]:
            mend = f"as root on {one.machine}: {one.lapsed[1]}"
            found.append(Finding(BROKEN, one.machine, f"{name}: {one.tree.root}: {one.lapsed[0]}", mend))
        promised, total = one.promised
        if promised > total:
            what = (
                f"its shares may hold {human(promised)}, and {one.tree.root} {human(total)}: who "
                f"fills theirs takes others' room"
            )
            found.append(
                Finding(WARNING, one.machine, f"{name}: {what}", f"give it more room; {PAGE}, Set it up")
            )
        for command in one.lacking:
            if one.tree.fs == "cephfs":
                what, mend = (
                    f"Ceph's manager does not let client.{one.tree.user} ask for: {command}",
                    "A guest that is a client itself",
                )
            else:
                what, mend = f"sudo does not permit: {command}", "its lines for sudoers"
            found.append(Finding(BROKEN, one.machine, f"{name}: {what}", f"{PAGE}, {mend}"))
        found += [Finding(WARNING, one.machine, f"{name}: {what}", HARM) for what in _pools(one, made)]
    return found


def _pools(one: Made, made: Sequence[Made]) -> Iterator[str]:
    """Yield of each pool to which guests write by keys, past the quotas of CephFS, that nothing bounds it,
    and whom that harms.
    """
    for pool, row in sorted(one.pools.items()):
        images = [image for image in one.images if image.id in row["images"]]
        if not any(_is_client(image, one.store) for image in images):
            continue
        writes = f"guests write to pool {pool} themselves"
        if row["lacks"]:
            yield (
                f"{writes}, and it has no quota ({' and '.join(row['lacks'])}): one that means harm "
                f"fills the cluster"
            )
        users = sorted({image.number("UID") for image in images})
        beside = [
            *row["beside"],
            *(
                f"datastore {other.store.id}"
                for other in made
                if other is not one and _offers(other.store, pool)
            ),
        ]
        beside += [f"users {', '.join(map(str, users))} of OpenNebula"] if len(users) > 1 else []
        if beside:
            yield (
                f"{writes}, and it is not one tenant's alone ({'; '.join(beside)}): one that means "
                f"harm fills it for all of them"
            )


def _offers(store: Datastore, pool: str) -> bool:
    try:
        return pool in share.pools(store)
    except BadAttribute:
        return False


def of_hosts(
    made: Sequence[Made], answers: Mapping[str, Mapping[str, Any]], libvirts: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Judge hosts: `answers` to LookAtShareHost, and what libvirt says of itself there."""
    found = []
    for host, answer in answers.items():
        has_some = False
        for one in made:
            seen = answer["roots"].get(one.tree.root) if one.tree.marker else None
            if (
                not one.by_hosts
                or seen is None
                or one.tree.fs in ONE_HOSTS
                and not seen.get("marker", "error" in seen)
            ):
                continue
            has_some = True
            found += _root(host, one, seen)
        if has_some:
            found += _host(host, answer, libvirts.get(host, {}))
    return found


def _root(host: str, one: Made, seen: Mapping[str, Any]) -> list[Finding]:
    root, mount = one.tree.root, f"as root on {host}: mount {one.tree.root} ({PAGE})"
    what = f"shares of datastore {one.store.id}: "
    if "error" in seen:
        return [Finding(BROKEN, host, f"{what}{root}: {seen['error']}", mount)]
    if not seen["there"] or not seen["marker"]:
        # Where they are made it is said of that already.
        return [] if host == one.machine else [Finding(BROKEN, host, f"{what}{root} is not mounted", mount)]
    if seen["marker"] != one.tree.marker:
        return [Finding(BROKEN, host, f"{what}{root} is the root of another datastore", mount)]
    if seen["lacks"]:
        return [
            Finding(
                BROKEN,
                host,
                f"{what}{root} is mounted without {' and '.join(seen['lacks'])}: no guest gets a share",
                f"as root on {host}: mount -o remount,nosuid,nodev {root}; and in /etc/fstab",
            )
        ]
    if seen["judged_by_user"]:
        return [
            Finding(
                WARNING,
                host,
                f"{what}{root} is mounted without fuse_default_permissions: root of guests cannot chown",
                f"as root on {host}: mount {root} anew ({PAGE}, CephFS)",
            )
        ]
    return []


def _host(host: str, answer: Mapping[str, Any], libvirt: Mapping[str, Any]) -> list[Finding]:
    found = []
    if not answer["daemon"]:
        mend = f"as root on {host}: apt-get install qemu-system-common (Debian 12), or virtiofsd"
        found.append(Finding(BROKEN, host, "shares: there is no virtiofsd", mend))
    if not answer["namespaces"]:
        mend = f"as root on {host}: sysctl user.max_user_namespaces=15000; and in /etc/sysctl.d"
        found.append(
            Finding(
                BROKEN,
                host,
                "shares: the kernel allows no user namespaces, which guests' users are kept in",
                mend,
            )
        )
    for path, name, first, last in answer["taken"]:
        owner = max(0, (first - FIRST_UID) // UIDS)
        what = (
            f"shares: {path} gives {first} to {last} to {name}, and they are users of guests, of user "
            f"{owner} of OpenNebula on"
        )
        kind = "uids" if path.endswith("uid") else "gids"
        found.append(
            Finding(WARNING, host, what, f"as root on {host}: usermod --del-sub{kind} {first}-{last} {name}")
        )
    if libvirt.get("virtiofs") is False:
        mend = f"as root on {host}: update qemu and libvirt"
        found.append(Finding(BROKEN, host, "shares: libvirt says that QEMU there has no virtiofs", mend))
    if "apparmor" in libvirt.get("confines", ()) and WRAPPER not in answer["profile"]:
        mend = f"{PAGE}, the line for /etc/apparmor.d/local/usr.sbin.libvirtd"
        found.append(Finding(BROKEN, host, f"shares: AppArmor does not let libvirt start {WRAPPER}", mend))
    return found
