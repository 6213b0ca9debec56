# SPDX-License-Identifier: Apache-2.0
"""A running guest goes on in a copy of its VM directory, on the same host (plan/vm/datastore_change.py).

    origin   K <- delta  <- guest      K <- delta  <- guest      K <- delta
    copy     K <- delta                K <- delta  = mirror      K <- delta  <- guest

premigrate has put deltas on its disks (deltas.py) and copied the layers below them. `mirrored` has QEMU
mirror the deltas. The next action on the VM's disks ends that, in the directory where oned then has the VM:
in the origin it ends the mirrors, in the copy `enter` does; the deltas are merged in either. The note of the
deltas in the copy says where it comes `from`.

QEMU writes to the source of a mirror first. So until a disk's record in the copy names the delta there, the
one in the origin counts, also for a guest that died: `enter` then fetches it. The record changes only while
the guest rests and both are equal.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Dict
from xml.etree import ElementTree

from ..errors import MigrationRefused, MissingImage
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.vm.move_steps import CheckNotOpen
from ..tools import files
from ..tools.effects import point
from ..tools.run import work
from . import active_layer, block_jobs, domain, freeze, job_events, libvirtd, mirror

BEGIN_S = 60
METADATA = "http://opennebula.org/xmlns/libvirt/1.0"
"""Namespace of OpenNebula's metadata in a domain: `<one:system_datastore>` is its VM directory."""


def mirrored(vm_dir: str, origin: str, name: str) -> Dict[str, Record]:
    """Have QEMU mirror the deltas in `origin` into those of the copy; return the records by target.

    The mirrors go on afterwards; each has been equal to its delta once.
    """
    opened, found = active_layer.opened(origin, name), {}
    for record in active_layer.noted(vm_dir):
        there = os.path.realpath(disk_names.delta(origin, record.disk))
        if there in opened:
            found[opened[there]] = record
    ready = _ready(name)
    for target, record in found.items():
        path = active_layer.delta_of(record)
        if ready.get(target) != path:
            block_jobs.end_job(name, target)
            active_layer.create(record)
            with job_events.listening(name, target) as job:
                mirror.begin(name, target, path)
                point("delta is being mirrored")
                job.wait_until_ready()
    return found


def _ready(name: str) -> Dict[str, str]:
    """Return the target file of each mirror of a guest that has been equal once, by the disk's target."""
    found = {}
    for disk in ElementTree.fromstring(domain.dumpxml(name)).iterfind("devices/disk"):
        target, mirror = disk.find("target"), disk.find("mirror")
        source = None if mirror is None else mirror.find("source")
        if target is not None and mirror is not None and source is not None and mirror.get("ready") == "yes":
            found[target.get("dev", "")] = source.get("file", "")
    return found


def enter(vm_dir: str, origin: str, name: str) -> None:
    """Pivot the guest to the copy's deltas and media; `name` is '' when no guest runs."""
    if name:
        # The switch notes its rest in the origin, where an action there would find it, too.
        freeze.wake(origin, name)
        _switch(vm_dir, origin, name)
        _change_media(vm_dir, origin, name)
        domain.ask(name, "metadata", partial(_say_where, vm_dir, origin))
    else:
        for record in active_layer.noted(vm_dir):
            if (files.read_json(disk_names.record(vm_dir, record.disk)) or {}).get("path") == record.path:
                _fetch(vm_dir, origin, record)
    # From here on a record without its delta means that the delta was merged.
    active_layer.note(vm_dir, active_layer.noted(vm_dir))
    point("copy entered")


def _switch(vm_dir: str, origin: str, name: str) -> None:
    found, here = mirrored(vm_dir, origin, name), os.uname().nodename
    if found:
        mirror.go_over(vm_dir, name, found, f"it goes on in {vm_dir} when it runs", origin)
    opened = active_layer.opened(vm_dir, name)
    for record in active_layer.noted(vm_dir):
        if os.path.realpath(active_layer.delta_of(record)) not in opened:
            raise MissingImage(
                f"domain {name} on {here} has disk {record.disk} open neither in {origin} nor in {vm_dir}"
            )


def _change_media(vm_dir: str, origin: str, name: str) -> None:
    """Insert the copies of media in the guest's CD drives."""
    libvirt = libvirtd.binding()
    flags = libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_DEVICE_MODIFY_FORCE
    for disk in ElementTree.fromstring(domain.dumpxml(name)).iterfind("devices/disk"):
        source = disk.find("source")
        path = "" if source is None else "/" + os.path.normpath(source.get("file", "")).lstrip("/")
        if source is None or disk.get("device") != "cdrom" or not path.startswith(f"{origin}/"):
            continue
        source.attrib = {"file": f"{vm_dir}{path[len(origin) :]}"}
        for below in disk.findall("backingStore"):
            disk.remove(below)
        xml = ElementTree.tostring(disk, "unicode")
        domain.ask(name, "change-media", partial(_update, xml, flags), timeout_s=BEGIN_S)
        point("medium changed")


def _update(device: str, flags: int, guest: Any) -> None:
    guest.updateDeviceFlags(device, flags)


def _say_where(vm_dir: str, origin: str, guest: Any) -> None:
    """Set the VM directory in OpenNebula's metadata of the domain: system snapshots and the probe use it."""
    libvirt = libvirtd.binding()
    kind, live = libvirt.VIR_DOMAIN_METADATA_ELEMENT, libvirt.VIR_DOMAIN_AFFECT_LIVE
    try:
        said = ElementTree.fromstring(guest.metadata(kind, METADATA, live))
    except libvirt.libvirtError as e:
        if e.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_METADATA:
            return
        raise
    for element in said.iter():
        if (
            element.tag.rpartition("}")[2] == "system_datastore"
            and os.path.normpath(f"/{element.text or ''}".replace("//", "/")) == origin
        ):
            element.text = vm_dir
            guest.setMetadata(kind, ElementTree.tostring(said, "unicode"), "one", METADATA, live)
            point("metadata changed")


def _fetch(vm_dir: str, origin: str, record: Record) -> None:
    """Copy the delta of a guest that died in the origin, if its record there names it, and record it here."""
    there = disk_names.delta(origin, record.disk)
    if (files.read_json(disk_names.record(origin, record.disk)) or {}).get(
        "path"
    ) != there or not files.exists(there):
        raise MissingImage(
            f"{there} on {os.uname().nodename} is not there, and {vm_dir} has not what its guest has written"
        )
    path = active_layer.delta_of(record)
    files.remove_staged(*os.path.split(path))
    with files.published(path) as staged:
        work(["cp", "-a", "--sparse=always", "--reflink=auto", "--", there, staged])
    point("delta fetched")
    active_layer.write(vm_dir, active_layer.with_delta(record))


def check_not_open(step: CheckNotOpen) -> None:
    """Raise MigrationRefused if a running guest has files of a VM directory open.

    Without `disks`, open disks are allowed; but raise it also for system snapshots, whose XML names the
    directory: the guest cannot go on in a copy.
    """
    vm_dir, name = step.vm_dir, step.domain
    if domain.state(name) in ("absent", "off"):
        return
    xml, here = ElementTree.fromstring(domain.dumpxml(name)), os.uname().nodename
    if not step.disks and domain.snapshots(name):
        raise MigrationRefused(
            f"domain {name} on {here} has system snapshots, which name its directory: it cannot "
            f"change while it runs"
        )
    devices = xml.find("devices")
    for parent, child in (
        (xml, "metadata"),
        *(((devices, "disk"),) if devices is not None and not step.disks else ()),
    ):
        for element in parent.findall(child):
            parent.remove(element)
    for element in xml.iter():
        for text in (*element.attrib.values(), element.text or ""):
            if f"{vm_dir}/" in text.replace("//", "/"):
                raise MigrationRefused(f"domain {name} on {here} has {text.strip()} open ({element.tag})")
