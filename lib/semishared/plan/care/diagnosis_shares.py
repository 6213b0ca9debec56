# SPDX-License-Identifier: Apache-2.0
"""Judge shares by machines' answers (share/inspection.py; checks.py has the rows)."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Optional, Sequence

from ...errors import BadAttribute
from ...model import platforms
from ...model.share import share
from ...model.share.share import FIRST_UID, UIDS, Tree
from ...model.share.steps import PoolOfShares, RootOnHost, SeenShareHost
from ...named import NamedTuple
from ...opennebula.xml import Datastore, Image
from ...units import human
from ..image import placement
from ..vm.hypervisor import version
from .checks import Finding, Judge, judged
from .diagnosis_machines import platform_of

WRAPPER = "vmm/semishared/virtiofsd"


class Made(NamedTuple):
    """A datastore of shares, and the answer of the machine that makes them."""

    store: Datastore
    tree: Tree
    machine: str
    lacking: Sequence[str] = ()
    wrong: str = ""
    mend: str = ""
    by_hosts: bool = True
    """Whether a guest may have one by its host."""
    has_cloud: bool = True
    """Whether the root names its OpenNebula."""
    lapsed: Sequence[str] = ("", "")
    """Why no share is limited to its size now, and what mends it."""
    promised: Sequence[int] = (0, 0)
    """Bytes that all shares may hold together, and bytes that there are."""
    images: Sequence[Image] = ()
    front_end: str = ""
    others: Sequence[Any] = ()
    """The same of the other datastores of shares."""
    sudo: str = ""
    """Version of sudo there, '' if that is not known."""
    pools: Mapping[str, PoolOfShares] = {}
    """Data pools of their shares, if guests are clients themselves (Clients.pools)."""


def ways(store: Datastore, images: Sequence[Image]) -> tuple[bool, bool]:
    """Return whether guests may have a datastore's shares by their hosts, and whether as clients."""
    found = {
        _is_client(image, store)
        for image in (None, *(image for image in images if image.store_id == store.id))
    }
    return False in found, True in found


def _is_client(image: Optional[Image], store: Datastore) -> Optional[bool]:
    """Tell whether guests are clients, None for a wrong attribute, which is another finding."""
    try:
        return placement.is_client(image, store)
    except BadAttribute:
        return None


def _promised(it: Made) -> object:
    promised, total = it.promised
    return promised > total and {"promised": human(promised), "total": human(total)}


def _old_sudo(it: Made) -> str:
    # What Ceph's manager does needs no sudo.
    is_old = bool(it.sudo) and version(it.sudo) < platforms.SUDO_FLOOR
    return it.sudo if is_old and not it.tree.backend.has_manager else ""


def _bounds(it: Made) -> list[dict[str, str]]:
    return [{"pool": pool, "it": what} for pool, what in _pools(it)]


ROOT: dict[str, Judge] = {
    "root-marked": lambda it: not it.tree.marker and {"machine": it.front_end},
    "root-answers": lambda it: it.wrong and {"it": it.wrong, "mend": it.mend},
    "root-cloud": lambda it: not it.has_cloud,
    "root-quotas": lambda it: it.lapsed[0] and {"it": it.lapsed[0], "mend": it.lapsed[1]},
    "root-promised": _promised,
    "root-sudo": lambda it: [] if it.tree.backend.has_manager else list(it.lacking),
    "root-sudo-old": _old_sudo,
    "root-manager": lambda it: list(it.lacking) if it.tree.backend.has_manager else [],
    "root-bounds": _bounds,
}


def of_roots(made: Sequence[Made], front_end: str) -> list[Finding]:
    """Judge datastores on the machines that make their shares."""
    found = []
    for one in made:
        facts = one._replace(front_end=front_end, others=[other for other in made if other is not one])
        store, tree = one.store, one.tree
        about = {"name": f"datastore {store.id} ({store.name})", "store": store.id, "root": tree.root}
        for of in ("root!", "root-holds"):
            found += judged(of, ROOT, facts, one.machine, user=tree.user, **about)
    return found


def _pools(one: Made) -> Iterator[tuple[str, str]]:
    """Yield pools that guests write to by keys, past CephFS quotas, without a bound or with other users."""
    for pool, row in sorted(one.pools.items()):
        images = [image for image in one.images if image.id in row.images]
        if not any(_is_client(image, one.store) for image in images):
            continue
        if row.lacks:
            lacks = " and ".join(row.lacks)
            yield pool, f"it has no quota ({lacks}): one that means harm fills the cluster"
        users = sorted({image.number("UID") for image in images})
        beside = [*row.beside]
        beside += [f"datastore {other.store.id}" for other in one.others if _offers(other.store, pool)]
        beside += [f"users {', '.join(map(str, users))} of OpenNebula"] if len(users) > 1 else []
        if beside:
            alone = f"it is not one tenant's alone ({'; '.join(beside)})"
            yield pool, f"{alone}: one that means harm fills it for all of them"


def _offers(store: Datastore, pool: str) -> bool:
    try:
        return pool in share.pools(store)
    except BadAttribute:
        return False


class Seen(NamedTuple):
    """A root as a host sees it."""

    seen: RootOnHost
    made: Made
    host: str = ""


class ShareHost(NamedTuple):
    """A host's answer to LookAtShareHost, and its libvirt's."""

    answer: SeenShareHost
    libvirt: Mapping[str, Any] = {}
    platform: Mapping[str, Any] = {}


def _not_mounted(it: Seen) -> bool:
    # The machine that makes them has a finding of its own.
    return not _is_there(it) and it.host != it.made.machine


def _is_there(it: Seen) -> bool:
    return bool(it.seen.there and it.seen.marker)


def _taken(it: ShareHost) -> list[dict[str, object]]:
    return [
        {
            "path": path,
            "user": name,
            "first": first,
            "last": last,
            "owner": max(0, (first - FIRST_UID) // UIDS),
            "kind": "uids" if path.endswith("uid") else "gids",
        }
        for path, name, first, last in it.answer.taken
    ]


def _confined(it: ShareHost) -> object:
    confines = "apparmor" in it.libvirt.get("confines", ())
    is_barred = confines and WRAPPER not in it.answer.profile
    return is_barred and {"wrapper": WRAPPER, "daemon": platforms.daemon(it.platform)}


def _no_daemon(it: ShareHost) -> object:
    return not it.answer.daemon and {"install": platforms.install(it.platform, ["virtiofsd"])}


HOST: dict[str, Judge] = {
    "share-answers": lambda it: [it.seen.error] if it.seen.error else [],
    "share-mounted": _not_mounted,
    "share-own": lambda it: _is_there(it) and it.seen.marker != it.made.tree.marker,
    "share-options": lambda it: _is_there(it) and " and ".join(it.seen.lacks),
    "share-chown": lambda it: _is_there(it) and it.seen.judged_by_user,
    "virtiofsd": _no_daemon,
    "namespaces": lambda it: not it.answer.namespaces,
    "ids-free": _taken,
    "qemu-virtiofs": lambda it: it.libvirt.get("virtiofs") is False,
    "wrapper": _confined,
}


def of_hosts(
    made: Sequence[Made], answers: Mapping[str, SeenShareHost], machines: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Judge hosts by their `answers` to LookAtShareHost, and what the `machines` say of themselves."""
    found = []
    for host, answer in answers.items():
        has_some = False
        for one in made:
            root = one.tree.root
            seen = answer.roots.get(root) if one.tree.marker else None
            if not one.by_hosts or seen is None:
                continue
            if one.tree.backend.is_one_hosts and not (seen.marker or seen.error):
                continue
            has_some = True
            found += judged("root-seen!", HOST, Seen(seen, one, host), host, root=root, store=one.store.id)
        if has_some:
            said = machines.get(host, {})
            facts = ShareHost(answer, said.get("libvirt", {}), platform_of(said))
            found += judged("share-host", HOST, facts, host)
    return found
