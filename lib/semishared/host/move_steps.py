# SPDX-License-Identifier: Apache-2.0
"""Steps that move VMs between machines to functions (model/vm/move_steps.py), and their looks."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ..disk import in_memory, on_devices, pending_jobs, records, transfer, vm_dir, vm_dir_inventory
from ..errors import MigrationRefused, StoreUnavailable
from ..guest import virsh
from ..model.disk import names as disk_names
from ..model.refs import DiskRef
from ..model.vm import move_steps as m
from ..tools import beneath, files, locks
from ..tools.effects import point
from .work import Steps


class OnMoves(Steps):
    """Forwards what disk/ does; probes of stores are done here."""

    def MarkVm(self, step: m.MarkVm) -> object:
        if locks.is_held(disk_names.disks_lock(disk_names.base_store_of(step.vm_dir), step.vm)):
            from ..guest import job_lock

            # What is not oned's (a disk that goes to another device) would have the directory be another than
            # was sent.
            job_lock.take(step.vm, step.vm_dir)
        return vm_dir_inventory.mark(step.vm, step.vm_dir)

    def LookAtVm(self, step: m.LookAtVm) -> object:
        return vm_dir_inventory.seen(step.vm_dir)

    def LookForVm(self, step: m.LookForVm) -> object:
        return vm_dir_inventory.look(step.vm_dir, step.token, step.seen)

    def UnmarkVm(self, step: m.UnmarkVm) -> None:
        vm_dir_inventory.unmark(step.vm_dir, step.token)

    def SendVm(self, step: m.SendVm) -> object:
        vm_dir_inventory.unmark(step.vm_dir, step.token)
        self._enter(step.vm, step.vm_dir, step.domain)
        sent = transfer.send(step.vm_dir, self.talk.send_data, step.deltas)
        self.talk.send(event="sent", **sent)
        point("directory sent")
        return sent

    def MakeRoom(self, step: m.MakeRoom) -> None:
        transfer.make_room(step, self.talk.asking)

    def ReceiveVm(self, step: m.ReceiveVm) -> None:
        transfer.receive(step, self.talk.chunks(), self.talk.sha256, self.planned, self.talk.asking)

    def RenameVm(self, step: m.RenameVm) -> object:
        self._enter(step.vm, step.source, step.domain)
        return transfer.rename(step, self.planned, self.talk.asking)

    def _enter(self, vm: int, vm_dir: str, domain: str) -> None:
        """See that a VM directory does not depend on another one, of which it is a copy that its guest has
        not entered.

        Nor that its disks lie over their stores in part only (guest/base_switch.py), or are about to leave a
        device, when their names do not lead to what is right yet (guest/device_switch.py).
        """
        pending_jobs.end_moves(vm, vm_dir)
        if not os.path.lexists(disk_names.delta_note(vm_dir)):
            return
        from ..disk import recovery
        from ..guest import active_layer, deltas, device_switch, job_lock

        if active_layer.origin(vm_dir) or active_layer.leaving(vm_dir) or device_switch.left(vm_dir):
            job_lock.take(vm, vm_dir)
            recovery.check_there(vm_dir)
            deltas.merge(vm_dir, domain)

    def ReleaseVm(self, step: m.ReleaseVm) -> object:
        return transfer.release(step, self.planned)

    def ClearVm(self, step: m.ClearVm) -> object:
        return transfer.clear(step, self.planned)

    def DescribeVm(self, step: m.DescribeVm) -> object:
        return {
            "present": os.path.isdir(step.vm_dir),
            "records": [record.to_data() for record in records.records(step.vm_dir)],
        }

    def WriteProbe(self, step: m.WriteProbe) -> object:
        try:
            with beneath.directory(step.store_dir, disk_names.SIDE if step.side else "") as directory:
                files.remove_stale(directory)
                path = files.staged_name(f"{directory}/probe")
                files.write(path, step.text.encode())
        except OSError as e:
            raise StoreUnavailable(
                f"nothing can be written into {step.store_dir} on {os.uname().nodename}: {e.strerror}"
            ) from None
        name = os.path.basename(path)
        return {"name": f"{disk_names.SIDE}/{name}" if step.side else name}

    def LookAtGuest(self, step: m.LookAtGuest) -> object:
        from ..guest import domain as guest_domain

        return guest_domain.disk_types(step.vm_dir, step.domain)

    def AnswerProbe(self, step: m.AnswerProbe) -> None:
        with self._beside(step) as path:
            self._expect(step.store_dir, path, step.text)
            files.write(path, step.answer.encode())

    def CheckProbe(self, step: m.CheckProbe) -> None:
        with self._beside(step) as path:
            try:
                self._expect(step.store_dir, path, step.text)
            finally:
                files.unlink(path)

    @contextmanager
    def _beside(self, step: m.AnswerProbe | m.CheckProbe) -> Iterator[str]:
        """Yield the path of a probe in its directory, opened beneath the store's."""
        directory, name = os.path.split(step.name)
        try:
            with beneath.directory(step.store_dir, directory) as where:
                yield f"{where}/{name}"
        except FileNotFoundError as e:
            raise StoreUnavailable(f"{step.store_dir} on {os.uname().nodename}: {e.strerror}") from None

    def _expect(self, store_dir: str, path: str, text: str) -> None:
        try:
            if files.read(path, 1000).decode("ascii", "replace") == text:
                return
        except OSError:
            pass
        raise StoreUnavailable(f"{store_dir} on {os.uname().nodename} is not the same as on the other host")

    def ReachDisk(self, step: m.ReachDisk) -> None:
        from . import rbd_disk

        rbd_disk.reach(step)

    def AdoptClone(self, step: m.AdoptClone) -> None:
        from ..disk import create

        create.adopt_clone(step, self.planned)

    def AddDeltas(self, step: m.AddDeltas) -> None:
        from ..disk import recovery
        from ..guest import deltas, job_lock

        job_lock.take(step.vm, step.vm_dir)
        recovery.recover(step.vm_dir, step.domain)
        in_memory.more_each([disk_names.layers(disk_names.disk(step.vm_dir, disk)) for disk in step.disks])
        with (
            vm_dir.publishing(step.vm, step.vm_dir, self.planned),
            recovery.ended_on_failure(step.vm_dir, step.domain),
        ):
            deltas.add(
                step.vm_dir,
                step.domain,
                [records.record_of(DiskRef(step.vm, disk, step.vm_dir)) for disk in step.disks],
            )

    def MergeDeltas(self, step: m.MergeDeltas) -> None:
        from ..disk import recovery
        from ..guest import job_lock

        if recovery.left(step.vm_dir):
            job_lock.take(step.vm, step.vm_dir)
            recovery.recover(step.vm_dir, step.domain)
            for name in on_devices.links(step.vm_dir):
                in_memory.settle(f"{step.vm_dir}/{name}")

    def AllowMigration(self, step: m.AllowMigration) -> None:
        files.remove_staged(*os.path.split(disk_names.migration_note(step.vm_dir)))
        proof = {"shared_checked": list(step.stores), "foreign": list(step.foreign)}
        files.write_json(
            disk_names.migration_note(step.vm_dir),
            {"version": 1, "to": step.to, "brought": step.brought, **proof},
        )

    def CheckNotOpen(self, step: m.CheckNotOpen) -> None:
        from ..guest import relocation

        relocation.check_not_open(step.vm_dir, step.domain, disks=step.disks)

    def CheckNotRunning(self, step: m.CheckNotRunning) -> None:
        if step.domain and step.domain in virsh.active_domains():
            raise MigrationRefused(
                f"domain {step.domain} still runs on {os.uname().nodename}, nothing was removed"
            )
