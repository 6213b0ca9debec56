# SPDX-License-Identifier: Apache-2.0
"""Lead a set of VMs to bases of their hosts: look, stage all images once, let every host detach.

    rows = detach([12, 13, 17], tell, rate=100 << 20)

Callers have the ids of VMs: `semishared detach`, and code that finds VMs in another way. Several threads call
`tell`: with event="vm" and a Row (plan/disk/detach.py) as soon as a disk is done, and with the events of a
staging session (event="plan", "host" or "note"). It returns all rows, and raises only what keeps it from
beginning. With `is_dry` the same is planned, the bases included, and no host is told to change anything.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

from ..config import Config, load
from ..errors import MissingImage, OnedUnavailable, SemisharedError
from ..model import steps as s
from ..model.base.steps import DetachedVm, DetachVm
from ..model.disk import names as disk_names
from ..model.exchange import On, drive
from ..model.refs import ImageRef
from ..opennebula.args import absolute
from ..opennebula.oned import Oned
from ..opennebula.xml import Datastore, Vm
from ..plan.disk import detach as plan
from ..plan.disk.detach import Found, Row, Staged, Wanted
from ..wire.session import Session
from .action import answering
from .now import telling
from .staging import Staging
from .staging_look import Look
from .staging_round import Outcome, Wish
from .staging_round import Wanted as Base

ACTION = "detach"
AT_ONCE = 32
"""Hosts at work at the same time."""
WOULD = "would detach"
"""How a disk is, in the place of `detached`, where nothing is changed."""
Tell = Callable[..., None]


def detach(
    ids: Sequence[int],
    tell: Tell,
    *,
    rate: int = 0,
    transport: str = "auto",
    disks: Optional[Mapping[int, Collection[int]]] = None,
    is_dry: bool = False,
) -> List[Row]:
    """Detach these VMs; return a row for each disk, and each VM left alone; raise OnedUnavailable.

    `rate`: bytes per second that a host sends, and copies, at most, 0 for no limit. `disks`: by VM the only
    ones to detach.
    """
    led = (_Looked if is_dry else _Led)(Oned(), load(), tell, rate, transport)
    rows, asked = [], []
    for vm in (led.oned.vm(number) for number in ids):
        try:
            wanted = plan.wanted(vm, led.location(vm), None if disks is None else disks.get(vm.id))
        except SemisharedError as e:
            rows.append(
                led.told(plan.row(Wanted(vm.id, vm.host, "", ""), how="failed", why=e.line(), id=e.id))
            )
            continue
        why = plan.why_not(vm)
        if why:
            rows.append(led.told(plan.row(wanted, how="skipped", why=why)))
        else:
            asked.append(wanted)
    return rows + led.run(asked)


class _Led:
    """One run: the conversations with its hosts, and what was staged."""

    def __init__(self, oned: Oned, config: Config, tell: Tell, rate: int, transport: str) -> None:
        self.oned, self._config, self._tell, self._rate, self._transport = oned, config, tell, rate, transport
        self._datastores: Dict[int, Datastore] = {store.id: store for store in oned.datastores()}
        self._hosts = {host.name: host for host in oned.hosts()}
        self._sessions: Dict[str, Session] = {}
        self._staged: Dict[Tuple[ImageRef, str], Staged] = {}
        self._is_over = False

    def location(self, vm: Vm) -> str:
        """Return the DATASTORE_LOCATION that a VM's directory is below."""
        system = self._datastores.get(vm.system_datastores[-1] if vm.system_datastores else -1)
        if system is None:
            return ""  # it was never deployed
        return os.path.dirname(absolute(system.base_path, "BASE_PATH"))

    def told(self, row: Row) -> Row:
        self._tell(event="vm", **row)
        return row

    def run(self, asked: Sequence[Wanted]) -> List[Row]:
        """Detach VMs that can be; return their rows."""
        by_host: Dict[str, List[Wanted]] = {}
        for wanted in asked:
            by_host.setdefault(wanted.host, []).append(wanted)
        try:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                looked = dict(zip(by_host, pool.map(self._look, by_host.values())))
            vms = [vm for found, _ in looked.values() for vm in found]
            self._stage(plan.images(vms))
            with ThreadPoolExecutor(AT_ONCE) as pool:
                try:
                    done = list(pool.map(self._on_host, (found for found, _ in looked.values())))
                except BaseException:
                    # An interrupt waits for the VM that each host is at, not for all of them.
                    self._is_over = True
                    raise
        finally:
            for session in self._sessions.values():
                session.close(is_over=not session.is_busy)
        return [row for _, rows in looked.values() for row in rows] + [row for rows in done for row in rows]

    # -- one host -------------------------------------------------------------------------------------

    def _session(self, host: str) -> Session:
        session = self._sessions.get(host)
        if session is None or session.is_busy:
            # Another action has ended the host's part, with its VM; the other VMs are still to be done.
            if session:
                session.close(is_over=False)
            session = self._sessions[host] = Session(host, ACTION, self._config, bulk=True)
        return session

    def _look(self, asked: Sequence[Wanted]) -> Tuple[List[Found], List[Row]]:
        """Return the host's facts of these VMs, and rows of those that it says nothing about."""
        host, found, rows = asked[0].host, [], []
        try:
            if host not in self._hosts or self._hosts[host].is_offline:
                raise SemisharedError(f"{host} is offline in OpenNebula and was not asked")
            answers = self._session(host).run([s.DescribeVm(wanted.vm, wanted.vm_dir) for wanted in asked])
        except SemisharedError as e:
            return [], [self.told(plan.row(wanted, how="failed", why=e.line(), id=e.id)) for wanted in asked]
        for wanted, answer in zip(asked, answers):
            try:
                found.append(plan.found(wanted, answer))
            except SemisharedError as e:
                rows.append(self.told(plan.row(wanted, how="failed", why=e.line(), id=e.id)))
        return found, rows

    def _on_host(self, vms: Sequence[Found]) -> List[Row]:
        rows: List[Row] = []
        for vm in vms:
            if self._is_over:
                break
            rows += [self.told(row) for row in drive(plan.on_host([vm], self._staged, self._rate), self._do)]
        return rows

    def _do(self, wanted: Any) -> Any:
        assert isinstance(wanted, On)
        (step,) = wanted.steps
        assert isinstance(step, DetachVm)
        with answering(disk_names.base_store_of(step.vm_dir), wanted.machine, self._config) as of_bases:

            def answer(question: Dict[str, object]) -> object:
                return (
                    {"why": _changed(step.vm, wanted.machine)}
                    if question.get("question") == "vm"
                    else of_bases(question)
                )

            session = self._session(wanted.machine)
            with telling(step.vm, session):
                return session.run([step], answer=answer)

    # -- bases ----------------------------------------------------------------------------------------

    @property
    def _wish(self) -> Wish:
        return Wish(self._transport, self._config.staging_compress, self._rate, True)

    def _staging(self, root: str, wants: Mapping[str, Sequence[Base]]) -> Staging:
        return Staging(root, wants, list(self._hosts.values()), self._wish, self._config, self._tell)

    def _stage(self, needed: Mapping[ImageRef, Sequence[str]]) -> None:
        """Stage the bases of images on the hosts that need them, and note the result of each."""
        by_root: Dict[str, Dict[str, List[Base]]] = {}
        for image, hosts in needed.items():
            try:
                if image.store not in self._datastores:
                    raise MissingImage(f"OpenNebula has no datastore {image.store}")
                base = Base.at(image, self._datastores[image.store])
                root = disk_names.base_store(
                    os.path.dirname(absolute(self._datastores[image.store].base_path, "BASE_PATH"))
                )
            except SemisharedError as e:
                self._staged.update({(image, host): Staged("", e.line()) for host in hosts})
                continue
            for host in hosts:
                by_root.setdefault(root, {}).setdefault(host, []).append(base)
        for root, wants in by_root.items():
            self._stage_below(root, wants)

    def _stage_below(self, root: str, wants: Mapping[str, Sequence[Base]]) -> None:
        session = self._staging(root, wants)
        outcomes: Mapping[str, Outcome] = {}
        why = "its base did not come"
        try:
            outcomes = session.run()
        except SemisharedError as e:
            why = e.line()
        for host, bases in wants.items():
            outcome = outcomes.get(host)
            for image in (base.image for base in bases):
                lacks = not outcome or not session.brings(host, image)
                self._staged[image, host] = Staged(
                    session.generations.get(image, image.generation),
                    ((outcome.why if outcome else "") or why) if lacks else "",
                )
        self._said(outcomes)

    def _said(self, outcomes: Mapping[str, Outcome]) -> None:
        """Say what is to be said of a session for bases, beside what it says itself."""


class _Looked(_Led):
    """A run that only looks: it has hosts described, plans, and sends no step that changes anything."""

    def told(self, row: Row) -> Row:
        return super().told({**row, "how": WOULD} if row["how"] == "detached" else row)

    def _staging(self, root: str, wants: Mapping[str, Sequence[Base]]) -> Staging:
        return Look(root, wants, list(self._hosts.values()), self._wish, self._config, self._tell)

    def _said(self, outcomes: Mapping[str, Outcome]) -> None:
        for host, outcome in outcomes.items():
            for line in outcome.would:
                self._tell(event="note", host=host, text=f"would {line}")

    def _do(self, wanted: Any) -> Any:
        (step,) = wanted.steps
        return [DetachedVm(step.vm, [], 0.0, "", "")]


def _changed(vm: int, host: str) -> str:
    """Return why a VM may not be detached any more, '' if oned has it on its host as before."""
    try:
        now = Oned().vm(vm)
    except OnedUnavailable as e:
        return e.detail
    return plan.why_not(now) or ("" if now.host == host else f"it is on {now.host} by now")
