# SPDX-License-Identifier: Apache-2.0
"""A disk that QEMU opens over the network: what its record says, and what the domain XML is written from.

    {"disk": 0, "place": "shared", "how": "in-place", "format": "raw", "path": "", "readonly": false,
     "image": {..., "source": "one/one-35", "access": {...}},
     "network": {"protocol": "rbd", "name": "one/one-35", "hosts": ["10.77.0.1:6789"], "user": "libvirt",
                 "secret": "00000000-0000-4000-8000-0000000000cc", "conf": ""}}

What a disk on the host lies over is named the same way, with a "snapshot" (its record's "over"). Of any other
one there is no disk.N on the host. `how` is in-place (the image itself) or store-clone (its clone for this
disk). User and secret are required: without them QEMU would connect as client.admin wherever it finds that
key.
"""

from __future__ import annotations

import re
from typing import Tuple

from ...errors import BadArguments, BadAttribute, BadRecord
from ...named import NamedTuple
from ..store import access as store_access


class NetworkDisk(NamedTuple):
    """Where QEMU finds a disk, and the Ceph user that opens it."""

    name: str
    """POOL/IMAGE"""
    hosts: Tuple[str, ...]
    """Monitors, `address`, `address:port` or `[address]:port`; none: those of the configuration `conf`."""
    user: str
    secret: str
    conf: str = ""
    protocol: str = "rbd"
    snapshot: str = ""
    """The snapshot that is read, '' for the image itself."""

    @classmethod
    def of(cls, name: str, access: store_access.Access) -> NetworkDisk:
        """Return how guests open the image `name`; raise BadAttribute without a secret: libvirt would try
        client.admin.
        """
        if not access.secret:
            raise BadAttribute(
                f"the datastore of {name} has no CEPH_SECRET, without which libvirt cannot open "
                f"it as {access.user}"
            )
        return cls(
            store_access.check_source(access, name), access.hosts, access.user, access.secret, access.conf
        )

    @classmethod
    def below(cls, name: str, snapshot: str, access: store_access.Access) -> NetworkDisk:
        """Return how guests read a snapshot of the image `name`, by `remote` if it is set; raise as `of`."""
        whole = cls.of(name, access)
        return whole._replace(
            user=access.remote or whole.user, secret=access.remote_secret or whole.secret, snapshot=snapshot
        )

    @property
    def node(self) -> dict[str, object]:
        """Return it as QEMU's JSON names have it."""
        pool, _, image = self.name.partition("/")
        file = {
            "driver": self.protocol,
            "pool": pool,
            "image": image,
            "snapshot": self.snapshot,
            "user": self.user,
            "conf": self.conf,
        }
        return {"driver": "raw", "file": {name: value for name, value in file.items() if value}}

    def to_data(self) -> dict[str, object]:
        """Return the record's "network"."""
        data: dict[str, object] = {**self._asdict(), "hosts": list(self.hosts)}
        if not self.snapshot:
            del data["snapshot"]  # records of older disks do not have it
        return data

    @classmethod
    def parse(cls, data: object) -> NetworkDisk:
        """Return the disk in a record's "network"; raise BadRecord for what we cannot have written."""
        known = cls("", (), "", "")._asdict()
        if (
            not isinstance(data, dict)
            or set(data) | {"snapshot"} != set(known)
            or not isinstance(data["hosts"], (list, tuple))
        ):
            raise BadRecord(f"not a network disk: {str(data)[:200]}")
        texts = [
            data["protocol"],
            data["name"],
            data["user"],
            data["secret"],
            data["conf"],
            data.get("snapshot", ""),
            *data["hosts"],
        ]
        if not all(isinstance(text, str) for text in texts):
            raise BadRecord(f"not a network disk: {str(data)[:200]}")
        if (
            data["protocol"] != "rbd"
            or not re.match(store_access.STORED, data["name"])
            or not re.match(store_access.POOL, data["user"])
            or not re.match(store_access.SECRET, data["secret"])
            or (data["conf"] and not re.match(store_access.CONF, data["conf"]))
            or (data.get("snapshot") and not re.match(store_access.POOL, data["snapshot"]))
            or not all(re.match(store_access.MONITOR, host) for host in data["hosts"])
        ):
            raise BadRecord(f"a network disk that nobody would write: {str(data)[:200]}")
        return cls(**{**data, "hosts": tuple(data["hosts"])})

    @classmethod
    def from_data(cls, data: object) -> NetworkDisk:
        """Return the disk in a step's JSON data; raise BadArguments."""
        try:
            return cls.parse(data)
        except BadRecord as e:
            raise BadArguments(e.detail) from None

    @property
    def monitors(self) -> list[tuple[str, str]]:
        """Return (address, port) of each monitor, port '' if it is not named; an IPv6 address without
        brackets.
        """
        found = []
        for host in self.hosts:
            if host.startswith("["):
                address, _, port = host[1:].partition("]")
                found.append((address, port.lstrip(":")))
            else:
                address, _, port = host.partition(":")
                found.append((address, port))
        return found
