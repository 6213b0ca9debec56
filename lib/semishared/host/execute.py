# SPDX-License-Identifier: Apache-2.0
"""Steps to functions: carry out a plan on this machine."""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from typing import Any, Callable, Iterator

from .. import store
from ..base import cache, room
from ..base.ensure import borrowed, ensure
from ..disk import create, layout, records, snapshots, transfer, vm_dir, whereabouts
from ..disk.epochs import Planned
from ..errors import BadArguments, MigrationRefused, MissingImage, NoSpace, StoreUnavailable, TransferCorrupt
from ..guest import listing
from ..model import layout as notes
from ..model import steps as s
from ..store import marker
from ..tools import beneath, files, progress
from ..tools.crash_points import point
from ..wire.messages import Message, Writer


class Execution:
    """One plan: `planned` is what was so when it arrived, `next_message` the rest of the conversation with the front-end.

    `poll` returns what the front-end has said meanwhile, None if nothing; `answers`: it answers questions.
    """

    def __init__(
        self, planned: Planned, writer: Writer, next_message: Callable[[], Message], poll: Callable[[], Message], answers: bool
    ) -> None:
        self.planned = planned
        self._writer = writer
        self._inbox = next_message
        self._poll = poll
        self._answers = answers

    def _next(self) -> Message:
        # The other end may take its time; if it dies, this process is killed (hostside.py).
        with progress.waiting():
            return self._inbox()

    def step(self, step: s.Step) -> object:
        """Carry out one step; return what it found out (JSON data) or None."""
        name = type(step).__name__
        layout.guard(step)
        if hasattr(self, name):
            return getattr(self, name)(step)
        # Of images where these are changed: loaded where any is.
        from .store_steps import OnStore

        return getattr(OnStore(self.planned, self._next, self._asking), name)(step)

    def _hear(self) -> Message:
        # The front-end may wait for another host, or for a backup server: it has limits of its own.
        with progress.waiting():
            return self._next()

    def _chunks(self) -> Iterator[bytes]:
        while True:
            message = self._hear()
            if not isinstance(message, bytes):
                break
            yield message
        self._end = message if isinstance(message, dict) else {}

    def PrepareVm(self, step: s.PrepareVm) -> None:
        try:
            vm_dir.prepare(step.vm, step.vm_dir, self.planned)
        except NoSpace:
            room.for_disk(step.vm_dir, room.LITTLE, self._asking)
            vm_dir.prepare(step.vm, step.vm_dir, self.planned)

    def CheckStore(self, step: s.CheckStore) -> None:
        marker.check(step.store_dir, step.marker)

    def StageBase(self, step: s.StageBase) -> object:
        content = store.content(step.image)
        base, _ = ensure(step.root, step.image, self._asking, content=content)
        return {"generation": base.generation, **content.unnamed()}

    @property
    def _asking(self) -> room.Ask | None:
        return self._ask if self._answers else None

    def _ask(self, **question: object) -> dict[str, object]:
        self._writer.send(event="ask", **question)
        message = self._hear()
        answer = message.get("answer") if isinstance(message, dict) else None
        return answer if isinstance(answer, dict) else {}

    def CreateOverlay(self, step: s.CreateOverlay) -> None:
        create.create_overlay(step, self.planned, self._asking)

    def CopyImage(self, step: s.CopyImage) -> None:
        create.copy_image(step, self.planned, self._asking)

    def CopyFile(self, step: s.CopyFile) -> None:
        create.copy_file(step, self.planned)

    def CloneOnStore(self, step: s.CloneOnStore) -> None:
        create.clone_on_store(step, self.planned)

    def LinkInPlace(self, step: s.LinkInPlace) -> None:
        create.link_in_place(step, self.planned)

    def CreateVolatile(self, step: s.CreateVolatile) -> None:
        create.create_volatile(step, self.planned, self._asking)

    def SaveDisk(self, step: s.SaveDisk) -> object:
        disk = step.disk
        record = records.read_record(disk.vm_dir, disk.disk)
        with borrowed(cache.root_of(disk.vm_dir), record, (disk.vm, disk.disk), self._asking):
            return create.save_disk(step)

    def DescribeDisk(self, step: s.DescribeDisk) -> object:
        return snapshots.describe(step)

    def LookAtDisk(self, step: s.LookAtDisk) -> object:
        return snapshots.look_at(step)

    def NameLayer(self, step: s.NameLayer) -> None:
        snapshots.name_layer(step, self.planned)

    def AddLayer(self, step: s.AddLayer) -> None:
        snapshots.add_layer(step, self.planned)

    def ActivateLayer(self, step: s.ActivateLayer) -> None:
        snapshots.activate_layer(step, self.planned)

    def SwitchLayer(self, step: s.SwitchLayer) -> object:
        return snapshots.switch_layer(step, self.planned)

    def RestGuest(self, step: s.RestGuest) -> object:
        return snapshots.rest_for(step, lambda: self._ask(rests=step.domain))

    def MergeLayer(self, step: s.MergeLayer) -> None:
        snapshots.merge_layer(step)

    def PullLayer(self, step: s.PullLayer) -> None:
        snapshots.pull_layer(step)

    def DropStrays(self, step: s.DropStrays) -> None:
        snapshots.drop_strays(step)

    def DropLayer(self, step: s.DropLayer) -> None:
        snapshots.drop_layer(step)

    def CopyOut(self, step: s.CopyOut) -> object:
        return snapshots.copy_out(step, self.planned)

    def GrowDisk(self, step: s.GrowDisk) -> object:
        return snapshots.grow(step)

    def EndSession(self, step: s.EndSession) -> None:
        vm_dir.end_session(step.disk, self.planned)

    def RemoveDisk(self, step: s.RemoveDisk) -> object:
        return vm_dir.remove_disk(step.disk, self.planned, step.store_dir, forget=False)

    def RemoveVm(self, step: s.RemoveVm) -> None:
        vm_dir.remove(step.vm, step.vm_dir, self.planned)

    def ReceiveFile(self, step: s.ReceiveFile) -> None:
        digest = hashlib.sha256()
        directory, name = os.path.split(step.path)
        with vm_dir.published(step.vm, directory, name, self.planned) as staged:
            with open(staged, "xb") as file:
                for chunk in self._chunks():
                    digest.update(chunk)
                    file.write(chunk)
                    progress.count("received", len(chunk))
            if digest.hexdigest() != step.sha256:
                raise TransferCorrupt(f"{step.path} did not arrive whole on {os.uname().nodename}")

    def SendFile(self, step: s.SendFile) -> object:
        digest = hashlib.sha256()
        try:
            with open(step.path, "rb") as file:
                for chunk in iter(lambda: file.read(transfer.CHUNK), b""):
                    digest.update(chunk)
                    self._writer.send_data(chunk)
                    progress.count("sent", len(chunk))
                size = file.tell()
        except FileNotFoundError:
            raise MissingImage(f"{step.path} is not there on {os.uname().nodename}") from None
        return {"sha256": digest.hexdigest(), "size": size}

    def MarkVm(self, step: s.MarkVm) -> object:
        return whereabouts.mark(step.vm, step.vm_dir)

    def LookAtVm(self, step: s.LookAtVm) -> object:
        return whereabouts.seen(step.vm_dir)

    def LookForVm(self, step: s.LookForVm) -> object:
        return whereabouts.look(step.vm_dir, step.token, step.seen)

    def UnmarkVm(self, step: s.UnmarkVm) -> None:
        whereabouts.unmark(step.vm_dir, step.token)

    def SendVm(self, step: s.SendVm) -> object:
        whereabouts.unmark(step.vm_dir, step.token)
        sent = transfer.send(step.vm_dir, self._writer.send_data)
        self._writer.send(event="sent", **sent)
        point("directory sent")
        return sent

    def ReceiveVm(self, step: s.ReceiveVm) -> None:
        transfer.receive(step, self._chunks(), lambda: str(self._end.get("sha256")), self.planned, self._asking)

    def RenameVm(self, step: s.RenameVm) -> object:
        return transfer.rename(step, self.planned, self._asking)

    def ReleaseVm(self, step: s.ReleaseVm) -> object:
        return transfer.release(step, self.planned)

    def DescribeVm(self, step: s.DescribeVm) -> object:
        return {"present": os.path.isdir(step.vm_dir), "records": [record.to_data() for record in records.records(step.vm_dir)]}

    def WriteProbe(self, step: s.WriteProbe) -> object:
        with beneath.directory(step.store_dir, cache.NAME) as directory:
            files.remove_stale(directory)
            path = files.staged_name(f"{directory}/probe")
            files.write(path, step.text.encode())
        return {"name": f"{cache.NAME}/{os.path.basename(path)}"}

    def AnswerProbe(self, step: s.AnswerProbe) -> None:
        with self._beside(step) as path:
            self._expect(step.store_dir, path, step.text)
            files.write(path, step.answer.encode())

    def CheckProbe(self, step: s.CheckProbe) -> None:
        with self._beside(step) as path:
            try:
                self._expect(step.store_dir, path, step.text)
            finally:
                files.unlink(path)

    @contextmanager
    def _beside(self, step: s.AnswerProbe | s.CheckProbe) -> Iterator[str]:
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

    def TakeNetworkDisk(self, step: s.TakeNetworkDisk) -> None:
        from . import rbd_disk

        rbd_disk.take(step, self.planned)

    def AllowMigration(self, step: s.AllowMigration) -> None:
        files.remove_staged(f"{step.vm_dir}/{vm_dir.RECORDS}", "migration.json")
        data = {"version": 1, "to": step.to, "shared_checked": list(step.stores)}
        files.write_json(notes.migration_note(step.vm_dir), data)

    def CheckNotRunning(self, step: s.CheckNotRunning) -> None:
        if step.domain in listing.active():
            raise MigrationRefused(f"domain {step.domain} still runs on {os.uname().nodename}, nothing was removed")

    def BackUp(self, step: s.BackUp) -> None:
        from ..disk import backup

        backup.back_up(step, self.planned)

    def EndBackup(self, step: s.EndBackup) -> None:
        from ..disk import backup

        backup.end(step)

    def RestoreDisk(self, step: s.RestoreDisk) -> None:
        from ..disk import restore

        with restore.received(step.disk, self._chunks(), lambda: str(self._end.get("sha256"))) as path:
            restore.restore(step, path, self.planned)

    def LookAround(self, step: s.LookAround) -> object:
        from . import leftovers

        return leftovers.look_around(step)

    def Discard(self, step: s.Discard) -> object:
        from . import leftovers

        return leftovers.discard(step)

    def ListBases(self, step: Any) -> object:
        return room.list_bases(step.root)

    def VerifyBase(self, step: Any) -> object:
        from ..base import scrub

        return scrub.verify(step, self._writer.send)

    def ReadBase(self, step: Any) -> object:
        from ..base import scrub

        return scrub.read(step, self._writer.send)

    def MendBase(self, step: Any) -> object:
        from ..base import scrub

        return scrub.mend(step, self._asking)

    def ServeBase(self, step: Any) -> object:
        from ..base import peers

        return peers.serve(step, self._writer.send_data)

    def FetchBase(self, step: Any) -> object:
        from ..base import fetch

        return fetch.receive(step, self._writer.send, self._poll)

    def StreamBase(self, step: Any) -> object:
        from ..base import multicast

        return multicast.send(step, self._writer.send, self._poll)

    def DescribeBase(self, step: Any) -> object:
        from ..base import fetch

        return fetch.describe(step)

    def EvictBase(self, step: Any) -> object:
        return room.evict(step.root, step.name)

    def ReportDisks(self, step: Any) -> object:
        from ..disk import report

        return report.report(step)


def read_plan(data: object) -> tuple[int, list[s.Step]]:
    """Return SEQ (-1: not known) and steps of a plan in JSON data; raise BadArguments."""
    if not isinstance(data, dict) or not isinstance(data.get("steps"), list) or not isinstance(data.get("seq"), int):
        raise BadArguments("not a plan")
    return data["seq"], [s.from_data(step) for step in data["steps"]]
