# SPDX-License-Identifier: Apache-2.0
"""Steps to functions: carry out a plan on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .. import store
from ..base import cache, room
from ..disk import create, guard, records, retained_diffs, vm_dir
from ..errors import BadArguments, NoSpace, TransferCorrupt
from ..model import steps as s
from ..stage.ensure import borrowed, ensure
from ..store import verbs
from ..tools import progress
from .work import Steps

if TYPE_CHECKING:
    from ..model.disk.acquired import Given


class Execution(Steps):
    """One plan: the steps of model/steps.py are carried out here, the others by the module of theirs."""

    def step(self, step: s.Step) -> object:
        """Carry out one step; return what it found out (JSON data) or None."""
        guard.guard(step, self.talk.warn, self.planned.seq)
        name = type(step).__name__
        if type(step).__module__.endswith(".share.steps"):
            from ..share import verbs as of_shares

            return of_shares.do(step)
        return (
            verbs.do(step, self.planned.seq) if name in verbs.VERBS else getattr(self.part(step), name)(step)
        )

    def part(self, step: s.Step) -> object:
        """Return what carries out the steps of a step's vocabulary: loaded when one of them comes, most plans
        are of one.
        """
        vocabulary = type(step).__module__.partition(".model.")[2]
        if vocabulary == "disk.snapshot_steps":
            from .snapshot_steps import OnSnapshots

            return OnSnapshots(self.planned, self.talk)
        if vocabulary == "vm.move_steps":
            from .move_steps import OnMoves

            return OnMoves(self.planned, self.talk)
        if vocabulary == "base.steps":
            from .base_steps import OnBases

            return OnBases(self.planned, self.talk)
        if vocabulary == "disk.commit_steps":
            from .commit_steps import OnCommits

            return OnCommits(self.planned, self.talk)
        if vocabulary == "device.steps":
            from .device_steps import OnDevices

            return OnDevices(self.planned, self.talk)
        if vocabulary in ("store.image_steps", "store.datastore_steps"):
            from .store_steps import OnStore

            return OnStore(self.planned, self.talk)
        return self

    def PrepareVm(self, step: s.PrepareVm) -> None:
        try:
            vm_dir.prepare(step.vm, step.vm_dir, self.planned)
        except NoSpace:
            room.for_disk(step.vm_dir, room.LITTLE, self.talk.asking)
            vm_dir.prepare(step.vm, step.vm_dir, self.planned)

    def ReplaceLostBases(self, step: s.ReplaceLostBases) -> None:
        from ..disk import hot_bases

        create.replace_lost_bases(step.vm, step.vm_dir, self.talk.asking, self.talk.warn)
        hot_bases.provide(step.vm, step.vm_dir, self.talk.warn)

    def StageBase(self, step: s.StageBase) -> object:
        content = store.content(step.image)
        base, _ = ensure(step.root, step.image, self.talk.asking, content=content)
        return {"generation": base.generation, **content.unnamed()}

    def CreateOverlay(self, step: s.CreateOverlay) -> None:
        create.create_overlay(step, self.planned, self.talk.asking)

    def CreateRemote(self, step: s.CreateRemote) -> None:
        create.create_remote(step, self.planned)

    def CopyImage(self, step: s.CopyImage) -> None:
        create.copy_image(step, self.planned, self.talk.asking)

    def CopyFile(self, step: s.CopyFile) -> None:
        create.copy_file(step, self.planned)

    def CloneOnStore(self, step: s.CloneOnStore) -> None:
        create.clone_on_store(step, self.planned)

    def LinkInPlace(self, step: s.LinkInPlace) -> None:
        create.link_in_place(step, self.planned)

    def CreateVolatile(self, step: s.CreateVolatile) -> None:
        create.create_volatile(step, self.planned, self.talk.asking)

    def NoteIoClasses(self, step: s.NoteIoClasses) -> None:
        vm_dir.note_io_classes(step, self.planned)

    def NoteClients(self, step: s.NoteClients) -> None:
        from ..disk import clients

        clients.note(step, self.planned)

    def SaveDisk(self, step: s.SaveDisk) -> object:
        disk = step.disk
        vm_dir.check_wanted(disk, self.planned)
        record = records.read_record(disk.vm_dir, disk.disk)
        with borrowed(cache.root_of(disk.vm_dir), record, (disk.vm, disk.disk), self.talk.asking):
            return create.save_disk(step)

    def EndSession(self, step: s.EndSession) -> object:
        record = records.as_found(step.disk.vm_dir, step.disk.disk)
        if record and record.place.commits:
            return {"commits": True}
        return vm_dir.end_session(step.disk, self.planned)

    def RemoveDisk(self, step: s.RemoveDisk) -> object:
        return vm_dir.remove_disk(step.disk, self.planned, step.store_dir, forget=False)

    def RemoveVm(self, step: s.RemoveVm) -> object:
        found: list[str] = []

        def keep() -> str:
            found.extend(retained_diffs.keep_all(step.vm, step.vm_dir))
            return ""

        vm_dir.remove(step.vm, step.vm_dir, self.planned, keep)
        return {"kept": found}

    def ReceiveFile(self, step: s.ReceiveFile) -> None:
        import hashlib

        digest = hashlib.sha256()
        directory, name = os.path.split(step.path)
        with vm_dir.published(step.vm, directory, name, self.planned) as staged:
            with open(staged, "xb") as file:
                for chunk in self.talk.chunks():
                    digest.update(chunk)
                    file.write(chunk)
                    progress.count("received", len(chunk))
            if digest.hexdigest() != step.sha256:
                raise TransferCorrupt(f"{step.path} did not arrive whole on {os.uname().nodename}")

    def BackUp(self, step: s.BackUp) -> None:
        from ..disk import backup

        backup.back_up(step, self.planned, self.talk.asking)

    def EndBackup(self, step: s.EndBackup) -> None:
        from ..disk import backup

        backup.end(step)

    def RestoreDisk(self, step: s.RestoreDisk) -> None:
        from ..disk import backup, pending_jobs

        pending_jobs.settle(step.disk.vm, step.disk.vm_dir)
        session = backup.session(step.disk)
        with backup.received(step.disk, self.talk.chunks(), self.talk.sha256) as path:
            backup.restore(step, path, self.planned, self.talk.asking, session)

    def LookAround(self, step: s.LookAround) -> object:
        from . import leftovers

        return leftovers.look_around(step)

    def Discard(self, step: s.Discard) -> object:
        from . import leftovers

        return leftovers.discard(step)


def read_plan(data: object) -> tuple[int, list[s.Step]]:
    """Return SEQ (-1: not known) and steps of a plan in JSON data; raise BadArguments."""
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("steps"), list)
        or not isinstance(data.get("seq"), int)
    ):
        raise BadArguments("not a plan")
    return data["seq"], [s.from_data(step) for step in data["steps"]]


def read_given(plan: object) -> dict[int, dict[int, Given]]:
    """Return what oned has given VMs as their disks, by VM, as far as the plan in JSON data says; raise
    BadArguments.
    """
    said = plan.get("given", []) if isinstance(plan, dict) else []
    if not said:
        return {}
    from ..model.disk.acquired import Given  # moves alone say it

    return {vm: {disk: Given.from_data(data) for disk, data in disks} for vm, disks in said}
