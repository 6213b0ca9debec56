# SPDX-License-Identifier: Apache-2.0
"""Steps that concern images in stores, and more than a verb of their store (store/verbs.py), to functions."""

from __future__ import annotations

import os

from .. import store
from ..base import cache, room
from ..disk import epochs, on_devices, pending_jobs, records, recovery, snapshots, vm_dir
from ..disk.create import opened
from ..errors import MissingImage, VmGone
from ..guest import block_jobs, job_lock
from ..model.disk import names as disk_names
from ..model.disk.place import PLACES
from ..model.disk.record import Record
from ..model.steps import DiskRef
from ..model.store import image_steps as i
from ..stage.ensure import borrowed
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from ..tools.rate_limit import standing_back
from .work import Steps


class OnStore(Steps):
    """Steps of model/store/image_steps.py and model/store/datastore_steps.py."""

    # -- on a host ------------------------------------------------------------------------------------

    def RecordNetwork(self, step: i.RecordNetwork) -> None:
        disk = step.disk
        record = Record(
            disk.disk, PLACES[step.how], step.image.format, "", step.readonly, step.image, step.network
        )
        with vm_dir.publishing(disk.vm, disk.vm_dir, self.planned, disk.disk) as file:
            epochs.note_made(file, str(disk.disk))
            # A disk made anew in another place: at no moment may a record lie about the disk beside it.
            on_devices.remove(disk.path)
            layers.remove(disk.path)
            records.write_record(disk.vm_dir, record)
        vm_dir.release(disk, self.planned)
        point("disk recorded")

    def ConfirmDisk(self, step: i.ConfirmDisk) -> None:
        disk = step.disk
        with vm_dir.publishing(disk.vm, disk.vm_dir, self.planned, disk.disk):
            if records.read_record(disk.vm_dir, disk.disk) is None:
                raise VmGone(f"disk {disk.disk} of VM {disk.vm} was deleted while it was being made")

    def ForgetDisk(self, step: i.ForgetDisk) -> None:
        vm_dir.remove_disk(step.disk, self.planned)

    def FillImage(self, step: i.FillImage) -> object:
        found: dict[str, object] = {}
        disk = step.disk
        vm_dir.check_wanted(disk, self.planned)
        if step.domain:
            job_lock.take(disk.vm, disk.vm_dir)
            recovery.recover(disk.vm_dir, step.domain)
        elif step.snapshot == -1:
            pending_jobs.settle(disk.vm, disk.vm_dir)
        record = records.record_of(disk)
        if record.image:
            # The disk may lie where it is not at home (undeployed, on the front-end): with the keys that are
            # there.
            access = step.image.access
            over = record.over and record.over._replace(user=access.remote or access.user)
            record = record._replace(image=record.image._replace(access=access), over=over)
        path, format = record.path, record.format
        with borrowed(cache.root_of(disk.vm_dir), record, (disk.vm, disk.disk), self.talk.asking):
            if step.snapshot != -1:
                path, format = snapshots.snapshot_file(record, step.snapshot)
            elif not os.path.exists(path):
                raise MissingImage(f"{path} is not there on {os.uname().nodename}")
            if step.domain:
                files.unlink(disk_names.saved(disk.vm_dir, disk.disk))  # a killed run's
                with opened(record, path, format, step.snapshot) as source:
                    room.require(
                        disk.vm_dir, qemu_img.measure(source, format), self.talk.asking, where=disk.vm_dir
                    )
                path, found = self._copied(disk, step.domain, path, step.freeze)
                format = "raw"
            try:
                with (
                    opened(None if step.domain else record, path, format, step.snapshot) as source,
                    standing_back(),
                ):
                    store.bridged(step.image.access).draft(step.image).fill(
                        source, format, share=step.snapshot != -1
                    )
            finally:
                if step.domain:
                    os.unlink(path)
        return found

    def _copied(self, disk: DiskRef, domain: str, path: str, freeze: str) -> tuple[str, dict[str, object]]:
        """Return a local copy of one moment of a running guest's disk, and how the guest rested."""
        copy = disk_names.saved(disk.vm_dir, disk.disk)
        target, _ = block_jobs.find(domain, path)
        try:
            rested = block_jobs.copy(disk, domain, target, copy, "raw", freeze)
        except BaseException:
            if os.path.lexists(copy):
                os.unlink(copy)
            raise
        return copy, rested.to_data()

    def RestoreImage(self, step: i.RestoreImage) -> None:
        from ..disk import backup

        disk = step.disk
        with backup.received(disk, self.talk.chunks(), self.talk.sha256) as path:
            with vm_dir.publishing(disk.vm, disk.vm_dir, self.planned, disk.disk):
                pass
            with standing_back():
                store.bridged(step.image.access).draft(step.image).fill(path, "qcow2")

    # -- where images are changed ---------------------------------------------------------------------

    def ReceiveImage(self, step: i.ReceiveImage) -> object:
        generation = store.of(step.image.access).receive(
            step.image, step.size, self.talk.extents(), self.talk.sha256
        )
        return {"generation": generation}

    def BeginSession(self, step: i.BeginSession) -> object:
        at = store.of(step.image.access)
        at.check(step.image)
        others: list[str] = []
        if not step.readonly:
            if not step.shareable:
                others = at.writers(step.image)
            at.begin_session(step.image)
        return {"open_by": others}
