# SPDX-License-Identifier: Apache-2.0
"""Steps to functions: what a hypervisor action does on its host (model/vm/hypervisor_steps.py)."""

from __future__ import annotations

import os
from typing import Any, Callable, NoReturn

from ..errors import BadArguments, StoreUnavailable, ToolMissing
from ..model.refs import Step
from ..model.vm import hypervisor_steps as h
from ..plan.vm.hypervisor import MESSAGE
from . import records

CHECKPOINT_S = 60
"""How long libvirt may take to read or write the head of a checkpoint."""


class OnHost:
    """The steps of one action: `scripts` is the directory of the vmm scripts, `stdin` what was read there,
    `say` gets lines for the log.
    """

    def __init__(
        self, scripts: str = "", stdin: bytes = b"", say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._scripts = scripts
        self._stdin = stdin
        self._say = say

    def do(self, step: Step) -> Any:
        """Carry out one step."""
        name = type(step).__name__
        if hasattr(self, name):
            return getattr(self, name)(step)
        # Of a migration: loaded where one is.
        from .live_migration import OnGuest

        return getattr(OnGuest(self._say), name)(step)

    def ReadVm(self, step: h.ReadVm) -> str | None:
        try:
            with open(f"{step.vm_dir}/vm.xml", "rb") as file:
                return file.read().decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            return None
        except OSError as e:
            raise BadArguments(str(e)) from None

    def ReadRecords(self, step: h.ReadRecords) -> dict[str, object]:
        disks = records.numbers_recorded(step.vm_dir) if step.disks is None else step.disks
        return {"records": [record.to_data() for record in records.read_records(step.vm_dir, disks)]}

    def SeeNotes(self, step: h.SeeNotes) -> list[str]:
        return records.notes(step.vm_dir)

    def Recover(self, step: h.Recover) -> None:
        from ..disk import recovery
        from ..guest import job_lock

        # What is not oned's may be at work yet, and ends for this.
        job_lock.take(int(os.path.basename(step.vm_dir)), step.vm_dir)
        recovery.recover(step.vm_dir, step.domain)

    def CheckDisk(self, step: h.CheckDisk) -> None:
        records.check_disk(step.vm_dir, step.record)

    def CheckEpoch(self, step: h.CheckEpoch) -> str:
        from ..disk import epoch_check

        name = os.path.basename(step.vm_dir)
        return epoch_check.check(int(name), step.vm_dir) if name.isdigit() else ""

    def ReadChain(self, step: h.ReadChain) -> list[tuple[str, str]]:
        return records.read_chain(step.path, step.record)

    def HoldHot(self, step: h.HoldHot | h.SeeHot) -> str:
        from ..disk import hot_bases

        return hot_bases.held(step.vm_dir, step.record, step.lease, hold=isinstance(step, h.HoldHot))

    SeeHot = HoldHot

    def ReadIoLimits(self, step: h.ReadIoLimits) -> dict[str, tuple[int, int]]:
        from ..config import load

        return load().io_limits

    def CheckShare(self, step: h.CheckShare) -> tuple[str, bool]:
        from ..share import attached, daemons
        from ..tools.hung_store import LIMIT_S, unless_its_process_hangs
        from . import virtiofsd

        noted = records.share_note(step.vm_dir)[1].get(step.image, records.Noted())
        given = unless_its_process_hangs(
            lambda: attached.check(step.image, step.source, noted.marker, noted.born), None, LIMIT_S
        )
        if given is None:
            raise StoreUnavailable(
                f"{step.source} on {os.uname().nodename} hangs: no answer within {LIMIT_S:.0f} s"
            )
        daemons.daemon()
        # DISK of a VM is its user's to write, the image its owner's: what that says now, or has said when the
        # share was made.
        reads = step.readonly or (given.readonly if noted.readonly is None else noted.readonly)
        return os.path.abspath(f"{self._scripts}/{virtiofsd.READ_ONLY if reads else virtiofsd.NAME}"), bool(
            given.directory
        )

    def ReadClients(self, step: h.ReadClients) -> list[int]:
        return records.clients(step.vm_dir)

    def ListTargets(self, step: h.ListTargets) -> list[str]:
        from ..guest import domain

        return list(domain.disks(step.domain))

    def ReadCheckpoint(self, step: h.ReadCheckpoint) -> str | None:
        if not os.path.isfile(step.path):
            return None
        from ..guest import libvirtd

        secure = libvirtd.binding().VIR_DOMAIN_SAVE_IMAGE_XML_SECURE
        what = f"save-image-dumpxml {step.path}"
        return libvirtd.call(
            what, lambda libvirt: str(libvirt.saveImageGetXMLDesc(step.path, secure)), timeout_s=CHECKPOINT_S
        )

    def WriteCheckpoint(self, step: h.WriteCheckpoint) -> None:
        from ..guest import libvirtd

        what = f"save-image-define {step.path}"
        libvirtd.call(
            what, lambda libvirt: libvirt.saveImageDefineXML(step.path, step.xml, 0), timeout_s=CHECKPOINT_S
        )

    def BecomeStock(self, step: h.BecomeStock) -> NoReturn:
        argv, stock = list(step.argv), f"{self._scripts}/../kvm/{step.action}"
        if step.message:
            import base64

            argv[MESSAGE] = base64.b64encode(step.message.encode()).decode()
        stdin = step.stdin.encode() or self._stdin
        if stdin:
            _stdin_is(stdin)
        try:
            os.execv(stock, [stock, *argv])
        except OSError as e:
            raise ToolMissing(f"OpenNebula's own script {os.path.normpath(stock)}: {e.strerror}") from None


def _stdin_is(data: bytes) -> None:
    """Make `data` the standard input of this process and of what it becomes."""
    fd = os.memfd_create("domain")
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    os.dup2(fd, 0)
    os.close(fd)
