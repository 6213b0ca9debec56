# SPDX-License-Identifier: Apache-2.0
"""A disk that QEMU opens over the network: what its record says, and what the domain XML is written from.

    {"disk": 0, "place": "shared", "how": "in-place", "format": "raw", "path": "", "readonly": false,
     "network": {"protocol": "rbd", "name": "one/one-35", "hosts": ["10.77.0.1:6789"], "user": "libvirt",
                 "secret": "00000000-0000-4000-8000-0000000000cc", "conf": ""}}

There is no disk.N on the host. `how` is in-place (the image itself) or store-clone (its clone for this disk). User and
secret are required: without them QEMU would connect as client.admin wherever it finds that key.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Tuple

from ..errors import BadRecord

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
"""Pools, images, users: nothing that means something to rbd (`@ / :`), to librados (`= ,`) or to a shell."""
USER = re.compile(NAME + r"\Z")
STORED = re.compile(rf"({NAME})/({NAME})\Z")
MONITOR = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.\-]*|\[[0-9a-fA-F:]+\])(:[0-9]{1,5})?\Z")
SECRET = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")
CONF = re.compile(r"/[A-Za-z0-9_.\-/]+\Z")


class NetworkDisk(NamedTuple):
    """Where QEMU finds a disk, and as whom it opens it."""

    name: str
    """POOL/IMAGE"""
    hosts: Tuple[str, ...]
    """Monitors, `address`, `address:port` or `[address]:port`; none: those of the configuration `conf`."""
    user: str
    secret: str
    conf: str = ""
    protocol: str = "rbd"

    @classmethod
    def parse(cls, data: object) -> NetworkDisk:
        """Return the disk in a record's "network"; raise BadRecord for anything that could not have been written by us."""
        known = cls("", (), "", "")._asdict()
        if not isinstance(data, dict) or set(data) != set(known) or not isinstance(data["hosts"], (list, tuple)):
            raise BadRecord(f"not a network disk: {str(data)[:200]}")
        texts = [data["protocol"], data["name"], data["user"], data["secret"], data["conf"], *data["hosts"]]
        if not all(isinstance(text, str) for text in texts):
            raise BadRecord(f"not a network disk: {str(data)[:200]}")
        if (
            data["protocol"] != "rbd" or not STORED.match(data["name"]) or not USER.match(data["user"])
            or not SECRET.match(data["secret"]) or (data["conf"] and not CONF.match(data["conf"]))
            or not all(MONITOR.match(host) for host in data["hosts"])
        ):  # fmt: skip
            raise BadRecord(f"a network disk that nobody would write: {str(data)[:200]}")
        return cls(**{**data, "hosts": tuple(data["hosts"])})

    @property
    def monitors(self) -> list[tuple[str, str]]:
        """Return (address, port) of each monitor, port '' if it is not named; an IPv6 address without brackets."""
        found = []
        for host in self.hosts:
            if host.startswith("["):
                address, _, port = host[1:].partition("]")
                found.append((address, port.lstrip(":")))
            else:
                address, _, port = host.partition(":")
                found.append((address, port))
        return found
