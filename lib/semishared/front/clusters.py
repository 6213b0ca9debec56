# SPDX-License-Identifier: Apache-2.0
"""Run a set of VMs: stage all bases in one session, start all VMs at once, watch until they run."""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from ..config import Config
from ..errors import OnedUnavailable, SemisharedError
from ..model.disk import names as disk_names
from ..model.store import template
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Host, Vm
from ..plan.care import clusters as plan
from ..plan.image.images import image_ref
from .noted_datastores import whole
from .staging import Staging
from .staging_round import Wanted, Wish

POLL_S = 1.0
BEGIN_S = 60.0
"""Seconds within which OpenNebula begins what it has accepted."""
Row = Dict[str, Any]
"""{"vm", "name", "host", "how": booted|running|failed|skipped, "why", "seconds"}"""
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

    def run(self, vms: Sequence[Vm], hosts: Optional[Sequence[Host]]) -> List[Row]:
        """Have the VMs run; return a row for each; raise OnedUnavailable.

        `hosts`: where their disks may come to be, None for where they were last.
        """
        begun = time.monotonic()
        for vm in vms:
            why = plan.start(vm).why
            if vm.is_running or why:
                self._done(vm, "failed" if why else "running", why)
        self._stage([vm for vm in vms if vm.id not in self._rows and vm.is_on_no_host], hosts)
        for vm in vms:
            if vm.id not in self._rows:
                self._start(vm)
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
            action = plan.start(self._oned.vm(vm.id)).action
            if action:
                self._oned.act(vm.id, action)
        except OnedUnavailable as e:
            self._done(vm, "failed", e.detail)

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
                self._done(self._oned.vm(number), "failed" if why else "booted", why)
            elif time.monotonic() - begun > self._limit_s:
                self._done(
                    vm,
                    "failed",
                    f"it does not run after {self._limit_s:.0f} s: state {vm.state}/{vm.lcm_state}",
                )
            if vm.is_active:
                active.add(number)

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
                            Wanted(image_ref(image, whole(store)), template.machine(store, image.id)),
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
