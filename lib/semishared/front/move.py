# SPDX-License-Identifier: Apache-2.0
"""mv of a VM directory: relayed between two hosts, or copied on one; the source is removed last, and only if nobody wants it.

`recover --failure` stops no driver: while an older mv goes on, the VM may run again where its files came from. So before
the source goes its host looks for the domain and for changes, and oned is asked whether the move is still under way. In
doubt the source is kept, which is no failure: the target has it all, and `semishared gc` removes what oned says is not
the VM's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from ..errors import OnedUnavailable, Overtaken, SameDirectory, SemisharedError
from ..model import steps as s
from ..plan import disks

if TYPE_CHECKING:
    from ..opennebula import args
    from ..opennebula.oned import Oned
    from ..opennebula.xml import Vm
    from ..wire.session import Session
    from .action import Action

Now = Callable[[], "Vm"]
"""Asks oned for the VM."""


def move(action: Action, request: args.Move) -> None:
    """Carry out mv of a VM directory."""
    from ..opennebula.oned import Oned
    from ..wire.session import is_here

    oned, here = Oned(), (is_here(request.source.host), is_here(request.target.host))
    vm = oned.vm(request.source.vm)
    action.seq = vm.seq
    runs_vms = any(here) and front_end_runs_vms(oned)
    pair = disks.mv(request, vm, *here, runs_vms)
    if pair is None:
        return
    source_step, target_step = pair
    guest = disks.domain_at(vm, here[0], runs_vms)
    if target_step is None:
        rename(action, request.source.host, source_step, vm, lambda: Oned().vm(vm.id), guest)
    else:
        carry(action, request, source_step, target_step, vm, lambda: Oned().vm(vm.id), guest)


def front_end_runs_vms(oned: Oned) -> bool:
    """Tell whether this machine may be a host too."""
    from ..wire.session import is_here

    try:
        return any(is_here(host.name) for host in oned.hosts())
    except OnedUnavailable:
        return True


def rename(action: Action, host: str, step: Any, vm: Vm, now: Now, guest: str) -> None:
    """Copy a VM directory to another datastore of its host, then let go of the first."""
    with action.answering(host, (step,)) as answer, action.session(host, bulk=True) as session:
        (found,) = session.run([step], answer=answer)
        release(action, session, s.ReleaseVm(step.vm, step.source, guest, _seen(found)), vm, now)
        action.tell(session.host, session.moved)


def carry(action: Action, request: args.Move, source_step: Any, target_step: s.Step, vm: Vm, now: Now, guest: str) -> None:
    """Relay a VM directory between two hosts; the source lets go only when the target has it."""
    place, there = request.source, request.target
    with action.session(place.host, bulk=True) as source, action.session(there.host, bulk=True) as target:
        target.agree()
        (found,) = source.run([s.MarkVm(place.vm, place.path)])
        assert isinstance(found, dict)
        token, seen = str(found["token"]), str(found["seen"])
        (looked,) = target.run([s.LookForVm(there.vm, there.path, token, seen)])
        assert isinstance(looked, dict)
        if looked["same"]:
            source.run([s.UnmarkVm(place.vm, place.path, token)])
            _same_directory(action, request)
            return
        if s.has_arrived(found, looked, action.seq):
            source.run([s.UnmarkVm(place.vm, place.path, token)])
        elif not found["present"]:
            raise SemisharedError(f"VM {place.vm} is neither on {place.host} nor, as it is now, on {there.host}")
        else:
            seen = _send(action, source, target, (source_step._replace(token=token), target_step), vm, now)
        release(action, source, s.ReleaseVm(place.vm, place.path, guest, seen), vm, now)


def _same_directory(action: Action, request: args.Move) -> None:
    source, target = request.source, request.target
    text = f"{source.path} on {source.host} and {target.path} on {target.host} are one directory"
    if source.path != target.path:
        raise SameDirectory(text)
    action.report.warn(f"{text}: nothing was moved. A system datastore of semishared must not be shared")


def _send(action: Action, source: Session, target: Session, steps: tuple[s.Step, s.Step], vm: Vm, now: Now) -> str:
    """Send the directory and have it published; return the fingerprint of what was sent."""
    target.begin([steps[1]], answers=True)
    source.begin([steps[0]])
    message = source.read()
    while isinstance(message, bytes):
        target.send_data(message)
        message = source.read()
    sent = message if isinstance(message, dict) else {}
    source.finish()
    over = _asked(lambda: disks.why_over(vm, now()), "")
    # Without its hash what arrived is removed.
    target.send(end=True, sha256="" if over else sent.get("sha256"))
    try:
        with action.answering(target.host, (steps[1],)) as answer:
            target.finish(answer)
    except SemisharedError:
        if not over:
            raise
    if over:
        raise Overtaken(f"{over}: this move is not under way any more, nothing was moved")
    action.tell(target.host, target.moved)
    return _seen(sent)


def _seen(found: object) -> str:
    return str(found.get("seen", "")) if isinstance(found, dict) else ""


def _asked(question: Callable[[], str], unknown: str) -> str:
    try:
        return question()
    except OnedUnavailable as e:
        return unknown and f"{unknown}: {e.detail}"


def release(action: Action, session: Session, step: s.ReleaseVm, vm: Vm, now: Now) -> None:
    """Remove the source of a move, unless it is in doubt whose it is."""
    why = _asked(lambda: disks.why_doubted(vm, now()), "oned cannot be asked")
    if not why:
        (done,) = session.run([step])
        why = str(done.get("kept", "")) if isinstance(done, dict) else ""
    if why:
        action.report.warn(f"{step.vm_dir} on {session.host} is kept: {why}. semishared gc removes it when it is not the VM's")
