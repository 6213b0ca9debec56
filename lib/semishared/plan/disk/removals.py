# SPDX-License-Identifier: Apache-2.0
"""Plans of removals: delete of a disk or a VM directory, and what mvds shares with it.

oned retries the epilog of a stopped or undeployed VM on its last host, and deletes such a VM there, though
all of its files are on the front-end. So a removal on a host is also done on the front-end if that has the VM
and is not that host (`is_here`). Then a host that is gone does not hold it up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ...errors import HostUnreachable
from ...model import steps as s
from ...model.exchange import AskOned, Lines, On, Part, Plan, Say, T, agree, warn
from ...opennebula.args import Delete, ToImage, VmPlace
from .disks import disk_ref, running_domain

if TYPE_CHECKING:
    from ...opennebula.xml import Vm


def delete(asked: Delete, is_here: bool) -> Plan:
    """Plan delete of a disk or VM directory, also for persistent disks: only the VM's own files go."""
    place = asked.vm_place
    if asked.is_nothing:
        return
    if asked.disk is None:
        gone = yield from everywhere(place, is_here, s.RemoveVm(place.vm, place.path))
        yield Say(_finished, (place, *gone))
        return
    disk = disk_ref(asked.disk)
    # The datastore is the image's for an image disk, the system's for a volatile one, which has no clones.
    found = yield from everywhere(
        place, is_here, s.RemoveDisk(disk, f"{place.datastore_location}/{asked.store}")
    )
    for answer in found:
        if isinstance(answer, s.OnStore):
            from ...model.store.image_steps import ForgetDisk
            from ..image import disk_image
            from ..store import rbd

            yield from rbd.remove_clone((yield from disk_image.clone(disk.vm, disk.disk, answer.on_store)))
            yield from everywhere(place, is_here, ForgetDisk(disk))
            return
    yield Say(_finished, (place, *found))


def mvds(asked: ToImage, is_here: bool, vm: Optional[Vm] = None) -> Plan:
    """Plan mvds: end the session of an in-place disk, whose data is on the store; commit a diff.

    `vm`: oned's view of it, if the caller has it.
    """
    place, disk = asked.disk.vm_place, disk_ref(asked.disk)
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
        domain = running_domain(vm or (yield AskOned("vm", place.vm)))
        for machine in diffs:
            finish = FinishDisk(disk, "" if is_here and machine == "localhost" else domain)
            done = yield from commit_turns.settled(machine, finish)
            yield Say(_finished, (place, *done))


def _finished(place: VmPlace, *answers: Any) -> Lines:
    if not any(map(any, answers)):
        return ()
    from ..store import commit_turns

    return commit_turns.finished(place.vm, *answers)


def everywhere(place: VmPlace, is_here: bool, step: s.Step[T]) -> Part[list[T]]:
    """Carry out a removal on the front-end if it has the VM, then on the named host; return the answers."""
    on_host = On(place.host, (step,))
    if not is_here:
        return list((yield on_host))
    found: list[T] = []
    try:
        # Else half would be removed, and an unsynced host would refuse the rest.
        yield agree(place.host)
        found = list((yield On("localhost", (step,))))
        found += yield on_host
    except HostUnreachable as e:
        found = found or (yield On("localhost", (step,)))
        yield warn(
            f"{e.detail}. VM {place.vm} was on the front-end; what that host may still have of it is left"
        )
    return found
