# SPDX-License-Identifier: Apache-2.0
"""Hypervisor actions for a VM that has a record of ours: change what must differ, then become the stock script.

The stock script is exec'ed, not called: its output and its exit code are what OpenNebula gets.

Why the other actions that see a disk are plain forwarders:
resize_disk               addresses the disk by its target (vda), never by its path.
save                      a checkpoint holds the XML that deploy and attach_disk made, so paths and formats are right.
                          What snapshots change while the VM is suspended, and what an attached disk lies over (libvirt
                          does not keep what it has found by itself), our restore puts right; the stock one replaces
                          `<datastores>/<n>/<vm>/` only, which paths on a shared store never contain.
snapshot_delete, _revert  libvirt keeps system snapshots inside the disks, whatever those are called.
"""

from __future__ import annotations

import base64
import os
import sys
from typing import Mapping, NoReturn, Optional

from ..errors import BadArguments, BadRecord, SemisharedError
from ..model import layout
from ..opennebula.args import absolute
from ..opennebula.report import Report, caught
from ..opennebula.xml import View, decode, parse
from ..plan.attach_xml import AttachMessage
from ..plan.domain_xml import Domain, Records, check_system_snapshot, disk_number, disks_of_ours
from .records import RECORDS, all_records, check_disk, read_chains, read_records
from .stock_script import become, stdin_is

CHECKPOINT_S = 60
"""How long libvirt may take to read or write the head of a checkpoint."""


def run(here: str, argv: list[str]) -> int:
    """Do action `argv[0]` with the arguments that follow; `here` is the directory of the vmm scripts.

    What we become must not inherit a umask of ours: so not entry.run.
    """
    known = (deploy, attach_disk, detach_disk, migrate, restore, snapshot_create)
    actions = {function.__name__: function for function in known}
    name = argv[0] if argv else ""

    def act(report: Report) -> int:
        if name not in actions:
            raise BadArguments(f"{name!r} is none of {', '.join(actions)}")
        return actions[name](here, argv[1:], report)

    return caught(name if name in actions else "with_records", act)


def deploy(here: str, argv: list[str], report: Report) -> NoReturn:
    """Boot the VM whose domain XML is on stdin, with its disks where and what their records say."""
    if not argv:
        raise BadArguments("no deployment file")
    vm_dir = os.path.dirname(argv[0])
    ours = _disks_of_ours(vm_dir, report)
    domain = Domain(sys.stdin.buffer.read(), vm_dir, ours)
    if domain.has_unknown:
        raise BadRecord(f"which disks of {vm_dir} are on Ceph cannot be told without vm.xml")
    records = read_records(vm_dir, domain.disk_numbers)
    unrecorded = set(ours or ()) & set(domain.disk_numbers) - set(records)
    if unrecorded:
        # oned's format may be wrong for it, and a qcow2 overlay taken for raw is destroyed by its guest.
        raise BadRecord(f"disk {min(unrecorded)} of {vm_dir} has no record")
    _put_right(vm_dir)
    for record in records.values():
        check_disk(vm_dir, record)
    stdin_is(domain.with_records(records, read_chains(domain.sources(records), records)))
    become(here, "deploy", argv)


def _put_right(vm_dir: str) -> None:
    """End what actions on the guest's last run, killed with it, have left in its disks."""
    try:
        notes = [name for name in os.listdir(f"{vm_dir}/{RECORDS}") if name == "frozen.json" or name.startswith("job.")]
    except OSError:
        return
    if notes:
        from ..disk import recovery

        recovery.recover(vm_dir, "")


def attach_disk(here: str, argv: list[str], _report: Report) -> NoReturn:
    """Attach `argv[1]` to a running VM under the name and format that deploy would give it."""
    if len(argv) < 5:
        raise BadArguments(f"{len(argv)} arguments where at least 5 belong")
    vm_dir = os.path.dirname(argv[1])
    number = disk_number(argv[1], vm_dir)
    message = AttachMessage(decode(argv[4].encode()))
    if number is None or number != message.number:
        raise BadArguments(f"{argv[1]} is not disk {message.number} of the driver message")
    record = read_records(vm_dir, [number]).get(number)
    if record is None:
        if message.is_ours:
            raise BadRecord(f"disk {number} of {vm_dir} has no record")
        become(here, "attach_disk", argv)
    check_disk(vm_dir, record)
    # What it lies over libvirt finds by itself, and tells AppArmor; the stock script has no words for it.
    read_chains({number: record.source(argv[1])}, {number: record})
    changed = list(argv)
    changed[1] = record.source(argv[1])
    changed[4] = base64.b64encode(message.with_record(record)).decode()
    become(here, "attach_disk", changed)


def detach_disk(here: str, argv: list[str], report: Report) -> int:
    """Detach the disk at target `argv[2]` of the running VM `argv[0]`, or say that it is done.

    The transfer action comes after this one and may fail; oned then has the disk still, and detaches it once more.
    """
    if len(argv) < 3:
        raise BadArguments(f"{len(argv)} arguments where at least 3 belong")
    if _has_lost(argv[0], argv[2]):
        report.warn(f"{argv[0]} has no disk {argv[2]} any more: it was detached before")
        return 0
    become(here, "detach_disk", argv)


def _has_lost(name: str, target: str) -> bool:
    """Tell whether a guest is seen to have no disk at `target`; if nothing is seen, what is wrong is the stock script's to say."""
    from ..guest import domain

    try:
        return bool(target) and target not in domain.disks(name)
    except SemisharedError:
        return False


def migrate(here: str, argv: list[str], report: Report) -> int:
    """Move the running VM to another host."""
    from . import live_migration

    return live_migration.migrate(here, argv, sys.stdin.buffer.read(), report)


def restore(here: str, argv: list[str], _report: Report) -> NoReturn:
    """Resume the VM from the checkpoint `argv[0]`, with its disks at the layers that are active now, over what those lie."""
    if not argv:
        raise BadArguments("no checkpoint")
    vm_dir = os.path.dirname(argv[0])
    records = all_records(vm_dir)
    changeable = any(record.format == "qcow2" or record.layer for record in records.values())
    if changeable and os.path.isfile(argv[0]):
        _bring_up_to_date(argv[0], vm_dir, records)
    become(here, "restore", argv)


def _bring_up_to_date(checkpoint: str, vm_dir: str, records: Records) -> None:
    from ..guest import libvirtd
    from ..plan.checkpoint import with_active_layers

    named = {number: record.source(layout.disk(vm_dir, number)) for number, record in records.items() if not record.network}
    chains = read_chains(named, records)
    secure = libvirtd.binding().VIR_DOMAIN_SAVE_IMAGE_XML_SECURE
    read = libvirtd.Call(f"save-image-dumpxml {checkpoint}", lambda libvirt: str(libvirt.saveImageGetXMLDesc(checkpoint, secure)))
    xml = read.answer(CHECKPOINT_S).encode()
    changed = with_active_layers(xml, records, chains)
    if changed != xml:
        text = changed.decode()
        write = libvirtd.Call(f"save-image-define {checkpoint}", lambda libvirt: libvirt.saveImageDefineXML(checkpoint, text, 0))
        write.answer(CHECKPOINT_S)


def snapshot_create(here: str, argv: list[str], _report: Report) -> NoReturn:
    """Do `snapshot_create DEPLOY_ID SNAPSHOT VM_ID HOST` of the whole VM, unless a disk cannot take part."""
    stdin = sys.stdin.buffer.read()
    directory = View(parse(stdin, "VMM_DRIVER_ACTION_DATA")).text("DATASTORE/BASE_PATH")
    check_system_snapshot(all_records(absolute(f"{directory}/{argv[-2]}", "VM directory")))
    stdin_is(stdin)
    become(here, "snapshot_create", argv)


def _disks_of_ours(vm_dir: str, report: Report) -> Optional[Mapping[int, str]]:
    """Return what vm.xml, written just before deploy, says; without a readable one (None) the records alone count."""
    try:
        with open(f"{vm_dir}/vm.xml", "rb") as file:
            return disks_of_ours(file.read())
    except FileNotFoundError:
        return None
    except (OSError, BadArguments) as e:
        report.warn(f"vm.xml is of no use: {e}")
        return None
