# SPDX-License-Identifier: Apache-2.0
"""mv of a VM directory: relayed between two hosts, or copied on one.

The source is removed last, and only if no action needs it.

`recover --failure` stops no driver: while an older mv goes on, the VM may run again where its files came
from. So before the source goes, its host looks for the domain and for changes, and oned is asked whether the
move is still under way. In doubt the source stays, which is no failure: the target has all files, and
`semishared gc` removes what oned says is not the VM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Mapping, Tuple

from ...errors import (
    HostUnreachable,
    MigrationRefused,
    MissingVm,
    OnedUnavailable,
    Overtaken,
    SameDirectory,
    SemisharedError,
)
from ...model import steps as s
from ...model.exchange import AskOned, End, On, Part, Plan, Relay, Say, agree, ask, warn
from ...named import NamedTuple
from ...opennebula.args import Move, VmPlace
from ...opennebula.states import LcmState
from ...opennebula.xml import Vm
from ..disk.disks import DRIVER, can_start, running_domain
from ..under_way import why_over
from . import checklist

if TYPE_CHECKING:
    from ...model.disk.commit_steps import RenewedVm

COMING = (
    LcmState.PROLOG_MIGRATE,
    LcmState.PROLOG_RESUME,
    LcmState.PROLOG_UNDEPLOY,
    LcmState.PROLOG_MIGRATE_POWEROFF,
    LcmState.PROLOG_MIGRATE_SUSPEND,
    LcmState.PROLOG_MIGRATE_UNKNOWN,
)
"""States in which oned has a VM's files moved to the host where it is to run."""
MOVING = (*COMING, LcmState.EPILOG_STOP, LcmState.EPILOG_UNDEPLOY)
SAVED = (LcmState.PROLOG_MIGRATE, LcmState.PROLOG_MIGRATE_SUSPEND, LcmState.PROLOG_RESUME)
"""States in which a VM goes to a host with the memory of its guest."""
UNKNOWN = (LcmState.PROLOG_MIGRATE_UNKNOWN, LcmState.PROLOG_MIGRATE_UNKNOWN_FAILURE)
"""States in which oned has lost sight of the VM, mostly with its host (plan/vm/failover.py)."""
MAY_BE_LOST = (*UNKNOWN, LcmState.PROLOG_MIGRATE_POWEROFF)
"""States in which the host that the VM leaves may be lost."""


class Told(NamedTuple):
    """What the front-end knows of the machines."""

    source_is_here: bool
    """Whether the source is the front-end."""
    target_is_here: bool
    front_end_runs_vms: bool = False
    """Whether the front-end is a host too."""
    why_not_fenced: str = ""
    """For a VM that is off, or that oned has lost sight of: why its host may still write to a store, '' if
    not.
    """
    overlay_options: str = ""
    file_systems: Mapping[str, Tuple[str, ...]] = {}
    """What volatile disks may have, if they are to begin anew (plan/disk/disks.py)."""


def mv(asked: Move, vm: Vm, told: Told) -> Plan:
    """Plan mv of a VM directory; its disks travel with it, and mv of a disk is nothing."""
    pair = steps_of(asked, vm, *told[:3])
    if pair is None:
        return
    if vm.lcm_state in MAY_BE_LOST:
        from . import failover

        if not told.why_not_fenced and (
            vm.lcm_state in UNKNOWN or (yield from failover.is_away(asked.source))
        ):
            yield from failover.mv(asked, vm, told.overlay_options, told.file_systems)
            return
        if vm.lcm_state in UNKNOWN:
            yield from failover.seen_to_be_off(asked.source.host, vm, told.why_not_fenced)
    source_step, target_step = pair
    guest = domain_at(vm, told.source_is_here, told.front_end_runs_vms)
    if target_step is None:
        yield from renamed(asked.source.host, source_step, vm, guest)
    else:
        is_home = told.source_is_here and not told.front_end_runs_vms
        yield from carried(asked, (source_step, target_step), vm, guest, is_home)


def steps_of(
    request: Move,
    vm: Vm,
    source_is_frontend: bool,
    target_is_frontend: bool,
    front_end_runs_vms: bool = False,
) -> tuple[s.Step, s.Step | None] | None:
    """Return mv of a VM directory: (step at the source, step at the target); None if there is none.

    Disks travel with their directory, so mv of a disk is nothing. On one host it is a single step.
    """
    source, target = request.source, request.target
    if request.disk or (source.host, source.path) == (target.host, target.path):
        return None
    guest, disks = (
        domain_at(vm, target_is_frontend, front_end_runs_vms),
        [disk for disk in vm.disks if not disk.is_directory],
    )
    ids = tuple(sorted(disk.id for disk in disks))
    foreign = tuple(sorted(disk.id for disk in disks if disk.driver not in ("", DRIVER)))
    # A VM at rest on the front-end has no leases there; one that comes to it as a host needs them.
    runs = not target_is_frontend or (front_end_runs_vms and vm.lcm_state in COMING)
    if source.host == target.host or (source_is_frontend and target_is_frontend):
        step = s.RenameVm(source.vm, source.path, target.path, runs, guest, ids, foreign)
        return (step, None) if source.path != target.path else None
    return (
        s.SendVm(source.vm, source.path, domain=domain_at(vm, source_is_frontend, front_end_runs_vms)),
        s.ReceiveVm(target.vm, target.path, keep_bases=runs, domain=guest, disks=ids, foreign=foreign),
    )


def renamed(host: str, step: Any, vm: Vm, guest: str) -> Plan:
    """Copy a VM directory to another datastore of its host, then let go of the first."""
    found: s.RenamedVm = yield from ask(host, step)
    yield from _release(host, s.ReleaseVm(step.vm, step.source, guest, found.seen), vm)


def carried(asked: Move, steps: tuple[Any, Any], vm: Vm, guest: str, is_home: bool = False) -> Plan:
    """Relay a VM directory between two hosts, one of which may be the front-end.

    One at rest may be on another front-end (at_rest.py). `is_home`: the front-end is the source, and no host.
    """
    try:
        yield from _relayed(asked, steps, vm, guest, is_home)
    except (MissingVm, HostUnreachable) as e:
        from . import at_rest

        source = yield from at_rest.of_move(asked, vm, e)
        if source:
            yield from _relayed(asked._replace(source=source), steps, vm, guest)


def _relayed(asked: Move, steps: tuple[Any, Any], vm: Vm, guest: str, is_home: bool = False) -> Plan:
    """Relay a VM directory between two hosts; the source lets go only when the target has it."""
    place, there = asked.source, asked.target
    yield agree(there.host)
    mark = s.MarkVm(place.vm, place.path)
    fits: tuple[s.CheckMachine, ...] = ()
    found: s.MarkedVm
    if vm.lcm_state in SAVED:
        found, machine = yield On(place.host, (mark, s.SeeMachine(place.vm, place.path, guest)))
        fits = checklist.can_run(vm, machine)
    else:
        if vm.lcm_state == LcmState.PROLOG_UNDEPLOY:
            yield from can_start(vm, there.host)
        found = yield from ask(place.host, mark)
    unmark = On(place.host, (s.UnmarkVm(place.vm, place.path, found.token),))
    if is_home:
        from . import at_rest

        if vm.lcm_state in at_rest.RESUMING and at_rest.is_older_stay(found.seq, vm):
            found = found._replace(present=False, whole=False)
    try:
        gone = yield from _carried(asked, steps, vm, guest, found, fits, unmark)
    except SemisharedError:
        if found.token:
            # A mark that stays is a file beside the VM directory, which no command looks for.
            try:
                yield unmark
            except SemisharedError:
                pass  # that host may be what has failed
        raise
    if gone is not None:
        yield from _release(place.host, s.ReleaseVm(place.vm, place.path, guest, gone), vm)


def _carried(
    asked: Move,
    steps: tuple[Any, Any],
    vm: Vm,
    guest: str,
    found: s.MarkedVm,
    fits: tuple[s.CheckMachine, ...],
    unmark: On,
) -> Part[str | None]:
    """Have the directory where it is to go; return the fingerprint of what is to be let go of, None if it was
    there under another name.
    """
    place, there = asked.source, asked.target
    seen = found.seen
    looked = yield from ask(there.host, s.LookForVm(there.vm, there.path, found.token, seen))
    if looked.same:
        yield from _same_directory(place, there)
        yield unmark
        return None
    if s.has_arrived(found, looked, vm.seq):
        yield unmark
    elif not found.present:
        older = f"; {there.host} has what it was at SEQ {looked.seq}"
        older = older if looked.whole else f", nor on {there.host}"
        here = f"on {place.host} as it was at SEQ {found.seq}" if found.seq >= 0 else f"not on {place.host}"
        raise MissingVm(f"VM {place.vm} is {here}, where it is to be moved from{older}")
    elif not found.whole and any(disk.driver in ("", DRIVER) and not disk.is_directory for disk in vm.disks):
        raise MigrationRefused(s.no_records(place.path, place.host))
    else:
        source_step, target_step = steps
        if found.diffs:
            renewed = yield from _renewed(
                place, guest, leaves_bases=not getattr(target_step, "keep_bases", True)
            )
            found = found._replace(bytes=renewed.bytes, bases=renewed.bases)
        if found.classes and target_step.keep_bases:
            from ..device import choose

            # At rest on the front-end, its disks need no class of devices.
            target_step = target_step._replace(wants=choose.travelling(vm, found.classes))
        target_step = target_step._replace(sizes=found.sizes)
        room = checklist.room_for_arrival(there, found, keep_bases=target_step.keep_bases)
        yield On(there.host, (*fits, room))
        relay = Relay(
            On(place.host, (source_step._replace(token=found.token),)),
            On(there.host, (target_step,)),
            checklist.most_bytes(vm),
        )
        seen = yield from _sent(relay, vm)
    return seen


def _renewed(place: VmPlace, guest: str, *, leaves_bases: bool) -> Part[RenewedVm]:
    """Commit diffs before they go where no base is, or where theirs may be unavailable.

    Return the directory's facts after that.
    """
    from ...model.disk.commit_steps import RenewVm
    from ..store import commit_turns

    found = yield from commit_turns.settled(place.host, RenewVm(place.vm, place.path, leaves_bases, guest))
    yield Say(commit_turns.renewed, tuple(found))
    return found[-1]


def _same_directory(source: VmPlace, target: VmPlace) -> Plan:
    text = f"{source.path} on {source.host} and {target.path} on {target.host} are one directory"
    if source.path != target.path:
        raise SameDirectory(text)
    yield warn(f"{text}: nothing was moved. A system datastore of semishared must not be shared")


def _sent(relay: Relay, vm: Vm) -> Part[str]:
    """Send the directory and have it published; return the fingerprint of what was sent."""
    sent: s.SentVm = yield relay
    over = yield from _asked(why_over, vm, "")
    try:
        # Without its hash the target removes what arrived.
        yield End(relay.target.machine, "" if over else sent.sha256)
    except SemisharedError:
        if not over:
            raise
    if over:
        raise Overtaken(f"{over}: this move is not under way any more, nothing was moved")
    return sent.seen


def _asked(question: Callable[[Vm, Vm], str], then: Vm, unknown: str) -> Part[str]:
    """Return `question` of the VM as it was `then` and as oned has it now; `unknown` without oned."""
    try:
        now = yield AskOned("vm", then.id)
    except OnedUnavailable as e:
        return unknown and f"{unknown}: {e.detail}"
    return question(then, now)


def _release(host: str, step: s.ReleaseVm, vm: Vm) -> Plan:
    """Remove the source of a move, unless its owner is in doubt."""
    why = yield from _asked(why_doubted, vm, "oned cannot be asked")
    if not why:
        why = (yield from ask(host, step)).kept
    if why:
        yield warn(
            f"{step.vm_dir} on {host} is kept: {why}. semishared gc removes it when it is not the VM's"
        )


def domain_at(vm: Vm, is_frontend: bool, front_end_runs_vms: bool) -> str:
    """Return libvirt's name of the VM on a machine, '' where there are no domains."""
    return "" if is_frontend and not front_end_runs_vms else running_domain(vm)


def why_doubted(then: Vm, now: Vm) -> str:
    """Return why the source of a move may still be wanted though the target has it, '' if it is not."""
    state = f"VM {now.id} is in state {now.lcm_state}, in which oned moves no files"
    return why_over(then, now) or ("" if now.lcm_state in MOVING else state)
