# SPDX-License-Identifier: Apache-2.0
"""The blocklist of a Ceph cluster, changed with the key of the role `fence` (`semishared caps --role fence`).

It also finds the clients that a fence may have to block.

An OSD refuses all operations of a client on the list; an entry ADDRESS:0/0 blocks all present and future
clients of an address. An OSD that does not know an entry yet learns it from the next client that connects,
before it serves that client. Adding an existing entry does not extend its expiry (as of 16.2.15); so an entry
that librbd or an administrator added for an hour is removed and added again. Only the monitors' clock decides
about expiry.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Iterable, List, Tuple

from ...errors import CephRefused, MissingImage, ToolFailed
from ...model.steps import Access
from ...model.store.rbd_names import FOR_EVER_S, Blocklist, Opener, ip_of
from ...tools.effects import point
from . import ceph

AT_ONCE = 8
"""Images that are inspected in parallel."""
EACCES = 13


class Fencer:
    """A connection to a cluster as the user of the fence key; raise as ceph.cluster."""

    def __init__(self, access: Access, user: str) -> None:
        self._access, self._user = access, user
        self._cluster = ceph.cluster(access, user)

    @property
    def fsid(self) -> str:
        with ceph.understood("the cluster's id", self._user):
            return str(self._cluster.get_fsid())

    def _command(self, prefix: str, **words: object) -> Any:
        text = json.dumps({"prefix": prefix, "format": "json", **words})
        with ceph.understood(prefix, self._user):
            code, out, said = self._cluster.mon_command(text, b"", timeout=ceph.ANSWER_S)
        if abs(code) == EACCES:
            raise CephRefused(f"`ceph {prefix}` as client.{self._user}: {said}")
        if code:
            raise ToolFailed(f"`ceph {prefix}` as client.{self._user}: {said} ({code})")
        return json.loads(out) if out.strip() else None

    # -- clients --------------------------------------------------------------------------------------

    def look(self) -> Tuple[Blocklist, frozenset[str]]:
        """Return the blocklist, and the addresses of the cluster's OSDs."""
        found = self._command("osd dump")
        addresses = [
            str(osd[key]) for osd in found["osds"] for key in ("public_addr", "cluster_addr") if key in osd
        ]
        # By the monitors' clock: adding an entry changes the map, so no entry is newer than the map.
        now = _at(str(found["modified"]))
        entries = {str(entry): _at(str(until)) - now for entry, until in found.get("blocklist", {}).items()}
        return Blocklist(entries), frozenset(ip_of(address) for address in addresses)

    def see(self, pool: str) -> Tuple[ceph.Pool, List[str]]:
        """Return a pool and the names of its images."""
        where = ceph.pool(self._access, self._user, pool)
        with ceph.understood(f"pool {pool}", self._user):
            return where, [str(name) for name in where.rbd.list(where.ioctx)]

    def openers(self, pool: str) -> Tuple[List[str], List[Opener]]:
        """Return the images of a pool as POOL/IMAGE, and the clients that watch them or hold their locks."""
        where, names = self.see(pool)
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = threads.map(lambda name: _openers_of(where, name), names)
            return [f"{pool}/{name}" for name in names], [opener for row in found for opener in row]

    # -- what is done ---------------------------------------------------------------------------------

    def block(self, entries: Iterable[str]) -> Blocklist:
        """Block the clients that the entries name, until `unblock`; return the new list."""
        listed, _ = self.look()
        for entry in listed.lacks(tuple(entries)):
            if entry in listed.entries:
                self._command("osd blocklist", blocklistop="rm", addr=entry)
            self._command("osd blocklist", blocklistop="add", addr=entry, expire=float(FOR_EVER_S))
            point("address blocked")
        return self.look()[0]

    def unblock(self, entries: Iterable[str]) -> None:
        """Remove entries from the blocklist; a missing entry is no error."""
        for entry in entries:
            self._command("osd blocklist", blocklistop="rm", addr=entry)
            point("address let in")


def _at(text: str) -> float:
    """Return a monitor's timestamp in seconds since 1970."""
    from datetime import datetime

    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%f%z").timestamp()


def _openers_of(where: ceph.Pool, name: str) -> List[Opener]:
    shown = f"{where.name}/{name}"
    try:
        with ceph.opened(where, name, read_only=True) as image:
            lockers = [(str(row[0]), str(row[2])) for row in (image.list_lockers() or {}).get("lockers", [])]
            watchers = [(f"client.{found['id']}", str(found["addr"])) for found in image.watchers_list()]
    except MissingImage:
        return []  # removed meanwhile
    return [Opener(shown, client, address) for client, address in dict.fromkeys([*lockers, *watchers])]
