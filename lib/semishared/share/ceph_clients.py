# SPDX-License-Identifier: Apache-2.0
"""Keys of Ceph by which a guest, or whoever an operator gives one, is itself a client of one share.

Each is that of a user of the cluster of its own, who may read and write (or read) one subvolume: its
directory, and its objects in their namespace; and, as all clients do, see the cluster's maps. The manager
makes and removes them, for shares of our group alone: who could make users oneself could make any. (Asked to,
it also tells the key of a user who is there already, whoever that is: so the names of those that we may ask
for are confined, too.) The key is the same when it is asked for again; we keep it nowhere.

That somebody has one stands in a file of the root from before the key is made until it is gone
(share_names.key): so `gc` finds what a killed action leaves, and nobody has to be let list the cluster's
users. So does the SEQ of the VM's history at which it was given last: no action of an earlier one, which runs
on after oned has given it up, gives or takes the key of a VM that runs again.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any, Iterable

from ..errors import (
    BadRecord,
    CephRefused,
    CephUnavailable,
    LateAction,
    MissingImage,
    NotSupported,
    ToolFailed,
)
from ..model.share import names as share_names
from ..model.share.share import Tree
from ..named import NamedTuple
from ..store.rbd import ceph
from ..tools import files
from ..tools.effects import point
from .cephfs import CephFs

VERSION = 1
VERBS = ("authorize", "deauthorize", "evict")
NOBODYS = -1
QUOTAS = ("max_bytes", "max_objects")
"""Of a pool."""


class Key(NamedTuple):
    """Who has a key for a share."""

    image: int
    vm: int = -1
    """-1: somebody who is no VM."""
    readonly: bool = False
    seq: int = -1
    """SEQ of the VM's history at which it was given last, -1 if nobody has said one."""
    wrong: str = ""
    """Why that cannot be told, '' if it can."""

    @property
    def note(self) -> str:
        """Return where it stands, seen from the root."""
        return share_names.key(self.image, self.vm, self.readonly)

    def user(self, tree: Tree) -> str:
        """Return as whom. The group goes before: whom we may make and remove has to be told from all others
        (docs/how-to/shares.md).

        Who only reads is another one than who writes: what a user may do is never changed below a mount. Of
        two clouds on a cluster groups and ids may be the same, the markers of their roots are not.
        """
        group = tree.volume.rpartition("/")[2]
        vm, does = f"-{self.vm}" if self.vm >= 0 else "", "-ro" if self.readonly else ""
        return f"share-{group}-{self.image}{vm}{does}-{tree.marker[:8]}"


def of(tree: Tree) -> Clients:
    """Return what gives keys for shares; raise NotSupported where they are on no CephFS."""
    if not tree.backend.has_manager:
        raise NotSupported(
            f"{tree.root} is on {tree.fs}: guests can be clients of CephFS alone (SEMISHARED_FS = cephfs)"
        )
    return Clients(tree)


def listed(root: str) -> list[Key]:
    """Return who has keys for shares of a root, also those of whom it cannot be read since when."""
    directory = f"{root}/{share_names.KEYS}"
    files.refresh(directory)
    try:
        found = map(share_names.key_of, os.listdir(directory))
    except FileNotFoundError:
        return []
    return [_seen(root, Key(*key)) for key in sorted(key for key in found if key)]


def _seen(root: str, key: Key) -> Key:
    try:
        return _read(root, key)
    except BadRecord as e:
        return key._replace(wrong=e.detail)


def _read(root: str, key: Key) -> Key:
    """Return a key with what its note says; raise BadRecord. Those of older versions say no SEQ."""
    known = files.read_json(f"{root}/{key.note}") or {}
    seq = known.get("seq", -1)
    if not isinstance(seq, int):
        raise BadRecord(f"{root}/{key.note} on {os.uname().nodename} is damaged: it says no SEQ")
    return key._replace(seq=seq)


class Clients(CephFs):
    """The shares of a root, as their clients see them. Whoever asks holds the share's lock."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self._tree = tree

    def give(self, key: Key) -> dict[str, str]:
        """Have a key; return it, and where the share is for clients: monitors, file system, path, user;
        `access` is ro or rw.

        A VM has one for a share, which is off when it is given one: as its disk is by now. Raise LateAction
        if it was given one at a later SEQ.
        """
        path = f"{self.root}/{key.note}"
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        files.remove_stale(os.path.dirname(path))
        other = key._replace(readonly=not key.readonly)
        last = max(_read(self.root, key), _read(self.root, other), key=lambda one: one.seq)
        if 0 <= key.seq < last.seq:
            since = f"since SEQ {last.seq} of its history, and this is of SEQ {key.seq}"
            raise LateAction(
                f"VM {key.vm} has its key for image {key.image} {since} ({self.root}/{last.note} "
                f"on {os.uname().nodename})"
            )
        files.write_json(path, {"version": VERSION, "seq": max(key.seq, last.seq)})
        if key.vm >= 0 and files.exists(f"{self.root}/{other.note}"):
            self.take(other)
        return self.told(key)

    def told(self, key: Key) -> dict[str, str]:
        """Return the key of who stands in the root, and the rest, as `give`."""
        user = key.user(self._tree)
        # The manager gives no key to who names no tenant, and lets no other one ask for the same user.
        level = "r" if key.readonly else "rw"
        secret = self._ask(
            "authorize", key.image, auth_id=user, access_level=level, tenant_id=self._tree.marker
        ).strip()
        point("key given")
        return {
            "monitors": self._monitors(),
            "fs": self._volume,
            "path": str(self._info(key.image)["path"]),
            "user": user,
            "key": secret,
            "access": "ro" if key.readonly else "rw",
        }

    def lacking_for_keys(self) -> list[str]:
        """Return what the manager does not let us ask for: whether we may, it says before it looks for the
        share, which is nobody's.
        """
        found, user, more = (
            [],
            Key(NOBODYS).user(self._tree),
            {"access_level": "r", "tenant_id": self._tree.marker},
        )
        for verb in VERBS:
            try:
                self._ask(verb, NOBODYS, auth_id=user, **(more if verb == "authorize" else {}))
            except MissingImage:
                continue
            except CephRefused:
                found.append(f"fs subvolume {verb}")
        return found

    def take(self, key: Key) -> None:
        """Remove the user of a key, and shut out who has the share mounted as that; the user need not be
        there any more.

        Raise MissingImage where there is no such subvolume (any more): the manager then looks for no user,
        who may be there all the same.
        """
        user = key.user(self._tree)
        for verb in ("deauthorize", "evict"):
            try:
                self._ask(verb, key.image, auth_id=user)
            except MissingImage:
                self._require(key, user)
            point(f"key taken: {verb}")
        files.unlink(f"{self.root}/{key.note}")
        point("note of the key removed")

    def _require(self, key: Key, user: str) -> None:
        try:
            self._info(key.image)
        except MissingImage as e:
            note, then = f"{self.root}/{key.note} on {os.uname().nodename}", f"`ceph auth rm client.{user}`"
            raise MissingImage(
                f"{e.detail}: so client.{user} may have its key still. {then}, then remove {note}"
            ) from None

    def take_until(self, key: Key, seq: int) -> bool:
        """Take a key, unless it was given at a later SEQ than `seq` (-1: whatever it was), or is gone; tell
        whether it was taken.
        """
        if not files.exists(f"{self.root}/{key.note}") or 0 <= seq < _read(self.root, key).seq:
            return False
        self.take(key)
        return True

    def take_all(self, image: int) -> None:
        """Take back all keys for a share; raise BadRecord, and take none, if a note of them cannot be
        read.
        """
        found = [key for key in listed(self.root) if key.image == image]
        for key in found:
            if key.wrong:
                raise BadRecord(key.wrong)
        for key in found:
            self.take(key)

    def pools(self, images: Iterable[int]) -> dict[str, dict[str, Any]]:
        """Return the data pools that shares are in: their `images`, which quotas the pool lacks (OSDs keep
        those, whoever writes), and what else of the cluster is in it.
        """
        found: dict[str, dict[str, Any]] = {}
        for image in images:
            with suppress(MissingImage, ToolFailed):
                pool = str(self._info(image)["data_pool"])
                found.setdefault(pool, {"images": [], "lacks": [], "beside": []})["images"].append(image)
        if found:
            others = [fs for fs in self._said("fs ls") if fs["name"] != self._volume]
            for pool in self._said("osd dump")["pools"]:
                row = found.get(pool["pool_name"])
                if row:
                    row["lacks"] = [name for name in QUOTAS if not pool[f"quota_{name}"]]
                    row["beside"] = sorted(set(pool["application_metadata"]) - {"cephfs"})
                    row["beside"] += [
                        f"file system {fs['name']}" for fs in others if pool["pool_name"] in fs["data_pools"]
                    ]
        return found

    def _monitors(self) -> str:
        """Return the addresses of the monitors as the kernel's client takes them by itself: of the older
        protocol, where they have it.
        """
        return ",".join(filter(None, map(_address, self._said("mon dump")["mons"])))

    def _said(self, prefix: str) -> Any:
        """Return what the monitors say; raise CephRefused, CephUnavailable."""
        what = f"{prefix} as client.{self._user} on {os.uname().nodename}"
        with ceph.understood(what, self._user):
            asked = json.dumps({"prefix": prefix, "format": "json"})
            code, out, said = ceph.cluster(self._access, self._user).mon_command(
                asked, b"", timeout=ceph.ANSWER_S
            )
        if code:
            raise CephUnavailable(f"{what}: {said or os.strerror(abs(code))}")
        return json.loads(out)


def _address(monitor: dict[str, Any]) -> str:
    known = {str(one["type"]): str(one["addr"]) for one in monitor["public_addrs"]["addrvec"]}
    return known.get("v1") or known.get("v2", "")
