# SPDX-License-Identifier: Apache-2.0
"""Backup and restore: the transfer actions around OpenNebula's backup datastores."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterator, Tuple

from ..errors import (
    BackupCancelled,
    BadArguments,
    MissingImage,
    OnedUnavailable,
    ToolFailed,
)
from ..model.exchange import Plan
from ..opennebula import args
from ..opennebula.xml import Vm
from ..plan.disk import backup as plan
from ..tools import this_machine

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

    The script of each backup driver looks, on the front-end, for processes named `ruby` with the words of a
    prebackup of the VM, and sends them TERM. Our words are those; so is the name, from here on.
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
    """Give this process another name; return its former one."""
    with open("/proc/self/comm", "r+", encoding="utf-8") as file:
        had = file.read().strip()
        file.write(name)
    return had


def prebackup(action: Action, asked: args.Backup) -> Plan:
    """Copy the disks of a VM that is off for a backup driver."""
    return _before(action, asked, live=False)


def prebackup_live(action: Action, asked: args.Backup) -> Plan:
    """Copy the disks of a running VM, as of one moment."""
    return _before(action, asked, live=True)


def _before(action: Action, asked: args.Backup, *, live: bool) -> Plan:
    """Return the plan of prebackup or prebackup_live, cancellable from beginning to end."""
    with cancellable():
        given = sys.stdin.buffer.read()
        vm = Vm.parse(given)
        action.seq = vm.seq
        # In base64: that is how upstream's drivers write and read it.
        xml = base64.encodebytes(given).decode("ascii")
        at, in_vain = _priority(vm, live=live)
        if in_vain:
            action.report.info(in_vain)
        yield from plan.prebackup(
            asked,
            vm,
            xml,
            _base_path(),
            live=live,
            are_one=this_machine.are_one,
            at=at._replace(rate=action.config.backup_rate),
        )


def _priority(vm: Vm, *, live: bool) -> Tuple[plan.Priority, str]:
    """Return how the copies run, by the template of the backup datastore; raise BadAttribute."""
    from ..opennebula.oned import Oned

    number = vm.number("BACKUPS/BACKUP_CONFIG/LAST_DATASTORE_ID")
    try:
        return plan.priority(Oned().datastore(number), live=live) if number >= 0 else (plan.Priority(), "")
    except OnedUnavailable:
        return plan.Priority(), ""


def postbackup(asked: args.Backup) -> Plan:
    """Remove what prebackup left."""
    return plan.postbackup(asked, _base_path(), live=False)


def postbackup_live(asked: args.Backup) -> Plan:
    """End what prebackup_live began and remove what it left."""
    return plan.postbackup(asked, _base_path(), live=True)


def restore(action: Action, asked: args.Restore) -> Plan:
    """Replace the disks of a VM by those of a backup."""
    from ..opennebula.oned import Oned

    oned = Oned()
    vm, image = oned.vm(asked.place.vm), oned.image(asked.image)
    store = oned.datastore_with_secrets(image.store_id)
    if not DRIVER.match(store.store_driver):
        raise BadArguments(f"not a backup driver: {store.store_driver!r}")
    data = b"".join(part.to_bytes() for part in (store, vm, image))
    if asked.increment != -1:
        has = [one.number("ID") for one in image.all("BACKUP_INCREMENTS/INCREMENT")] or [0]
        if asked.increment not in has:
            names = ", ".join(map(str, has))
            raise MissingImage(f"backup {asked.image} has no increment {asked.increment}, but {names}")
        # `-i` says where the chain ends alone: without this the files listed are those of the last increment.
        data += f"<TEMPLATE><INCREMENT_ID>{asked.increment}</INCREMENT_ID></TEMPLATE>".encode()
    data = b"<DS_DRIVER_ACTION_DATA>" + data + b"</DS_DRIVER_ACTION_DATA>"
    known = {disk.id for disk in vm.disks}
    urls, tpm = _listed(f"{REMOTES}/datastore/{store.store_driver}/ls", asked, data)
    gone = sorted(urls.keys() - known)
    if asked.disk == -1 and gone:
        action.report.warn(f"VM {vm.id} no longer has disks {gone} of backup {asked.image}: they stay there")
        urls = {disk: url for disk, url in urls.items() if disk in known}
    if not urls:
        raise MissingImage(f"backup {asked.image} has nothing for VM {vm.id} (disk {asked.disk})")
    action.seq, action.bulk = vm.seq, True
    # As OpenNebula's own drivers: with the VM's first disk.
    has_tpm = 0 in urls and vm.text("TEMPLATE/TPM/MODEL")
    return plan.restore(asked, vm, urls, _of_last(tpm) if has_tpm else "")


def _of_last(url: str) -> str:
    """Return the URL of a file that lies in the last increment of a chain, without those before it.

    OpenNebula's downloaders take the files of a longer chain for disks that they merge.
    """
    return re.sub(r"\A([a-z+]+://[0-9]+/[0-9]*/)(?:[^/]*,)?([^/,]+/)", r"\1\2", url)


def _listed(program: str, request: args.Restore, data: bytes) -> tuple[dict[int, str], str]:
    """Return the URL that the backup driver lists for each wanted disk, and that of a TPM's state or ''."""
    from ..tools.run import stream

    text = b"".join(stream([program, "-i", str(request.increment)], stdin=data))
    try:
        found = json.loads(text)
        urls = {int(disk): str(url) for disk, url in found.items() if disk.isdigit()}
    except (ValueError, AttributeError, RecursionError):
        raise ToolFailed(f"{program}: its answer is no list of disks: {text[:200]!r}") from None
    if request.disk != -1:
        urls = {disk: url for disk, url in urls.items() if disk == request.disk}
    return urls, str(found.get("tpm", ""))
