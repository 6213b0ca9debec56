# SPDX-License-Identifier: Apache-2.0
"""What libvirt is told about a VM's disks: the domain XML, and the message of a hot attach.

oned fixes the driver type per image and the path per datastore; here they follow the record that the transfer action
left of each disk. Everything else in the XML stays as it came, to the byte.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

from ..errors import BadArguments, BadRecord, NotSupported
from ..opennebula.args import DISK, absolute
from ..opennebula.markup import Element, Markup, escape

RECORD_VERSION = 1
PLACES = {
    "overlay": "local",
    "copy": "local",
    "volatile": "local",
    "in-place": "shared",
    "store-clone": "shared",
}
FORMATS = ("raw", "qcow2")
DRIVER = "semishared"


class DiskRecord(NamedTuple):
    """What the transfer action made of one disk: `<VMDIR>/.semishared/disk.<N>.json`."""

    disk: int
    how: str
    format: str
    path: str
    readonly: bool = False

    @property
    def is_local(self) -> bool:
        return PLACES[self.how] == "local"

    @property
    def layer(self) -> str:
        """Return the active layer's path seen from the disk's own: `.snap/K`, '' if the disk is a plain file."""
        folder, _, layer = self.path.rpartition("/")
        return f".snap/{layer}" if folder.endswith(f"/disk.{self.disk}.snap") and layer.isdigit() else ""

    def source(self, named: str) -> str:
        """Return what libvirt is to open for the disk that OpenNebula names `named`.

        A local disk stays where this deployment says that the VM directory is.
        """
        return f"{named}{self.layer}" if self.is_local else self.path

    @classmethod
    def parse(cls, disk: int, text: bytes) -> DiskRecord:
        """Return the record of `disk` in `text`; raise BadRecord."""
        try:
            data = json.loads(text)
        except ValueError as e:
            raise BadRecord(f"the record of disk {disk} is not JSON: {e}") from None
        if not isinstance(data, dict) or not isinstance(data.get("version"), int):
            raise BadRecord(f"the record of disk {disk} has no version")
        if data["version"] > RECORD_VERSION:
            raise BadRecord(f"the record of disk {disk} has version {data['version']}, newer than {RECORD_VERSION} known here")
        how, place, path = data.get("how"), data.get("place"), data.get("path")
        if data.get("disk") != disk:
            raise BadRecord(f"the record of disk {disk} is that of disk {data.get('disk')!r}")
        if not isinstance(how, str) or PLACES.get(how) is None or PLACES[how] != place:
            raise BadRecord(f"the record of disk {disk} says how={how!r}, place={place!r}")
        if data.get("format") not in FORMATS:
            raise BadRecord(f"the record of disk {disk} says format={data.get('format')!r}")
        try:
            path = absolute(path, "path") if isinstance(path, str) else ""
        except BadArguments as e:
            raise BadRecord(f"the record of disk {disk}: {e.detail}") from None
        if not path:
            raise BadRecord(f"the record of disk {disk} names no path")
        return cls(disk, how, data["format"], path, data.get("readonly") is True)


Records = Mapping[int, DiskRecord]


def disk_number(path: str, vm_dir: str) -> Optional[int]:
    """Return N if `path` is `<vm_dir>/disk.N`, however many slashes there are."""
    directory, _, name = path.rpartition("/")
    match = DISK.match(name)
    if not match or _slashes(directory) != _slashes(vm_dir):
        return None
    return int(match.group(1))


def _slashes(path: str) -> str:
    return "/".join(part for part in path.split("/") if part)


def _vm_disks(domain: Markup, vm_dir: str) -> Iterator[tuple[int, Element, Element]]:
    """Yield number, disk and source of each disk that is a file or device `<vm_dir>/disk.N`."""
    for disk in domain.root.find("devices", "disk"):
        for source in disk.all("source"):
            path = source.attributes.get("file") or source.attributes.get("dev") or ""
            number = disk_number(path, vm_dir)
            if number is not None:
                yield number, disk, source


class Domain:
    """A domain XML on its way to libvirt."""

    def __init__(self, text: bytes, vm_dir: str) -> None:
        self.markup = Markup(text, "domain")
        self.vm_dir = vm_dir

    @property
    def disk_numbers(self) -> list[int]:
        """Return the numbers of the disks that lie in the VM directory, as the XML names them."""
        return sorted({number for number, _, _ in _vm_disks(self.markup, self.vm_dir)})

    def with_records(self, records: Records) -> bytes:
        """Return the XML in which each recorded disk has the path and the format of its record."""
        for number, disk, source in _vm_disks(self.markup, self.vm_dir):
            record = records.get(number)
            if record is None:
                continue
            if disk.attributes.get("type") != "file" or "file" not in source.attributes:
                raise NotSupported(f"disk {number} is a {disk.attributes.get('type')} disk for OpenNebula, not a file")
            drivers = disk.all("driver")
            if len(disk.all("source")) != 1 or len(drivers) > 1:
                raise BadArguments(f"disk {number} has more than one source or driver in the domain XML")
            path = record.source(source.attributes["file"])
            if path != source.attributes["file"]:
                self.markup.set_attribute(source, "file", path)
            if drivers:
                self.markup.set_attribute(drivers[0], "type", record.format)
            else:
                self.markup.insert_before(source, f"<driver name='qemu' type='{escape(record.format)}'/>")
        return self.markup.result()


LAYER = re.compile(r"/disk\.([0-9]{1,9})(\.snap/[0-9]+)\Z")


def with_active_layers(domain: bytes, records: Records) -> bytes:
    """Return a checkpoint's domain XML with each disk at the layer that is active now, in the layer's format.

    Backing chains go: snapshots were made, merged and deleted since, and libvirt finds the chain again by the headers.
    """
    markup = Markup(domain, "domain")
    on_store = {record.path.rpartition("/")[0]: record for record in records.values() if record.how == "store-clone"}
    for disk in markup.root.find("devices", "disk"):
        source, driver = disk.first("source"), disk.first("driver")
        path = source.attributes.get("file", "") if source else ""
        match = LAYER.search(path)
        record = records.get(int(match.group(1))) if match else on_store.get(path.rpartition("/")[0])
        if record is None or source is None or driver is None:
            continue
        if match and record.layer:
            markup.set_attribute(source, "file", path[: match.start(2)] + record.layer)
        elif not match:
            markup.set_attribute(source, "file", record.path)
        markup.set_attribute(driver, "type", record.format)
        for chain in disk.all("backingStore"):
            markup.remove(chain)
    return markup.result()


def check_system_snapshot(records: Records) -> None:
    """Raise NotSupported, naming the disk, if any cannot take part in a snapshot of the whole VM."""
    for number, record in sorted(records.items()):
        if record.format != "qcow2" and not record.readonly:
            raise NotSupported(
                f"disk {number} ({record.how}, {record.format}) cannot take part in a snapshot of the whole VM, which libvirt "
                "keeps inside qcow2 files; snapshot its disks one by one"
            )


def disks_of_ours(vm: bytes) -> set[int]:
    """Return the numbers of the disks that `vm.xml` says our transfer driver made."""
    root = Markup(vm, "VM").root
    return {
        int(disk.value("DISK_ID"))
        for disk in root.find("TEMPLATE", "DISK")
        if disk.value("TM_MAD") == DRIVER and disk.value("DISK_ID").isdigit()
    }


class AttachMessage:
    """The driver message that names the disk to attach (DISK with ATTACH=YES)."""

    def __init__(self, text: bytes) -> None:
        self.markup = Markup(text, "VMM_DRIVER_ACTION_DATA")
        disks = [disk for disk in self.markup.root.find("VM", "TEMPLATE", "DISK") if disk.value("ATTACH") == "YES"]
        if len(disks) != 1:
            raise BadArguments(f"{len(disks)} disks to attach in the driver message")
        self.disk = disks[0]

    @property
    def number(self) -> int:
        """Return the disk's number."""
        number = self.disk.value("DISK_ID")
        if not number.isascii() or not number.isdigit():
            raise BadArguments(f"the disk to attach has the number {number!r}")
        return int(number)

    @property
    def is_ours(self) -> bool:
        return self.disk.value("TM_MAD") == DRIVER

    def with_record(self, record: DiskRecord) -> bytes:
        """Return the message that makes the stock script attach a file of the record's format."""
        for name in ("DRIVER", "FORMAT"):
            self.markup.set_child(self.disk, name, record.format)
        kind = self.disk.value("TYPE").upper()
        if kind.endswith("CDROM"):
            kind = "CDROM"
        elif kind not in ("FS", "SWAP"):
            kind = "FILE"
        if self.disk.value("TYPE").upper() != kind:
            self.markup.set_child(self.disk, "TYPE", kind)
        self.markup.set_child(self.disk, "DISK_TYPE", "FILE")
        return self.markup.result()
