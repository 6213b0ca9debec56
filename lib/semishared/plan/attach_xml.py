# SPDX-License-Identifier: Apache-2.0
"""The message of a hot attach, from which OpenNebula's script makes the disk's XML."""

from __future__ import annotations

from ..errors import BadArguments, NotSupported
from ..model.record import Record
from ..opennebula.xml_edit import Markup
from .domain_xml import DRIVER
from .io_limits import Limits


class AttachMessage:
    """The driver message that names the disk to attach (DISK with ATTACH=YES)."""

    def __init__(self, text: bytes) -> None:
        self.markup = Markup(text, "VMM_DRIVER_ACTION_DATA")
        disks = [
            disk for disk in self.markup.root.find("VM", "TEMPLATE", "DISK") if disk.value("ATTACH") == "YES"
        ]
        if len(disks) != 1:
            raise BadArguments(f"{len(disks)} disks to attach in the driver message")
        self.disk = disks[0]

    @property
    def number(self) -> int:
        """Return the disk's number."""
        number = self.disk.number("DISK_ID")
        if number is None or number < 0:
            raise BadArguments(f"the disk to attach has the number {self.disk.value('DISK_ID')!r}")
        return number

    @property
    def is_ours(self) -> bool:
        return self.disk.value("TM_MAD") == DRIVER

    def with_record(self, record: Record, limits: Limits = Limits()) -> bytes:  # noqa: B008 - a tuple
        """Return the message that makes the stock script attach what the record says, which may do what
        `limits` says.
        """
        changes = {
            "DRIVER": record.format,
            "FORMAT": record.format,
            "DISK_TYPE": "RBD" if record.network else "FILE",
        }
        is_cdrom = self.disk.value("TYPE").upper().endswith("CDROM")
        if record.network:
            network = record.network
            if (network.conf and not network.hosts) or any(host.startswith("[") for host in network.hosts):
                raise NotSupported(
                    f"attaching disk {record.disk}: OpenNebula's script takes monitors as "
                    f"address[:port] in CEPH_HOST alone"
                )
            # That script takes all of it from here, and appends VM and disk to SOURCE if CLONE is YES.
            changes["TYPE"] = "RBD_CDROM" if is_cdrom else "RBD"
            changes.update(SOURCE=network.name, CLONE="NO", CEPH_HOST=" ".join(network.hosts))
            changes.update(CEPH_USER=network.user, CEPH_SECRET=network.secret)
        elif is_cdrom:
            changes["TYPE"] = "CDROM"
        elif self.disk.value("TYPE").upper() not in ("FS", "SWAP"):
            changes["TYPE"] = "FILE"
        changes.update(limits.attributes(self.disk))
        for name, value in changes.items():
            if name != "TYPE" or self.disk.value(name).upper() != value:
                self.markup.set_child(self.disk, name, value)
        return self.markup.result()
