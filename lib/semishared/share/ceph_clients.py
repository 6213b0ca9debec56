# SPDX-License-Identifier: Apache-2.0
"""Ceph keys by which a guest, or any machine that an operator gives one, mounts one share itself.

Each share has Ceph users of its own. Such a user may read and write (or read) one subvolume, that is its
directory and its objects in their namespace, and see the cluster's maps, as all clients do. The Ceph manager
creates and removes these users, for shares of our group alone: with caps to create users, this suite could
create any user. (The manager also tells the key of any existing user that it is asked for, so our caps
confine the names, too.) It returns the same key each time; this suite stores none.

A note in the root (share_names.key) exists from before the key is created until after it is removed: so `gc`
finds what a killed action leaves, without caps to list the cluster's users. The note has the SEQ of the VM's
history at which the VM last got the key. So a late action, which oned has given up, neither gives nor takes
the key of a VM that runs again.
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
from ..model.share.steps import GivenKey, PoolOfShares
from ..named import NamedTuple
from ..store.rbd import ceph
from ..tools import files
from ..tools.effects import point
from .cephfs import CephFs

VERSION = 1
VERBS = ("authorize", "deauthorize", "evict")
NOBODYS = -1
QUOTAS = ("max_bytes", "max_objects")
"""Quotas of a Ceph pool."""


class Key(NamedTuple):
    """A key for a share, and its holder."""

    image: int
    vm: int = -1
    """-1: the holder is no VM."""
    readonly: bool = False
    seq: int = -1
    """SEQ of the VM's history at which it last got the key, -1 if unknown."""
    wrong: str = ""
    """Why the note is unreadable, '' if it is not."""

    @property
    def note(self) -> str:
        """Return the path of its note, relative to the root."""
        return share_names.key(self.image, self.vm, self.readonly)

    def user(self, tree: Tree) -> str:
        """Return the Ceph user name. The group comes first: by it our caps tell our users from others.

        (docs/how-to/shares.md.) Readers and writers are separate users: what a user may do never changes
        below a mount. Two clouds on one cluster may have the same groups and ids, but their roots' markers
        differ.
        """
        group = tree.volume.rpartition("/")[2]
        vm, does = f"-{self.vm}" if self.vm >= 0 else "", "-ro" if self.readonly else ""
        return f"share-{group}-{self.image}{vm}{does}-{tree.marker[:8]}"


def of(tree: Tree) -> Clients:
    """Return the keys of a root's shares; raise NotSupported if the root is on no CephFS."""
    if not tree.backend.has_manager:
        raise NotSupported(
            f"{tree.root} is on {tree.fs}: guests can be clients of CephFS alone (SEMISHARED_FS = cephfs)"
        )
    return Clients(tree)


def listed(root: str) -> list[Key]:
    """Return all keys for shares of a root; one with an unreadable note has a reason in `wrong`."""
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
    """Return a key with the SEQ of its note; raise BadRecord. Notes of older versions have no SEQ."""
    known = files.read_json(f"{root}/{key.note}") or {}
    seq = known.get("seq", -1)
    if not isinstance(seq, int):
        raise BadRecord(f"{root}/{key.note} on {os.uname().nodename} is damaged: it says no SEQ")
    return key._replace(seq=seq)


class Clients(CephFs):
    """The keys of a root's shares. The caller of a method that changes one holds the share's lock."""

    def give(self, key: Key) -> GivenKey:
        """Create a key; return it and the client's other settings, as `told` does.

        A VM has one key for a share: its key of the other access is removed. Raise LateAction if the VM got a
        key at a later SEQ.
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

    def told(self, key: Key) -> GivenKey:
        """Return a noted key with what else a client needs."""
        user = key.user(self._tree)
        # The manager returns a key only to a named tenant, and lets no other tenant ask for that user.
        level = "r" if key.readonly else "rw"
        more = {"access_level": level, "tenant_id": self._tree.marker}
        secret = self._ask("authorize", key.image, auth_id=user, **more).strip()
        point("key given")
        path, access = str(self._info(key.image)["path"]), "ro" if key.readonly else "rw"
        return GivenKey(self._monitors(), self._volume, path, user, secret, access)

    def lacking_for_keys(self) -> list[str]:
        """Return the verbs that the manager refuses us.

        The manager checks caps before it looks for the share, so the share asked for does not exist.
        """
        found, user = [], Key(NOBODYS).user(self._tree)
        for verb in VERBS:
            more = {"access_level": "r", "tenant_id": self._tree.marker} if verb == "authorize" else {}
            try:
                self._ask(verb, NOBODYS, auth_id=user, **more)
            except MissingImage:
                continue
            except CephRefused:
                found.append(f"fs subvolume {verb}")
        return found

    def take(self, key: Key) -> None:
        """Remove the user of a key, and evict its clients of the share; the user need not exist.

        Raise MissingImage if the subvolume does not exist: the manager then does not look for the user, which
        may exist.
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
        """Remove a key, unless the VM got it at a later SEQ than `seq` (-1: any); return True if removed."""
        if not files.exists(f"{self.root}/{key.note}") or 0 <= seq < _read(self.root, key).seq:
            return False
        self.take(key)
        return True

    def take_all(self, image: int) -> None:
        """Remove all keys for a share; raise BadRecord, and remove none, if one has an unreadable note."""
        found = [key for key in listed(self.root) if key.image == image]
        for key in found:
            if key.wrong:
                raise BadRecord(key.wrong)
        for key in found:
            self.take(key)

    def pools(self, images: Iterable[int]) -> dict[str, PoolOfShares]:
        """Return the data pools of shares: `images`, the quotas that each `lacks`, and what else is `beside`.

        OSDs enforce a pool's quotas against every client.
        """
        found: dict[str, PoolOfShares] = {}
        for image in images:
            with suppress(MissingImage, ToolFailed):
                pool = str(self._info(image)["data_pool"])
                found.setdefault(pool, PoolOfShares([], [], [])).images.append(image)
        if found:
            others = [fs for fs in self._said("fs ls") if fs["name"] != self._volume]
            for pool in self._said("osd dump")["pools"]:
                row = found.get(pool["pool_name"])
                if row:
                    row.lacks.extend(name for name in QUOTAS if not pool[f"quota_{name}"])
                    row.beside.extend(sorted(set(pool["application_metadata"]) - {"cephfs"}))
                    row.beside.extend(
                        f"file system {fs['name']}" for fs in others if pool["pool_name"] in fs["data_pools"]
                    )
        return found

    def _monitors(self) -> str:
        """Return the monitors' addresses for the kernel's client."""
        return ",".join(filter(None, map(_address, self._said("mon dump")["mons"])))

    def _said(self, prefix: str) -> Any:
        """Return the monitors' answer; raise CephRefused, CephUnavailable."""
        what = f"{prefix} as client.{self._user} on {os.uname().nodename}"
        with ceph.understood(what, self._user):
            asked = json.dumps({"prefix": prefix, "format": "json"})
            connected = ceph.cluster(self._access, self._user)
            code, out, said = connected.mon_command(asked, b"", timeout=ceph.ANSWER_S)
        if code:
            raise CephUnavailable(f"{what}: {said or os.strerror(abs(code))}")
        return json.loads(out)


def _address(monitor: dict[str, Any]) -> str:
    """Return a monitor's address for the kernel's client: of protocol v1 where there is one."""
    known = {str(one["type"]): str(one["addr"]) for one in monitor["public_addrs"]["addrvec"]}
    return known.get("v1") or known.get("v2", "")
