# SPDX-License-Identifier: Apache-2.0
"""The domain XML inside a checkpoint: compared with what oned and our records say of the disks, and brought to what has become of those.

A checkpoint travels with the VM, from a host that may have written into it what it likes. What there is here to compare it with is
compared: whose it is, and what each disk is. Emulator, and devices that are no disks, are that host's word (docs/explanation/security.md).
"""

from __future__ import annotations

import posixpath
from typing import Optional, Union

from ..errors import BadArguments, ForeignCheckpoint
from ..model import layout
from ..model.network_disk import NetworkDisk
from ..model.record import Record
from ..named import NamedTuple
from ..opennebula.xml_edit import Element, Markup
from .backing import NO_CHAINS, Chains, lay_over
from .domain_xml import DRIVER, Records


class Told(NamedTuple):
    """What oned says with the action of the VM that is resumed."""

    deploy_id: str
    others: dict[int, str]
    """SOURCE of each disk that is another driver's, by number: that one knows what it is."""
    has_raw: bool
    """Whether the VM's template has parts of a domain, of whatever kind."""

    @classmethod
    def parse(cls, message: bytes) -> Optional[Told]:
        """Return what the driver message of `restore` says, None if there is none."""
        try:
            root = Markup(message, "VMM_DRIVER_ACTION_DATA").root
        except BadArguments:
            return None
        vm = root.first("VM")
        if vm is None:
            return None
        numbered = [(disk.number("DISK_ID"), disk) for disk in vm.find("TEMPLATE", "DISK")]
        others = {number: disk.value("SOURCE") for number, disk in numbered if number is not None and disk.value("TM_MAD") != DRIVER}
        return cls(vm.value("DEPLOY_ID"), others, any(True for _ in vm.find("TEMPLATE", "RAW")))


def check(domain: bytes, records: Records, vm_dir: str, told: Optional[Told]) -> None:
    """Raise ForeignCheckpoint unless a checkpoint's domain XML is of this VM and its disks are those that records and oned name."""
    root = Markup(domain, "domain").root
    names = (root.value("name"), root.value("uuid"))
    if told and told.deploy_id and told.deploy_id not in names:
        raise ForeignCheckpoint(f"it is of domain {names[0]!r} ({names[1]}), and the VM is {told.deploy_id!r}")
    if told and not told.has_raw and any(True for _ in root.find("devices", "filesystem")):
        raise ForeignCheckpoint("it gives the guest a directory, and no guest that has one is written to a checkpoint")
    known = {record.path for record in records.values() if record.path and not record.is_local}
    folders = {path.rpartition("/")[0] for path in known if layout.are_layers(path.rpartition("/")[0])}
    pools = {record.network.name for record in records.values() if record.network}
    vm = posixpath.basename(posixpath.normpath(vm_dir))
    for disk in root.find("devices", "disk"):
        for source in disk.all("source"):
            wrong = _foreign(source, vm, told, known, folders, pools)
            if wrong:
                target = disk.first("target")
                raise ForeignCheckpoint(f"its disk {target.attributes.get('dev', '?') if target else '?'} is {wrong}")


def _foreign(source: Element, vm: str, told: Optional[Told], known: set[str], folders: set[str], pools: set[str]) -> str:
    """Return what a disk is that neither a record nor oned names, '' if one does."""
    words = source.attributes
    path = words.get("file") or words.get("dev") or ""
    if path:
        local = layout.disk_file(path)
        if local and posixpath.basename(local.vm_dir) == vm and ".." not in path.split("/"):
            return ""
        is_known = path in known or path.rpartition("/")[0] in folders
        return "" if is_known or (told and path in told.others.values()) else repr(path)
    name = words.get("name", "")
    if name in pools:
        return ""
    if words.get("protocol") and (told is None or any(name == one or name.startswith(f"{one}-") for one in told.others.values() if one)):
        return ""
    text = name or ", ".join(f"{key}={value}" for key, value in words.items() if key not in ("index", "startupPolicy"))
    return repr(text) if text else ""


def with_active_layers(domain: bytes, records: Records, chains: Chains = NO_CHAINS) -> bytes:
    """Return a checkpoint's domain XML with each disk at the layer that is active now, in its format, over what `chains` says.

    Snapshots were made, merged and deleted since, and of a disk that was attached to the running guest libvirt has not kept
    what it lies over. Local disks stay in the directory that the checkpoint names: the stock restore replaces that.
    """
    markup = Markup(domain, "domain")
    shared = {}
    for record in records.values():
        if record.path and not record.is_local:
            # Of a clone whichever layer, of a disk in place the image.
            shared[record.path.rpartition("/")[0] if record.place.backing == "store" else record.path] = record
    for disk in markup.root.find("devices", "disk"):
        source, driver = disk.first("source"), disk.first("driver")
        path = source.attributes.get("file", "") if source else ""
        local, here = _local(path), ("", "")
        found = _recorded(local, records) if local else shared.get(path) or shared.get(path.rpartition("/")[0])
        if found is None or source is None or driver is None:
            continue
        if local:
            plain = layout.disk(local.vm_dir, local.disk)
            markup.set_attribute(source, "file", found.active(plain))
            here = (found.path.rpartition("/")[0], layout.layers(plain)) if found.layer else here
        else:
            markup.set_attribute(source, "file", found.path)
        markup.set_attribute(driver, "type", found.format)
        chain = chains.get(found.disk)
        if chain is not None:
            lay_over(markup, disk, source, [(_moved(name, *here), format) for name, format in chain])
        else:
            for child in disk.all("backingStore"):
                markup.remove(child)
    return markup.result()


def _local(path: str) -> Optional[layout.DiskFile]:
    found = layout.disk_file(path)
    return found if found and layout.is_number(posixpath.basename(found.vm_dir)) else None


def _recorded(local: layout.DiskFile, records: Records) -> Optional[Record]:
    """Return the record of a local disk by its name and that of the VM's directory, whatever lies above."""
    record = records.get(local.disk)
    same = _local(record.path) if record and record.is_local else None
    is_same = same and same.disk == local.disk and posixpath.basename(same.vm_dir) == posixpath.basename(local.vm_dir)
    return record if is_same else None


def _moved(path: Union[str, NetworkDisk], was: str, now: str) -> Union[str, NetworkDisk]:
    if not isinstance(path, str):
        return path
    folder, _, name = path.rpartition("/")
    return f"{now}/{name}" if was and folder == was else path
