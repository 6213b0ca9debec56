# SPDX-License-Identifier: Apache-2.0
"""A backup job of a running guest: QEMU copies all disks as of one moment, while the guest goes on."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import Any, Collection, Dict, Iterator, List, Mapping

from ..errors import NoSpace, SemisharedError, ToolFailed, ToolTimeout
from ..tools import progress
from ..tools.run import QUICK_S
from . import domain, libvirtd
from .domain import quoted
from .job_events import LOOK_S, SOON_S, Patience, next_said

END_S = 30


class BackupJob:
    """The backup job of a domain; its events are collected from before it begins."""

    def __init__(self, name: str, heard: libvirtd.Heard) -> None:
        self._name, self._heard = name, heard

    def begin(self, targets: Dict[str, str], since: Mapping[str, str], mark: str) -> None:
        """Have QEMU begin to copy disks into qcow2 files; `targets`: file by target name.

        `since`: the checkpoints that libvirt knows, by the target names of the disks of which QEMU copies
        what changed since; `mark`: XML of a checkpoint that is made at that moment, '' for none.
        """
        domain.check_plain(self._name, targets)

        def how(device: str) -> str:
            if device in since:
                return f" backupmode='incremental' incremental='{quoted(since[device])}'"
            return " backupmode='full'" if since else ""

        disks = "".join(
            f"<disk name='{quoted(device)}' backup='yes' type='file'{how(device)}><target "
            f"file='{quoted(path)}'/><driver type='qcow2'/></disk>"
            for device, path in targets.items()
        )
        xml = f"<domainbackup mode='push'><disks>{disks}</disks></domainbackup>"
        reuse = libvirtd.binding().VIR_DOMAIN_BACKUP_BEGIN_REUSE_EXTERNAL
        domain.ask(
            self._name,
            "backup-begin",
            lambda guest: guest.backupBegin(xml, mark or None, reuse),
            timeout_s=QUICK_S,
        )

    def limit(self, devices: Collection[str], rate: int) -> None:
        """Have QEMU copy `rate` bytes per second at most, shared out among the disks; 0 for no limit.

        What it has begun by then, some 64 MiB of a disk, goes on without.
        """
        if rate:
            domain.ask(self._name, "blockjob --bytes", lambda guest: _limit(guest, devices, rate))

    def wait(self) -> None:
        """Wait for the end of the job; raise NoSpace or ToolFailed unless it copied everything."""
        patience = Patience(f"the backup of {self._name}")
        within_s = LOOK_S
        while True:
            said = next_said(self._heard, within_s)
            # libvirt's event comes before QEMU has closed the last copy; this answer comes after it.
            job = domain.job(self._name)
            if not job:
                break
            processed, left = (int(job.get(f"disk_{name}") or 0) for name in ("processed", "remaining"))
            patience.see((processed, left))
            progress.reached(processed, processed + left)
            within_s = SOON_S if said else LOOK_S
        self._judge(_last(self._name))

    def _judge(self, job: Dict[str, Any]) -> None:
        if job.get("type") == libvirtd.binding().VIR_DOMAIN_JOB_COMPLETED and domain.is_in(job, "BACKUP"):
            return
        text = (
            f"backup of {self._name} on {os.uname().nodename}: "
            f"{str(job.get('errmsg') or 'it was ended').strip()}"
        )
        raise NoSpace(text) if "No space left" in text or "quota" in text else ToolFailed(text)


def _limit(guest: Any, devices: Collection[str], rate: int) -> None:
    libvirt = libvirtd.binding()
    share = max(rate // len(devices), 1)
    for device in devices:
        with suppress(libvirt.libvirtError):  # a disk whose copy is complete needs no limit
            guest.blockJobSetSpeed(device, share, libvirt.VIR_DOMAIN_BLOCK_JOB_SPEED_BANDWIDTH_BYTES)


def _last(name: str) -> Dict[str, Any]:
    """Return libvirt's statistics of the last job of a domain."""
    libvirt = libvirtd.binding()
    flags = libvirt.VIR_DOMAIN_JOB_STATS_COMPLETED | libvirt.VIR_DOMAIN_JOB_STATS_KEEP_COMPLETED
    return domain.ask(name, "domjobinfo --completed", lambda guest: dict(guest.jobStats(flags)))


@contextmanager
def listening(name: str) -> Iterator[BackupJob]:
    """Listen, within the block, to the backup job that it begins."""
    with domain.hearing(name, "JOB_COMPLETED") as heard:
        yield BackupJob(name, heard)


def end(name: str, directories: List[str]) -> None:
    """End a backup job that writes below `directories`; leave other jobs of the domain alone."""
    deadline = time.monotonic() + END_S
    while domain.state(name) in ("running", "paused"):
        if not domain.is_in(domain.job(name), "BACKUP"):
            return
        try:
            xml = domain.ask(name, "backup-dumpxml", lambda guest: str(guest.backupGetXMLDesc(0)))
            if not any(directory in xml for directory in directories):
                return
            domain.ask(name, "domjobabort", lambda guest: guest.abortJob())
        except SemisharedError:
            pass  # the job is just beginning, or has ended: the next turn of the loop sees
        if time.monotonic() > deadline:
            raise ToolTimeout(f"the backup job of {name} on {os.uname().nodename} does not end")
        progress.touch()
        time.sleep(0.1)
