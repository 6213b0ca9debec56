# SPDX-License-Identifier: Apache-2.0
"""The transfer actions: what was asked, what oned knows, the plan, and the hosts that carry it out.

docs/explanation/contract.md has the contract. Imports within functions come after `expects`, while the host
side starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional

from .. import table
from ..errors import NotSupported, SemisharedError
from ..model.exchange import File, Part, Plan, warn
from ..opennebula import args
from ..opennebula.report import Report
from . import vm_location
from .action import Action, carry_out

if TYPE_CHECKING:
    from ..opennebula.oned import Oned
    from ..opennebula.xml import Datastore, Vm
    from ..plan.share.client_keys import Clients


def _marked(action: Action, oned: Oned, number: int) -> Datastore:
    """Return a datastore; warn if its store cannot be told from an empty mount point."""
    from ..model.store import template
    from .action import datastore

    found = datastore(oned, number)
    if template.unmarked(found):
        action.report.warn(template.unmarked(found))
    return found


def planned(action: Action) -> Plan:
    """Return the plan of a transfer action, by its row of the table.

    The planner's parameters say what it is given: `asked`, the `action`, what is configured (`freeze`,
    `options`), or oned's word: `vm`, the `disk` that its words name, that disk's `image` and its `datastore`.
    One whose disk is Optional is for kernels too, of which oned knows the datastore alone.
    """
    words, first, row = table.ACTIONS[action.name]
    shape, _, parse = words.partition(".")
    asked = getattr(getattr(args, shape), parse)(action.argv)
    found = {"action": action, "asked": asked}
    action.report.subject = lambda: _subject(found)
    action.vm = args.of_words(asked).vm
    if first:
        action.expects(getattr(asked, first).host)
    planner, config = table.loaded(row), action.config
    found.update(freeze=config.freeze, options=config.overlays_options)
    wanted = planner.__code__.co_varnames[: planner.__code__.co_argcount]
    if not set(wanted) <= set(found):
        _ask_oned(found, planner)
    if "file_systems" in wanted and found["disk"].file_system:
        from . import stock_conf

        found["file_systems"] = stock_conf.file_systems()
    plan: Plan = planner(**{name: found[name] for name in wanted if name in found})
    return plan


def _subject(found: dict[str, Any]) -> args.Subject:
    """Return what an action is about, as far as it is known by now."""
    disk = found.get("disk")
    return args.of_words(found["asked"], disk.image_id if disk else -1)


def _ask_oned(found: dict[str, Any], planner: Callable[..., Plan]) -> None:
    """Add to `found` the objects of oned that a planner wants."""
    from ..opennebula.oned import Oned

    action, asked = found["action"], found["asked"]
    oned, place = Oned(), asked.target if "target" in asked._fields else asked.disk
    wanted = planner.__annotations__
    if place.disk is None and wanted.get("disk") == "Optional[Disk]":
        found.update(disk=None, image=None, datastore=_marked(action, oned, asked.store))
        return
    vm = oned.vm(place.vm_place.vm)
    action.seq = vm.seq
    found["vm"] = vm
    if "disk" in wanted:
        found["disk"] = vm.disk(place.disk or 0)
    if "image" in wanted:
        found["image"] = oned.image(found["disk"].image_id)
        found["datastore"] = _marked(action, oned, found["image"].store_id)
    if action.name in MAKE:
        _refuse_stock(found)


MAKE = ("clone", "ln", "mkimage")
"""Actions that make a disk as attributes say: what cannot work is refused here, not when the disk goes."""


def _refuse_stock(found: dict[str, Any]) -> None:
    from ..model.store import template

    template.refuse_stock("disk", found["disk"], found["disk"].fields())
    if "datastore" in found:
        template.refuse_stock("datastore", found["datastore"], found["datastore"].fields("TEMPLATE"))


def context(action: Action, asked: args.Context) -> Plan:
    """context.sh [FILE[:NAME] ...] HOST:VMDIR/disk.N VM DATASTORE - build the CONTEXT ISO and bring it to the
    host.
    """
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


def mvds(action: Action, asked: args.ToImage) -> Plan:
    """HOST:VMDIR/disk.N SOURCE VM DATASTORE - end the session of an in-place disk."""
    from ..plan.disk import removals

    vm = vm_location.known_shares(asked.disk.vm_place.vm)
    action.seq = vm.seq_on(asked.disk.host) if vm else -1
    place = asked.disk.vm_place
    may_rest = vm_location.may_rest_elsewhere(place, vm)
    return removals.mvds(asked, vm_location.is_here_too(place), vm, may_rest)


def cpds(action: Action, asked: args.ToImage) -> Plan:
    """HOST:VMDIR/disk.N SOURCE SNAPSHOT|-1 VM DATASTORE - save a disk as another image."""
    from ..opennebula.oned import Oned
    from ..plan.disk import backup as disk_backup
    from ..tools.this_machine import are_one

    oned, place = Oned(), asked.disk.vm_place
    vm = oned.vm(place.vm)
    action.seq = vm.seq
    host = asked.disk.host
    if vm.lcm_state in disk_backup.AWAY:
        host = vm_location.source_of_copy(place, vm.host)
        if vm_location.may_rest_elsewhere(place, vm):
            from ..plan.vm import at_rest

            rests = yield from at_rest.elsewhere(place, vm)
            host = rests.machine or host
            if not rests.machine:
                rests.refuse(vm.id, f"is not on {place.host}")
    datastore = _marked(action, oned, asked.store)
    yield from disk_backup.cpds(asked, vm, datastore, host, action.config.freeze, are_one)


def delete(action: Action, asked: args.Delete) -> Plan:
    """HOST:VMDIR[/disk.N] VM DATASTORE - remove a disk or a VM directory."""
    vm = None
    if not asked.is_nothing:
        action.expects(asked.vm_place.host)
        vm = vm_location.known_shares(asked.vm_place.vm)
        action.seq = vm.seq_on(asked.vm_place.host) if vm else -1
    from ..plan.disk import removals

    try:
        may_rest = not asked.is_nothing and vm_location.may_rest_elsewhere(asked.vm_place, vm)
        yield from removals.delete(asked, vm_location.is_here_too(asked.vm_place), may_rest)
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


def mv(action: Action, asked: args.Move) -> Plan:
    """HOST:VMDIR[/disk.N] HOST:VMDIR[/disk.N] VM DATASTORE - move a VM directory; its disks travel with
    it.
    """
    if not asked.disk:
        from . import move

        yield from move.mv(action, asked)


def monitor(action: Action) -> None:
    """DATASTORE - only asked for a system datastore with SHARED=YES, which cannot be ours."""
    raise NotSupported(
        "a system datastore of semishared must have SHARED=NO: its disks are local to each host"
    )


PLANNED = dict.fromkeys(table.ACTIONS, planned)
"""Transfer action -> what it does before its plan, and the plan."""
ACTIONS: dict[str, Callable[[Action], object]] = {**PLANNED, "monitor": monitor}
"""entry.py has monitor_ds, which the front-end does not lead."""


def _led(action: Action) -> Plan:
    """Plan an action from the start of its plan: its conversations can begin before oned is asked."""
    yield from planned(action)


def act(action: str, argv: list[str], report: Report) -> str:
    """Carry out a transfer action; nothing goes to stdout."""
    under_way = Action(action, argv, report)
    try:
        with under_way.counted("tm"):
            if action in PLANNED:
                carry_out(_led(under_way), under_way)
            else:
                ACTIONS[action](under_way)
    except SemisharedError as e:
        _noted(under_way, f"{action}: {e.id} {e.detail}")
        raise
    _noted(under_way)
    return ""


def _noted(action: Action, error: str = "") -> None:
    """Leave a note that the VM's vector in oned is to be written: after all that the action has done."""
    if action.vm < 0:
        return
    from . import vm_notes

    if action.name == "delete" and not error and not args.is_disk(action.argv[0]):
        vm_notes.leave_gone(action.vm)
    else:
        vm_notes.leave(action.vm, error)
