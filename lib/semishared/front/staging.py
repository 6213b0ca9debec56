# SPDX-License-Identifier: Apache-2.0
"""A staging session, as the front-end leads it: one ssh to each host, all at once, in rounds until no one is left.

Nothing of a session outlives it: each host's part ends with its ssh (hostside.py), and what that has started with it.
"""

from __future__ import annotations

import threading
import time
from typing import Callable, NamedTuple

from ..config import Config
from ..errors import ImageChanged, NoSpace, NotSupported, SemisharedError
from ..model import steps_base as b
from ..model.refs import ImageRef
from ..model.steps import StageBase, Step
from ..model.steps_image import FreezeImage, NameGeneration
from ..opennebula.xml import Host
from ..plan import eviction
from ..plan import staging as plan
from ..wire.session import Session
from . import base_tracker
from .staging_round import Round


class Wish(NamedTuple):
    """How a session is wanted."""

    transport: str
    codec: str
    rate: int
    """Bytes per second, 0 for no limit."""
    wait: bool


class Outcome:
    """How it went on one host."""

    def __init__(self) -> None:
        self.ok = False
        self.sources: dict[str, dict[str, int]] = {}
        self.troubles: list[str] = []
        self.why = ""

    def add(self, sources: object) -> None:
        """Add what came from where in one round."""
        for name, entry in (sources if isinstance(sources, dict) else {}).items():
            known = self.sources.setdefault(name, {"extents": 0, "bytes": 0})
            for key in known:
                known[key] += int(entry[key])

    def data(self) -> dict[str, object]:
        return {"ok": self.ok, "sources": self.sources, "troubles": self.troubles, "why": self.why}


class Staging:
    """The session of one image and its hosts."""

    def __init__(
        self, root: str, image: ImageRef, bridge: str, hosts: list[Host], wish: Wish, config: Config, tell: Callable[..., None]
    ) -> None:
        self.root, self.image, self.hosts, self.wish, self.config, self.tell = root, image, hosts, wish, config, tell
        self._bridge = bridge
        """The machine that changes the image, '' if all that is to be known of it lies beside it in a mounted store."""
        self._conversations: dict[str, Session] = {}
        """Those with hosts that were asked, and are not done."""
        self.outcomes = {host.name: Outcome() for host in hosts}
        self.transports: list[str] = []
        self.sender = ""
        self.stream: dict[str, object] = {}

    @property
    def name(self) -> str:
        return f"{self.image.store}-{self.image.id}-{self.image.generation}"

    def run(self) -> dict[str, Outcome]:
        """Stage; return how it went on each host."""
        started = time.monotonic()
        try:
            self._run()
        finally:
            for session in self._conversations.values():
                session.close(is_over=False)
        self.seconds = time.monotonic() - started
        return self.outcomes

    def session(self, host: str) -> Session:
        """Return the conversation with a host for its next plan: the one that is under way, or a new one."""
        return self._conversations.pop(host, None) or Session(host, "stage", self.config, bulk=True)

    def _run(self) -> None:
        if self._bridge:
            # Hosts read what is frozen, and may not freeze.
            self._on_bridge(FreezeImage(self.image))
        described = self._describe(self.hosts)
        if not self.image.generation:
            self._find_generation(described)
            described = self._describe(self.hosts)
        if described and not any(answer["has"] or answer["manifest"] for answer in described.values()):
            # Nobody can verify extents one by one: one host reads the image whole, and the others have it from there.
            self._read_whole(described)
            described = self._describe(self.hosts)
        everybody = [host.name for host in self.hosts]
        base_tracker.begin(self.root, self.name, [name for name in described if not described[name]["has"]])
        try:
            for number in range(plan.ROUNDS):
                if number:
                    # Also those that did not answer before: who comes late gets it from the others.
                    described = self._describe([host for host in self.hosts if not self.outcomes[host.name].ok])
                    if not described:
                        break
                if not self._round(described, is_last=number == plan.ROUNDS - 1):
                    break
        finally:
            base_tracker.leave(self.root, self.name, {name: self.outcomes[name].ok for name in everybody})

    # -- before a round --------------------------------------------------------------------------------

    def on(self, hosts: list[str], work: Callable[[str], None]) -> None:
        """Do `work` for all hosts at once; what fails is noted at the host."""

        def one(host: str) -> None:
            try:
                work(host)
            except SemisharedError as e:
                self.outcomes[host].why = e.line()
                self.note(host, e.line())
            except Exception as e:  # noqa: BLE001 - a thread's; the others go on
                self.outcomes[host].why = f"{type(e).__name__}: {e}"

        threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def note(self, host: str, text: str) -> None:
        self.tell(event="note", host=host, text=text)

    def _describe(self, hosts: list[Host]) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        by_name = {host.name: host for host in hosts}

        def ask(name: str) -> None:
            if by_name[name].is_offline:
                raise NotSupported("the host is offline in OpenNebula")
            session = self.session(name)
            try:
                (answer,) = session.run([b.DescribeBase(self.root, self.image)])
            except BaseException:
                session.close(is_over=False)
                raise
            if isinstance(answer, dict):
                found[name] = answer
            # What it is to do next goes the same way: an ssh more is half a second of a host's processor.
            self._conversations[name] = session

        self.on(list(by_name), ask)
        return {name: found[name] for name in by_name if name in found}

    def _find_generation(self, described: dict[str, dict[str, object]]) -> None:
        """Find out which generation the hosts are to have; if nobody knows it, one host reads the image to say so."""
        known = {str(answer["current"]) for answer in described.values() if answer["current"]}
        if len(known) > 1:
            raise ImageChanged(f"image {self.image.id} changes while it is to be staged")
        if not known:
            known = {self._read_whole(described)}
        self.image = self.image._replace(generation=known.pop())

    def _read_whole(self, described: dict[str, dict[str, object]]) -> str:
        """Have one host stage the image from the store, as a clone does; return the generation."""
        host = next((name for name, answer in described.items() if not answer["trouble"]), "")
        if not host:
            why = next((str(answer["trouble"]) for answer in described.values()), "no host answers")
            raise NotSupported(f"no host that answers reaches image {self.image.id} on its store ({why})")
        self.note(host, "reads the image whole: nobody knows its hashes yet")
        with self.session(host) as session:
            (answer,) = session.run([StageBase(self.root, self.image)], answer=lambda question: self._answer(host, question))
        self.outcomes[host].add({"store": {"extents": 0, "bytes": session.moved.get("store_read", 0)}})
        if not isinstance(answer, dict):
            return ""
        generation = str(answer["generation"])
        if "snapshot" in answer:
            self._on_bridge(NameGeneration(self.image, answer["snapshot"], generation))
        return generation

    def _answer(self, host: str, question: dict[str, object]) -> dict[str, object]:
        """Return which bases have to go; from where others get this one, the session says."""
        return {"evict": self._room(host, question)} if question.get("question") == "base" else {}

    def _on_bridge(self, step: Step) -> None:
        with Session(self._bridge, "stage", self.config) as session:
            session.run([step])

    def _room(self, name: str, answer: dict[str, object]) -> tuple[str, ...]:
        host = next(host for host in self.hosts if host.name == name)
        total = answer["total"] if isinstance(answer["total"], int) else 0
        limit = eviction.limits_of(host, self.config.bases_size_limit, self.config.bases_free_floor, total)
        needed = answer["needed"] if isinstance(answer["needed"], int) else 0
        return tuple(eviction.room(answer, limit, name, needed, self.name))

    # -- a round ---------------------------------------------------------------------------------------

    def _round(self, described: dict[str, dict[str, object]], is_last: bool) -> bool:
        """Carry out one round; tell whether another one may help."""
        evict: dict[str, tuple[str, ...]] = {}
        for name, answer in list(described.items()):
            if answer["has"]:
                self.outcomes[name].ok, self.outcomes[name].why = True, ""
                self.tell(event="host", host=name, have=1, of=1, source="", done=True)
                continue
            try:
                evict[name] = self._room(name, answer)
            except NoSpace as e:
                self.outcomes[name].why = e.line()
                self.note(name, e.line())
                del described[name]
        holders = [
            plan.Described(name, True, True) for name, outcome in self.outcomes.items() if outcome.ok and name not in described
        ]  # fmt: skip
        facts = [plan.Described(name, bool(a["has"]), _has_udpcast(a)) for name, a in described.items()]
        elsewhere = [name for name in base_tracker.holders_of(self.root, self.name) if name not in self.outcomes]
        wish = self.wish.transport
        if self.transports and wish == "auto" and self.transports[-1] in ("multicast", "chain"):
            wish = "chain" if self.transports[-1] == "multicast" else "unicast"
        chosen = plan.plan([*facts, *holders], elsewhere, wish, is_last)
        if not chosen.hosts:
            return False
        self.transports.append(chosen.transport)
        self.sender = chosen.sender
        self.tell(event="plan", transport=chosen.transport, sender=chosen.sender, hosts=[item.host for item in chosen.hosts])
        Round(self, chosen, evict).run()
        return not all(outcome.ok for outcome in self.outcomes.values())


def _has_udpcast(answer: dict[str, object]) -> bool:
    tools = answer.get("tools")
    return isinstance(tools, list) and {"udp-sender", "udp-receiver"} <= set(tools)
