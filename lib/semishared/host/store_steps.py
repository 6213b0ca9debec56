# SPDX-License-Identifier: Apache-2.0
"""Steps that concern images in stores to functions (model/steps_image.py): on hosts, and where images are changed."""

from __future__ import annotations

import os
from typing import Callable, Iterator

from .. import store
from ..base import cache, room
from ..base.ensure import borrowed
from ..disk import records, recovery, snapshots, vm_dir
from ..disk.create import opened
from ..disk.epochs import Planned
from ..errors import MissingImage, TransferCorrupt, VmGone
from ..guest import block_jobs, job_lock
from ..model import layout
from ..model import steps_image as i
from ..model.place import PLACES
from ..model.record import Record
from ..model.steps import DiskRef
from ..tools import layers, progress
from ..tools.crash_points import point
from ..wire.messages import Message


class OnStore:
    """Steps of one plan: `planned` is what was so when it arrived, `next_message` the rest of the conversation with it.

    `ask` asks the front-end, None if it does not answer.
    """

    def __init__(self, planned: Planned, next_message: Callable[[], Message], ask: room.Ask | None) -> None:
        self._planned = planned
        self._next = next_message
        self._ask = ask

    # -- on a host ------------------------------------------------------------------------------------

    def SeeImage(self, step: i.SeeImage) -> object:
        return store.bridged(step.image.access).look(step.image)

    def RecordNetwork(self, step: i.RecordNetwork) -> None:
        disk = step.disk
        record = Record(disk.disk, PLACES[step.how], step.image.format, "", step.readonly, step.image, step.network)
        with vm_dir.publishing(disk.vm, disk.vm_dir, self._planned, disk.disk):
            # A disk made anew in another place: at no moment may a record lie about the disk beside it.
            layers.remove(disk.path)
            records.write_record(disk.vm_dir, record)
        cache.release(cache.root_of(disk.vm_dir), disk.vm, disk.disk)
        point("disk recorded")

    def ConfirmDisk(self, step: i.ConfirmDisk) -> None:
        disk = step.disk
        with vm_dir.publishing(disk.vm, disk.vm_dir, self._planned, disk.disk):
            if records.read_record(disk.vm_dir, disk.disk) is None:
                raise VmGone(f"disk {disk.disk} of VM {disk.vm} was deleted while it was being made")

    def ForgetDisk(self, step: i.ForgetDisk) -> None:
        vm_dir.remove_disk(step.disk, self._planned)

    def FillImage(self, step: i.FillImage) -> object:
        found: dict[str, object] = {}
        disk = step.disk
        record = records.record_of(disk)
        if record.image:
            # The disk may lie where it is not at home (undeployed, on the front-end): with the keys that are there.
            record = record._replace(image=record.image._replace(access=step.image.access))
        path, format = record.path, record.format
        with borrowed(cache.root_of(disk.vm_dir), record, (disk.vm, disk.disk), self._ask):
            if step.snapshot != -1:
                path, format = snapshots.snapshot_file(record, step.snapshot)
            elif not os.path.exists(path):
                raise MissingImage(f"{path} is not there on {os.uname().nodename}")
            if step.domain:
                path, found = self._copied(disk, step.domain, path, step.freeze)
                format = "raw"
            try:
                with opened(None if step.domain else record, path, format, step.snapshot) as source:
                    store.bridged(step.image.access).draft(step.image).fill(source, format, share=step.snapshot != -1)
            finally:
                if step.domain:
                    os.unlink(path)
        return found

    def _copied(self, disk: DiskRef, domain: str, path: str, freeze: str) -> tuple[str, dict[str, object]]:
        """Return a local copy of one moment of a running guest's disk, and how the guest rested."""
        job_lock.take(disk.vm, disk.vm_dir)
        recovery.recover(disk.vm_dir, domain)
        copy = layout.saved(disk.vm_dir, disk.disk)
        if os.path.lexists(copy):
            os.unlink(copy)
        target, _ = block_jobs.find(domain, path)
        try:
            rested = block_jobs.copy(disk, domain, target, copy, "raw", freeze)
        except BaseException:
            if os.path.lexists(copy):
                os.unlink(copy)
            raise
        return copy, rested.to_data()

    def RestoreImage(self, step: i.RestoreImage) -> None:
        from ..disk import restore

        disk = step.disk
        with restore.received(disk, self._bytes(), lambda: self._sent) as path:
            with vm_dir.publishing(disk.vm, disk.vm_dir, self._planned, disk.disk):
                pass
            store.bridged(step.image.access).draft(step.image).fill(path, "qcow2")

    def _bytes(self) -> Iterator[bytes]:
        """Yield what follows the plan, up to a message with its hash."""
        while True:
            with progress.waiting():
                message = self._next()
            if not isinstance(message, bytes):
                self._sent = str(message.get("sha256")) if isinstance(message, dict) else ""
                return
            yield message

    # -- where images are changed ---------------------------------------------------------------------

    def CreateImage(self, step: i.CreateImage) -> None:
        store.of(step.image.access).create(step.image, step.size, step.fs)

    def ReceiveImage(self, step: i.ReceiveImage) -> object:
        generation = store.of(step.image.access).receive(step.image, step.size, self._extents(), lambda: self._sent)
        return {"generation": generation}

    def _extents(self) -> Iterator[tuple[int, bytes]]:
        """Yield what follows the plan: {"extent": index}, then its bytes; {"end", "sha256"} at last."""
        while True:
            with progress.waiting():
                message = self._next()
            if not isinstance(message, dict) or "extent" not in message:
                self._sent = str(message.get("sha256")) if isinstance(message, dict) else ""
                return
            with progress.waiting():
                content = self._next()
            if not isinstance(content, bytes) or not isinstance(message["extent"], int):
                raise TransferCorrupt("an extent without its bytes")
            yield message["extent"], content

    def CopyStored(self, step: i.CopyStored) -> None:
        source = step.image._replace(source=step.source)
        if step.running:
            store.bridged(step.image.access).copy_held(step.image, source)
        else:
            store.of(step.image.access).copy(step.image, source, step.snapshot)

    def HoldMoment(self, step: i.HoldMoment) -> None:
        store.bridged(step.image.access).hold(step.image._replace(source=step.source))

    def StageImage(self, step: i.StageImage) -> object:
        return {"staged": store.bridged(step.image.access).stage(step.image, step.size)}

    def PublishImage(self, step: i.PublishImage) -> None:
        store.bridged(step.image.access).show(step.image, step.staged)

    def RemoveImage(self, step: i.RemoveImage) -> None:
        store.of(step.image.access).remove(step.image)

    def RemoveClone(self, step: i.RemoveClone) -> None:
        store.of(step.image.access).remove_clone(step.image, step.image.source)

    def MeasurePool(self, step: i.MeasurePool) -> object:
        used, total, free = store.of(step.access).capacity(step.pool)
        return {"used": used, "total": total, "free": free}

    def ListPool(self, step: i.ListPool) -> object:
        return store.bridged(step.access).names(step.pool)

    def LookAtImages(self, step: i.LookAtImages) -> object:
        pool = store.bridged(step.access)
        return {name: found for name in step.names for found in (pool.describe(step.pool, name),) if found}

    def DigestImage(self, step: i.DigestImage) -> object:
        digest, size = store.of(step.image.access).digest(step.image, step.kind)
        return {"digest": digest, "size": size}

    def FreezeImage(self, step: i.FreezeImage) -> object:
        return {"generation": store.of(step.image.access).freeze(step.image)}

    def NameGeneration(self, step: i.NameGeneration) -> None:
        store.of(step.image.access).name(step.image, step.snapshot, step.generation)

    def BeginSession(self, step: i.BeginSession) -> object:
        at = store.of(step.image.access)
        at.check(step.image)
        others: list[str] = []
        if not step.readonly:
            if not step.shareable:
                others = at.writers(step.image)
            at.begin_session(step.image)
        return {"open_by": others}

    def CloneStored(self, step: i.CloneStored) -> None:
        store.of(step.image.access).clone(step.image, step.target, step.min_size)

    def KeepSnapshot(self, step: i.KeepSnapshot) -> None:
        store.of(step.image.access).keep(step.image, step.snapshot)

    def ForgetSnapshot(self, step: i.ForgetSnapshot) -> None:
        store.of(step.image.access).forget(step.image, step.snapshot)

    def RevertImage(self, step: i.RevertImage) -> None:
        store.of(step.image.access).revert(step.image, step.snapshot, step.size)

    def FlattenImage(self, step: i.FlattenImage) -> None:
        store.of(step.image.access).flatten(step.image, step.snapshot, step.size)

    def GrowImage(self, step: i.GrowImage) -> None:
        store.of(step.image.access).grow(step.image, step.size)

    def BeginChange(self, step: i.BeginChange) -> object:
        return {"hidden": store.bridged(step.image.access).begin_change(step.image, step.min_size)}

    def EndChange(self, step: i.EndChange) -> None:
        store.bridged(step.image.access).end_change(step.image, step.whole)
