# SPDX-License-Identifier: Apache-2.0
"""A staging session, as the front-end leads it: round by round, until every host has the base or cannot be helped.

Nothing of a session outlives it: each host's part ends with its ssh (hostside.py), and what that has started with it.
"""

from __future__ import annotations

import time
from typing import Callable, Sequence

from ..config import Config
from ..errors import ImageChanged, NoSpace, NotSupported
from ..model.refs import ImageRef
from ..model.steps import StageBase, Step
from ..model.steps_image import FreezeImage, NameGeneration
from ..opennebula.xml import Host
from ..plan import eviction
from ..plan import staging as plan
from ..wire.session import Session
from . import base_tracker
from .staging_hosts import Hosts, Outcome, Wish
from .staging_round import Round


class Staging:
    """The session of one image and its hosts."""

    def __init__(
        self, root: str, image: ImageRef, bridge: str, hosts: Sequence[Host], wish: Wish, config: Config, tell: Callable[..., None]
    ) -> None:
        self.root, self.image = root, image
        self.hosts = Hosts(hosts, wish, config, tell)
        self._bridge = bridge
        """The machine that changes the image, '' if all that is to be known of it lies beside it in a mounted store."""
        self.transports: list[str] = []
        self.sender = ""
        self.stream: dict[str, object] = {}

    @property
    def name(self) -> str:
        return self.image.base_name

    def run(self) -> dict[str, Outcome]:
        """Stage; return how it went on each host."""
        started = time.monotonic()
        try:
            self._run()
        finally:
            self.hosts.close()
        self.seconds = time.monotonic() - started
        return self.hosts.outcomes

    def _run(self) -> None:
        if self._bridge:
            # Hosts read what is frozen, and may not freeze.
            self._on_bridge(FreezeImage(self.image))
        described = self._describe(list(self.hosts.all))
        if not self.image.generation:
            self._find_generation(described)
            described = self._describe(list(self.hosts.all))
        if described and not any(answer["has"] or answer["manifest"] for answer in described.values()):
            # Nobody can verify extents one by one: one host reads the image whole, and the others have it from there.
            self._read_whole(described)
            described = self._describe(list(self.hosts.all))
        base_tracker.begin(self.root, self.name, [name for name in described if not described[name]["has"]])
        try:
            for number in range(plan.ROUNDS):
                if number:
                    # Also those that did not answer before: who comes late gets it from the others.
                    described = self._describe([name for name, outcome in self.hosts.outcomes.items() if not outcome.ok])
                    if not described:
                        break
                if not self._round(described, is_last=number == plan.ROUNDS - 1):
                    break
        finally:
            base_tracker.leave(self.root, self.name, {name: outcome.ok for name, outcome in self.hosts.outcomes.items()})

    # -- before a round --------------------------------------------------------------------------------

    def _describe(self, names: list[str]) -> dict[str, dict[str, object]]:
        return self.hosts.describe(names, self.root, self.image)

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
        self.hosts.note(host, "reads the image whole: nobody knows its hashes yet")
        with self.hosts.session(host) as session:
            (answer,) = session.run([StageBase(self.root, self.image)], answer=lambda question: self._answer(host, question))
        self.hosts.outcomes[host].add({"store": {"extents": 0, "bytes": session.moved.get("store_read", 0)}})
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
        with Session(self._bridge, "stage", self.hosts.config) as session:
            session.run([step])

    def _room(self, name: str, answer: dict[str, object]) -> tuple[str, ...]:
        config = self.hosts.config
        total = answer["total"] if isinstance(answer["total"], int) else 0
        limit = eviction.limits_of(self.hosts.all[name], config.bases_size_limit, config.bases_free_floor, total)
        needed = answer["needed"] if isinstance(answer["needed"], int) else 0
        return tuple(eviction.room(answer, limit, name, needed, self.name))

    # -- a round ---------------------------------------------------------------------------------------

    def _round(self, described: dict[str, dict[str, object]], is_last: bool) -> bool:
        """Carry out one round; tell whether another one may help."""
        hosts = self.hosts
        evict: dict[str, tuple[str, ...]] = {}
        for name, answer in list(described.items()):
            if answer["has"]:
                hosts.outcomes[name].ok, hosts.outcomes[name].why = True, ""
                hosts.tell(event="host", host=name, have=1, of=1, source="", done=True)
                continue
            try:
                evict[name] = self._room(name, answer)
            except NoSpace as e:
                hosts.outcomes[name].why = e.line()
                hosts.note(name, e.line())
                del described[name]
        holders = [
            plan.Described(name, True, True) for name, outcome in hosts.outcomes.items() if outcome.ok and name not in described
        ]  # fmt: skip
        facts = [plan.Described(name, bool(a["has"]), _has_udpcast(a)) for name, a in described.items()]
        elsewhere = [name for name in base_tracker.holders_of(self.root, self.name) if name not in hosts.outcomes]
        wish = hosts.wish.transport
        if self.transports and wish == "auto" and self.transports[-1] in ("multicast", "chain"):
            wish = "chain" if self.transports[-1] == "multicast" else "unicast"
        chosen = plan.plan([*facts, *holders], elsewhere, wish, is_last)
        if not chosen.hosts:
            return False
        self.transports.append(chosen.transport)
        self.sender = chosen.sender
        hosts.tell(event="plan", transport=chosen.transport, sender=chosen.sender, hosts=[item.host for item in chosen.hosts])
        self.stream = Round(hosts, self.root, self.image, chosen, evict).run() or self.stream
        return not all(outcome.ok for outcome in hosts.outcomes.values())


def _has_udpcast(answer: dict[str, object]) -> bool:
    tools = answer.get("tools")
    return isinstance(tools, list) and {"udp-sender", "udp-receiver"} <= set(tools)
