# SPDX-License-Identifier: Apache-2.0
"""Stores: what each kind can do, and how a datastore's store is reached.

Actions decide on what a store can do (`Kind`), never on its name. The kind of a datastore is its DISK_TYPE,
OpenNebula's own attribute: RBD is `rbd`, anything else `dir`. Ceph's keys are never here: CEPH_USER names
one, which lies in a keyring on the machine that uses it; CEPH_SECRET names what libvirt has.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Tuple

from ...errors import BadArguments, BadAttribute
from ...named import NamedTuple
from .. import attributes as a
from ..attributes import CONF, MARKER, MONITOR, POOL, SECRET, STORED

if TYPE_CHECKING:
    from ..attributes import Attribute
    from ..attributes import Holder as Datastore


class Kind(NamedTuple):
    """What stores of one kind can do."""

    name: str
    has_bridge: bool
    """Images are reached over the network and changed by one machine, the store's bridge; else by any, at the
    same path on all.
    """
    formats: Tuple[str, ...]
    """Formats in which images are stored."""
    source: str
    """What SOURCE of an image looks like."""
    source_is: str
    """The same in words."""


KINDS = {
    "dir": Kind("dir", False, ("raw", "qcow2"), r"(?s)/.*", "a plain absolute path"),
    "rbd": Kind("rbd", True, ("raw",), STORED, "POOL/IMAGE"),
}


FORMS = {
    "kind": r"[a-z]+\Z",
    "conf": CONF,
    "host": MONITOR,
    "secret": SECRET,
    "marker": MARKER,
    "cloud": MARKER,
    "remote_secret": SECRET,
}
"""What the fields of an Access look like that are no names of Ceph's, and each of its hosts."""
NEWER = ("marker", "cloud", "remote", "remote_secret")
"""Fields that records of older disks do not have."""


class Access(NamedTuple):
    """How a store is reached: `user` by guests, `reader` by hosts that copy bases, `bridge_user` by who
    changes images.
    """

    kind: str = "dir"
    user: str = ""
    reader: str = ""
    bridge_user: str = ""
    conf: str = ""
    hosts: Tuple[str, ...] = ()
    """Monitors, `address` or `address:port`; none: those that Ceph's own configuration names."""
    secret: str = ""
    """UUID of the libvirt secret with the key of `user`."""
    data_pool: str = ""
    marker: str = ""
    """Id of a mounted store, by its marker (store/dir/marker.py); '' for one that was never marked."""
    cloud: str = ""
    """Id of the OpenNebula whose datastore this is; '' if it has none. What is made beside images carries
    it.
    """
    remote: str = ""
    """Who opens what remote-first disks lie over, '' for `user`."""
    remote_secret: str = ""
    """UUID of the libvirt secret with the key of `remote`, '' for `secret`."""

    @property
    def can(self) -> Kind:
        return KINDS[self.kind]

    def by_bridge(self) -> Access:
        """Return the same for the bridge, which has its own key alone, also for what hosts do otherwise."""
        return self._replace(user=self.bridge_user, reader=self.bridge_user, remote="", remote_secret="")

    def to_data(self) -> dict[str, object]:
        """Return the access as JSON data."""
        data = {**self._asdict(), "hosts": list(self.hosts)}
        return {name: value for name, value in data.items() if value or name not in NEWER}

    @classmethod
    def from_data(cls, data: object) -> Access:
        """Return the access in JSON data; raise BadArguments."""
        if (
            not isinstance(data, dict)
            or set(data) | set(NEWER) != set(cls._fields)
            or str(data["kind"]) not in KINDS
        ):
            raise BadArguments(f"not an access: {str(data)[:200]}")
        if not isinstance(data["hosts"], (list, tuple)):
            raise BadArguments(f"not an access: {str(data)[:200]}")
        found = cls(**{**data, "hosts": tuple(data["hosts"]), **{name: data.get(name, "") for name in NEWER}})
        values = {**found._asdict(), "hosts": ""}
        for name, value in (*values.items(), *(("host", host) for host in found.hosts)):
            if (
                not isinstance(value, str)
                or (value and not re.match(FORMS.get(name, POOL), value))
                or ".." in value.split("/")
            ):
                raise BadArguments(f"not an access: its {name} is {str(value)[:200]!r}")
        return found


MOUNTED = Access()

ADMIN = "admin"


def kind(datastore: Datastore) -> Kind:
    """Return the kind of the store of `datastore`."""
    return KINDS["rbd" if datastore.attribute("DISK_TYPE").upper() == "RBD" else "dir"]


def is_shares(datastore: Datastore) -> bool:
    """Tell whether the images of a datastore are shares (model/share/share.py), and no disks."""
    return datastore.attribute("DISK_TYPE").upper() == "FILESYSTEM"


def access(datastore: Datastore) -> Access:
    """Return how the store of `datastore` is reached; raise BadAttribute."""
    cloud = a.CLOUD.of_store(datastore)
    if not kind(datastore).has_bridge:
        return MOUNTED._replace(marker=a.STORE.of_store(datastore), cloud=cloud)
    user, hosts = ceph_user(datastore), a.CEPH_HOST.words(datastore)
    return Access(
        "rbd",
        user,
        _user(datastore, a.CEPH_READER) or user,
        _user(datastore, a.CEPH_BRIDGE_USER) or user,
        a.CEPH_CONF.of_store(datastore),
        hosts,
        a.CEPH_SECRET.of_store(datastore),
        a.EC_POOL_NAME.of_store(datastore),
        cloud=cloud,
        **_remote(datastore),
    )


def ceph_user(datastore: Datastore) -> str:
    """Return CEPH_USER; raise BadAttribute if there is none, or a key beside it."""
    user = _user(datastore, a.CEPH_USER)
    if not user:
        raise BadAttribute(
            f"datastore {datastore.id} has no CEPH_USER: without one Ceph takes client.admin, "
            f"which nothing here runs as"
        )
    if datastore.attribute("CEPH_KEY"):
        raise BadAttribute(
            f"CEPH_KEY of datastore {datastore.id}: put the key into a keyring that CEPH_CONF "
            f"names, and remove this"
        )
    return user


def _remote(datastore: Datastore) -> dict[str, str]:
    user, secret = _user(datastore, a.CEPH_REMOTE), a.CEPH_REMOTE_SECRET.of_store(datastore)
    if bool(user) != bool(secret):
        raise BadAttribute(
            f"datastore {datastore.id} names only one of SEMISHARED_CEPH_REMOTE and "
            f"SEMISHARED_CEPH_REMOTE_SECRET: a user and libvirt's secret with the key of that user"
        )
    return {"remote": user, "remote_secret": secret}


def unmarked(datastore: Datastore) -> str:
    """Return what to say of a datastore whose store should have a marker and has none, '' of any other."""
    if kind(datastore).has_bridge or a.STORE.text(datastore):
        return ""
    return (
        f"datastore {datastore.id} has no SEMISHARED_STORE: that its store is not mounted would not be "
        "noticed; `semishared setup --apply` marks it"
    )


def _user(datastore: Datastore, attribute: Attribute) -> str:
    user = attribute.of_store(datastore)
    if user == ADMIN or user.startswith("client."):
        raise BadAttribute(
            f"{attribute.name} of datastore {datastore.id} is {user!r}: name a user of its own, without "
            f"`client.`, and not admin"
        )
    return user


def fence_user(datastore: Datastore) -> str:
    """Return as whom the front-end shuts a dead host out of an rbd datastore's cluster, '' if nobody is
    named; raise BadAttribute.
    """
    user = _user(datastore, a.CEPH_FENCE_USER)
    others = (a.CEPH_USER, a.CEPH_READER, a.CEPH_BRIDGE_USER)
    if user and user in [other.text(datastore) for other in others]:
        raise BadAttribute(
            f"SEMISHARED_CEPH_FENCE_USER of datastore {datastore.id} is {user!r}, who has another "
            f"role: name one of its own"
        )
    return user


def pool(datastore: Datastore) -> str:
    """Return the pool of an rbd datastore; raise BadAttribute for a name that no pool should have."""
    return a.POOL_NAME.of_store(datastore)


def bridges(datastore: Datastore) -> list[str]:
    """Return the hosts of BRIDGE_LIST, empty for the front-end; raise BadAttribute."""
    return list(a.BRIDGE_LIST.words(datastore))


def bridge(datastore: Datastore, number: int) -> str:
    """Return the machine that changes images of a datastore for object `number` (as upstream: by its id), ''
    for any.
    """
    if not kind(datastore).has_bridge:
        return ""
    found = bridges(datastore)
    return found[number % len(found)] if found else "localhost"


def check_source(store: Access, source: str, what: str = "source") -> str:
    """Return `source` if it names an image in a store of this kind; raise BadArguments."""
    if not re.match(store.can.source, source):
        raise BadArguments(f"{what} is not {store.can.source_is}: {source!r}")
    return source


def new_source(store: Access, root: str, number: int, token: str) -> str:
    """Return the SOURCE of the new image `number` in the directory or pool `root`; `token` is a new name."""
    if not store.can.has_bridge:
        return f"{root}/{token}"
    from . import rbd_names

    return f"{root}/{rbd_names.image(number)}"


def is_path(source: str) -> bool:
    """Tell whether SOURCE of an image is a path, where nobody says whose it is: in a mounted store, then."""
    return source.startswith("/")


def pool_and_name(source: str) -> tuple[str, str]:
    """Return pool and image name of the SOURCE `source`; raise BadArguments."""
    match = re.match(STORED, source)
    if not match:
        raise BadArguments(f"not POOL/IMAGE: {source!r}")
    return match.group(1), match.group(2)
