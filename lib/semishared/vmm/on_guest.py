# SPDX-License-Identifier: Apache-2.0
"""Steps to functions: what a live migration does to the guest, through libvirt, and to the libvirtd of the
other host.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable

from ..config import load
from ..errors import Overtaken, SemisharedError
from ..guest import domain, libvirtd
from ..guest.kvmrc import site
from ..model import layout
from ..model import steps_live as h
from ..plan.live_migration import arriving
from ..tools.run import run
from . import migration_job

NEVER_RAN = {"destroy": "paused", "undefine": "off"}
"""In which state a domain is that a migration has left half-started: another one may have come to its end
there since.
"""


class OnGuest:
    """The steps of one migration; `say` is given lines for the log while it goes on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def SeeDomain(self, step: h.SeeDomain) -> dict[str, object]:
        name = step.domain
        return {
            "xml": domain.dumpxml(name).decode(),
            "snapshots": domain.snapshots(name),
            "persistent": domain.is_persistent(name),
        }

    def LookAtProof(self, step: h.LookAtProof | h.TakeProof) -> object:
        try:
            with open(layout.migration_note(step.vm_dir), "rb") as file:
                proof: object = json.loads(file.read(layout.JSON_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        return proof

    def TakeProof(self, step: h.TakeProof) -> object:
        proof = self.LookAtProof(step)
        if proof is not None:
            try:
                os.unlink(layout.migration_note(step.vm_dir))
            except OSError:
                return None
        return proof

    def ReadSite(self, step: h.ReadSite) -> dict[str, object]:
        return {**site()._asdict(), "target": site().uri_of(step.host), "migration": load().migration}

    def SeeState(self, step: h.SeeState) -> str:
        return domain.state(step.domain, site().uri_of(step.host)) if step.host else domain.state(step.domain)

    def MigrateDomain(self, step: h.MigrateDomain) -> str:
        options = step.options
        if step.chains:
            xml = arriving(domain.migratable(step.domain), step.chains)
            options = options._replace(values={**options.values, "DEST_XML": xml.decode()})
        return migration_job.migrate(step.domain, site().uri_of(step.host), options, self._say)

    def CopyDeltas(self, step: h.CopyDeltas) -> None:
        from ..guest import job_lock, relocation

        job_lock.take(step.vm, step.vm_dir)
        relocation.mirrored(step.vm_dir, step.origin, step.domain)

    def Wait(self, step: h.Wait) -> None:
        time.sleep(step.seconds)

    def RemoveArrival(self, step: h.RemoveArrival) -> None:
        def remove(left: Any) -> None:
            state = domain.state_of(left)
            if state != NEVER_RAN[step.how]:
                raise Overtaken(f"{step.domain} on {step.host} is {state} by now: it is left as it is")
            getattr(left, step.how)()

        domain.ask(step.domain, step.how, remove, uri=site().uri_of(step.host), timeout_s=60)

    def SyncTime(self, step: h.SyncTime) -> None:
        sync = libvirtd.binding().VIR_DOMAIN_TIME_SYNC  # whatever the seconds say
        where = site().uri_of(step.host)
        try:
            domain.ask(
                step.domain, "domtime --sync", lambda guest: guest.setTime({"seconds": 0}, sync), uri=where
            )
        except SemisharedError:
            pass  # a guest without an agent

    def CompactMemory(self, _: h.CompactMemory) -> None:
        try:
            run(["sudo", "-n", "sysctl", "vm.drop_caches=3", "vm.compact_memory=1"], timeout_s=20)
        except SemisharedError:
            pass
