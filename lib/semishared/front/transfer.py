# SPDX-License-Identifier: Apache-2.0
"""The transfer actions: what was asked, what oned knows, the plan, and the hosts that carry it out (docs/explanation/contract.md)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Callable

from ..errors import BadArguments, NotSupported
from ..model import steps as s
from ..model import stores
from ..model.exchange import Plan
from ..opennebula import args
from ..opennebula.report import Report
from ..plan import disks
from . import migration, snapshots
from .action import Action, carry_out
from .vm_location import everywhere, source_of_copy

if TYPE_CHECKING:
    from ..opennebula.xml import Datastore, Disk, Image

def _facts(action: Action, request: args.FromImage) -> tuple[Disk, Image, Datastore]:
    from ..opennebula.oned import Oned

    oned = Oned()
    vm = oned.vm(request.target.vm_place.vm)
    action.seq = vm.seq
    disk = vm.disk(request.target.disk or 0)
    return disk, oned.image(disk.image_id), _marked(action, oned.datastore(disk.store_id))


def _marked(action: Action, datastore: Datastore) -> Datastore:
    """Return the datastore; say it if nobody could tell its store from the place where that is to be mounted."""
    access = stores.access(datastore)
    if access.can.is_mounted and not access.marker:
        action.report.warn(stores.unmarked(datastore))
    return datastore


def clone(action: Action) -> Plan:
    """FE:SOURCE HOST:VMDIR/disk.N VM DATASTORE - give a VM its own disk from an image."""
    asked = args.FromImage.parse(action.argv)
    if asked.target.disk is None:
        from ..opennebula.oned import Oned

        return disks.copy_kernel(asked, _marked(action, Oned().datastore(asked.store)))
    return disks.clone(asked, *_facts(action, asked), action.config.overlays_options)


def ln(action: Action) -> Plan:
    """FE:SOURCE HOST:VMDIR/disk.N VM DATASTORE - attach an image in place."""
    asked = args.FromImage.parse(action.argv)
    return disks.ln(asked, *_facts(action, asked))


def mkimage(action: Action) -> None:
    """SIZE_MIB FORMAT HOST:VMDIR/disk.N VM DATASTORE - make an empty disk."""
    from ..opennebula.oned import Oned

    request = args.NewDisk.parse(action.argv)
    vm = Oned().vm(request.target.vm_place.vm)
    action.seq = vm.seq
    disk = vm.disk(request.target.disk or 0)
    action.on(request.target.host, disks.mkimage(request, disk))


def mkswap(action: Action) -> None:
    """SIZE_MIB HOST:VMDIR/disk.N VM DATASTORE - make a swap area."""
    request = args.NewDisk.parse_swap(action.argv)
    action.on(request.target.host, disks.mkswap(request))


def context(action: Action) -> None:
    """context.sh [FILE[:NAME] ...] HOST:VMDIR/disk.N VM DATASTORE - build the CONTEXT ISO and bring it to the host."""
    import hashlib

    from ..tools import context_iso

    request = args.Context.parse(action.argv)
    place = request.target
    with context_iso.built(request.files) as path:
        with open(path, "rb") as file:
            data = file.read()
        digest = hashlib.sha256(data).hexdigest()
        steps = [
            s.PrepareVm(place.vm_place.vm, place.vm_place.path),
            s.ReceiveFile(place.path, place.vm_place.vm, len(data), digest),
        ]
        with action.session(place.host) as session:
            chunks = (data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20))
            session.run(steps, chunks, digest)


def mvds(action: Action) -> None:
    """HOST:VMDIR/disk.N SOURCE VM DATASTORE - end the session of an in-place disk."""
    request = args.ToImage.parse(action.argv)
    everywhere(action, request.disk.vm_place, disks.mvds(request))


def cpds(action: Action) -> None:
    """HOST:VMDIR/disk.N SOURCE SNAPSHOT|-1 VM DATASTORE - save a disk as another image."""
    from ..opennebula.oned import Oned

    request = args.ToImage.parse_copy(action.argv)
    oned = Oned()
    vm = oned.vm(request.disk.vm_place.vm)
    action.seq = vm.seq
    host = source_of_copy(request.disk.vm_place, vm.host) if vm.lcm_state in disks.SAVEAS_AWAY else request.disk.host
    if not request.image.startswith("/"):
        from . import rbd

        rbd.cpds(action, request, vm, host, oned.datastore(request.store))
        return
    steps = disks.cpds(request, vm, _marked(action, oned.datastore(request.store)), action.config.freeze)
    snapshots.tell_rest(action, action.on(host, steps))


def delete(action: Action) -> None:
    """HOST:VMDIR[/disk.N] VM DATASTORE - remove a disk or a VM directory."""
    request = args.Delete.parse(action.argv)
    steps = disks.delete(request)
    if not steps:
        return
    action.seq = _seq(request.vm_place.vm)
    found = everywhere(action, request.vm_place, steps)
    if any(found):
        from . import rbd

        rbd.delete(action, request, found)


def _seq(vm: int) -> int:
    """Return the SEQ of a VM that oned may not know any more, or of an oned that does not answer: -1 then."""
    from ..errors import OnedUnavailable
    from ..opennebula.oned import Oned

    try:
        return Oned().vm(vm).seq
    except OnedUnavailable:
        return -1


def mv(action: Action) -> None:
    """HOST:VMDIR[/disk.N] HOST:VMDIR[/disk.N] VM DATASTORE - move a VM directory; its disks travel with it."""
    request = args.Move.parse(action.argv)
    if not request.disk:
        from . import move

        move.move(action, request)


def prebackup(action: Action) -> None:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - copy the disks of a VM that is off for a backup driver."""
    from . import backup

    backup.before(action, live=False)


def prebackup_live(action: Action) -> None:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - copy the disks of a running VM, as of one moment."""
    from . import backup

    backup.before(action, live=True)


def postbackup(action: Action) -> None:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - remove what prebackup left."""
    from . import backup

    backup.after(action, live=False)


def postbackup_live(action: Action) -> None:
    """HOST:VMDIR ID[:ID...] DEPLOY_ID JOB VM DATASTORE - end what prebackup_live began and remove what it left."""
    from . import backup

    backup.after(action, live=True)


def restore(action: Action) -> None:
    """HOST:VMDIR VM IMAGE INCREMENT DISK - replace the disks of a VM by those of a backup."""
    from . import backup

    backup.restore(action)


def monitor(action: Action) -> None:
    """DATASTORE - only asked for a system datastore with SHARED=YES, which cannot be ours."""
    raise NotSupported("a system datastore of semishared must have SHARED=NO: its disks are local to each host")


def monitor_ds(action: Action) -> None:
    """DIRECTORY - print the disk sizes of all VMs of a system datastore (runs on the host)."""
    from ..host import vm_sizes

    if len(action.argv) != 1:
        raise BadArguments("one directory is wanted")
    sys.stdout.write(vm_sizes.report(args.absolute(action.argv[0], "datastore directory")))


PLANNED: dict[str, Callable[[Action], Plan]] = {function.__name__: function for function in (clone, ln)}
"""Transfer action -> what is known before its plan, and the plan."""
ACTIONS: dict[str, Callable[[Action], object]] = {
    **PLANNED,
    **{function.__name__: function for function in (
        mkimage, mkswap, context, mvds, cpds, delete, mv, monitor, monitor_ds,
        migration.premigrate, migration.postmigrate, migration.failmigrate,
        snapshots.snap_create, snapshots.snap_create_live, snapshots.snap_delete, snapshots.snap_revert, snapshots.resize,
        prebackup, prebackup_live, postbackup, postbackup_live, restore,
    )},
}  # fmt: skip


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a transfer action; nothing goes to stdout but what monitor_ds prints."""
    under_way = Action(action, argv, report)
    if action in PLANNED:
        carry_out(PLANNED[action](under_way), under_way)
    else:
        ACTIONS[action](under_way)
    return ""
