# SPDX-License-Identifier: Apache-2.0
"""A running VM changes its system datastore and stays on its host (from 7.2 on, with DS_LIVE_MIGRATE).

oned never lets it change both at once.

premigrate         local disks get deltas; the VM directory is copied, with new deltas
(vmm/migrate)      QEMU mirrors what the guest writes into the copy (guest/go_over.py)
postmigrate        the guest goes on in the copy, its deltas are merged, the directory it came from is removed
failmigrate        the mirrors end, deltas are merged where they were, the copy is removed

Either directory is whole until the other one is gone, whichever process is killed: oned says which counts,
and the next action there makes it so (disk/recovery.py).
"""

from __future__ import annotations

from ...errors import MigrationRefused, SemisharedError
from ...model import steps as s
from ...model.exchange import AskOned, On, Part, Plan, Say, agree, ask, warn
from ...opennebula.args import Migrate
from ...opennebula.xml import Vm
from ..disk.disks import running_domain
from . import checklist


def premigrate(asked: Migrate, vm: Vm) -> Plan:
    """Plan premigrate: have a copy of the VM directory in the other datastore, or refuse."""
    from ...model.disk.record import described

    place, domain = asked.target, running_domain(vm)
    source = yield from _left(asked, vm)
    look = (
        s.DescribeVm(vm.id, source),
        s.LookAtVm(vm.id, source),
        s.CheckNotOpen(vm.id, source, domain, disks=False),
    )
    seen: s.MarkedVm
    found, seen, _ = yield On(place.host, look)
    records = described(found)
    for disk in checklist.of_others(vm, records):
        raise checklist.refusal(vm, disk, "only its driver could change its place")
    own = checklist.own_disks(vm, records)
    for record in records:
        if record.over:
            # libvirt knows a mirror target's backing files only from headers, which name no Ceph user.
            raise MigrationRefused(
                f"disk {record.disk} (remote-first) reads from Ceph: its system datastore changes "
                f"while the VM is off"
            )
    copy = s.RenameVm(
        vm.id, source, place.path, True, "", tuple(sorted(disk.id for disk in vm.disks)), live=True
    )
    yield On(place.host, (checklist.room_for_arrival(place, seen),))
    try:
        frozen = s.AddDeltas(vm.id, source, domain, own) if own else s.MergeDeltas(vm.id, source, domain)
        yield On(place.host, (frozen,))
        yield On(place.host, (copy, s.AllowMigration(vm.id, source, place.host, ())))
    except SemisharedError:
        try:
            yield from _undone(asked, vm, source)
        except SemisharedError as e:
            yield warn(f"not all that was made ready for VM {vm.id} in {place.path} is undone: {e.detail}")
        raise


def postmigrate(asked: Migrate, vm: Vm) -> Plan:
    """Plan postmigrate: let the guest go on in the copy, and remove what it was."""
    place, domain = asked.target, running_domain(vm)
    source = yield from _left(asked, vm)
    yield On(place.host, (s.MergeDeltas(vm.id, place.path, domain),))
    yield from _cleared(asked, vm, source, brought=False)


def failmigrate(asked: Migrate, vm: Vm) -> Plan:
    """Plan failmigrate: merge what the guest has written meanwhile where it is, and remove the copy."""
    yield from _undone(asked, vm, (yield from _left(asked, vm)))


def _undone(asked: Migrate, vm: Vm, source: str) -> Plan:
    yield On(asked.target.host, (s.MergeDeltas(vm.id, source, running_domain(vm)),))
    yield from _cleared(asked, vm, asked.target.path, brought=True)


def _cleared(asked: Migrate, vm: Vm, vm_dir: str, *, brought: bool) -> Plan:
    not_open = s.CheckNotOpen(vm.id, vm_dir, running_domain(vm), disks=True)
    cleared = yield from ask(asked.target.host, s.ClearVm(vm.id, vm_dir, vm.seq, brought), (not_open,))
    yield Say(s.why_kept, (vm_dir, asked.target.host, cleared))


def _left(asked: Migrate, vm: Vm) -> Part[str]:
    """Return the VM directory that the VM is leaving; oned's view of the VM names only the other one."""
    yield agree(asked.target.host)
    known = yield AskOned("vm", vm.id)
    datastore = known.datastore_at(vm.seq - 1)
    path = f"{asked.target.datastore_location}/{datastore}/{vm.id}"
    if datastore < 0 or path == asked.target.path:
        raise MigrationRefused(
            f"VM {vm.id} cannot move to where it is: {asked.target.path} on {asked.target.host}"
        )
    return path
