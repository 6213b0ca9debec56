# SPDX-License-Identifier: Apache-2.0
"""Write what Sunstone shows of VMs' disks into oned (plan/care/vm_vector.py says what that is).

    with publisher(oned, config) as work: rows = work.publish([12, 13])

A run asks oned for 100 VMs in one answer, each of their machines once, and writes what is not there yet: so
1,000 VMs cost 10 questions, a conversation with each host, and a call for each VM that has changed. Only our
one attribute is ever sent, for oned to merge (one.vm.update with append): what a user saves at the same
moment stays. A user's form that was opened before brings an old vector back; the next change, or look, or
`semishared publish` writes the new one.

It may be killed anywhere: the note of a VM stays until all of it is written. With `is_dry` all is asked and
decided in the same way, and neither oned nor a note is written.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, Union

from .. import NAME
from ..config import Config
from ..errors import GoneFromOned, OnedUnavailable, SemisharedError
from ..model.base.steps import ReportedVm, ReportVms
from ..model.disk import commit_steps
from ..named import NamedTuple
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.states import VmState
from ..opennebula.xml import Vm
from ..plan.care import gc_places, vm_vector
from ..plan.care.vm_vector import Facts
from ..tools import locks
from ..tools.effects import point
from ..tools.this_machine import is_here
from ..wire.session import Session
from . import front_ends, noted_datastores, vm_notes
from .vm_notes import Known

AT_ONCE = 32
"""Machines asked at the same time."""
IN_ONE = 100
"""VMs in one answer of oned's; and in one run of the timer."""
WAIT_S = 60.0
"""Until another publisher has to be done."""
SOON_S = 2.0
"""The same for a command that has something else to do: the timer comes anyway."""
PUBLISHED, SAME, PUT_OFF, GONE, FAILED = "published", "as before", "put off", "gone", "failed"
WOULD = "would publish"
"""In the place of PUBLISHED where nothing is written."""


class Row(NamedTuple):
    """What has become of a VM's vector."""

    vm: int
    how: str
    why: str = ""
    fields: Mapping[str, str] = {}


class Job(NamedTuple):
    """A VM whose machine is to be asked."""

    vm: Vm
    known: Known
    where: str
    location: str
    system: int
    is_settled: bool


Said = Union[ReportedVm, SemisharedError]


class Unwritten:
    """Stands where vm_notes stands for a run that writes nothing."""

    take = staticmethod(vm_notes.noted)

    @staticmethod
    def remember(vm: int, known: Known, due_at: float = 0) -> None:
        """Keep nothing."""

    @staticmethod
    def put_off(vm: int, due_at: float) -> None:
        """Leave its notes due as they are."""

    @staticmethod
    def drop(vm: int) -> None:
        """Leave its note."""


@contextmanager
def publisher(
    oned: Oned, config: Config, wait_s: Optional[float] = None, *, is_dry: bool = False
) -> Iterator[Publisher]:
    """Yield the only publisher of this front-end; raise ToolTimeout if another one is not done in time.

    One that `is_dry` is not the only one: it waits for none, and holds up none.
    """
    if is_dry:
        yield Publisher(oned, config, is_dry=True)
        return
    with locks.exclusive(vm_notes.lock(), WAIT_S if wait_s is None else wait_s):
        vm_notes.sweep(time.time())
        yield Publisher(oned, config)


def after(oned: Oned, config: Config, done: Mapping[int, str]) -> None:
    """Publish VMs that a command has changed, each with the error in which that ended ('': none).

    What cannot be written now is noted, for the timer: the command has done its work.
    """
    if not done:
        return
    for vm, error in done.items():
        vm_notes.leave(vm, error)
    try:
        with publisher(oned, config, SOON_S) as work:
            work.publish(sorted(done))
    except (SemisharedError, OSError):
        return


def later() -> float:
    """Return when a VM is looked at again without a new note."""
    return time.time() + vm_notes.LATER_S


class Publisher:
    """One run, under the lock."""

    def __init__(self, oned: Oned, config: Config, *, is_dry: bool = False) -> None:
        self._oned, self._config, self._is_dry = oned, config, is_dry
        self._notes: Any = Unwritten if is_dry else vm_notes
        datastores = oned.datastores()
        if not is_dry:
            noted_datastores.note_all(datastores)
        self._locations = {store.id: store.base_path for store in datastores}
        self._front_end = os.uname().nodename
        self._lines: Set[int] = set()
        """Images that have a line of VMs of this run."""
        self._rests: Dict[int, str] = {}
        """The front-end that has a VM at rest, where that is another one."""
        self.errors: Dict[str, str] = {}
        """Machines that said nothing, with why."""
        self.images: Dict[int, str] = {}
        """The lines of images that were written, or would be, '' for one that was taken back."""

    def publish(self, ids: Sequence[int]) -> List[Row]:
        """Write what these VMs lack; raise OnedUnavailable if oned does not answer at all."""
        rows: List[Row] = []
        for at in range(0, len(ids), IN_ONE):
            rows += self._some(ids[at : at + IN_ONE])
        return rows

    def publish_all(self) -> List[Row]:
        """Do the same for all VMs in system datastores of ours; and take back lines of images in vain."""
        ours = [vm.id for vm in self._oned.vms() if vm.driver == NAME]
        rows = self.publish(sorted({*ours, *vm_notes.every()}))
        seen = {row.vm for row in rows if row.how in (PUBLISHED, WOULD, SAME)}
        if not any(row.how == FAILED for row in rows):
            for image in self._oned.images():
                if image.id not in self._lines and image.vms <= seen and not vm_vector.is_state(image, ""):
                    self._write_image(image.id, "")
        return rows

    def _some(self, ids: Sequence[int]) -> List[Row]:
        # A note is taken before oned and the host are asked: what comes later has a note of its own.
        noted = {number: self._noted(number) for number in ids}
        there = {vm.id: vm for vm in self._oned.vms_of(ids)}
        rows, jobs = [], []
        for number in ids:
            job = self._job(number, there.get(number), noted[number])
            if isinstance(job, Row):
                rows.append(job)
            else:
                jobs.append(job)
        said = self._asked(jobs)
        return rows + [self._guarded(job, said[job.vm.id]) for job in jobs]

    def _noted(self, vm: int) -> Known:
        has_note, error = self._notes.take(vm)
        known = vm_notes.known(vm)
        return known._replace(error=error) if has_note else known

    def _job(self, number: int, vm: Optional[Vm], known: Known) -> Union[Job, Row]:
        """Return what is to be asked of a VM's machine, or the row of a VM that has none."""
        if vm is None or vm.state == VmState.DONE:
            return self._gone(number, vm, known)
        place = gc_places.place_of(vm, self._front_end, is_here)
        systems = vm.system_datastores
        if place is None and systems and vm.host and not vm.has_failed:
            self._notes.put_off(number, time.time() + vm_notes.BUSY_S)
            return Row(number, PUT_OFF, "OpenNebula is at work on it")
        if not systems or not vm.host:
            self._notes.drop(number)
            self._notes.put_off(number, later())
            return Row(number, GONE, "it is on no host")
        where = place.machine if place else vm.host
        base = self._locations.get(systems[-1], "")
        try:
            location = os.path.dirname(absolute(base, "BASE_PATH"))
        except SemisharedError as e:
            self._notes.put_off(number, later())
            return Row(number, FAILED, e.line())
        return Job(vm, known, where, location, systems[-1], place is not None)

    # -- machines ------------------------------------------------------------------------------------

    def _asked(self, jobs: Sequence[Job]) -> Dict[int, Said]:
        by_machine: Dict[str, List[Job]] = {}
        for job in jobs:
            by_machine.setdefault(job.where, []).append(job)
        found: Dict[int, Said] = {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for answer in pool.map(self._ask, by_machine, by_machine.values()):
                found.update(answer)
        return found

    def _ask(self, machine: str, jobs: Sequence[Job]) -> Dict[int, Said]:
        """Return what a machine says of VMs, in one conversation; a VM without a directory has no disk.

        One at rest that is not on this front-end is asked for on the others (plan/vm/at_rest.py).
        """
        found: Dict[int, Said] = {job.vm.id: ReportedVm(job.vm.id, job.system, [], "") for job in jobs}
        try:
            there = self._reported(machine, jobs)
        except SemisharedError as e:
            self.errors[machine] = e.line()
            return dict.fromkeys(found, e)
        found.update(there)
        away = [job for job in jobs if job.vm.is_on_front_end and job.vm.id not in there]
        for other in front_ends.others(self._oned) if away else ():
            try:
                reported = self._reported(other, away)
                there.update(reported)
                self._rests.update(dict.fromkeys(reported, other))
            except SemisharedError as e:
                self.errors[other] = e.line()
                found.update({job.vm.id: e for job in away})
        return {**found, **there}

    def _reported(self, machine: str, jobs: Sequence[Job]) -> Dict[int, ReportedVm]:
        """Return what a machine says of those of the VMs that have a directory there."""
        by_place: Dict[Tuple[str, int], List[int]] = {}
        for job in jobs:
            by_place.setdefault((job.location, job.system), []).append(job.vm.id)
        found: Dict[int, ReportedVm] = {}
        with self._session(machine) as session:
            for (location, system), vms in by_place.items():
                (answer,) = session.run([ReportVms(location, (system,), tuple(vms))])
                found.update({vm.vm: vm for vm in answer.vms if vm.vm in vms})
        return found

    def _session(self, machine: str) -> Session:
        return Session("localhost" if is_here(machine) else machine, "publish", self._config)

    # -- oned ----------------------------------------------------------------------------------------

    def _guarded(self, job: Job, said: Said) -> Row:
        try:
            return self._write(job, said)
        except OnedUnavailable as e:
            # As of a VM that its user has locked; its note stays. GoneFromOned is one of these.
            self._notes.put_off(job.vm.id, later())
            return Row(job.vm.id, FAILED, e.line())

    def _write(self, job: Job, said: Said) -> Row:
        vm, known = job.vm, job.known
        seen = said if isinstance(said, ReportedVm) else None
        why = f"{said.id} {said.detail}" if isinstance(said, SemisharedError) else ""
        facts = Facts(vm, self._rests.get(vm.id, job.where), seen, why, job.is_settled, error=known.error)
        if seen is not None:
            known = known._replace(since=(known.since or vm_notes.stamp()) if facts.uncommitted else "")
        facts = facts._replace(since=known.since)
        fields, states = vm_vector.vector(facts), vm_vector.image_states(facts)
        # Noted before they are written: a line that no file knows of would stay.
        lines = known._replace(images=tuple(sorted({*known.images, *states})))
        again = later() if facts.may_change or seen is None else 0
        self._notes.remember(vm.id, lines, again)
        is_new = not vm_vector.is_said(vm, fields)
        if is_new and not self._is_dry:
            self._oned.update_vm(vm.id, vm_vector.vm_template(fields))
            point("published a VM")
        if seen is None:
            self._notes.put_off(vm.id, again)
            return Row(vm.id, FAILED, why, fields)
        self._lines.update(states)
        self._say_of_images(vm.id, {**dict.fromkeys(lines.images, ""), **states})
        self._notes.remember(vm.id, lines._replace(images=tuple(sorted(states))), again)
        self._notes.drop(vm.id)
        return Row(vm.id, (WOULD if self._is_dry else PUBLISHED) if is_new else SAME, "", fields)

    def _say_of_images(self, vm: int, states: Mapping[int, str]) -> None:
        """Write or remove lines of images on a VM; one that another VM has by now is left to that."""
        for number, text in states.items():
            try:
                image = self._oned.image(number)
            except GoneFromOned:
                continue
            if (text or not image.vms - {vm}) and not vm_vector.is_state(image, text):
                self._write_image(number, text)

    def _write_image(self, number: int, text: str) -> None:
        if not self._is_dry:
            self._oned.update_image(number, vm_vector.image_template(text))
            point("published an image")
        self.images[number] = text

    def _gone(self, number: int, vm: Optional[Vm], known: Known) -> Row:
        """Take back what was said of a VM that is gone, but of images whose newest content it has left."""
        left: Dict[int, str] = {}
        try:
            if known.images and vm is not None and vm.host:
                # A host has no word on images of other VMs.
                left = {image: text for image, text in self._left(vm).items() if image in known.images}
            self._lines.update(left)
            self._say_of_images(number, {**dict.fromkeys(known.images, ""), **left})
        except SemisharedError as e:
            self._notes.put_off(number, later())
            return Row(number, FAILED, e.line())
        again = later() if left else 0
        self._notes.remember(number, Known(images=tuple(sorted(left))), again)
        self._notes.drop(number)
        return Row(number, GONE, "what it has not committed is kept" if left else "")

    def _left(self, vm: Vm) -> Dict[int, str]:
        """Return the lines of images of which a VM's last host keeps a diff; raise SemisharedError."""
        system = vm.system_datastores[-1]
        location = os.path.dirname(absolute(self._locations.get(system, ""), "BASE_PATH"))
        with self._session(vm.host) as session:
            kept = session.ask(commit_steps.FindKept(vm.id, location, (system,))).kept
        return vm_vector.kept_states(vm.id, vm.host, kept)
