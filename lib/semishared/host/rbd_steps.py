# SPDX-License-Identifier: Apache-2.0
"""Steps that concern images on the network to functions (model/steps_image.py): on hosts, and on the store's bridge."""

from __future__ import annotations

import hashlib
import os
from typing import Callable, Iterator

from ..base import cache
from ..disk import layers, snapshots, vm_dir
from ..disk.create import make_empty, opened
from ..disk.epochs import Planned
from ..errors import MissingImage, TransferCorrupt, VmGone
from ..guest import block_jobs, job_lock
from ..model import steps_image as i
from ..model.steps import DiskRef, ImageRef
from ..store import ceph, rbd_image, rbd_pool, rbd_store
from ..tools import extents, progress, qemu_img
from ..tools.crash_points import point
from ..wire.messages import Message

SAVED = "semishared-saved"


def made_for(image: ImageRef) -> str:
    """Return what is written on an image that we make: one of the same name that somebody else made has it not."""
    return f"datastore {image.store} {image.source}"


class OnNetwork:
    """Steps of one plan: `planned` is what was so when it arrived, `next_message` the rest of the conversation with it."""

    def __init__(self, planned: Planned, next_message: Callable[[], Message]) -> None:
        self._planned = planned
        self._next = next_message

    # -- on a host ------------------------------------------------------------------------------------

    def SeeImage(self, step: i.SeeImage) -> object:
        found = rbd_store.RbdContent(step.image).look()
        return {"frozen": found is not None, "generation": found.generation if found else ""}

    def RecordNetwork(self, step: i.RecordNetwork) -> None:
        disk = step.disk
        record = {
            "place": "shared", "how": step.how, "format": step.image.format, "path": "", "readonly": step.readonly,
            "image": step.image.to_data(), "network": step.network.to_data(),
        }  # fmt: skip
        with vm_dir.publishing(disk.vm, disk.vm_dir, self._planned, disk.disk):
            # A disk made anew in another place: at no moment may a record lie about the disk beside it.
            layers.remove(disk.path)
            vm_dir.write_record(disk, record)
        cache.release(cache.root_of(disk.vm_dir), disk.vm, disk.disk)
        point("disk recorded")

    def ConfirmDisk(self, step: i.ConfirmDisk) -> None:
        disk = step.disk
        with vm_dir.publishing(disk.vm, disk.vm_dir, self._planned, disk.disk):
            if vm_dir.read_record(disk.vm_dir, disk.disk) is None:
                raise VmGone(f"disk {disk.disk} of VM {disk.vm} was deleted while it was being made")

    def ForgetDisk(self, step: i.ForgetDisk) -> None:
        vm_dir.remove_disk(step.disk, self._planned)

    def FillImage(self, step: i.FillImage) -> object:
        found: dict[str, object] = {}
        disk = step.disk
        record = vm_dir.record_of(disk)
        image = record.get("image")
        if isinstance(image, dict):
            # The disk may lie where it is not at home (undeployed, on the front-end): with the keys that are there.
            record = {**record, "image": {**image, "access": step.image.access.to_data()}}
        target = qemu_img.rbd_name(step.image.source, step.image.access.user, step.image.access.conf)
        path, format = str(record["path"]), str(record["format"])
        with cache.borrowed(cache.root_of(disk.vm_dir), record, disk.vm, disk.disk):
            if step.snapshot != -1:
                path, format = snapshots.snapshot_file(record, step.snapshot)
            elif not os.path.exists(path):
                raise MissingImage(f"{path} is not there on {os.uname().nodename}")
            if step.domain:
                path, found = self._copied(disk, step.domain, path, step.freeze)
                format = "raw"
            try:
                with opened(None if step.domain else record, path, format) as source:
                    qemu_img.fill(source, format, target, share=step.snapshot != -1)
            finally:
                if step.domain:
                    os.unlink(path)
        point("image filled")
        return found

    def _copied(self, disk: DiskRef, domain: str, path: str, freeze: str) -> tuple[str, dict[str, object]]:
        """Return a local copy of one moment of a running guest's disk, and how the guest rested."""
        job_lock.take(disk.vm, disk.vm_dir)
        block_jobs.recover(disk.vm_dir, domain)
        copy = f"{disk.vm_dir}/.staged-saved.disk.{disk.disk}"
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
            qemu_img.fill(path, "qcow2", qemu_img.rbd_name(step.image.source, step.image.access.user, step.image.access.conf))
        point("image filled")

    def _bytes(self) -> Iterator[bytes]:
        """Yield what follows the plan, up to a message with its hash."""
        while True:
            with progress.waiting():
                message = self._next()
            if not isinstance(message, bytes):
                self._sent = str(message.get("sha256")) if isinstance(message, dict) else ""
                return
            yield message

    # -- on the bridge --------------------------------------------------------------------------------

    def CreateImage(self, step: i.CreateImage) -> None:
        where, name = ceph.bridged(step.image)
        with rbd_pool.published(where, name, made_for(step.image)) as staged:
            rbd_pool.create(where, staged, step.size)
            if step.fs:
                self._make_file_system(where, staged, step.size, step.fs)
            with ceph.opened(where, staged) as image:
                rbd_image.create(image, rbd_image.NEW)

    def _make_file_system(self, where: ceph.Pool, name: str, size: int, fs: str) -> None:
        """Make it in a sparse file here: the tools want one, and it holds no more than the file system's own tables."""
        import tempfile

        with tempfile.TemporaryDirectory(prefix="semishared-mkfs-") as folder:
            path = f"{folder}/image"
            make_empty(path, "raw", size, fs)
            point("file system made")
            with open(path, "rb") as file, ceph.opened(where, name) as image:
                writing = rbd_store.Writing(image)
                for index, content in extents.data(file.fileno(), size):
                    writing.write(index * extents.EXTENT, content)
                writing.finish()

    def ReceiveImage(self, step: i.ReceiveImage) -> object:
        where, name = ceph.bridged(step.image)
        with rbd_pool.published(where, name, made_for(step.image)) as staged:
            rbd_pool.create(where, staged, step.size)
            with ceph.opened(where, staged) as image:
                made, writing = extents.Copy(None, step.size), rbd_store.Writing(image)
                for index, content in self._extents():
                    made.add(index, content)
                    writing.write(index * extents.EXTENT, content)
                writing.finish()
                generation = made.manifest(step.image.format).generation
                if generation != self._sent:
                    raise TransferCorrupt(f"{step.image.source}: what arrived on {os.uname().nodename} is not what was sent")
                point("image received")
                rbd_image.create(image, f"{rbd_image.OURS}{generation}")
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
        where, name = ceph.bridged(step.image)
        source_pool, source = ceph.bridged(step.image._replace(source=step.source))
        if not step.running:
            rbd_image.settle(source_pool, source)
        with rbd_pool.published(where, name, made_for(step.image)) as staged:
            if step.running:
                self._copy_moment(source_pool, source, staged)
            else:
                rbd_pool.copy(source_pool, source, "" if step.snapshot == -1 else str(step.snapshot), staged)
            with ceph.opened(where, staged) as image:
                rbd_image.create(image, rbd_image.NEW)

    def HoldMoment(self, step: i.HoldMoment) -> None:
        where, source = ceph.bridged(step.image._replace(source=step.source))
        with ceph.opened(where, source) as image:
            rbd_image.drop(image, SAVED)
            # The guest's own Ceph client writes out what it holds before.
            rbd_image.create(image, SAVED)
        point("moment held")

    def _copy_moment(self, where: ceph.Pool, source: str, staged: str) -> None:
        """Copy a snapshot of what a guest writes to."""
        try:
            rbd_pool.copy(where, source, SAVED, staged)
        finally:
            with ceph.opened(where, source) as image:
                rbd_image.drop(image, SAVED)

    def StageImage(self, step: i.StageImage) -> object:
        where, name = ceph.bridged(step.image)
        rbd_image.settle(where, name)
        rbd_pool.sweep(where, name)
        staged = f"{name}{rbd_pool.STAGED}{os.urandom(6).hex()}"
        rbd_pool.create(where, staged, step.size)
        return {"staged": f"{where.name}/{staged}"}

    def PublishImage(self, step: i.PublishImage) -> None:
        where, name = ceph.bridged(step.image)
        _, staged = ceph.bridged(step.image._replace(source=step.staged))
        with ceph.opened(where, staged) as image:
            rbd_image.create(image, rbd_image.NEW)
            image.metadata_set(rbd_pool.MADE, made_for(step.image))
        point("image staged")
        rbd_pool.show(where, staged, name, made_for(step.image))

    def RemoveImage(self, step: i.RemoveImage) -> None:
        rbd_pool.remove_all(*ceph.bridged(step.image))

    def RemoveClone(self, step: i.RemoveClone) -> None:
        rbd_pool.remove_all(*ceph.bridged(step.image))

    def MeasurePool(self, step: i.MeasurePool) -> object:
        used, total, free = rbd_pool.capacity(ceph.pool(step.access, step.access.bridge_user, step.pool))
        return {"used": used, "total": total, "free": free}

    def ListPool(self, step: i.ListPool) -> object:
        return rbd_pool.names(ceph.pool(step.access, step.access.bridge_user, step.pool))

    def LookAtImages(self, step: i.LookAtImages) -> object:
        where = ceph.pool(step.access, step.access.bridge_user, step.pool)
        return {name: found for name in step.names for found in (rbd_pool.look(where, name),) if found}

    def DigestImage(self, step: i.DigestImage) -> object:
        where, name = ceph.bridged(step.image)
        rbd_image.settle(where, name)
        digest = hashlib.new(step.kind)
        with ceph.opened(where, name, read_only=True) as image:
            size = image.size()
            for offset in range(0, size, extents.EXTENT):
                digest.update(image.read(offset, min(extents.EXTENT, size - offset)))
                progress.touch()
        return {"digest": digest.hexdigest(), "size": size}

    def FreezeImage(self, step: i.FreezeImage) -> object:
        found = rbd_image.freeze(*ceph.bridged(step.image))
        return {"generation": found.generation}

    def NameGeneration(self, step: i.NameGeneration) -> None:
        rbd_image.name_generation(*ceph.bridged(step.image), step.snapshot, step.generation)

    def BeginSession(self, step: i.BeginSession) -> object:
        where, name = ceph.bridged(step.image)
        others: list[str] = []
        if not step.readonly:
            if not step.shareable:
                others = rbd_image.check_not_written(where, name)
            rbd_image.begin_session(where, name)
        return {"size": rbd_pool.check_supported(where, name), "open_by": others}

    def CloneStored(self, step: i.CloneStored) -> None:
        where, name = ceph.bridged(step.image)
        _, target = ceph.bridged(step.image._replace(source=step.target))
        rbd_pool.clone(where, name, target, made_for(step.image._replace(source=step.target)), step.min_size)

    def KeepSnapshot(self, step: i.KeepSnapshot) -> None:
        rbd_image.keep(*ceph.bridged(step.image), step.snapshot)

    def ForgetSnapshot(self, step: i.ForgetSnapshot) -> None:
        where, name = ceph.bridged(step.image)
        rbd_pool.check_not_aside(where, name, step.snapshot)
        rbd_image.forget_of(where, name, step.snapshot)

    def RevertImage(self, step: i.RevertImage) -> None:
        where, name = ceph.bridged(step.image)
        rbd_pool.check_not_aside(where, name, step.snapshot)
        rbd_image.revert(where, name, step.snapshot)

    def FlattenImage(self, step: i.FlattenImage) -> None:
        where, name = ceph.bridged(step.image)
        rbd_pool.check_not_aside(where, name, step.snapshot)
        rbd_image.flatten(where, name, step.snapshot)

    def GrowImage(self, step: i.GrowImage) -> None:
        rbd_image.grow(*ceph.bridged(step.image), step.size)

    def BeginChange(self, step: i.BeginChange) -> object:
        where, name = ceph.bridged(step.image)
        hidden = rbd_image.begin_change(where, name)
        with ceph.opened(where, hidden) as image, ceph.long():
            size = max(image.size(), step.min_size)
            # What is written now need not write the zeros; what was is in the snapshot that begin_change has made.
            image.resize(0)
            image.resize(size)
        point("image emptied")
        return {"hidden": f"{where.name}/{hidden}"}

    def EndChange(self, step: i.EndChange) -> None:
        where, name = ceph.bridged(step.image)
        if step.whole:
            rbd_image.end_change(where, name)
        else:
            rbd_image.settle(where, name)
