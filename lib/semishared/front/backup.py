# SPDX-License-Identifier: Apache-2.0
"""Backup and restore: the transfer actions around OpenNebula's backup datastores."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import signal
import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Iterator

from ..errors import BackupCancelled, BadArguments, MissingImage, NotSupported, SemisharedError, ToolFailed
from ..model import steps as s
from ..model.record import described
from ..opennebula import args
from ..opennebula.xml import Vm
from ..plan import backup as plan

if TYPE_CHECKING:
    from .action import Action

REMOTES = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", ".."))
DRIVER = re.compile(r"[a-z0-9][a-z0-9_\-]*\Z")
BASE_PATH = re.compile(r"^(?:export\s+)?BACKUP_BASE_PATH=\"?([^\"\n]+)\"?\s*$", re.MULTILINE)


def _base_path() -> str:
    """Return BACKUP_BASE_PATH of OpenNebula's datastore.conf, '' if it is not set."""
    try:
        with open(f"{REMOTES}/etc/datastore/datastore.conf", encoding="utf-8", errors="replace") as file:
            found = BASE_PATH.findall(file.read())
    except OSError:
        return ""
    return args.absolute(found[-1].strip(), "BACKUP_BASE_PATH") if found else ""


@contextmanager
def cancellable() -> Iterator[None]:
    """Let OpenNebula's `backup_cancel` find and end this process within the block.

    The one of each backup driver looks, on the front-end, for processes called `ruby` with the words of a prebackup of the
    VM, and sends them TERM. Our words are those; so is the name, from here on.
    """

    def cancelled(_number: int, _frame: object) -> None:
        raise BackupCancelled("the backup was cancelled")

    before = signal.signal(signal.SIGTERM, cancelled)
    name = _called("ruby")
    try:
        yield
    finally:
        _called(name)
        signal.signal(signal.SIGTERM, before)


def _called(name: str) -> str:
    """Give this process another name; return the one it had."""
    with open("/proc/self/comm", "r+", encoding="utf-8") as file:
        had = file.read().strip()
        file.write(name)
    return had


def before(action: Action, *, live: bool) -> None:
    """Do prebackup or prebackup_live."""
    with cancellable():
        _before(action, live)


def _before(action: Action, live: bool) -> None:
    request = args.Backup.parse(action.argv)
    given = sys.stdin.buffer.read()
    # In base64: that is how upstream's drivers write and read it.
    vm = Vm.parse(given)
    action.seq = vm.seq
    steps = plan.prebackup(request, vm, base64.encodebytes(given).decode("ascii"), _base_path(), live=live)
    action.on(request.place.host, steps)


def after(action: Action, *, live: bool) -> None:
    """Do postbackup or postbackup_live."""
    request = args.Backup.parse(action.argv)
    action.on(request.place.host, plan.postbackup(request, _base_path(), live=live))


def restore(action: Action) -> None:
    """Do restore."""
    from ..opennebula.oned import Oned

    request = args.Restore.parse(action.argv)
    oned = Oned()
    vm, image = oned.vm(request.place.vm), oned.image(request.image)
    store = oned.datastore_with_secrets(image.store_id)
    if not DRIVER.match(store.store_driver):
        raise BadArguments(f"not a backup driver: {store.store_driver!r}")
    data = b"<DS_DRIVER_ACTION_DATA>" + b"".join(part.to_bytes() for part in (store, vm, image)) + b"</DS_DRIVER_ACTION_DATA>"
    place, known = request.place, {disk.id: disk for disk in vm.disks}
    urls = _listed(f"{REMOTES}/datastore/{store.store_driver}/ls", request, data)
    gone = sorted(urls.keys() - known.keys())
    if request.disk == -1 and gone:
        action.report.warn(f"VM {vm.id} no longer has disks {gone} of backup {request.image}: they stay there")
        urls = {disk: url for disk, url in urls.items() if disk in known}
    if not urls:
        raise MissingImage(f"backup {request.image} has nothing for VM {vm.id} (disk {request.disk})")
    domain = vm.deploy_id or f"one-{vm.id}"
    action.seq = vm.seq
    with action.session(place.host, bulk=True) as session:
        _, found = session.run([s.CheckNotRunning(domain), s.DescribeVm(vm.id, place.path)])
        records = {record.disk: record for record in described(found)}
        for disk, url in sorted(urls.items()):
            ref, size = s.DiskRef(vm.id, disk, place.path), known[disk].size
            record = records.get(disk)
            if record and record.network:
                from . import rbd

                rbd.restore(action, ref, record, size, partial(_bring, session, url))
            else:
                _bring(session, url, s.RestoreDisk(ref, size))
        action.tell(place.host, session.moved)


def _listed(program: str, request: args.Restore, data: bytes) -> dict[int, str]:
    """Return where the backup driver has each wanted disk."""
    from ..tools.run import stream

    text = b"".join(stream([program, "-i", str(request.increment)], stdin=data))
    try:
        found = json.loads(text)
        urls = {int(disk): str(url) for disk, url in found.items() if disk.isdigit()}
    except (ValueError, AttributeError):
        raise ToolFailed(f"{program}: its answer is no list of disks: {text[:200]!r}") from None
    if "tpm" in found:
        raise NotSupported(f"backup {request.image} has the state of a TPM, which cannot be restored yet")
    return urls if request.disk == -1 else {disk: url for disk, url in urls.items() if disk == request.disk}


def _bring(session: object, url: str, step: s.Step) -> None:
    """Let the host carry out a step that the bytes of `url` follow."""
    from ..tools.run import stream

    digest = hashlib.sha256()
    session.begin([step])  # type: ignore[attr-defined]
    try:
        for chunk in stream([f"{REMOTES}/datastore/downloader.sh", "--nodecomp", url, "-"]):
            digest.update(chunk)
            session.send_data(chunk)  # type: ignore[attr-defined]
    except SemisharedError:
        # So that the host removes what it has: it may be what fills its disk.
        session.send(end=True, sha256="")  # type: ignore[attr-defined]
        try:
            session.finish()  # type: ignore[attr-defined]
        except SemisharedError:
            pass
        raise
    session.send(end=True, sha256=digest.hexdigest())  # type: ignore[attr-defined]
    session.finish()  # type: ignore[attr-defined]
