# SPDX-License-Identifier: Apache-2.0
"""A domain through libvirt's binding: its XML, state, disks and job, and a pause after a disk error."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Collection,
    ContextManager,
    Dict,
    Iterator,
    List,
    Set,
    Tuple,
    TypeVar,
)
from xml.etree import ElementTree

from ..errors import EncryptedDisk, SemisharedError, ToolMissing
from ..model.vm.move_steps import OpenedDisk
from ..tools.effects import point
from . import libvirtd
from .libvirtd import ANSWER_S, HERE

if TYPE_CHECKING:
    from ..model.base.steps import PausedGuests

T = TypeVar("T")
MEDIUM_S = 60
UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\Z"
STATES = {
    "RUNNING": "running",
    "BLOCKED": "running",
    "SHUTDOWN": "running",
    "PMSUSPENDED": "running",
    "PAUSED": "paused",
    "SHUTOFF": "off",
    "CRASHED": "off",
}


def lookup(connection: Any, name: str) -> Any:
    """Return libvirt's present domain object of a name or UUID."""
    if re.match(UUID, name):
        try:
            return connection.lookupByUUIDString(name)
        except libvirtd.binding().libvirtError as e:
            if not _is_absent(e):
                raise
    return connection.lookupByName(name)


def _is_absent(error: Any) -> bool:
    return bool(error.get_error_code() == libvirtd.binding().VIR_ERR_NO_DOMAIN)


def ask(name: str, verb: str, do: Callable[[Any], T], *, uri: str = HERE, timeout_s: float = ANSWER_S) -> T:
    """Return `do(domain)` for libvirt's domain `name`; raise as libvirtd.call, naming virsh's `verb`."""
    return libvirtd.call(f"{verb} {name}", lambda connection: do(lookup(connection, name)), uri, timeout_s)


def hearing(name: str, event: str) -> ContextManager[libvirtd.Heard]:
    """Collect, within the block, libvirt's events VIR_DOMAIN_EVENT_ID_`event` of a domain."""
    return libvirtd.hearing(name, event, lambda connection: lookup(connection, name))


def dumpxml(name: str, uri: str = HERE) -> bytes:
    """Return the XML of a domain as it runs."""
    return ask(name, "dumpxml", lambda domain: str(domain.XMLDesc(0)).encode(), uri=uri)


def migratable(name: str) -> bytes:
    """Return a domain's XML for another host, with its secrets."""
    libvirt = libvirtd.binding()
    flags = libvirt.VIR_DOMAIN_XML_MIGRATABLE | libvirt.VIR_DOMAIN_XML_SECURE
    return ask(name, "dumpxml --migratable", lambda domain: str(domain.XMLDesc(flags)).encode())


def state(name: str, uri: str = HERE) -> str:
    """Return running, paused, off, absent or unknown; absent only if libvirtd reports no such domain."""
    try:
        return libvirtd.call(f"domstate {name}", lambda connection: _state(connection, name), uri)
    except ToolMissing:
        raise
    except SemisharedError:
        return "unknown"


def _state(connection: Any, name: str) -> str:
    libvirt = libvirtd.binding()
    try:
        return state_of(lookup(connection, name))
    except libvirt.libvirtError as e:
        if _is_absent(e):
            return "absent"
        raise


def state_of(domain: Any) -> str:
    """Return the state of libvirt's domain object, in the same words."""
    libvirt = libvirtd.binding()
    number, _ = domain.state()
    return {getattr(libvirt, f"VIR_DOMAIN_{word}"): state for word, state in STATES.items()}.get(
        number, "unknown"
    )


def uuid(name: str) -> str:
    """Return the UUID of a domain that is asked for by its name or UUID."""
    return ask(name, "domuuid", lambda domain: str(domain.UUIDString()))


def is_persistent(name: str) -> bool:
    """Return True if a domain is defined, not only running."""
    return ask(name, "dominfo", lambda domain: bool(domain.isPersistent()))


def snapshots(name: str) -> List[str]:
    """Return the names of a domain's system snapshots."""
    return ask(name, "snapshot-list", lambda domain: list(domain.snapshotListNames()))


def elements(name: str) -> Iterator[Tuple[str, ElementTree.Element]]:
    """Yield the target of each disk of a running guest, and its element in libvirt's XML."""
    for disk in ElementTree.fromstring(dumpxml(name)).iterfind("devices/disk"):
        target = disk.find("target")
        if target is not None:
            yield target.get("dev", ""), disk


def disks(name: str) -> Dict[str, str]:
    """Return what each disk of a running guest writes to, by target: file, device or network name, or ''."""
    found = {}
    for target, disk in elements(name):
        source = disk.find("source")
        attributes = {} if source is None else source.attrib
        keys = (key for key in ("file", "dev", "dir", "name") if attributes.get(key))
        found[target] = attributes.get(next(keys, ""), "")
    return found


def targets(domain: str) -> List[str]:
    """Return the targets of a running guest's disks."""
    return list(disks(domain))


def encrypted(name: str) -> Set[str]:
    """Return the targets of a running guest's disks with an encrypted file in their backing chains."""
    return {target for target, disk in elements(name) if next(disk.iter("encryption"), None) is not None}


def check_plain(name: str, targets: Collection[str]) -> None:
    """Raise EncryptedDisk if QEMU decrypts one of these disks of a running guest.

    A blockjob would write such data in clear to another file. So each job is preceded by this check, even if
    the plan has made it: a move out of full memory has no plan.
    """
    for target in sorted(encrypted(name).intersection(targets)):
        what = f"disk {target} of {name} on {os.uname().nodename} is encrypted (LUKS_SECRET)"
        raise EncryptedDisk(f"{what}, and QEMU, while it runs, would write it decrypted")


def below(name: str, target: str) -> List[str]:
    """Return the backing files of a running guest's disk, the topmost first, as libvirt lists them."""
    disk = dict(elements(name)).get(target)
    sources = [] if disk is None else [found.find("source") for found in disk.iter("backingStore")]
    return [source.get("file", "") for source in sources if source is not None]


def mirrors(name: str) -> Dict[str, str]:
    """Return the target file of each mirror of a guest that has been equal once, by the disk's target."""
    found = {target: disk.find("mirror[@ready='yes']/source") for target, disk in elements(name)}
    return {target: source.get("file", "") for target, source in found.items() if source is not None}


def change_media(name: str, origin: str, vm_dir: str) -> None:
    """Insert, for media from `origin`, their copies in `vm_dir` in the guest's CD drives."""
    libvirt = libvirtd.binding()
    flags = libvirt.VIR_DOMAIN_AFFECT_LIVE | libvirt.VIR_DOMAIN_DEVICE_MODIFY_FORCE
    for _, disk in elements(name):
        source = disk.find("source")
        path = "" if source is None else "/" + os.path.normpath(source.get("file", "")).lstrip("/")
        if source is None or disk.get("device") != "cdrom" or not path.startswith(f"{origin}/"):
            continue
        source.attrib = {"file": f"{vm_dir}{path[len(origin) :]}"}
        for below in disk.findall("backingStore"):
            disk.remove(below)
        xml = ElementTree.tostring(disk, "unicode")
        ask(name, "change-media", partial(_update, xml, flags), timeout_s=MEDIUM_S)
        point("medium changed")


def _update(device: str, flags: int, guest: Any) -> None:
    guest.updateDeviceFlags(device, flags)


def job(name: str) -> Dict[str, Any]:
    """Return libvirt's statistics of a domain's own job, not of a blockjob; {} if there is none."""
    stats = ask(name, "domjobinfo", lambda domain: dict(domain.jobStats()))
    return stats if stats.get("type") != libvirtd.binding().VIR_DOMAIN_JOB_NONE else {}


def is_in(job: Dict[str, Any], operation: str) -> bool:
    """Return True if a domain's job is VIR_DOMAIN_JOB_OPERATION_`operation`."""
    return bool(job.get("operation") == getattr(libvirtd.binding(), f"VIR_DOMAIN_JOB_OPERATION_{operation}"))


def quoted(text: str) -> str:
    """Return text escaped for XML, also for an attribute in single quotes."""
    # xml.sax.saxutils would load urllib.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&apos;")


HOPS = 8
"""Links to follow from a disk's name to its file; more are a loop."""


def disk_types(vm_dir: str, domain: str) -> Dict[str, OpenedDisk]:
    """Return each disk of a running guest, by target, for disks of other drivers, which have no records."""
    found = {}
    for target, disk in elements(domain):
        source = disk.find("source")
        if source is None:
            continue
        paths = [element.get("file", "") for element in disk.iter("source")]
        row = OpenedDisk(disk.get("type", ""))
        if row.type == "file" and all(paths):
            places = sorted({place for path in paths for place in _places(path, vm_dir)})
            row = row._replace(path=source.get("file", ""), directories=tuple(places))
        found[target] = row
    return found


def _places(path: str, vm_dir: str) -> List[str]:
    found: List[str] = []
    path = "/" + os.path.normpath(path).lstrip("/")
    for _ in range(HOPS):
        folder = os.path.dirname(path)
        is_inside = f"{folder}/".startswith(f"{vm_dir}/")
        if not os.path.islink(path):
            return [*found, "" if is_inside else folder]
        if not is_inside:
            found.append(folder)
        path = os.path.normpath(os.path.join(folder, os.readlink(path)))
    return [""]


def is_paused_on_error(name: str) -> bool:
    """Return True if QEMU has paused the guest after a disk error.

    The disk's error policy does that: libvirt's `paused (I/O error)`. A guest that an operator or OpenNebula
    has paused has another reason, also after its restart. QEMU remembers which disk failed.
    """
    return ask(name, "domstate --reason", stands_still)


def stands_still(guest: Any) -> bool:
    """Return the same of libvirt's domain object, within a call."""
    libvirt = libvirtd.binding()
    return tuple(guest.state()) == (libvirt.VIR_DOMAIN_PAUSED, libvirt.VIR_DOMAIN_PAUSED_IOERROR)


def find_paused() -> PausedGuests:
    """Return the guests of this host that a disk error has paused, in whatever state oned has their VMs."""
    from ..model.base.steps import PausedGuest, PausedGuests

    try:
        found = libvirtd.call("list --state-paused", _paused)
    except SemisharedError as e:
        return PausedGuests([], e.detail)
    return PausedGuests([PausedGuest(name, is_full) for name, is_full in found])


def _paused(connection: Any) -> List[Tuple[str, bool]]:
    libvirt, found = libvirtd.binding(), []
    for guest in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_PAUSED):
        try:
            if stands_still(guest):
                found.append((guest.name(), any(_failed(guest).values())))
        except libvirt.libvirtError as e:
            if not _is_absent(e):  # it has ended meanwhile
                raise
    return found


def failed_disks(name: str) -> Dict[str, bool]:
    """Return the failed disks of a guest paused by them, by target; True for want of space; else {}."""
    return ask(name, "domblkerror", _failed)


def _failed(guest: Any) -> Dict[str, bool]:
    if not stands_still(guest):
        return {}
    full = libvirtd.binding().VIR_DOMAIN_DISK_ERROR_NO_SPACE
    return {target: error == full for target, error in guest.diskErrors(0).items()}


def resume_after_error(name: str) -> None:
    """Resume a guest that a disk error has paused: QEMU repeats the write. Other pauses stay."""
    ask(name, "resume", lambda guest: guest.resume() if stands_still(guest) else None)
