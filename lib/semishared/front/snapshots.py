# SPDX-License-Identifier: Apache-2.0
"""The transfer actions for snapshots and sizes of disks: ask the host what is there, plan, do; one ssh each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import SemisharedError
from ..model import steps as s
from ..opennebula import args
from ..plan import encryption, snapshots
from ..plan.disks import running_domain

if TYPE_CHECKING:
    from ..opennebula.xml import Vm
    from .action import Action

RESIZE_RUNNING, RESIZE_UNDEPLOYED = 62, 64


def _ref(place: args.DiskPlace) -> s.DiskRef:
    return s.DiskRef(place.vm_place.vm, place.disk or 0, place.vm_place.path)


def _vm(action: Action, place: args.DiskPlace) -> Vm:
    from ..opennebula.oned import Oned

    vm = Oned().vm(place.vm_place.vm)
    action.seq = vm.seq
    return vm


def _change(action: Action, *, live: bool, plan: str) -> None:
    request = args.SnapshotPlace.parse(action.argv)
    place = request.disk
    vm = _vm(action, place)
    domain = running_domain(vm) if live or vm.lcm_state == snapshots.DELETE_RUNNING else ""
    if live and vm.disk(place.disk or 0).source.startswith("/"):
        # Before anything is asked of the guest. What is on the network is copied there, below QEMU; a local copy of it is not.
        encryption.check_running(vm, [place.disk or 0], "snapshot")
    with action.session(place.host) as session:
        (found,) = session.run([s.DescribeDisk(_ref(place), domain)])
        if isinstance(found, dict) and "on_store" in found:
            from . import rbd

            rbd.change(action, session, plan, request, found, domain if live else "")
            return
        facts = snapshots.Facts.parse(found)
        if plan == "create":
            encryption.check_snapshot(vm, place.disk or 0, facts.how == "in-place", bool(domain))
            steps = snapshots.create(request, facts, domain, action.config.freeze)
        elif plan == "delete":
            steps = snapshots.delete(request, facts, domain)
        else:
            # oned's SIZE of the disk does not go back with the snapshot.
            steps = [*snapshots.revert(request, facts), s.GrowDisk(_ref(place), vm.disk(place.disk or 0).size)]
        tell_rest(action, session.run([*steps, *snapshots.tidy(request, facts, vm.snapshots_of(place.disk or 0), domain)]))
        action.tell(place.host, session.moved)


def tell_rest(action: Action, results: list[object]) -> None:
    """Log how a guest rested while its disk was copied, or a snapshot taken."""
    for found in results:
        # Nothing else, not even a look: `semishared plan` has no answers.
        how, why = (found.get("rest"), found.get("why")) if type(found) is dict else (None, "")
        if how == "AGENT":
            action.report.info("the guest's agent froze its file systems for the moment that was kept")
        elif how == "SUSPEND":
            action.report.info(f"the guest was suspended for the moment that was kept{f' ({why})' if why else ''}")
        elif how == "NONE" and why:
            action.report.warn(f"the guest could neither be frozen nor suspended ({why}): what was kept is what a power cut leaves")


def snap_create(action: Action) -> None:
    """HOST:VMDIR/disk.N SNAPSHOT VM DATASTORE - keep the present content of a disk that nobody writes to."""
    _change(action, live=False, plan="create")


def snap_create_live(action: Action) -> None:
    """HOST:VMDIR/disk.N SNAPSHOT VM DATASTORE - keep the present content of a running guest's disk."""
    _change(action, live=True, plan="create")


def snap_delete(action: Action) -> None:
    """HOST:VMDIR/disk.N SNAPSHOT VM DATASTORE - forget a snapshot; the guest may be running."""
    _change(action, live=False, plan="delete")


def snap_revert(action: Action) -> None:
    """HOST:VMDIR/disk.N SNAPSHOT VM DATASTORE - go back to a snapshot, giving up the present content."""
    _change(action, live=False, plan="revert")


def resize(action: Action) -> None:
    """HOST:VMDIR/disk.N SIZE_MIB VM DATASTORE - grow a disk; that of a running guest is left to its hypervisor."""
    request = args.Resize.parse(action.argv)
    place = request.disk
    vm = _vm(action, place)
    if vm.lcm_state == RESIZE_RUNNING:
        return
    host = place.host
    if vm.lcm_state == RESIZE_UNDEPLOYED:
        # argv names the last host, the directory has moved to the front-end.
        host = _machine_of(action, place)
    (found,) = action.on(host, [s.GrowDisk(_ref(place), request.size)])
    if found:
        from . import rbd

        image = rbd.on_store(found)
        if image:
            rbd.grow(action, image, request.size)


def _machine_of(action: Action, place: args.DiskPlace) -> str:
    """Return which of the front-end and the disk's last host has the VM."""
    describe = s.DescribeVm(place.vm_place.vm, place.vm_place.path)
    for host in ("localhost", place.host):
        (found,) = action.on(host, [describe])
        if isinstance(found, dict) and found.get("present"):
            return host
    raise SemisharedError(f"VM {place.vm_place.vm} is neither on the front-end nor on {place.host}")
