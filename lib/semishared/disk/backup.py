# SPDX-License-Identifier: Apache-2.0
"""Copies of a VM's disks for OpenNebula's backup drivers. The way back: restore.py.

Running: one backup job of QEMU for all disks. It begins for all of them in one transaction, and copies what
the guest overwrites before it does: the copies show one moment, the VM's own disks and their layers stay as
they are. That is what a power cut leaves; FS_FREEZE = AGENT makes it what a clean unmount leaves.

What each crash leaves: `.staged-backup` (no backup driver looks there) or `backup`, removed by `end`, by the
next backup and with the VM; a job in QEMU, ended by `end`; a frozen guest, noted before, thawed by `end`
(guest/rest.py).
"""

from __future__ import annotations

import os
from typing import Iterable

from ..base import room
from ..errors import MissingImage
from ..guest import backup_job, block_jobs, domain, job_lock, rest
from ..model import layout
from ..model.record import Record
from ..model.steps import BackUp, DiskRef, EndBackup
from ..named import NamedTuple
from ..tools import files, progress, qemu_img
from ..tools.crash_points import point
from ..tools.rate_limit import standing_back
from . import records, recovery, vm_dir
from .create import opened
from .epochs import Planned


class _Disk(NamedTuple):
    """A disk: its file, '' on the network, its format, by what libvirt lists it, and its record."""

    path: str
    format: str
    listed: str
    record: Record


def _recorded(vm: int, directory: str, disk: int) -> _Disk:
    record = records.record_of(DiskRef(vm, disk, directory))
    if record.network:
        return _Disk("", record.format, record.network.name, record)
    path = record.path
    if not files.exists(path):
        raise MissingImage(f"{path} is not there on {os.uname().nodename}")
    return _Disk(path, record.format, os.path.realpath(path), record)


def back_up(step: BackUp, planned: Planned, ask: room.Ask | None) -> None:
    """Publish the copies."""
    staged = layout.staged_backup(step.directory)
    job_lock.take(step.vm, step.vm_dir)
    job_lock.check_not_ended(step.vm, step.vm_dir, planned.known)
    _put_right(step.vm_dir, step.domain, step.directory)
    files.remove_staged(step.vm_dir, "backup.xml")
    files.remove_tree(staged)
    files.remove_tree(step.directory)
    if not os.path.isdir(step.vm_dir):
        raise MissingImage(f"{step.vm_dir} is not there on {os.uname().nodename}")
    disks = {int(disk): _recorded(step.vm, step.vm_dir, int(disk)) for disk in step.disks}
    room.require(step.vm_dir, _needed(disks.values()), ask, where=os.path.dirname(staged))
    try:
        with files.enough_space(staged):
            os.makedirs(staged)
            point("backup begun")
            if step.domain:
                _copy_running(step, staged, disks)
            else:
                for disk, found in disks.items():
                    target = layout.backup_copy(staged, disk)
                    with opened(found.record, found.path, found.format) as source, standing_back():
                        qemu_img.convert(source, found.format, target, "qcow2", direct=True)
                        files.fsync(target)
                    point("disk copied")
            files.write(f"{staged}/vm.xml", step.xml.encode())
            files.fsync_tree(staged)
            progress.count(
                "backed_up", sum(files.allocated(f"{staged}/{name}") for name in os.listdir(staged))
            )
            with vm_dir.publishing(step.vm, step.vm_dir, planned):
                os.rename(staged, step.directory)
        point("backup published")
    except BaseException:
        # It may be what fills the disk.
        files.remove_tree(staged)
        raise


def _needed(disks: Iterable[_Disk]) -> int:
    needed = room.LITTLE
    for found in disks:
        with opened(found.record, found.path, found.format) as source:
            needed += qemu_img.measure(source, found.format)
    return needed


def _copy_running(step: BackUp, staged: str, disks: dict[int, _Disk]) -> None:
    devices = _devices(step, disks)
    targets = {}
    for disk, device in devices.items():
        target = layout.backup_copy(staged, disk)
        # Made by us, not by libvirt: that would make it as root, and QEMU, which is not, could not open it.
        qemu_img.create(target, "qcow2", block_jobs.capacity(step.domain, device))
        os.chmod(target, 0o660)
        targets[device] = target
    try:
        with backup_job.listening(step.domain) as job:
            with rest.resting(step.vm_dir, step.domain, step.freeze):
                job.begin(targets)
                point("backup job begun")
            job.wait()
        point("backup job done")
    except BaseException:
        _end_job(step.domain, step.directory)
        raise


def _devices(step: BackUp, disks: dict[int, _Disk]) -> dict[int, str]:
    """Return what libvirt calls each disk."""
    opens = domain.disks(step.domain).items()
    known = {os.path.realpath(source) if source.startswith("/") else source: name for name, source in opens}
    found = {}
    for disk, recorded in disks.items():
        device = known.get(recorded.listed)
        if not device:
            raise MissingImage(f"domain {step.domain} has no disk {recorded.listed}")
        found[disk] = device
    return found


def _end_job(name: str, directory: str) -> None:
    backup_job.end(name, [layout.staged_backup(directory), directory])


def _put_right(vm_dir: str, name: str, directory: str) -> None:
    """End what an earlier backup, or another action, has left in the guest."""
    try:
        recovery.recover(vm_dir, name)
    finally:
        if name:
            _end_job(name, directory)


def end(step: EndBackup) -> None:
    """Leave nothing of a backup: nobody at work on it, no job, no frozen guest, no copies."""
    job_lock.take(step.vm, step.vm_dir)
    job_lock.note_end(step.vm, step.vm_dir)
    point("backup ended")
    try:
        _put_right(step.vm_dir, step.domain, step.directory)
    finally:
        for directory in (layout.staged_backup(step.directory), step.directory):
            files.remove_tree(directory)
            point("copies removed")
        files.remove_staged(step.vm_dir, "backup.xml")
        parent = os.path.dirname(step.directory)
        if parent != step.vm_dir:
            _remove_if_empty(parent)


def _remove_if_empty(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:
        pass  # below BACKUP_BASE_PATH others may put something there
