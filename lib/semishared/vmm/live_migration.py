# SPDX-License-Identifier: Apache-2.0
"""Live migration of a VM that has a disk of ours: by us or not at all, never by the stock script."""

from __future__ import annotations

import json
import os
import re
import time

from ..errors import BadArguments, BadRecord, HostUnreachable, MigrationRefused, NotSupported, SemisharedError
from ..guest import domain, libvirtd
from ..guest.kvmrc import Site, site
from ..model import layout
from ..model.steps import State
from ..opennebula.args import HOST, absolute, number
from ..opennebula.report import Report
from ..opennebula.xml import View, Vm, parse
from ..plan.domain_xml import DRIVER
from ..plan.live_migration import Outcome, is_proved, options, outcome, paths_in_place
from ..plan.migrate_options import parsed
from ..tools.run import run
from . import migration_job
from .records import all_records
from .stock_script import become, stdin_is

DEPLOY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]*\Z")
PAUSE_S = 5
"""Between two tries, and between two looks at domains that change hands."""


def migrate(here: str, argv: list[str], stdin: bytes, report: Report) -> int:
    """Do `migrate DEPLOY_ID TARGET_HOST SOURCE_HOST VM_ID HOST`."""
    if len(argv) < 4 or not DEPLOY_ID.match(argv[0]):
        raise BadArguments(f"not the arguments of migrate: {argv}")
    name, target_host, source_host = argv[0], argv[1], argv[2]
    if not HOST.match(target_host):
        raise BadArguments(f"not a host name: {target_host!r}")
    message = View(parse(stdin, "VMM_DRIVER_ACTION_DATA"))
    vm_dir = absolute(f"{message.text('DATASTORE/BASE_PATH')}/{number(argv[3], 'VM id')}", "VM directory")
    vm = vm_of(message)
    records = all_records(vm_dir)
    unrecorded = {disk.id for disk in vm.disks if disk.driver == DRIVER} - set(records)
    if unrecorded:
        raise BadRecord(f"disk {min(unrecorded)} of {vm_dir} has no record")
    if not records:
        stdin_is(stdin)
        become(here, "migrate", argv)
    paths = paths_in_place(domain.dumpxml(name), vm_dir, records, vm.context_disk)
    if source_host == target_host:
        raise NotSupported("live migration to another system datastore")
    snapshots = domain.snapshots(name)
    if snapshots:
        raise MigrationRefused(f"VM {vm.id} has {len(snapshots)} system snapshots, libvirt does not move them")
    proved = is_proved(paths, take_proof(vm_dir), target_host)
    if not proved:
        report.warn(f"premigrate has not seen {target_host} share the disks of VM {vm.id}: libvirt decides if it is safe")
    chosen = options(
        list(site().migrate_options),
        message.text("VM/TEMPLATE/FEATURES/MIGRATE_AUTO_CONVERGE"),
        message.text("VM/TEMPLATE/FEATURES/MIGRATE_COMPRESSED"),
        domain.is_persistent(name),
        proved,
    )
    move(site(), name, target_host, chosen, report)
    after_move(site(), name, target_host)
    return 0


def vm_of(message: View) -> Vm:
    """Return the VM of a driver message."""
    element = message.element.find("VM")
    if element is None:
        raise BadArguments("the driver message has no VM")
    return Vm(element)


def take_proof(vm_dir: str) -> object:
    """Return the proof that premigrate left, and remove it: it holds for one migration."""
    path = layout.migration_note(vm_dir)
    try:
        with open(path, "rb") as file:
            proof: object = json.loads(file.read(65536))
        os.unlink(path)
    except (OSError, ValueError):
        return None
    return proof


def move(site: Site, name: str, host: str, chosen: list[str], report: Report) -> None:
    """Move the domain; on failure ask both libvirtds who has it, and clean up only what never ran."""
    target = site.uri_of(host)
    before = State(domain.state(name, target))
    if before is State.UNKNOWN:
        raise HostUnreachable(f"libvirtd of {host} does not answer at {target}")
    if before is not State.ABSENT:
        raise MigrationRefused(f"{host} already has a domain {name} ({before.value})")
    wanted = parsed(["--live", *chosen])
    for left in range(site.tries, 0, -1):
        try:
            took = migration_job.migrate(name, target, wanted)
            if took:
                report.info(f"moved to {host}: {took}")
            return
        except SemisharedError as e:
            if "active block job" not in e.detail or left == 1:
                if settle(site, name, host, report):
                    report.warn(f"libvirt failed after the VM had moved: {e.detail}")
                    return
                raise
            time.sleep(PAUSE_S)


def settle(site: Site, name: str, host: str, report: Report) -> bool:
    """Find out who owns the domain after a failure; tell whether it is the target after all."""
    target = site.uri_of(host)
    found, states = Outcome.IN_DOUBT, (State.UNKNOWN, State.UNKNOWN)
    for look in range(3):
        if look:
            time.sleep(PAUSE_S)
        states = State(domain.state(name)), State(domain.state(name, target))
        found = outcome(*states)
        if found in (Outcome.MOVED, Outcome.STAYED):
            return found is Outcome.MOVED
    if found is Outcome.IN_DOUBT:
        report.error(f"it is {states[0].value} here and {states[1].value} on {host}: nothing was cleaned up")
        return False
    try:
        if found is Outcome.REMOVE_TARGET:
            domain.ask(name, "destroy", lambda left: left.destroy(), uri=target, timeout_s=60)
        else:
            domain.ask(name, "undefine", lambda left: left.undefine(), uri=target, timeout_s=60)
        report.info(f"removed the half-started domain on {host}, which never ran there")
    except SemisharedError as e:
        report.warn(f"the half-started domain on {host} is still there: {e.detail}")
    return False


def after_move(site: Site, name: str, host: str) -> None:
    """Do what the stock script does after a migration; none of it decides about success."""
    if site.sync_time:
        sync = libvirtd.binding().VIR_DOMAIN_TIME_SYNC  # whatever the seconds say
        try:
            domain.ask(name, "domtime --sync", lambda guest: guest.setTime({"seconds": 0}, sync), uri=site.uri_of(host))
        except SemisharedError:
            pass  # a guest without an agent
    if site.compact_memory:
        try:
            run(["sudo", "-n", "sysctl", "vm.drop_caches=3", "vm.compact_memory=1"], timeout_s=20)
        except SemisharedError:
            pass
