# SPDX-License-Identifier: Apache-2.0
"""A staging session, as the front-end leads it: one ssh to each host, all at once, in rounds until no one is left.

Nothing of a session outlives it: each host's part ends with its ssh (hostside.py), and what that has started with it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import contextmanager
from typing import IO, Callable, Iterator, NamedTuple

from . import cold
from .config import Config
from .do import locks
from .do.packets import Session as Packets
from .do.ssh import Session
from .errors import BaseBusy, HostFailed, HostUnreachable, ImageChanged, NoSpace, NotSupported, SemisharedError
from .opennebula.xml import Host
from .plan import base_steps as b
from .plan import eviction
from .plan import staging as plan
from .plan.refs import ImageRef
from .plan.steps import StageBase

READY_S = 15.0
"""Until receivers of a stream must be ready: after that it begins without the others."""
TICK_S = 0.5


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
        self, root: str, image: ImageRef, hosts: list[Host], wish: Wish, config: Config, tell: Callable[..., None]
    ) -> None:
        self.root, self.image, self.hosts, self.wish, self.config, self._tell = root, image, hosts, wish, config, tell
        self.outcomes = {host.name: Outcome() for host in hosts}
        self.transports: list[str] = []
        self.sender = ""
        self.stream: dict[str, object] = {}
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return f"{self.image.store}-{self.image.id}-{self.image.generation}"

    def run(self) -> dict[str, Outcome]:
        """Stage; return how it went on each host."""
        started, described = time.monotonic(), self._describe(self.hosts)
        if not self.image.generation:
            self._find_generation(described)
            described = self._describe(self.hosts)
        if described and not any(answer["has"] or answer["manifest"] for answer in described.values()):
            # Nobody can verify extents one by one: one host reads the image whole, and the others have it from there.
            self._read_whole(described)
            described = self._describe(self.hosts)
        everybody = [host.name for host in self.hosts]
        cold.begin(self.root, self.name, [name for name in described if not described[name]["has"]])
        try:
            for number in range(plan.ROUNDS):
                if number:
                    described = self._describe([host for host in self.hosts if not self.outcomes[host.name].ok])
                if not self._round(described, is_last=number == plan.ROUNDS - 1):
                    break
        finally:
            cold.leave(self.root, self.name, {name: self.outcomes[name].ok for name in everybody})
        self.seconds = time.monotonic() - started
        return self.outcomes

    # -- before a round --------------------------------------------------------------------------------

    def _on(self, hosts: list[str], work: Callable[[str], None]) -> None:
        """Do `work` for all hosts at once; what fails is noted at the host."""

        def one(host: str) -> None:
            try:
                work(host)
            except SemisharedError as e:
                self.outcomes[host].why = e.line()
                self._note(host, e.line())
            except Exception as e:  # noqa: BLE001 - a thread's; the others go on
                self.outcomes[host].why = f"{type(e).__name__}: {e}"

        threads = [threading.Thread(target=one, args=(host,), daemon=True) for host in hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _note(self, host: str, text: str) -> None:
        self._tell(event="note", host=host, text=text)

    def _describe(self, hosts: list[Host]) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        by_name = {host.name: host for host in hosts}

        def ask(name: str) -> None:
            if by_name[name].is_offline:
                raise NotSupported("the host is offline in OpenNebula")
            with Session(name, "stage", self.config) as session:
                (answer,) = session.run([b.DescribeBase(self.root, self.image)])
            if isinstance(answer, dict):
                found[name] = answer

        self._on(list(by_name), ask)
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
        self._note(host, "reads the image whole: nobody knows its hashes yet")
        with Session(host, "stage", self.config) as session:
            (answer,) = session.run([StageBase(self.root, self.image)])
        self.outcomes[host].add({"store": {"extents": 0, "bytes": session.moved.get("store_read", 0)}})
        return str(answer["generation"]) if isinstance(answer, dict) else ""

    def _room(self, name: str, answer: dict[str, object]) -> tuple[str, ...]:
        host = next(host for host in self.hosts if host.name == name)
        total = answer["total"] if isinstance(answer["total"], int) else 0
        limit = eviction.limits_of(host, self.config.bases_size_limit, self.config.bases_free_floor, total)
        needed = answer["needed"] if isinstance(answer["needed"], int) else 0
        return tuple(cold.room(answer, limit, name, needed, self.name))

    # -- a round ---------------------------------------------------------------------------------------

    def _round(self, described: dict[str, dict[str, object]], is_last: bool) -> bool:
        """Carry out one round; tell whether another one may help."""
        evict: dict[str, tuple[str, ...]] = {}
        for name, answer in list(described.items()):
            if answer["has"]:
                self.outcomes[name].ok, self.outcomes[name].why = True, ""
                self._tell(event="host", host=name, have=1, of=1, source="", done=True)
                continue
            try:
                evict[name] = self._room(name, answer)
            except NoSpace as e:
                self.outcomes[name].why = e.line()
                self._note(name, e.line())
                del described[name]
        holders = [
            plan.Described(name, True, True) for name, outcome in self.outcomes.items() if outcome.ok and name not in described
        ]  # fmt: skip
        facts = [plan.Described(name, bool(a["has"]), _has_udpcast(a)) for name, a in described.items()]
        elsewhere = [name for name in cold.holders_of(self.root, self.name) if name not in self.outcomes]
        wish = self.wish.transport
        if self.transports and wish == "auto" and self.transports[-1] in ("multicast", "chain"):
            wish = "chain" if self.transports[-1] == "multicast" else "unicast"
        chosen = plan.plan([*facts, *holders], elsewhere, wish, is_last)
        if not chosen.hosts:
            return False
        self.transports.append(chosen.transport)
        self.sender = chosen.sender
        self._tell(event="plan", transport=chosen.transport, sender=chosen.sender, hosts=[item.host for item in chosen.hosts])
        Round(self, chosen, evict).run()
        return not all(self.outcomes[item.host].ok for item in chosen.hosts)


def _has_udpcast(answer: dict[str, object]) -> bool:
    tools = answer.get("tools")
    return isinstance(tools, list) and {"udp-sender", "udp-receiver"} <= set(tools)


class Round:
    """One plan on its way: hosts that receive, the stream, and the watch over both."""

    def __init__(self, staging: Staging, chosen: plan.Plan, evict: dict[str, tuple[str, ...]]) -> None:
        self.s, self.plan, self._evict = staging, chosen, evict
        self.packets = Packets.new().text
        self._sessions: dict[str, Session] = {}
        self._history: plan.History = {}
        self._ready: set[str] = set()
        self._over: set[str] = set()
        self._lock = threading.Lock()
        self._begun = 0.0
        self._left: set[str] = set()
        self._stream: Session | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Carry it out."""
        streaming = [item.host for item in self.plan.hosts if item.stream]
        with portbase(self.s.root, self.s.config.staging_portbase if streaming else 0) as port:
            watch = threading.Thread(target=self._watch, daemon=True)
            watch.start()
            helpers = [watch]
            if streaming:
                sender = threading.Thread(target=self._send, args=(streaming, port), daemon=True)
                sender.start()
                helpers.append(sender)
            by_host = {item.host: item for item in self.plan.hosts}
            try:
                self.s._on(list(by_host), lambda host: self._receive(by_host[host], port))
            finally:
                self._ended.set()
                self._end_stream()
                for thread in helpers:
                    thread.join(10)

    def _receive(self, item: plan.Assignment, port: int) -> None:
        s, outcome = self.s, self.s.outcomes[item.host]
        stream = (port, self.plan.sender) if item.stream else ()
        step = b.FetchBase(
            s.root, s.image, item.sources, item.from_store, self.packets, s.wish.codec, s.wish.rate, stream,
            self._evict.get(item.host, ()), s.wish.wait,
        )  # fmt: skip
        try:
            with Session(item.host, "stage", s.config, bulk=True) as session:
                with self._lock:
                    self._sessions[item.host] = session
                session.begin([step], last=True)
                while True:
                    message = session.read()
                    if not isinstance(message, dict):
                        continue
                    if message.get("event") == "done":
                        self._done(outcome, message)
                        break
                    if message.get("event") == "progress":
                        self._progress(item.host, message)
        except BaseBusy as e:
            outcome.why = e.line()
            raise
        finally:
            with self._lock:
                self._over.add(item.host)
                self._sessions.pop(item.host, None)
        s._tell(event="host", host=item.host, have=1, of=1, source="", done=True)

    def _done(self, outcome: Outcome, message: dict[str, object]) -> None:
        results = message.get("results")
        found = results[0] if isinstance(results, list) and results and isinstance(results[0], dict) else {}
        outcome.add(found.get("sources"))
        outcome.troubles += [str(text) for text in found.get("troubles", ())]
        outcome.ok, outcome.why = True, ""

    def _progress(self, host: str, message: dict[str, object]) -> None:
        have, of, wire, came = (_number(message, key) for key in ("have", "of", "wire", "came"))
        source = str(message.get("source"))
        with self._lock:
            if message.get("ready") or source != "stream":
                self._ready.add(host)
            samples = self._history.setdefault(host, [])
            samples.append(plan.Sample(time.monotonic(), have, source, wire, came))
            del samples[:-40]
        self.s._tell(event="host", host=host, have=have, of=of, source=source, done=False)

    # -- the stream ------------------------------------------------------------------------------------

    def _send(self, receivers: list[str], port: int) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and not self._ended.is_set():
            with self._lock:
                if all(host in self._ready or host in self._over for host in receivers):
                    break
            time.sleep(0.05)
        with self._lock:
            ready = [host for host in receivers if host in self._ready and host not in self._over]
        if not ready or self._ended.is_set():
            return
        s = self.s
        step = b.StreamBase(s.root, s.name, self.packets, s.wish.codec, s.wish.rate, port, len(ready), ready[0])
        try:
            with Session(self.plan.sender, "stage", s.config, bulk=True) as session:
                self._stream, self._begun = session, time.monotonic()
                session.begin([step], last=True)
                (answer,) = session.finish()
                s.stream = answer if isinstance(answer, dict) else {}
        except (SemisharedError, OSError, ValueError) as e:
            if not self._ended.is_set():
                s._note(self.plan.sender, f"the stream failed: {e.line() if isinstance(e, SemisharedError) else e}")
                # Without the sender there is nobody who has the rest: at once to the next round, and to another one.
                is_lost = isinstance(e, (HostUnreachable, HostFailed))
                self._order(receivers, end="round" if is_lost else "stream")
        finally:
            self._stream = None

    def _end_stream(self) -> None:
        session = self._stream
        if session:
            session.send(end="stream")

    def _order(self, hosts: list[str], **order: object) -> None:
        with self._lock:
            sessions = [self._sessions[host] for host in hosts if host in self._sessions]
        for session in sessions:
            try:
                session.send(**order)
            except (SemisharedError, OSError, ValueError):
                continue

    def _watch(self) -> None:
        """Leave behind who holds the others up."""
        while not self._ended.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                history = {host: list(samples) for host, samples in self._history.items() if host not in self._over}
                whole = {host: list(samples) for host, samples in self._history.items()}
            if self._begun:
                for host in plan.leave_stream(history, now, self._begun):
                    if host not in self._left:
                        self._left.add(host)
                        self.s._note(host, "leaves the stream: too slow, or not reached by it")
                        self._order([host], end="stream")
            for host, source in plan.skips(whole, now):
                if host not in self._over:
                    self.s._note(host, f"leaves {source}, which is slower than others")
                    self._order([host], skip=source)
                    with self._lock:
                        self._history[host] = []


def _number(message: dict[str, object], key: str) -> int:
    value = message.get(key)
    return value if isinstance(value, int) else 0


@contextmanager
def portbase(root: str, first: int) -> Iterator[int]:
    """Hold a pair of ports that no other session of this front-end has; 0 if `first` is 0."""
    file: IO[str] | None = None
    port = 0
    if first:
        os.makedirs(f"{root}/locks", exist_ok=True)
        # Other front-ends draw too; should they meet all the same, the packets tell whose they are.
        candidates = [first + 2 * number for number in range(100)]
        random.shuffle(candidates)
        for port in candidates:
            file = locks.attempt(f"{root}/locks/port-{port}")
            if file:
                break
        else:
            raise BaseBusy("no free port for a stream: a hundred sessions are under way")
    try:
        yield port
    finally:
        if file:
            os.unlink(file.name)
            file.close()
