# SPDX-License-Identifier: Apache-2.0
"""Plans of removals: delete of a disk or a VM directory, and what mvds shares with it.

oned retries the epilog of a stopped or undeployed VM on its last host, and deletes such a VM there, though
all of its files are on the front-end. So a removal on a host is also done on the front-end if that has the VM
and is not that host (`is_here`). Then a host that is gone does not hold it up.

In an HA group another front-end may have it, the one that led when it came to rest (plan/vm/at_rest.py). It
is looked for if this one does not have a VM that was at rest (`may_rest`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple

from ...errors import HostUnreachable
from ...model import steps as s
from ...model.exchange import AskOned, Lines, On, Part, Plan, Say, T, agree, warn
from ...opennebula.args import Delete, ToImage, VmPlace
from .disks import disk_ref, running_domain

if TYPE_CHECKING:
    from ...opennebula.xml import Vm


def delete(asked: Delete, is_here: bool, may_rest: bool = False) -> Plan:
    """Plan delete of a disk or VM directory, also for persistent disks: only the VM's own files go."""
    place = asked.vm_place
    if asked.is_nothing:
        return
    others: Tuple[str, ...] = ()
    if may_rest:
        from ..vm import at_rest

        rests = yield from at_rest.elsewhere(place)
        others = rests.machines
        for machine, why in () if asked.disk else rests.silent.items():
            yield warn(
                f"{why}. What front-end {machine} may have of VM {place.vm} is left to `semishared gc`"
            )
    if asked.disk is None:
        gone = yield from everywhere(place, is_here, s.RemoveVm(place.vm, place.path), others)
        yield Say(_finished, (place, *gone))
        return
    disk = disk_ref(asked.disk)
    # The datastore is the image's for an image disk, the system's for a volatile one, which has no clones.
    remove = s.RemoveDisk(disk, f"{place.datastore_location}/{asked.store}")
    found = yield from everywhere(place, is_here, remove, others)
    for answer in found:
        if isinstance(answer, s.OnStore):
            from ...model.store.image_steps import ForgetDisk
            from ..image import disk_image
            from ..store import rbd

            yield from rbd.remove_clone((yield from disk_image.clone(disk.vm, disk.disk, answer.on_store)))
            yield from everywhere(place, is_here, ForgetDisk(disk), others)
            return
    yield Say(_finished, (place, *found))


def mvds(asked: ToImage, is_here: bool, vm: Optional[Vm] = None, may_rest: bool = False) -> Plan:
    """Plan mvds: end the session of an in-place disk, whose data is on the store; commit a diff.

    `vm`: oned's view of it, if the caller has it. Raise OnAnotherFrontEnd if a diff may be on one that does
    not answer.
    """
    place, disk = asked.disk.vm_place, disk_ref(asked.disk)
    is_at_rest = False
    if may_rest:
        from ..vm import at_rest

        rests = yield from at_rest.elsewhere(place, vm)
        if rests.machine:
            # The only one: what others have is of earlier stays, and goes with the directory.
            place, is_here, is_at_rest = place._replace(host=rests.machine), False, True
        elif vm and rests.silent and (yield from _commits(vm, disk.disk)):
            rests.refuse(place.vm, f"is not on {place.host}, where disk {disk.disk} is to be committed")
    ended = yield from everywhere(place, is_here, s.EndSession(disk))
    if any(answer.kept for answer in ended):
        yield Say(_finished, (place, *ended))
    machines = ("localhost", place.host) if is_here else (place.host,)
    diffs = [machine for machine, answer in zip(machines, ended) if answer.commits]
    if diffs:
        from ...model.disk.commit_steps import FinishDisk
        from ..store import commit_turns

        # Other disks of a running guest may be at rest or have blockjobs. A VM at rest is where no domains
        # are.
        domain = "" if is_at_rest else running_domain(vm or (yield AskOned("vm", place.vm)))
        for machine in diffs:
            finish = FinishDisk(disk, "" if is_here and machine == "localhost" else domain)
            done = yield from commit_turns.settled(machine, finish)
            yield Say(_finished, (place, *done))


def _commits(vm: Vm, number: int) -> Part[bool]:
    """Tell whether a disk is a diff, by oned: one in place has nothing that is not on its store."""
    from ..image import placement

    disk = vm.disk(number)
    image = yield AskOned("image", disk.image_id)
    return placement.attached(image, (yield AskOned("datastore", image.store_id)), disk).commits


def _finished(place: VmPlace, *answers: Any) -> Lines:
    if not any(map(any, answers)):
        return ()
    from ..store import commit_turns

    return commit_turns.finished(place.vm, *answers)


def everywhere(place: VmPlace, is_here: bool, step: s.Step[T], others: Sequence[str] = ()) -> Part[list[T]]:
    """Carry out a removal on the front-end if it has the VM, then on the named host; return the answers.

    `others`: front-ends that have it, if this one does not.
    """
    on_host = On(place.host, (step,))
    if not is_here and not others:
        return list((yield on_host))
    found: list[T] = []
    homes = ("localhost",) if is_here else others
    try:
        # Else half would be removed, and an unsynced host would refuse the rest.
        yield agree(place.host)
        for home in homes:
            found += yield On(home, (step,))
        found += yield on_host
    except HostUnreachable as e:
        for home in homes[len(found) :]:
            found += yield On(home, (step,))
        yield warn(
            f"{e.detail}. VM {place.vm} was on the front-end; what that host may still have of it is left"
        )
    return found
