# SPDX-License-Identifier: Apache-2.0
"""Disks that QEMU opens over the network: how a record names one, and how libvirt is told.

    "network": {"protocol": "rbd", "name": "pool/image", "hosts": ["mon1:6789"], "user": "libvirt", "secret": "<uuid>"}

User and secret are required: without them QEMU would connect as client.admin wherever it finds that key (LAB, "cephx and
the backing chain"). The secret is libvirt's name of the key, never the key.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import BadRecord
from ..opennebula.markup import escape

PROTOCOLS = ("rbd",)
NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.\-]*(/[A-Za-z0-9_.][A-Za-z0-9_.\-]*){1,2}\Z")
"""Pool, namespace, image: without `@`, `:`, `=` and `\\`, which mean something to librbd and QEMU."""
MONITOR = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.\-]*)(?::([0-9]{1,5}))?\Z")
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")
SECRET = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z")


class NetworkDisk(NamedTuple):
    """Where a disk is, and as whom QEMU opens it."""

    name: str
    hosts: tuple[str, ...]
    user: str
    secret: str
    protocol: str = "rbd"

    @classmethod
    def parse(cls, disk: int, data: object) -> NetworkDisk:
        """Return what the record of `disk` says under `network`; raise BadRecord."""
        if not isinstance(data, dict) or set(data) != set(cls._fields):
            raise BadRecord(f"the record of disk {disk} does not say where on the network the disk is")
        hosts = data["hosts"]
        if data["protocol"] not in PROTOCOLS:
            raise BadRecord(f"the record of disk {disk} says protocol={data['protocol']!r}")
        for key, pattern in (("name", NAME), ("user", USER), ("secret", SECRET)):
            if not isinstance(data[key], str) or not pattern.match(data[key]):
                raise BadRecord(f"the record of disk {disk} says {key}={data[key]!r}")
        if not isinstance(hosts, list) or not all(isinstance(host, str) and MONITOR.match(host) for host in hosts):
            raise BadRecord(f"the record of disk {disk} says hosts={hosts!r}")
        return cls(data["name"], tuple(hosts), data["user"], data["secret"], data["protocol"])

    def source(self) -> str:
        """Return the `<source>` of a domain."""
        hosts = ""
        for host in self.hosts:
            name, _, port = host.partition(":")
            hosts += f"<host name='{escape(name)}'" + (f" port='{escape(port)}'/>" if port else "/>")
        return f"<source protocol='{escape(self.protocol)}' name='{escape(self.name)}'>{hosts}</source>"

    def auth(self) -> str:
        """Return the `<auth>` of a domain's disk."""
        return f"<auth username='{escape(self.user)}'><secret type='ceph' uuid='{escape(self.secret)}'/></auth>"
