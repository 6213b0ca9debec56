# SPDX-License-Identifier: Apache-2.0
"""Write a VM's disks for libvirt: the domain XML, backing chains, I/O limits, a hot attach.

oned fixes the driver type per image and the path per datastore, and whether a disk is a file or on the
network. Here each follows the record that the transfer action left of the disk. The rest of the XML stays as
it came, to the byte.

    for oned a file <VMDIR>/disk.N             known by that path
    for oned rbd <SOURCE>[-<vm>-<disk>]        known by its target (vda), which vm.xml has for each disk

AttachMessage is the message of a hot attach, from which OpenNebula's script makes the disk's XML.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional, Union

from ...errors import BadArguments, EncryptedDisk, NotSupported
from ...model.device.classes import MEMORY
from ...model.disk import names as disk_names
from ...model.disk.network_disk import NetworkDisk
from ...model.disk.record import Record
from ...named import NamedTuple
from ...opennebula.args import DISK
from ...opennebula.xml_edit import Element, Markup, escape

Chain = Sequence["tuple[Union[str, NetworkDisk], str]"]
"""Path (or, of the last, place on the network) and format of each image below a disk's active layer, the
topmost first.
"""
Chains = Mapping[int, Chain]
"""Those of a VM's disks in qcow2."""
NO_CHAINS: Chains = {}


def chain_of(record: Record, files: object) -> Chain:
    """Return what a disk lies over: the answer to a ReadChain, and below that what its record names."""
    assert isinstance(files, (list, tuple))
    found: list[tuple[Union[str, NetworkDisk], str]] = [(str(path), str(format)) for path, format in files]
    return [*found, (record.over, "raw")] if record.over else found


def backing(chain: Chain) -> str:
    """Return `<backingStore>` for the images of `chain` and nothing below them.

    libvirt would find the chain itself, in the headers. But virt-aa-helper, which makes AppArmor's rules of
    the XML, may not read our layers (its profile lets it read `disk.N`, not `disk.N.snap/K`), and QEMU may
    not open what is not in the XML.
    """
    layers = ""
    for where, format in chain:
        kind, source = (
            ("file", f"<source file='{escape(where)}'/>")
            if isinstance(where, str)
            else ("network", on_network(where))
        )
        layers += f"<backingStore type='{kind}'><format type='{escape(format)}'/>{source}"
    return f"{layers}<backingStore/>{'</backingStore>' * len(chain)}"


def on_network(network: NetworkDisk) -> str:
    """Return `<source>` of a backing store; without its `<auth>` QEMU would connect as client.admin."""
    return (
        f"<source protocol='{escape(network.protocol)}' "
        f"name='{escape(network.name)}'>{reached(network)}{auth(network)}</source>"
    )


def reached(network: NetworkDisk) -> str:
    """Return the place of a source on the network, and the snapshot that is read."""
    hosts = "".join(
        f"<host name='{escape(name)}'" + (f" port='{escape(port)}'/>" if port else "/>")
        for name, port in network.monitors
    )
    snapshot = f"<snapshot name='{escape(network.snapshot)}'/>" if network.snapshot else ""
    return hosts + snapshot + (f"<config file='{escape(network.conf)}'/>" if network.conf else "")


def auth(network: NetworkDisk) -> str:
    """Return `<auth>`: the Ceph user and secret by which QEMU opens a source on the network."""
    return (
        f"<auth username='{escape(network.user)}'><secret type='ceph' "
        f"uuid='{escape(network.secret)}'/></auth>"
    )


def _chain_in(disk: Element) -> Optional[list[tuple[str, str]]]:
    """Return the files below a disk in the XML (for an image on the network ''), None if it has no end."""
    found, here = [], disk.first("backingStore")
    while here is not None and here.children:
        format, source = here.first("format"), here.first("source")
        found.append(
            (
                source.attributes.get("file", "") if source else "",
                format.attributes.get("type", "") if format else "",
            )
        )
        here = here.first("backingStore")
    return None if here is None else found


def lay_over(markup: Markup, disk: Element, source: Element, chain: Chain) -> None:
    """Put a disk over the files of `chain`, whatever it lay over."""
    if _chain_in(disk) == list(chain):
        return
    for child in disk.all("backingStore"):
        markup.remove_line(child)
    markup.insert_after(source, backing(chain))


LIMIT = re.compile(r"(TOTAL|READ|WRITE)_(BYTES|IOPS)_SEC(_MAX)?\Z")
"""OpenNebula's limits, which only administrators may set (VM_RESTRICTED_ATTR); other names limit nothing."""


class Limits(NamedTuple):
    """The limits of a disk per second, reads and writes together; 0: none.

    QEMU itself applies them, whatever the host's kernel and the kind of disk; libvirt keeps them in a
    checkpoint and in a live migration. A disk with limits of OpenNebula's own (TOTAL_BYTES_SEC and the like)
    keeps those, and gets none of ours.
    """

    bytes: int = 0
    operations: int = 0

    @property
    def iotune(self) -> str:
        """Return libvirt's element of them, '' without limits."""
        parts = (("total_bytes_sec", self.bytes), ("total_iops_sec", self.operations))
        text = "".join(f"<{name}>{value}</{name}>" for name, value in parts if value)
        return f"<iotune>{text}</iotune>" if text else ""

    def attributes(self, disk: Element) -> dict[str, str]:
        """Return them as attributes for OpenNebula's script, none for a DISK that has its own."""
        if any(child.text.strip() and LIMIT.match(child.name) for child in disk.children):
            return {}
        parts = (("TOTAL_BYTES_SEC", self.bytes), ("TOTAL_IOPS_SEC", self.operations))
        return {name: str(value) for name, value in parts if value}


def io_limits(answer: Mapping[str, tuple[int, int]]) -> dict[str, Limits]:
    """Return the limits of each class in a host's answer to ReadIoLimits."""
    return {name: Limits(*numbers) for name, numbers in answer.items()}


DRIVER = "semishared"


Records = Mapping[int, Record]
NO_LIMITS: Mapping[int, Limits] = {}


def disk_number(path: str, vm_dir: str) -> Optional[int]:
    """Return N if `path` is `<vm_dir>/disk.N`, however many slashes there are."""
    directory, _, name = path.rpartition("/")
    match = re.match(DISK, name)
    if not match or _slashes(directory) != _slashes(vm_dir):
        return None
    return int(match.group(1))


def _slashes(path: str) -> str:
    return "/".join(part for part in path.split("/") if part)


def target_of(disk: Element) -> str:
    """Return the device name that a disk has in the guest, '' without one."""
    target = disk.first("target")
    return target.attributes.get("dev", "") if target else ""


class Domain:
    """A domain XML on its way to libvirt; `targets`: device names of our disks, None if unknown."""

    def __init__(self, text: bytes, vm_dir: str, targets: Optional[Mapping[int, str]] = None) -> None:
        self.markup = Markup(text, "domain")
        self.vm_dir = vm_dir
        self.targets = targets

    def _disks(self) -> Iterator[tuple[int, Element, Element]]:
        """Yield number, disk and source of each disk in the VM directory, by oned or by us."""
        by_target = {target: number for number, target in (self.targets or {}).items() if target}
        for disk in self.markup.root.find("devices", "disk"):
            for source in disk.all("source"):
                path = source.attributes.get("file") or source.attributes.get("dev") or ""
                number = disk_number(path, self.vm_dir)
                if number is None and _is_rbd(disk, source):
                    number = by_target.pop(target_of(disk), None)
                if number is not None:
                    yield number, disk, source

    @property
    def disk_numbers(self) -> list[int]:
        """Return the numbers of disks in the VM directory, or of ours by the targets of vm.xml."""
        return sorted({number for number, _, _ in self._disks()})

    @property
    def has_unknown(self) -> bool:
        """Tell whether a disk on RBD may be ours or not, as no targets are known."""
        disks = self.markup.root.find("devices", "disk")
        return self.targets is None and any(
            _is_rbd(disk, source) for disk in disks for source in disk.all("source")
        )

    def sources(self, records: Records) -> dict[int, str]:
        """Return the file that libvirt opens for each recorded disk that is a file."""
        found = {}
        for number, _, source in self._disks():
            record = records.get(number)
            if record and not record.network:
                found[number] = record.source(self._named(number, source))
        return found

    def _named(self, number: int, source: Element) -> str:
        return source.attributes.get("file") or disk_names.disk(self.vm_dir, number)

    def with_records(
        self, records: Records, chains: Chains = NO_CHAINS, limits: Mapping[int, Limits] = NO_LIMITS
    ) -> bytes:
        """Return the XML in which each recorded disk is as its record says, over what `chains` says.

        `limits`: what it may do, unless OpenNebula says that itself.

        virt-aa-helper, which makes AppArmor's rules of the XML, may not read our layers: QEMU is not allowed
        to open a layer that is not in the XML.
        """
        for number, disk, source in self._disks():
            record = records.get(number)
            if record is None:
                continue
            kind, drivers = disk.attributes.get("type"), disk.all("driver")
            if kind not in ("file", "network") or (kind == "file" and "file" not in source.attributes):
                raise NotSupported(f"disk {number} is a {kind} disk for OpenNebula, not a file")
            if len(disk.all("source")) != 1 or len(drivers) > 1:
                raise BadArguments(f"disk {number} has more than one source or driver in the domain XML")
            if record.place.backing != "none" and not record.network and disk.first("encryption"):
                raise EncryptedDisk(
                    f"disk {number} is a qcow2 overlay ({record.how}) and has a LUKS_SECRET: QEMU "
                    f"would take the overlay for encrypted"
                )
            if number in limits and not disk.first("iotune"):
                self.markup.insert_before(source, limits[number].iotune)
            driver = ""
            wanted = {"type": record.format}
            if disk.attributes.get("device") == "disk" and not (
                drivers and "discard" in drivers[0].attributes
            ):
                # QEMU drops trimmed blocks only if told. DISCARD of the disk or of vmm_exec_kvm.conf comes
                # first (LibVirtDriverKVM.cc:1658).
                wanted["discard"] = "unmap"
            if MEMORY in record.classes:
                # A write that fails on full memory can be repeated: the guest is paused until there is room.
                policies = {name: "stop" for name in ("error_policy", "rerror_policy")}
                wanted.update(
                    {
                        name: value
                        for name, value in policies.items()
                        if not (drivers and name in drivers[0].attributes)
                    }
                )
            if drivers:
                for name, value in wanted.items():
                    self.markup.set_attribute(drivers[0], name, value)
            else:
                driver = (
                    "<driver name='qemu'"
                    + "".join(f" {name}='{escape(value)}'" for name, value in wanted.items())
                    + "/>"
                )
            path = record.source(self._named(number, source))
            if record.network or kind == "network":
                self._replace(disk, source, record, path, driver, chains.get(number))
                continue
            if path != source.attributes["file"]:
                self.markup.set_attribute(source, "file", path)
            if driver:
                self.markup.insert_before(source, driver)
            if number in chains:
                lay_over(self.markup, disk, source, chains[number])
        return self.markup.result()

    def _replace(
        self, disk: Element, source: Element, record: Record, path: str, driver: str, chain: Optional[Chain]
    ) -> None:
        """Make a disk one on the network, or a file, whatever oned takes it for."""
        for name in ("auth", "backingStore"):
            for child in disk.all(name):
                self.markup.remove_line(child)
        parts = [driver] if driver else []
        if record.network:
            parts += network_source(record.network)
        else:
            parts.append(f"<source file='{escape(path)}'/>")
        if record.format == "raw":
            # A raw image has nothing below it: libvirt must not look, with credentials of its own choice.
            parts.append(backing(()))
        elif chain is not None:
            parts.append(backing(chain))
        self.markup.set_attribute(disk, "type", "network" if record.network else "file")
        self.markup.replace(source, *parts)


def network_source(network: NetworkDisk) -> list[str]:
    """Return `<source>` and `<auth>` of a disk."""
    return [
        f"<source protocol='{escape(network.protocol)}' "
        f"name='{escape(network.name)}'>{reached(network)}</source>",
        auth(network),
    ]


def _is_rbd(disk: Element, source: Element) -> bool:
    return disk.attributes.get("type") == "network" and source.attributes.get("protocol") == "rbd"


def check_system_snapshot(records: Records) -> None:
    """Raise NotSupported, naming the disk, if a disk cannot be in a snapshot of the whole VM."""
    for number, record in sorted(records.items()):
        if record.format != "qcow2" and not record.readonly:
            raise NotSupported(
                f"disk {number} ({record.how}, {record.format}) cannot take part in a snapshot of "
                f"the whole VM, which libvirt "
                "keeps inside qcow2 files; snapshot its disks one by one"
            )


def disks_of_ours(vm: bytes) -> dict[int, str]:
    """Return number and target of each disk in `vm.xml` that our transfer driver made; it makes no shares."""
    root = Markup(vm, "VM").root
    ours = [
        disk
        for disk in root.find("TEMPLATE", "DISK")
        if disk.value("TM_MAD") == DRIVER and disk.value("TYPE") != "FILESYSTEM"
    ]
    numbered = [(disk.number("DISK_ID"), disk.value("TARGET")) for disk in ours]
    return {number: target for number, target in numbered if number is not None}


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
        """Return the message with which the stock script attaches the disk of the record, with `limits`."""
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
            # The script takes all from here, and appends VM and disk to SOURCE if CLONE is YES.
            changes["TYPE"] = "RBD_CDROM" if is_cdrom else "RBD"
            changes.update(SOURCE=network.name, CLONE="NO", CEPH_HOST=" ".join(network.hosts))
            changes.update(CEPH_USER=network.user, CEPH_SECRET=network.secret)
        elif is_cdrom:
            changes["TYPE"] = "CDROM"
        elif self.disk.value("TYPE").upper() not in ("FS", "SWAP"):
            changes["TYPE"] = "FILE"
        changes.update(limits.attributes(self.disk))
        for name, value in changes.items():
            self.markup.set_child(self.disk, name, value)
        return self.markup.result()
