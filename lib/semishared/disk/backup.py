# SPDX-License-Identifier: Apache-2.0
"""Copies of a VM's disks for OpenNebula's backup drivers. The way back: restore.py.

Running: one backup job of QEMU for all disks. It begins for all of them in one transaction, and copies what the guest
overwrites before it does: the copies show one moment, the VM's own disks and their layers stay as they are. That is
what a power cut leaves; FS_FREEZE = AGENT makes it what a clean unmount leaves.

What each crash leaves: `.staged-backup` (no backup driver looks there) or `backup`, removed by `end`, by the next
backup and with the VM; a job in QEMU, ended by `end`; a frozen guest, noted before, thawed by `end` (rest.py).
"""

from __future__ import annotations

import os
import re
import time
from typing import NamedTuple

from ..errors import MissingImage, NoSpace, SemisharedError, ToolFailed, ToolTimeout
from ..guest import block_jobs, domain, job_lock, rest
from ..model.network_disk import NetworkDisk
from ..model.steps import BackUp, DiskRef, EndBackup
from ..tools import files, progress, qemu_img, standstill
from ..tools.crash_points import point
from ..tools.run import QUICK_S
from . import vm_dir
from .create import opened
from .epochs import Planned

END_S = 30
COPY = "{directory}/disk.{disk}.0"
"""The name that a full backup has for upstream's backup drivers: increment 0."""


def _staged(directory: str) -> str:
    return f"{os.path.dirname(directory)}/{files.STAGED}backup"


class _Disk(NamedTuple):
    """A disk: what qemu-img opens, its format, by what libvirt lists it, and its record."""

    path: str
    format: str
    listed: str
    record: dict[str, object]


def _recorded(vm: int, directory: str, disk: int) -> _Disk:
    record = vm_dir.record_of(DiskRef(vm, disk, directory))
    if record.get("network"):
        network = NetworkDisk.parse(record["network"])
        # As the guests' own user: QEMU opens no image, not even to read it, with a key that may only read.
        path = qemu_img.rbd_name(network.name, network.user, network.conf)
        return _Disk(path, str(record["format"]), network.name, {**record, "how": "network"})
    path = str(record["path"])
    if not files.exists(path):
        raise MissingImage(f"{path} is not there on {os.uname().nodename}")
    return _Disk(path, str(record["format"]), os.path.realpath(path), record)


def back_up(step: BackUp, planned: Planned) -> None:
    """Publish the copies."""
    staged = _staged(step.directory)
    job_lock.take(step.vm, step.vm_dir)
    job_lock.check_not_ended(step.vm, step.vm_dir, planned)
    _put_right(step.vm_dir, step.domain, step.directory)
    files.remove_staged(step.vm_dir, "backup.xml")
    files.remove_tree(staged)
    files.remove_tree(step.directory)
    if not os.path.isdir(step.vm_dir):
        raise MissingImage(f"{step.vm_dir} is not there on {os.uname().nodename}")
    disks = {int(disk): _recorded(step.vm, step.vm_dir, int(disk)) for disk in step.disks}
    try:
        with files.enough_space(staged):
            os.makedirs(staged)
            point("backup begun")
            if step.domain:
                _copy_running(step, staged, disks)
            else:
                for disk, found in disks.items():
                    target = COPY.format(directory=staged, disk=disk)
                    with opened(found.record, found.path, found.format) as source:
                        qemu_img.convert(source, found.format, target, "qcow2")
                    point("disk copied")
            files.write(f"{staged}/vm.xml", step.xml.encode())
            files.fsync_tree(staged)
            progress.count("backed_up", sum(files.allocated(f"{staged}/{name}") for name in os.listdir(staged)))
            with vm_dir.publishing(step.vm, step.vm_dir, planned):
                os.rename(staged, step.directory)
        point("backup published")
    except BaseException:
        # It may be what fills the disk.
        files.remove_tree(staged)
        raise


def _copy_running(step: BackUp, staged: str, disks: dict[int, _Disk]) -> None:
    devices = _devices(step, disks)
    parts = []
    for disk, device in devices.items():
        target = COPY.format(directory=staged, disk=disk)
        # Made by us, not by libvirt: that would make it as root, and QEMU, which is not, could not open it.
        qemu_img.create(target, "qcow2", block_jobs.capacity(step.domain, device))
        os.chmod(target, 0o660)
        parts.append(
            f"<disk name='{_quoted(device)}' backup='yes' type='file'><target file='{_quoted(target)}'/>"
            "<driver type='qcow2'/></disk>"
        )
    request = files.staged_name(f"{step.vm_dir}/backup.xml")
    try:
        with open(request, "x", encoding="utf-8") as file:
            file.write(f"<domainbackup mode='push'><disks>{''.join(parts)}</disks></domainbackup>")
        point("backup job described")
        with rest.resting(step.vm_dir, step.domain, step.freeze):
            domain.virsh(block_jobs.URI, "backup-begin", step.domain, request, "--reuse-external", timeout_s=QUICK_S)
            point("backup job begun")
        _wait(step)
        point("backup job done")
    except BaseException:
        _end_job(step.domain, step.directory)
        raise
    finally:
        files.unlink(request)


def _quoted(text: str) -> str:
    # xml.sax.saxutils would load urllib for this.
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("'", "&apos;")


def _devices(step: BackUp, disks: dict[int, _Disk]) -> dict[int, str]:
    """Return what libvirt calls each disk."""
    known = {}
    for line in domain.virsh(block_jobs.URI, "--quiet", "domblklist", step.domain).splitlines():
        name, _, source = line.strip().partition(" ")
        source = source.strip()
        known[os.path.realpath(source) if source.startswith("/") else source] = name
    found = {}
    for disk, recorded in disks.items():
        device = known.get(recorded.listed)
        if not device:
            raise MissingImage(f"domain {step.domain} has no disk {recorded.listed}")
        found[disk] = device
    return found


def _wait(step: BackUp) -> None:
    """Wait for the end of the job; raise unless all of it was copied."""
    seen, since = "", time.monotonic()
    pause = 0.05
    while True:
        said = domain.virsh(block_jobs.URI, "domjobinfo", step.domain)
        if re.search(r"^Job type:\s+None", said, re.MULTILINE):
            break
        done = "".join(re.findall(r"^File (?:processed|remaining):.*", said, re.MULTILINE))
        if done != seen:
            seen, since = done, time.monotonic()
        if time.monotonic() - since > standstill.patience_s():
            raise ToolTimeout(f"the backup of {step.domain} on {os.uname().nodename} makes no progress")
        progress.touch()
        time.sleep(pause)
        pause = min(pause * 2, 1)
    said = domain.virsh(block_jobs.URI, "domjobinfo", step.domain, "--completed", "--keep-completed", "--anystats")
    if re.search(r"^Job type:\s+Completed", said, re.MULTILINE) and re.search(r"^Operation:\s+Backup", said, re.MULTILINE):
        return
    reason = re.search(r"^Error message:\s+(.*)$", said, re.MULTILINE)
    text = reason.group(1).strip() if reason else "it was ended"
    if "No space left" in text or "quota" in text:
        raise NoSpace(f"backup of {step.domain} on {os.uname().nodename}: {text}")
    raise ToolFailed(f"backup of {step.domain} on {os.uname().nodename}: {text}")


def _end_job(name: str, directory: str) -> None:
    """End a backup job that writes below our directories; other jobs of the domain are none of ours."""
    deadline = time.monotonic() + END_S
    while domain.state(block_jobs.URI, name) in ("running", "paused"):
        said = domain.virsh(block_jobs.URI, "domjobinfo", name)
        if not re.search(r"^Operation:\s+Backup", said, re.MULTILINE):
            return
        try:
            job = domain.virsh(block_jobs.URI, "backup-dumpxml", name)
            if _staged(directory) not in job and directory not in job:
                return
            domain.virsh(block_jobs.URI, "domjobabort", name)
        except SemisharedError:
            pass  # it is just beginning, or has ended by itself: the loop knows
        if time.monotonic() > deadline:
            raise ToolTimeout(f"the backup job of {name} on {os.uname().nodename} does not end")
        progress.touch()
        time.sleep(0.1)


def _put_right(vm_dir: str, name: str, directory: str) -> None:
    """End what an earlier backup, or another action, has left in the guest."""
    try:
        block_jobs.recover(vm_dir, name)
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
        for directory in (_staged(step.directory), step.directory):
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


