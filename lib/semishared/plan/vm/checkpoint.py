# SPDX-License-Identifier: Apache-2.0
"""The domain XML inside a checkpoint: compared with oned and our records, and updated to the disks of now.

A checkpoint travels with the VM, from a host that may have written anything into it. Here its VM and each of
its disks are checked. Emulator, and devices that are no disks, are that host's word
(docs/explanation/security.md).
"""

from __future__ import annotations

import posixpath
from typing import Optional, Union

from ...errors import BadArguments, ForeignCheckpoint
from ...model.disk import names as disk_names
from ...model.disk.network_disk import NetworkDisk
from ...model.disk.record import Record
from ...named import NamedTuple
from ...opennebula.xml_edit import Element, Markup
from ..libvirt.domain import DRIVER, NO_CHAINS, Chains, Records, lay_over, network_source, target_of


class Told(NamedTuple):
    """oned's word with the action that resumes the VM."""

    deploy_id: str
    others: dict[int, str]
    """SOURCE of each disk of another driver, by number."""
    has_raw: bool
    """Whether the VM's template has raw parts of a domain."""
    ours: frozenset[int] = frozenset()
    """The disks that we have made, each of which has a record."""
    context: int = -1
    """The disk that is the CONTEXT ISO, which has none."""

    @classmethod
    def parse(cls, message: bytes) -> Optional[Told]:
        """Return the driver message of `restore`, None if there is none."""
        try:
            root = Markup(message, "VMM_DRIVER_ACTION_DATA").root
        except BadArguments:
            return None
        vm = root.first("VM")
        if vm is None:
            return None
        numbered = [(disk.number("DISK_ID"), disk) for disk in vm.find("TEMPLATE", "DISK")]
        others = {
            number: disk.value("SOURCE")
            for number, disk in numbered
            if number is not None and disk.value("TM_MAD") != DRIVER
        }
        ours = (
            number
            for number, disk in numbered
            if number is not None and number not in others and disk.value("TYPE") != "FILESYSTEM"
        )
        context = next((found.number("DISK_ID") for found in vm.find("TEMPLATE", "CONTEXT")), None)
        has_raw = any(True for _ in vm.find("TEMPLATE", "RAW"))
        return cls(
            vm.value("DEPLOY_ID"), others, has_raw, frozenset(ours), -1 if context is None else context
        )


def check(domain: bytes, records: Records, vm_dir: str, told: Optional[Told]) -> None:
    """Raise ForeignCheckpoint unless a checkpoint's domain XML is of this VM and its disks are those that
    records and oned name.
    """
    root = Markup(domain, "domain").root
    names = (root.value("name"), root.value("uuid"))
    if told and told.deploy_id and told.deploy_id not in names:
        raise ForeignCheckpoint(
            f"it is of domain {names[0]!r} ({names[1]}), and the VM is {told.deploy_id!r}"
        )
    if told and not told.has_raw and any(True for _ in root.find("devices", "filesystem")):
        raise ForeignCheckpoint(
            "it gives the guest a directory, and no guest that has one is written to a checkpoint"
        )
    if b"<dataStore" in domain:
        raise ForeignCheckpoint("it names a second file of a disk in qcow2, and none has one")
    known = {record.path for record in records.values() if record.path and not record.is_local}
    folders = {path.rpartition("/")[0] for path in known if disk_names.are_layers(path.rpartition("/")[0])}
    pools = {record.network.name for record in records.values() if record.network}
    numbers = {*records, *told.others, told.context} if told else None
    for disk in root.find("devices", "disk"):
        twice = [name for name in ("source", "driver", "target") if len(disk.all(name)) > 1]
        wrong = f"one with two of <{twice[0]}>" if twice else ""
        for source in disk.all("source"):
            wrong = wrong or _foreign(
                source, posixpath.normpath(vm_dir), numbers, told, known, folders, pools
            )
        if wrong:
            raise ForeignCheckpoint(f"its disk {target_of(disk) or '?'} is {wrong}")


def _is_in(path: str, vm_dir: str, numbers: Optional[set[int]]) -> bool:
    """Tell whether a path is a disk of the VM, in its directory here or in another system datastore's."""
    local, parts = disk_names.disk_file(path), path.split("/")
    if local is None or ".." in parts or (numbers is not None and local.disk not in numbers):
        return False
    place, system, vm = posixpath.normpath(local.vm_dir).rsplit("/", 2)
    here, _, own = vm_dir.rsplit("/", 2)
    return (place.lstrip("/"), vm) == (here.lstrip("/"), own) and disk_names.is_number(system)


def _foreign(
    source: Element,
    vm_dir: str,
    numbers: Optional[set[int]],
    told: Optional[Told],
    known: set[str],
    folders: set[str],
    pools: set[str],
) -> str:
    """Return what a disk is that neither a record nor oned names, '' if one does."""
    words = {
        name: value for name, value in source.attributes.items() if name not in ("index", "startupPolicy")
    }
    path, name = words.get("file") or words.get("dev") or "", words.get("name", "")
    text = ", ".join(f"{key}={value}" for key, value in words.items())
    # TYPE decides which of several words counts.
    if len(words) > (1 if path else 2):
        return repr(text)
    if path:
        if _is_in(path, vm_dir, numbers):
            return ""
        is_known = path in known or path.rpartition("/")[0] in folders
        return "" if is_known or (told and path in told.others.values()) else repr(path)
    if name in pools and words.get("protocol") == "rbd":
        return ""
    if words.get("protocol") and (
        told is None or any(name == one or name.startswith(f"{one}-") for one in told.others.values() if one)
    ):
        return ""
    return repr(name or text) if text else ""


def with_active_layers(
    domain: bytes, records: Records, chains: Chains = NO_CHAINS, context: int = -1
) -> bytes:
    """Return a checkpoint's domain XML with each disk at the layer that is active now, in its format, over
    what `chains` says.

    Snapshots were made, merged and deleted since, and of a disk that was attached to the running guest
    libvirt has not kept what it lies over. Local disks stay in the directory that the checkpoint names: the
    stock restore replaces that. Whatever else the checkpoint says of them, a disk is opened as its record
    says, or as raw (the CONTEXT ISO has none).
    """
    markup = Markup(domain, "domain")
    shared, on_network = {}, {record.network.name: record for record in records.values() if record.network}
    for record in records.values():
        if record.path and not record.is_local:
            # Of a clone any layer, of a disk in place the image.
            shared[record.path.rpartition("/")[0] if record.place.backing == "store" else record.path] = (
                record
            )
    for disk in markup.root.find("devices", "disk"):
        source, driver = disk.first("source"), disk.first("driver")
        path = source.attributes.get("file", "") if source else ""
        local, here = _local(path), ("", "")
        found = (
            _recorded(local, records) if local else shared.get(path) or shared.get(path.rpartition("/")[0])
        )
        name = (
            source.attributes.get("name", "") if source and source.attributes.get("protocol") == "rbd" else ""
        )
        network = on_network.get(name)
        found = found or network
        if source is None or (found is None and not (local and local.disk == context)):
            continue
        if driver is None:
            markup.insert_before(source, f"<driver name='qemu' type='{found.format if found else 'raw'}'/>")
        else:
            markup.set_attribute(driver, "type", found.format if found else "raw")
        if (
            found
            and found.readonly
            and not found.is_local
            and not disk.first("readonly")
            and disk.attributes.get("device") != "cdrom"
        ):
            markup.insert_before(source, "<readonly/>")
        if found is None or network:
            _plain(markup, disk, source, network)
            continue
        if local:
            plain = disk_names.disk(local.vm_dir, local.disk)
            markup.set_attribute(source, "file", found.active(plain))
            here = (found.path.rpartition("/")[0], disk_names.layers(plain)) if found.layer else here
        else:
            markup.set_attribute(source, "file", found.path)
        chain = chains.get(found.disk)
        if chain is not None:
            lay_over(markup, disk, source, [(_moved(name, *here), format) for name, format in chain])
        else:
            _plain(markup, disk, source, None)
    return markup.result()


def _plain(markup: Markup, disk: Element, source: Element, record: Optional[Record]) -> None:
    """Put a disk over nothing; one on the network is reached as its record says."""
    for child in disk.all("backingStore"):
        if child.children:
            markup.remove(child)
    if record and record.network and _reached(disk, source) != _reached(*_elements(record.network)):
        for child in disk.all("auth"):
            markup.remove(child)
        markup.replace(source, *network_source(record.network))


def _elements(network: NetworkDisk) -> tuple[Element, Element]:
    disk = Markup(f"<disk>{''.join(network_source(network))}</disk>".encode(), "disk").root
    return disk, disk.all("source")[0]


def _reached(disk: Element, source: Element) -> list[object]:
    """Return how a disk on the network is reached: monitors, configuration, snapshot, Ceph user."""
    auth = [one for element in (disk, source) for one in element.all("auth")]
    secrets = [secret.attributes for one in auth for secret in one.all("secret")]
    inside = sorted(
        (one.name, sorted(one.attributes.items()))
        for one in source.children
        if one.name not in ("auth", "privateData")
    )
    return [inside, [one.attributes.get("username") for one in auth], [one.get("uuid") for one in secrets]]


def _local(path: str) -> Optional[disk_names.DiskFile]:
    found = disk_names.disk_file(path)
    return found if found and disk_names.is_number(posixpath.basename(found.vm_dir)) else None


def _recorded(local: disk_names.DiskFile, records: Records) -> Optional[Record]:
    """Return the record of a local disk by its name and its VM directory's, whatever the path above."""
    record = records.get(local.disk)
    same = _local(record.path) if record and record.is_local else None
    is_same = (
        same
        and same.disk == local.disk
        and posixpath.basename(same.vm_dir) == posixpath.basename(local.vm_dir)
    )
    return record if is_same else None


def _moved(path: Union[str, NetworkDisk], was: str, now: str) -> Union[str, NetworkDisk]:
    if not isinstance(path, str):
        return path
    folder, _, name = path.rpartition("/")
    return f"{now}/{name}" if was and folder == was else path
