# SPDX-License-Identifier: Apache-2.0
"""Plans of removals: delete of a disk or a VM directory, and what mvds shares with it.

oned retries the epilog of a stopped or undeployed VM on its last host, and deletes such a VM there, though
all of its files are on the front-end. So whatever is removed on a host is removed there too (`is_here`: the
front-end has the VM, and is not that host); and if it was, a host that is not there any more holds nothing
up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

from ...errors import HostUnreachable
from ...model import steps as s
from ...model.exchange import AskOned, Lines, On, Part, Plan, Say, agree, warn
from ...opennebula.args import Delete, ToImage, VmPlace
from .disks import disk_ref, running_domain

if TYPE_CHECKING:
    from ...opennebula.xml import Vm


def delete(asked: Delete, is_here: bool) -> Plan:
    """Plan delete of a disk or VM directory, also for persistent disks: only what is the VM's own goes."""
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
        if answer and "on_store" in answer:
            from ...model.store.image_steps import ForgetDisk
            from ..image import disk_image
            from ..store import rbd

            yield from rbd.remove_clone((yield from disk_image.clone(disk.vm, disk.disk, answer["on_store"])))
            yield from everywhere(place, is_here, ForgetDisk(disk))
            return
    yield Say(_finished, (place, *found))


def mvds(asked: ToImage, is_here: bool, vm: Optional[Vm] = None) -> Plan:
    """Plan mvds: end the session of an in-place disk, whose data is on the store; commit a diff.

    `vm`: as oned has it, if that was asked for already.
    """
    place, disk = asked.disk.vm_place, disk_ref(asked.disk)
    ended = yield from everywhere(place, is_here, s.EndSession(disk))
    if any(answer and answer.get("kept") for answer in ended):
        yield Say(_finished, (place, *ended))
    machines = ("localhost", place.host) if is_here else (place.host,)
    diffs = [machine for machine, answer in zip(machines, ended) if answer and "commits" in answer]
    if diffs:
        from ...model.disk.commit_steps import FinishDisk
        from ..store import commit_turns

        # Of a guest that runs on other disks may be at rest, or have jobs. Where the files of one at rest
        # are, there are no domains.
        domain = running_domain(vm or (yield AskOned("vm", place.vm)))
        for machine in diffs:
            finish = FinishDisk(disk, "" if is_here and machine == "localhost" else domain)
            done = yield from commit_turns.settled(machine, finish)
            yield Say(_finished, (place, *done))


def _finished(place: VmPlace, *answers: Any) -> Lines:
    if not any(answers):
        return ()
    from ..store import commit_turns

    return commit_turns.finished(place.vm, *answers)


def everywhere(place: VmPlace, is_here: bool, step: s.Step) -> Part[list[Any]]:
    """Carry out a removal on the host that was named, and before that on the front-end if the VM is there;
    return the answers.
    """
    on_host = On(place.host, (step,))
    if not is_here:
        return list((yield on_host))
    found: list[Any] = []
    try:
        # Or half would be removed, and the rest be refused until that host is synced.
        yield agree(place.host)
        found = list((yield On("localhost", (step,))))
        found += yield on_host
    except HostUnreachable as e:
        found = found or (yield On("localhost", (step,)))
        yield warn(
            f"{e.detail}. VM {place.vm} was on the front-end; what that host may still have of it is left"
        )
    return found
