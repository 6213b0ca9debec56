# SPDX-License-Identifier: Apache-2.0
"""Stores: what each kind can do, and how a machine reaches one.

Actions decide on what a store can do (`Kind`), never on its name. Ceph's keys are never here: a user names
one, which lies in a keyring on the machine that uses it; a secret names what libvirt has.
"""

from __future__ import annotations

import re
from typing import Tuple

from ...errors import BadArguments
from ...named import NamedTuple

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
"""Pools, images, users: nothing that means something to rbd (`@ / :`), to librados (`= ,`) or to a shell."""
POOL = NAME + r"\Z"
STORED = rf"({NAME})/({NAME})\Z"
MONITOR = r"([A-Za-z0-9_][A-Za-z0-9_.\-]*|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?\Z"
SECRET = r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z"
CONF = r"/[A-Za-z0-9_.\-/]+\Z"
MARKER = r"[0-9a-f]{32}\Z"
NETWORK = r"(nfs4?|ceph|lustre|gpfs|beegfs|glusterfs|gfs2|ocfs2|9p|virtiofs|fuse\..*)\Z"
"""Types of file systems that several machines may have mounted."""


HERE = ""
"""The machine that does the action: it changes the images of a store that all machines have at one path."""


class Kind(NamedTuple):
    """What stores of one kind can do, and which machine does it."""

    name: str
    disk_type: str
    """DISK_TYPE of their datastores; '' for any that is of no other kind."""
    machine: str
    """Changes their images where BRIDGE_LIST names no machine. Only with HERE is BRIDGE_LIST not asked: hosts
    and guests have the images as files. Else they reach them over the network.
    """
    image: str
    """The name of a new image, by its `number` or a random `token`."""
    epochs: str
    """What has the epochs of its images' VMs: the whole store (`root`), or each image (`source`)."""
    formats: Tuple[str, ...]
    """Formats in which images are stored."""
    source: str
    """What SOURCE of an image looks like."""
    source_is: str
    """The same in words."""
    url: str = "{source}"
    """Where OpenNebula's downloader reads an image, from the machine `host`; `words`: Access.url_words."""

    @property
    def is_mounted(self) -> bool:
        return not self.machine

    def is_in_doubt(self, marker: str) -> bool:
        """Tell whether nothing would say that a store is there: a mounted one whose `marker` is ''."""
        return not self.machine and not marker


KINDS = {
    "dir": Kind(
        *("dir", "", HERE, "{token}", "root", ("raw", "qcow2"), r"(?s)/.*", "a plain absolute path"),
        "ssh://{host}:{source}",
    ),
    "rbd": Kind(
        *("rbd", "RBD", "localhost", "one-{number}", "source", ("raw",), STORED, "POOL/IMAGE"),
        "rbd://{host}/{source}?{words}",
    ),
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
"""Patterns of the fields of an Access that are no names of Ceph's, and of each host in it."""
NEWER = ("marker", "cloud", "remote", "remote_secret")
"""Fields that records of older disks do not have."""


class Access(NamedTuple):
    """How a store is reached: `user` by guests, `reader` by hosts for bases, `bridge_user` by its machine."""

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
    """The user that opens what remote-first disks lie over, '' for `user`."""
    remote_secret: str = ""
    """UUID of the libvirt secret with the key of `remote`, '' for `secret`."""

    @property
    def can(self) -> Kind:
        return KINDS[self.kind]

    @property
    def url_words(self) -> str:
        """Return what a URL of an image says of this: its reader, and the configuration."""
        conf = f"&CEPH_CONF={self.conf}" if self.conf else ""
        return f"CEPH_USER={self.bridge_user}{conf}"

    def holds(self, source: str) -> bool:
        """Tell whether SOURCE of an image is one of stores of this kind."""
        return bool(re.match(self.can.source, source))

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


def check_source(store: Access, source: str, what: str = "source") -> str:
    """Return `source` if it names an image in a store of this kind; raise BadArguments."""
    if not store.holds(source):
        raise BadArguments(f"{what} is not {store.can.source_is}: {source!r}")
    return source


def new_source(store: Access, root: str, number: int, token: str) -> str:
    """Return the SOURCE of the new image `number` in the directory or pool `root`; `token` is a new name."""
    return f"{root}/{store.can.image.format(number=number, token=token)}"


def is_path(source: str) -> bool:
    """Tell whether SOURCE of an image is a path, which means a mounted store."""
    return source.startswith("/")


def pool_and_name(source: str) -> tuple[str, str]:
    """Return pool and image name of the SOURCE `source`; raise BadArguments."""
    match = re.match(STORED, source)
    if not match:
        raise BadArguments(f"not POOL/IMAGE: {source!r}")
    return match.group(1), match.group(2)
