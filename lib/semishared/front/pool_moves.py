# SPDX-License-Identifier: Apache-2.0
"""Lead one host through a drain or a rebalance of its pool: look, plan, then one thing after the other.

    rows = Moving(config, host, root, tell, rate).drain("/mnt/a")

The host moves one thing at a time, and an action of oned ends that where they meet: the next one then begins
in a new session. If it is killed, moved things stay moved, and the next run goes on with the rest. `tell` is
called with event="host", as of a staging session, and event="note".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Sequence

from ..config import Config
from ..errors import OnedUnavailable, SemisharedError
from ..model.device.classes import MEMORY
from ..model.device.steps import CloseDevice, ListHeld, PoolDevice
from ..model.steps import Step
from ..opennebula.oned import Oned
from ..opennebula.xml import Vm
from ..plan.device import balance, pool_rows
from ..plan.device.balance import Item, Move
from ..plan.device.pool_rows import Held, Row
from ..wire.session import Session

if TYPE_CHECKING:
    from ..model.exchange import T

ACTION = "pool"
Tell = Callable[..., None]


class Moving:
    """One run on one host; `rate`: bytes per second at most, 0 for no limit; `is_dry`: only report."""

    def __init__(
        self, config: Config, host: str, root: str, tell: Tell, rate: int = 0, *, is_dry: bool = False
    ) -> None:
        self._config, self._host, self._root = config, host, root
        self._tell, self._rate, self._is_dry = tell, rate, is_dry
        self._session: Optional[Session] = None
        self._paths: Dict[str, str] = {}
        self._vms: Dict[int, Optional[Vm]] = {}
        self._devices: Sequence[PoolDevice] = ()
        self._moved, self._of = 0, 0

    def __enter__(self) -> Moving:
        return self

    def __exit__(self, *_: object) -> None:
        if self._session:
            self._session.close(is_over=not self._session.is_busy)

    # -- the two ------------------------------------------------------------------------------------

    def drain(self, device: str) -> List[Row]:
        """Close a device and move what lies on it; return a row for each; raise BadArguments, BadPool."""
        found = self._look()
        uuid = pool_rows.named(self._devices, device, self._host)
        if not self._is_dry:
            self._run(CloseDevice(self._root, uuid))
            found = self._look()
        found = [held for held in found if held.item.device == uuid]
        self._ask_of(found)
        why = self._staying(found)
        moves = balance.drain(
            pool_rows.devices(self._devices), [held.item for held in found if held.item not in why], uuid
        )
        rows = [self._row(held, "", how="stays", why=why[held.item]) for held in found if held.item in why]
        rows += self._carried_out(found, moves)
        for vm in pool_rows.reading_on(found, uuid, self._vms, rows):
            self._tell(
                event="note",
                host=self._host,
                text=f"VM {vm} has a base open on {self._paths[uuid]} until it starts anew, or moves",
            )
        return rows

    def rebalance(self) -> List[Row]:
        """Move just enough that no device is much fuller than the pool; return a row for each thing."""
        found = self._look()
        self._ask_of(found)
        why = self._staying(found)
        moves = balance.rebalance(
            pool_rows.devices(self._devices), [held.item for held in found if held.item not in why]
        )
        return self._carried_out(found, moves)

    def unevenness(self) -> float:
        """Return the fullest device's fill by the mean of its class, at the host's last answer."""
        return balance.unevenness(pool_rows.devices(self._devices))

    def is_empty(self, device: str) -> bool:
        """Ask the host whether a device is empty."""
        self._look()
        return not any(
            found.disks or found.bases
            for found in self._devices
            if device.rstrip("/") in (found.path, found.uuid)
        )

    # -- the host -------------------------------------------------------------------------------------

    def _look(self) -> List[Held]:
        answer = self._run(ListHeld(self._root))
        self._devices = answer.devices
        self._paths = {device.uuid: device.path for device in self._devices}
        return pool_rows.held(answer.items)

    def _ask_of(self, found: Sequence[Held]) -> None:
        """Ask oned for the VMs of these disks, and for those over these bases."""
        numbers = {held.said.vm for held in found if held.said.vm >= 0}
        known = {vm.id: vm for vm in Oned().vms()}
        numbers |= {int(name.partition("-")[0]) for held in found for name in held.said.leases}
        self._vms = {number: Oned().vm(number) if number in known else None for number in numbers}

    def _staying(self, found: Sequence[Held]) -> Dict[Item, str]:
        memory = {device.uuid for device in self._devices if device.class_ == MEMORY}
        return pool_rows.staying(found, self._vms, self._host, memory)

    def _run(self, step: Step[T]) -> T:
        """Carry out a step and return its answer; answer the host's questions, and tell its progress."""
        if self._session is None or self._session.is_busy:
            if self._session:
                self._session.close(is_over=False)
            self._session = Session(self._host, ACTION, self._config, bulk=True)
        session = self._session
        session.begin([step], answers=True)
        while True:
            message = session.read()
            if not isinstance(message, dict):
                continue
            if message.get("event") == "ask":
                session.send(answer=self._changed(int(str(message.get("vm")))))
            elif message.get("event") == "progress":
                self._tell(
                    event="host",
                    host=self._host,
                    have=self._moved + int(str(message.get("done", 0))),
                    of=self._of,
                )
            elif message.get("event") == "done":
                answer: T
                (answer,) = message["results"]  # type: ignore[misc]  # read by the step's type
                return answer

    def _changed(self, number: int) -> Dict[str, object]:
        """Return why a VM's disk may not be moved any more, and whether its guest must not run."""
        try:
            now = Oned().vm(number)
        except OnedUnavailable as e:
            return {"why": e.detail}
        was = self._vms.get(number)
        why = pool_rows.why_not(now, self._host)
        if not why and was is not None and was.state != now.state:
            why = "it has another state by now"
        return {"why": why, "is_off": not now.is_active}

    def _carried_out(self, found: Sequence[Held], moves: Sequence[Move]) -> List[Row]:
        by_item: Dict[Item, Held] = {held.item: held for held in found}
        self._of, rows = sum(move.item.size for move in moves if move.target), []
        for move in pool_rows.in_order(moves):
            held = by_item[move.item]
            if not move.target:
                rows.append(self._row(held, "", how="stays", why=pool_rows.no_room(held)))
            elif self._is_dry:
                rows.append(self._row(held, move.target, how="would move"))
            else:
                rows.append(self._one(held, move))
                self._moved += move.item.size
        return rows

    def _one(self, held: Held, move: Move) -> Row:
        try:
            step = pool_rows.step(held, move, self._root, self._vms.get(held.said.vm), self._rate)
            answer = self._run(step)
        except SemisharedError as e:
            return self._row(held, move.target, how="failed", why=e.line(), id=e.id)
        how = "failed" if answer.error else "moved"
        return self._row(held, move.target, how=how, why=answer.error, id=answer.id, seconds=answer.seconds)

    def _row(self, held: Held, target: str, **more: object) -> Row:
        row = pool_rows.row(held, target, lambda uuid: self._paths.get(uuid, uuid), **more)
        self._tell(event="vm", **row)
        return row
