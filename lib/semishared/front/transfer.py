# SPDX-License-Identifier: Apache-2.0
"""The transfer actions: what was asked, what oned knows, the plan, and the hosts that carry it out.

docs/explanation/contract.md has the contract. Imports within functions come after `expects`, while the host
side starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Optional

from ..errors import NotSupported, SemisharedError
from ..model.exchange import File, Part, Plan, warn
from ..opennebula import args
from ..opennebula.report import Report
from . import vm_location
from .action import Action, carry_out

if TYPE_CHECKING:
    from ..opennebula.xml import Datastore, Disk, Image, Vm
    from ..plan.share.client_keys import Clients


def _facts(action: Action, request: args.FromImage) -> tuple[Disk, Image, Datastore]:
    from ..opennebula.oned import Oned

    oned = Oned()
    vm = oned.vm(request.target.vm_place.vm)
    action.seq = vm.seq
    disk = vm.disk(request.target.disk or 0)
    image = oned.image(disk.image_id)
    return disk, image, _marked(action, oned.datastore(image.store_id))


def _vm(action: Action, place: args.DiskPlace) -> Vm:
    from ..opennebula.oned import Oned

    vm = Oned().vm(place.vm_place.vm)
    action.seq = vm.seq
    return vm


def _marked(action: Action, datastore: Datastore) -> Datastore:
    """Return the datastore; warn if its store cannot be told from an empty mount point."""
    from ..model.store import template

    if template.unmarked(datastore):
        action.report.warn(template.unmarked(datastore))
    return datastore


def clone(action: Action) -> Plan:
    """FE:SOURCE HOST:VMDIR/disk.N VM DATASTORE - give a VM its own disk from an image."""
    asked = args.FromImage.parse(action.argv)
    action.expects(asked.target.host)
    from ..plan.disk import disks

    if asked.target.disk is None:
        from ..opennebula.oned import Oned

        return disks.copy_kernel(asked, _marked(action, Oned().datastore(asked.store)))
    return disks.clone(asked, *_facts(action, asked), action.config.overlays_options)


def ln(action: Action) -> Plan:
    """FE:SOURCE HOST:VMDIR/disk.N VM DATASTORE - attach an image in place."""
    asked = args.FromImage.parse(action.argv)
    action.expects(asked.target.host)
    from ..plan.disk import disks

    return disks.ln(asked, *_facts(action, asked), action.config.overlays_options)


def mkimage(action: Action) -> Plan:
    """SIZE_MIB FORMAT HOST:VMDIR/disk.N VM DATASTORE - make an empty disk."""
    asked = args.NewDisk.parse(action.argv)
    action.expects(asked.target.host)
    from ..plan.disk import disks

    return disks.mkimage(asked, _vm(action, asked.target).disk(asked.target.disk or 0))


def mkswap(action: Action) -> Plan:
    """SIZE_MIB HOST:VMDIR/disk.N VM DATASTORE - make a swap area."""
    asked = args.NewDisk.parse_swap(action.argv)
    action.expects(asked.target.host)
    from ..plan.disk import disks

    return disks.mkswap(asked)


def context(action: Action) -> Plan:
    """context.sh [FILE[:NAME] ...] HOST:VMDIR/disk.N VM DATASTORE - build the CONTEXT ISO and bring it to the
    host.
    """
    asked = args.Context.parse(action.argv)
    action.expects(asked.target.host)
    vm = vm_location.with_shares(asked.target.vm_place.vm, asked.files[0])
    if vm:
        from ..plan.share import client_keys

        action.seq = vm.seq
        yield from client_keys.or_taken_back(
            vm, _context(asked, client_keys.handed(vm, asked.target.vm_place))
        )
    else:
        yield from _context(asked)


def _context(asked: args.Context, handed: Optional[Part[Clients]] = None) -> Plan:
    import hashlib

    from ..plan.disk import disks
    from ..tools import context_iso

    clients = (yield from handed) if handed else None
    with context_iso.built(
        asked.files, clients.lines if clients else b"", asked.target.vm_place.datastore_location
    ) as path:
        with open(path, "rb") as file:
            data = file.read()
        yield from disks.context(asked, File(path, hashlib.sha256(data).hexdigest()), len(data), clients)


def mvds(action: Action) -> Plan:
    """HOST:VMDIR/disk.N SOURCE VM DATASTORE - end the session of an in-place disk."""
    from ..plan.disk import removals

    asked = args.ToImage.parse(action.argv)
    vm = vm_location.known_shares(asked.disk.vm_place.vm)
    action.seq = vm.seq_on(asked.disk.host) if vm else -1
    return removals.mvds(asked, vm_location.is_here_too(asked.disk.vm_place), vm)


def cpds(action: Action) -> Plan:
    """HOST:VMDIR/disk.N SOURCE SNAPSHOT|-1 VM DATASTORE - save a disk as another image."""
    from ..opennebula.oned import Oned
    from ..plan.disk import backup as disk_backup
    from ..tools.this_machine import are_one

    asked = args.ToImage.parse_copy(action.argv)
    oned = Oned()
    vm = oned.vm(asked.disk.vm_place.vm)
    action.seq = vm.seq
    host = (
        vm_location.source_of_copy(asked.disk.vm_place, vm.host)
        if vm.lcm_state in disk_backup.AWAY
        else asked.disk.host
    )
    datastore = _marked(action, oned.datastore(asked.store))
    return disk_backup.cpds(asked, vm, datastore, host, action.config.freeze, are_one)


def delete(action: Action) -> Plan:
    """HOST:VMDIR[/disk.N] VM DATASTORE - remove a disk or a VM directory."""
    asked = args.Delete.parse(action.argv)
    vm = None
    if not asked.is_nothing:
        action.expects(asked.vm_place.host)
        vm = vm_location.known_shares(asked.vm_place.vm)
        action.seq = vm.seq_on(asked.vm_place.host) if vm else -1
    from ..plan.disk import removals

    try:
        yield from removals.delete(asked, vm_location.is_here_too(asked.vm_place))
    except SemisharedError:
        # A host that does not answer may be lost while its guest runs; a key is good from anywhere.
        yield from _withdrawn(asked, vm)
        raise
    yield from _withdrawn(asked, vm)


def _withdrawn(asked: args.Delete, vm: Optional[Vm]) -> Plan:
    """Take back the keys of a VM whose directory goes."""
    if vm is None and not asked.disk:
        yield warn(
            f"oned does not say whether VM {asked.vm_place.vm} had keys for shares: such are good "
            f"until `semishared gc` takes them"
        )
    elif vm and not asked.disk and vm_location.has_directories(vm):
        from ..plan.share import client_keys

        yield from client_keys.withdrawn(vm)


def snap_create(action: Action) -> Plan:
    """HOST:VMDIR/disk.N SNAPSHOT VM DATASTORE - keep the present content of a disk of a VM that is off."""
    return _change(action, "create")


def snap_create_live(action: Action) -> Plan:
    """HOST:VMDIR/disk.N SNAPSHOT VM DATASTORE - keep the present content of a running guest's disk."""
    return _change(action, "create", live=True)


def snap_delete(action: Action) -> Plan:
    """HOST:VMDIR/disk.N SNAPSHOT VM DATASTORE - forget a snapshot; the guest may be running."""
    return _change(action, "delete")


def snap_revert(action: Action) -> Plan:
    """HOST:VMDIR/disk.N SNAPSHOT VM DATASTORE - go back to a snapshot, giving up the present content."""
    return _change(action, "revert")


def _change(action: Action, what: str, live: bool = False) -> Plan:
    asked = args.SnapshotPlace.parse(action.argv)
    action.expects(asked.disk.host)
    from ..plan.disk import snapshots

    return snapshots.change(what, asked, _vm(action, asked.disk), live=live, freeze=action.config.freeze)


def resize(action: Action) -> Plan:
    """HOST:VMDIR/disk.N SIZE_MIB VM DATASTORE - grow a disk; that of a running guest is left to its
    hypervisor.
    """
    from ..plan.disk import snapshots

    asked = args.Resize.parse(action.argv)
    return snapshots.resize(asked, _vm(action, asked.disk))


def mv(action: Action) -> Plan:
    """HOST:VMDIR[/disk.N] HOST:VMDIR[/disk.N] VM DATASTORE - move a VM directory; its disks travel with
    it.
    """
    asked = args.Move.parse(action.argv)
    if not asked.disk:
        from . import move

        yield from move.mv(action, asked)


def premigrate(action: Action) -> Plan:
    """SOURCE_HOST TARGET_HOST VMDIR VM DATASTORE - make everything ready at the target, or refuse."""
    from . import migration

    return migration.premigrate(action)


def postmigrate(action: Action) -> Plan:
    """SOURCE_HOST TARGET_HOST VMDIR VM DATASTORE - remove what is left at the source."""
    from . import migration

    return migration.postmigrate(action)


def failmigrate(action: Action) -> Plan:
    """SOURCE_HOST TARGET_HOST VMDIR VM DATASTORE - remove what was made at the target."""
    from . import migration

    return migration.failmigrate(action)


def prebackup(action: Action) -> Plan:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - copy the disks of a VM that is off for a backup
    driver.
    """
    from . import backup

    return backup.before(action, live=False)


def prebackup_live(action: Action) -> Plan:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - copy the disks of a running VM, as of one moment."""
    from . import backup

    return backup.before(action, live=True)


def postbackup(action: Action) -> Plan:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - remove what prebackup left."""
    from . import backup

    return backup.after(action, live=False)


def postbackup_live(action: Action) -> Plan:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - end what prebackup_live began and remove what it
    left.
    """
    from . import backup

    return backup.after(action, live=True)


def restore(action: Action) -> Plan:
    """HOST:VMDIR VM IMAGE INCREMENT DISK - replace the disks of a VM by those of a backup."""
    from . import backup

    return backup.restore(action)


def monitor(action: Action) -> None:
    """DATASTORE - only asked for a system datastore with SHARED=YES, which cannot be ours."""
    raise NotSupported(
        "a system datastore of semishared must have SHARED=NO: its disks are local to each host"
    )


PLANNED: dict[str, Callable[[Action], Plan]] = {
    function.__name__: function
    for function in (
        clone,
        ln,
        mkimage,
        mkswap,
        context,
        mvds,
        cpds,
        delete,
        mv,
        premigrate,
        postmigrate,
        failmigrate,
        snap_create,
        snap_create_live,
        snap_delete,
        snap_revert,
        resize,
        prebackup,
        prebackup_live,
        postbackup,
        postbackup_live,
        restore,
    )
}
"""Transfer action -> what it does before its plan, and the plan."""
ACTIONS: dict[str, Callable[[Action], object]] = {**PLANNED, "monitor": monitor}
"""entry.py has monitor_ds, which the front-end does not lead."""


def _led(action: Action) -> Plan:
    """Plan an action from the start of its plan: its conversations can begin before oned is asked."""
    yield from PLANNED[action.name](action)


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a transfer action; nothing goes to stdout."""
    under_way = Action(action, argv, report)
    if action in PLANNED:
        carry_out(_led(under_way), under_way)
    else:
        ACTIONS[action](under_way)
    return ""
