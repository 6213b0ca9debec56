# SPDX-License-Identifier: Apache-2.0
"""Plans of a backup: copies of the wanted disks, or of what changed in them, as of one moment.

                running                                     off
prebackup       (mark the disks, of an increment)           (the same)
                freeze (if wanted)                          copy each disk
                one backup job of QEMU for all disks,
                which begins for all of them at once
                thaw; wait for the job
(backup)        OpenNebula's backup driver fetches VMDIR/backup
postbackup      end the job, thaw, remove the copies        remove the copies

And save-as: an independent copy of one disk as a new image.
"""

from __future__ import annotations

import re
from typing import Callable, Dict, Mapping, Tuple

from ...errors import BadArguments, BadAttribute, NotSupported
from ...model import steps as s
from ...model.exchange import Download, Feed, On, Plan, Say, ask
from ...model.store import access as store_access
from ...model.store import template
from ...named import NamedTuple
from ...opennebula.args import Backup, Restore, ToImage
from ...opennebula.states import LcmState
from ...opennebula.xml import Datastore, Vm
from ..image import images, placement
from . import freeze as disk_freeze
from .disks import DRIVER, check_store, disk_ref, running_domain

FREEZE = ("NONE", "AGENT", "SUSPEND")
NAME = "backup"


def directory(asked: Backup, base_path: str) -> str:
    """Return where the backup driver looks: beside the disks, or below BACKUP_BASE_PATH of datastore.conf."""
    return f"{base_path}/{asked.place.vm}/{NAME}" if base_path else f"{asked.place.path}/{NAME}"


class Priority(NamedTuple):
    """How copies run, as BackUp has it."""

    nice: int = 0
    io_level: int = -1
    rate: int = 0
    slice: str = ""
    limits: Tuple[str, ...] = ()


UNSET = -1
"""What stock's drivers take for no value of such an attribute."""
CONFINED = ("NICE", "IONICE")
"""What the backup datastore's template says, as RSYNC_NICE, of the copies of a VM that is off."""
SLICE = {
    "CPU_QUOTA": "CPUQuota={}%",
    "MEMORY_MAX_MB": "MemoryMax={}M",
    "MAX_RIOPS": "IOReadIOPSMax={}",
    "MAX_WIOPS": "IOWriteIOPSMax={}",
}
"""What it says of a slice of systemd's instead, and the property; of I/O, of the VM directory's device."""
MOST = 10**9 - 1


def priority(store: Datastore, *, live: bool) -> Tuple[Priority, str]:
    """Return how copies for a backup datastore run, and what its template says in vain ('' for nothing).

    QEMU itself copies the disks of a running VM: that work has no process of its own. Raise BadAttribute.
    """
    driver = store.store_driver.upper()
    nice = _number(store, f"{driver}_NICE", -20, 19)
    level = _number(store, f"{driver}_IONICE", 0, 7)
    numbers = {what: _number(store, f"{driver}_{what}", 1, MOST) for what in SLICE}
    limits = tuple(SLICE[what].format(number) for what, number in numbers.items() if number != UNSET)
    names = [f"{driver}_{what}" for what in (*CONFINED, *SLICE)] if live else []
    said = [name for name in names if store.attribute(name) not in ("", str(UNSET))]
    in_vain = (
        f"{', '.join(said)} of datastore {store.id}: its driver keeps to that, and QEMU copies the disks of "
        f"a running VM"
        if said
        else ""
    )
    name = f"backup.{store.id}.slice" if limits else ""  # that of its driver
    return Priority(0 if nice == UNSET else nice, level, 0, name, limits), in_vain


def _number(store: Datastore, name: str, least: int, most: int) -> int:
    text = store.attribute(name) or str(UNSET)
    is_number = re.match(r"-?[0-9]{1,9}\Z", text)
    if not is_number or not (text == str(UNSET) or least <= int(text) <= most):
        raise BadAttribute(f"{name} of datastore {store.id} is {text[:40]!r}, not {max(least, 0)} to {most}")
    return int(text)


def prebackup(
    asked: Backup,
    vm: Vm,
    xml: str,
    base_path: str,
    *,
    live: bool,
    are_one: Callable[[str, str], bool],
    at: Priority = Priority(),  # noqa: B008 - immutable
) -> Plan:
    """Plan prebackup; `xml` is the future vm.xml. Raise NotSupported for another kind of backup."""
    if vm.backup_setting("INTERACTIVE") == "YES":
        raise NotSupported(f"interactive backup (VM {vm.id}) is not supported yet")
    tpm = bool(vm.text("TEMPLATE/TPM/MODEL"))
    if tpm and vm.backup_setting("MODE") == "INCREMENT":
        raise NotSupported(
            f"VM {vm.id} has a TPM, whose state OpenNebula's backup drivers cannot keep beside increments: "
            f"its backups are of MODE = FULL"
        )
    bridge = vm.text("BACKUPS/BACKUP_CONFIG/LAST_BRIDGE")
    if bridge and not are_one(bridge, asked.place.host):
        store = vm.text("BACKUPS/BACKUP_CONFIG/LAST_DATASTORE_ID")
        raise NotSupported(
            f"backup datastore {store} has a BRIDGE_LIST: its driver would fetch the disks of VM "
            f"{vm.id} from {bridge}, and they are on "
            f"{asked.place.host}. Use a backup datastore without BRIDGE_LIST, or with that host alone in it"
        )
    freeze = vm.backup_setting("FS_FREEZE") or "NONE"
    if freeze not in FREEZE:
        raise NotSupported(f"FS_FREEZE = {freeze} of VM {vm.id} is not one of {', '.join(FREEZE)}")
    for number in asked.disks:
        driver = vm.disk(number).driver
        if driver not in ("", DRIVER):
            raise NotSupported(
                f"disk {number} of VM {vm.id} is of driver {driver}: backup together with ours is "
                f"not supported yet"
            )
    domain = domain_of(asked, live)
    if domain:
        placement.check_running(vm, asked.disks, "backup")
    ids = tuple(str(number) for number in asked.disks)
    place = asked.place
    of_device = tuple(
        one.replace("=", f"={place.path} ") if one.startswith("IO") else one for one in at.limits
    )
    at = at._replace(limits=of_device)
    back_up = s.BackUp(
        place.vm, place.path, directory(asked, base_path), ids, domain, freeze if domain else "NONE", xml, *at
    )._replace(tpm=tpm, **increment(vm))
    if vm.backup_setting("INCREMENT_MODE") == "SNAPSHOT" and back_up.since is not None:
        text = f"INCREMENT_MODE = SNAPSHOT of VM {vm.id}: what changed is told as for CBT"
        yield Say(lambda: [("info", text)])
    yield On(place.host, (back_up,))


def increment(vm: Vm) -> Dict[str, int]:
    """Return the fields of BackUp that say which increment oned wants; none for a full backup."""
    if vm.backup_setting("MODE") != "INCREMENT":
        return {}
    config = "BACKUPS/BACKUP_CONFIG"
    return {
        "since": vm.number(f"{config}/LAST_INCREMENT_ID"),
        "chain": vm.number(f"{config}/INCREMENTAL_BACKUP_ID"),
        "newest": max(vm.backup_ids, default=-1),
    }


def postbackup(asked: Backup, base_path: str, *, live: bool) -> Plan:
    """Plan postbackup, also after a prebackup that failed or was killed."""
    place = asked.place
    yield On(
        place.host, (s.EndBackup(place.vm, place.path, directory(asked, base_path), domain_of(asked, live)),)
    )


def restore(asked: Restore, vm: Vm, urls: Mapping[int, str], tpm: str = "") -> Plan:
    """Plan restore: the disks of `urls` get what is there, the VM's TPM its state at the URL `tpm` ('': stays
    as it is); the VM is off.
    """
    from ...model.disk.record import described

    place, domain = asked.place, vm.deploy_id or f"one-{vm.id}"
    found = yield from ask(place.host, s.DescribeVm(vm.id, place.path), after=(s.CheckNotRunning(domain),))
    records = {record.disk: record for record in described(found)}
    for number, url in sorted(urls.items()):
        disk, size = s.DiskRef(vm.id, number, place.path), vm.disk(number).size
        record = records.get(number)
        if record and record.bridged:
            from ..image import disk_image
            from ..store import rbd

            image = yield from disk_image.confirmed(vm, number, record.bridged.to_data())
            if record.readonly:
                raise NotSupported(f"disk {number} of VM {vm.id} is read-only and cannot be restored")
            yield from rbd.restore(place.host, disk, image, size, Download(url))
        else:
            yield Feed(On(place.host, (s.RestoreDisk(disk, size),)), Download(url))
    if tpm:
        from ...model.store.image_steps import RestoreTpm

        yield Feed(On(place.host, (RestoreTpm(vm.id, place.path),)), Download(tpm))


def domain_of(asked: Backup, live: bool) -> str:
    """Return the running domain, '' if it is off; raise BadArguments for what is no domain's name."""
    if not live:
        return ""
    name = asked.domain
    if not name or name.startswith("-") or any(not (c.isalnum() or c in "-_.") for c in name):
        raise BadArguments(f"not a deploy id: {name!r}")
    return name


# cpds saves a disk as another image, which its store has to reach first (plan/store/rbd.py).


AWAY = (LcmState.HOTPLUG_SAVEAS_UNDEPLOYED, LcmState.HOTPLUG_SAVEAS_STOPPED)
"""States in which the files of the VM are on the front-end."""


def cpds(
    asked: ToImage, vm: Vm, datastore: Datastore, host: str, freeze: str, are_one: Callable[[str, str], bool]
) -> Plan:
    """Plan cpds: save a disk of `host` as another image; a running guest rests for a moment (`freeze`)."""
    disk, access = disk_ref(asked.disk), template.access(datastore)
    # A snapshot does not change while the guest runs.
    is_running = vm.lcm_state == LcmState.HOTPLUG_SAVEAS and asked.snapshot == -1
    guest = disk_freeze.Guest(running_domain(vm), freeze) if is_running else disk_freeze.Guest()
    machine = yield from images.machine(datastore, vm.id)
    if not machine:
        if is_running:
            placement.check_running(vm, [disk.disk], "copy")
        path = store_access.check_source(access, asked.image, "image")
        format = vm.disk(disk.disk).format or "raw"
        save = s.SaveDisk(disk, path, format, guest.domain, asked.snapshot, guest.freeze)
        found = yield On(host, (*check_store(access, path), save))
        yield Say(disk_freeze.lines, tuple(found))
        return
    from ..image import disk_image
    from ..store import rbd

    target = images.ref_at(asked.store, access, vm.id, asked.image, "image")
    record = yield from rbd.record_of(host, disk)
    if record.bridged:
        source = yield from disk_image.confirmed(vm, disk.disk, record.bridged.to_data())
        yield from rbd.copy(host, machine, source.source, target, disk, asked.snapshot, guest)
        return
    if guest.domain:
        # An image on the network is copied by Ceph, which knows no secret; a file of a running guest by QEMU.
        placement.check_running(vm, [disk.disk], "copy")
    own = access.by_bridge() if are_one(host, machine) else access
    local = rbd.Local(host, disk, vm.disk(disk.disk).size, own)
    yield from rbd.fill(local, machine, target, asked.snapshot, guest)
