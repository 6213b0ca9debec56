# SPDX-License-Identifier: Apache-2.0
"""Run a set of VMs: stage all bases in one session, start all VMs at once, watch until they run.

VMs on no host are deployed on the hosts that the command names, if it names any and nothing else decides
(plan/care/vm_placement.py); else OpenNebula's scheduler places them.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from ..config import Config
from ..errors import OnedUnavailable, SemisharedError
from ..model.disk import names as disk_names
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.states import VmState
from ..opennebula.xml import Datastore, Host, Vm
from ..plan.care import clusters as plan
from ..plan.care.vm_placement import Placement
from .staging import Staging
from .staging_round import Wanted, Wish

POLL_S = 1.0
BEGIN_S = 60.0
"""Seconds within which OpenNebula begins what it has accepted."""
Row = Dict[str, Any]
"""{"vm", "name", "host", "how": booted|running|elsewhere|failed|skipped, "why", "seconds"}"""
ROUNDS = "which by default starts one VM for each host in a round (MAX_HOST = 1)"
"""What the scheduler does to a set of VMs: the user sees them come up one after the other."""
Tell = Callable[..., None]


def row(vm: Vm, how: str, why: str = "", seconds: float = 0.0) -> Row:
    """Return the row of a VM."""
    return {
        "vm": vm.id,
        "name": vm.name,
        "host": vm.host,
        "how": how,
        "why": why,
        "seconds": round(seconds, 1),
    }


class Boot:
    """One set of VMs on its way to run."""

    def __init__(self, oned: Oned, config: Config, tell: Tell, wish: Wish, limit_s: float) -> None:
        self._oned, self._config, self._tell, self._wish, self._limit_s = oned, config, tell, wish, limit_s
        self._started: Dict[int, float] = {}
        self._rows: Dict[int, Row] = {}
        self._placement: Optional[Placement] = None
        self._scheduled: Dict[int, str] = {}
        """VMs that wait for the scheduler, and what decides instead of the named hosts; '' without these."""

    def run(self, vms: Sequence[Vm], hosts: Optional[Sequence[Host]]) -> List[Row]:
        """Have the VMs run; return a row for each; raise OnedUnavailable.

        `hosts`: where those are to run that are on no host, None: where the scheduler places them, and the
        bases come to where they were last.
        """
        begun = time.monotonic()
        for vm in vms:
            why = plan.start(vm).why
            if vm.is_running or why:
                self._done(vm, "failed" if why else "running", why)
        self._stage([vm for vm in vms if vm.id not in self._rows and vm.is_on_no_host], hosts)
        left = [vm for vm in vms if vm.id not in self._rows]
        if hosts is not None and any(vm.is_on_no_host for vm in left):
            self._placement = Placement(self._now(hosts), self._oned.datastores(), self._oned.vm_groups())
        for vm in left:
            self._start(vm)
        if self._scheduled:
            count = f"{len(self._scheduled)} VM{'s wait' if len(self._scheduled) > 1 else ' waits'}"
            self._tell(event="note", host="scheduler", text=f"{count} for OpenNebula's scheduler, {ROUNDS}")
        self._watch({vm.id: vm for vm in vms}, begun)
        return [self._rows[vm.id] for vm in vms]

    def _done(self, vm: Vm, how: str, why: str = "") -> None:
        started = self._started.get(vm.id)
        found = self._rows[vm.id] = row(vm, how, why, time.monotonic() - started if started else 0.0)
        self._tell(event="vm", **found)

    def _start(self, vm: Vm) -> None:
        # Staging may have taken a while.
        self._started[vm.id] = time.monotonic()
        try:
            now = self._oned.vm(vm.id)
            if now.is_on_no_host:
                why = self._placement.why_scheduled(now) if self._placement else ""
                if self._placement and not why:
                    self._deploy(now, self._placement)
                    return
                self._scheduled[vm.id] = why
            action = plan.start(now).action
            if action:
                self._oned.act(vm.id, action)
        except OnedUnavailable as e:
            self._done(vm, "failed", e.detail)

    def _now(self, hosts: Sequence[Host]) -> List[Host]:
        """Return hosts as oned has them now: staging may have taken a while."""
        names = {host.name for host in hosts}
        return [host for host in self._oned.hosts() if host.name in names]

    def _deploy(self, vm: Vm, placement: Placement) -> None:
        """Have oned deploy a VM on the first host that takes it; raise OnedUnavailable."""
        why = "none is monitored, in its clusters and near a system datastore of ours"
        for target in placement.targets(vm):
            try:
                self._oned.deploy(vm.id, target.host.id, target.datastore)
                placement.take(vm, target)
                return
            except OnedUnavailable as e:
                why = f"{target.host.name}: {e.detail}"
                if not self._oned.vm(vm.id).is_on_no_host:
                    # The scheduler was first, or oned's answer was lost.
                    self._scheduled[vm.id] = "the scheduler was first"
                    return
        self._done(vm, "failed", f"no host of --hosts takes it: {why}")

    def _watch(self, vms: Mapping[int, Vm], begun: float) -> None:
        """Wait for all that were started, as long as they may still come up."""
        active: set[int] = set()
        while len(self._rows) < len(vms):
            try:
                self._look(vms, active, begun)
            except OnedUnavailable as e:
                # They were started, and may run by now.
                if time.monotonic() - begun > self._limit_s:
                    for number in [number for number in vms if number not in self._rows]:
                        self._done(vms[number], "failed", e.detail)
            if len(self._rows) < len(vms):
                time.sleep(POLL_S)

    def _look(self, vms: Mapping[int, Vm], active: set[int], begun: float) -> None:
        """Note the states of started VMs; `active` are those that once were; raise OnedUnavailable."""
        now = {vm.id: vm for vm in self._oned.vms()}
        for number in [number for number in vms if number not in self._rows]:
            vm, waited = now.get(number), time.monotonic() - self._started[number]
            if vm is None:
                self._done(vms[number], "failed", "it is gone")
                continue
            why = plan.why_failed(vm, number in active or waited > BEGIN_S)
            if vm.is_running or why:
                found = self._oned.vm(number)
                other = "" if why else self._elsewhere(found)
                self._done(found, "failed" if why else "elsewhere" if other else "booted", why or other)
            elif time.monotonic() - begun > self._limit_s:
                self._done(
                    vm,
                    "failed",
                    f"it does not run after {self._limit_s:.0f} s: state {vm.state}/{vm.lcm_state}"
                    + (f": it waits for the scheduler, {ROUNDS}" if vm.state == VmState.PENDING else ""),
                )
            if vm.is_active:
                active.add(number)

    def _elsewhere(self, vm: Vm) -> str:
        """Return why a VM runs on none of the named hosts, '' if it does, or had a host before."""
        if not self._placement or vm.id not in self._scheduled or self._placement.names(vm):
            return ""
        return f"it is on {vm.host}, none of --hosts: {self._scheduled[vm.id]}"

    # -- bases ----------------------------------------------------------------------------------------

    def _stage(self, vms: Sequence[Vm], hosts: Optional[Sequence[Host]]) -> None:
        """Stage the bases of VMs; a VM whose base does not come gets it as any clone does."""
        images = {image.id: image for image in self._oned.images()} if vms else {}
        datastores = {store.id: store for store in self._oned.datastores()} if vms else {}
        known = {host.name: host for host in self._oned.hosts()} if vms else {}
        wants: Dict[str, Dict[str, List[Wanted]]] = {}
        for vm in vms:
            for name in (
                [host.name for host in hosts] if hosts is not None else [vm.host] if vm.host in known else []
            ):
                for image, store in plan.bases(vm, images, datastores):
                    try:
                        root, item = (
                            _root(store),
                            Wanted.of(image, store),
                        )
                    except SemisharedError as e:
                        self._tell(event="note", host=name, text=f"image {image.id}: {e.line()}")
                        continue
                    wants.setdefault(root, {}).setdefault(name, []).append(item)
        for root, by_host in wants.items():
            try:
                session = Staging(root, by_host, list(known.values()), self._wish, self._config, self._tell)
                outcomes = session.run()
            except SemisharedError as e:
                self._tell(event="note", host="stage", text=e.line())
                continue
            for name, outcome in outcomes.items():
                if not outcome.ok:
                    self._tell(event="note", host=name, text=f"its bases did not all come: {outcome.why}")


def _root(datastore: Datastore) -> str:
    return disk_names.base_store(os.path.dirname(absolute(datastore.base_path, "BASE_PATH")))
