# SPDX-License-Identifier: Apache-2.0
"""One round of a staging session: hosts that receive, the stream to them, and the watch over both."""

from __future__ import annotations

import os
import random
import threading
import time
from contextlib import contextmanager
from typing import IO, Callable, Iterator, Mapping, Sequence

from ..config import COMPRESSORS, Config
from ..errors import BaseBusy, HostFailed, HostUnreachable, NotSupported, SemisharedError
from ..model import answers
from ..model.base import names as base_names
from ..model.base import steps as base_steps
from ..model.disk import names as disk_names
from ..model.refs import ImageRef
from ..model.store import template
from ..named import NamedTuple, to_data
from ..opennebula.xml import Datastore, Host, Image
from ..plan.base import sharing as plan
from ..plan.base.sharing import Assignment, Plan
from ..plan.image.images import image_ref
from ..tools import locks
from ..wire.packets import Session as Packets
from ..wire.session import Session
from . import questions
from .noted_datastores import whole

# The hosts of a staging session: one ssh to each, all at once, and the result of each.


class Wish(NamedTuple):
    """The options of a session."""

    transport: str
    codec: str
    rate: int
    """Bytes per second, 0 for no limit."""
    wait: bool


class Wanted(NamedTuple):
    """A base that a host is to have; without a generation, of the image's current one."""

    image: ImageRef
    changers: tuple[str, ...] = ()
    """The machines that may change the image, the first first; none if a mounted store has all facts about
    it."""

    @classmethod
    def of(cls, image: Image, store: Datastore) -> Wanted:
        """Return the base of an image of oned's; raise LostAttributes, BadAttribute, BadRecord."""
        return cls.at(image_ref(image, whole(store)), store)

    @classmethod
    def at(cls, image: ImageRef, store: Datastore) -> Wanted:
        """Return the base of an image in its datastore; raise BadAttribute."""
        return cls(image, tuple(template.changers(store, image.id)) if template.kind(store).machine else ())


class Outcome:
    """The result of one host."""

    def __init__(self, why: str = "") -> None:
        self.ok = False
        """Whether it has all its bases."""
        self.lacks: set[str] = set()
        """Names of the bases that it lacks, as far as known."""
        self.sources: dict[str, base_steps.FromSource] = {}
        self.troubles: list[str] = []
        self.why, self.refused = why, ""
        """Why it lacks some: the last failure, and images that were not available to any host."""
        self.silent = ""
        """Why it could not be reached when it was last spoken to, '' if it could."""
        self.would: list[str] = []
        """What it would do, of a session that only looks."""

    def add(self, sources: Mapping[str, base_steps.FromSource]) -> None:
        """Add the bytes of one round, by source."""
        for name, entry in sources.items():
            known = self.sources.get(name, base_steps.FromSource(0, 0))
            self.sources[name] = base_steps.FromSource(*map(sum, zip(known, entry)))

    def fail(self, why: str, name: str) -> None:
        """Note that a base is not available, and why."""
        self.refused = why
        self.lacks.add(name)

    def data(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "sources": to_data(self.sources),
            "troubles": self.troubles,
            "why": self.why,
            "lacks": sorted(self.lacks),
            "would": self.would,
        }


class Hosts:
    """The hosts that are to have bases, by name."""

    described_by: type[base_steps.DescribeBase] | type[base_steps.LookAtBase] = base_steps.DescribeBase
    """The step by which they are asked."""

    def __init__(self, hosts: Sequence[Host], wish: Wish, config: Config, tell: Callable[..., None]) -> None:
        self.all = {host.name: host for host in hosts}
        self.wish, self.config, self.tell = wish, config, tell
        self.outcomes = {name: Outcome() for name in self.all}
        self.addresses: Mapping[str, str] = {}
        """Where hosts take bulk data, also others than these, as far as they do not by their names."""
        self.tools: dict[str, frozenset[str]] = {}
        """Programs of each host by its last answer: compressors, and those of udpcast."""
        self._conversations: dict[str, Session] = {}
        """Conversations with hosts that have answered and are not done."""

    def session(self, host: str) -> Session:
        """Return the conversation for a host's next plan: the open one, or a new one."""
        return self._conversations.pop(host, None) or Session(host, "stage", self.config, bulk=True)

    def close(self) -> None:
        """End the conversations that are under way."""
        for session in self._conversations.values():
            session.close(is_over=False)

    def on(self, hosts: Sequence[str], work: Callable[[str], None]) -> None:
        """Do `work` for all hosts at once; a failure is noted at its host."""

        def one(host: str) -> None:
            self.outcomes[host].silent = ""
            try:
                work(host)
            except SemisharedError as e:
                self.outcomes[host].why = e.line()
                self.outcomes[host].silent = e.detail if isinstance(e, HostUnreachable) else ""
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

    def describe(
        self, root: str, wants: Mapping[str, Sequence[ImageRef]]
    ) -> dict[str, list[base_steps.DescribedBase]]:
        """Return each host's answers about the bases of images, in their order, if it answers."""
        found: dict[str, list[base_steps.DescribedBase]] = {}

        def ask(name: str) -> None:
            if self.all[name].is_offline:
                raise NotSupported("the host is offline in OpenNebula")
            with self._kept(name) as session:
                found[name] = session.run([self.described_by(root, image) for image in wants[name]])

        self.on(list(wants), ask)
        return {name: found[name] for name in wants if name in found}

    def manifest(self, host: str, root: str, image: ImageRef) -> bytes:
        """Return the text of a manifest that a host knows."""
        parts: list[bytes] = []
        with self._kept(host) as session:
            session.begin([base_steps.SendManifest(root, image)])
            while True:
                message = session.read()
                if isinstance(message, bytes):
                    parts.append(message)
                elif isinstance(message, dict) and message.get("event") == "done":
                    return b"".join(parts)

    @contextmanager
    def _kept(self, host: str) -> Iterator[Session]:
        """Yield a conversation that stays open for the host's next plan.

        Another ssh would take half a second of its processor.
        """
        session = self.session(host)
        try:
            yield session
        except BaseException:
            session.close(is_over=False)
            raise
        if self._conversations.setdefault(host, session) is not session:
            session.close()


READY_S = 15.0
"""Seconds until receivers of a stream must be ready: then it begins without the others."""
TICK_S = 0.5


class Round:
    """One plan under way: hosts that receive, the stream, and the watch over both."""

    def __init__(
        self,
        hosts: Hosts,
        root: str,
        images: Mapping[str, ImageRef],
        chosen: Plan,
        evict: Mapping[str, tuple[str, ...]],
        where: Mapping[str, Mapping[str, str]],
        from_store: str,
    ) -> None:
        """`evict`: bases to remove first on each host; `where`: by base, the device on which it is made."""
        self.hosts, self.root, self.images, self.plan, self._evict = hosts, root, images, chosen, evict
        self._where, self._from_store = where, from_store
        self.packets = Packets.new().text
        self._sessions: dict[str, Session] = {}
        self._history: plan.History = {}
        self._ready: set[str] = set()
        self._without: set[str] = set()
        """Hosts that go on without the stream, or have not joined it: it does not wait for them."""
        self._over: set[str] = set()
        self._lock = threading.Lock()
        self._begun = 0.0
        self._left: set[str] = set()
        self._stream: Session | None = None
        self._streamed: base_steps.Streamed | None = None
        self._ended = threading.Event()

    def run(self) -> base_steps.Streamed | None:
        """Carry it out; return the sender's facts about the stream."""
        streaming = [item.host for item in self.plan.hosts if item.stream]
        with portbase(self.root, self.hosts.config.staging_portbase if streaming else 0) as port:
            watch = threading.Thread(target=self._watch, daemon=True)
            watch.start()
            helpers = [watch]
            if streaming:
                sender = threading.Thread(target=self._send, args=(streaming, port), daemon=True)
                sender.start()
                helpers.append(sender)
            by_host = {item.host: item for item in self.plan.hosts}
            try:
                self.hosts.on(list(by_host), lambda host: self._receive(by_host[host], port))
            finally:
                self._ended.set()
                self._end_stream()
                for thread in helpers:
                    thread.join(10)
        return self._streamed

    def _receive(self, item: Assignment, port: int) -> None:
        hosts, outcome = self.hosts, self.hosts.outcomes[item.host]
        where = self._where.get(item.host, {})
        parts = tuple(
            base_steps.Part(
                self.images[way.name], way.holders, way.shared, way.first, where.get(way.name, "")
            )
            for way in item.ways
        )
        wish, peers = hosts.wish, {*item.sources, *(name for way in item.ways for name in way.holders)}
        step = base_steps.FetchBases(
            self.root,
            parts,
            item.sources,
            self._from_store,
            self.packets,
            wish.codec,
            self.plan.rate(wish.rate),
            self.plan.unique_rate(wish.rate),
            (port, self._on_stream(self.plan.sender)) if item.stream else (),
            self._evict.get(item.host, ()),
            wish.wait,
            {name: hosts.addresses[name] for name in peers if name in hosts.addresses},
        )
        try:
            with hosts.session(item.host) as session:
                with self._lock:
                    self._sessions[item.host] = session
                session.begin([step], last=True)
                while True:
                    message = session.read()
                    if not isinstance(message, dict):
                        continue
                    if message.get("event") == "done":
                        self._done(item, outcome, message["results"][0])  # type: ignore[index]
                        break
                    if message.get("event") == "came":
                        self._came(outcome, answers.one(item.host, base_steps.FetchBases, message))
                    if message.get("event") == "base":
                        self._base(item, outcome, str(message.get("name")))
                    if message.get("event") == "progress":
                        self._progress(item.host, message)
        except BaseBusy as e:
            outcome.why = e.line()
            raise
        except (HostUnreachable, HostFailed):
            if item.host == self.plan.sender:
                # No host has what the sender lacks: the others must not wait for it. A living sender says
                # itself what it lacks.
                self._order([other.host for other in self.plan.hosts if other.host != item.host], end="round")
            raise
        finally:
            with self._lock:
                self._over.add(item.host)
                self._sessions.pop(item.host, None)
        hosts.tell(event="host", host=item.host, have=1, of=1, source="", done=True)

    def _done(self, item: Assignment, outcome: Outcome, fetched: base_steps.Fetched) -> None:
        outcome.lacks -= {way.name for way in item.ways}
        self._came(outcome, fetched)
        outcome.ok, outcome.why = True, ""

    def _base(self, item: Assignment, outcome: Outcome, name: str) -> None:
        """Note that a host has one of its bases: others can fetch it there, whatever becomes of the rest."""
        if name in {way.name for way in item.ways}:
            outcome.lacks.discard(name)
            try:
                questions.arrived(self.root, name, item.host, True)
            except (SemisharedError, OSError):
                pass  # a hint; it is noted again in the end
            self.hosts.tell(event="base", host=item.host, name=name)

    def _came(self, outcome: Outcome, found: base_steps.Fetched) -> None:
        """Note the bytes that a host has got, even if it could not get all."""
        outcome.add(found.sources)
        outcome.troubles += found.troubles

    def _progress(self, host: str, message: dict[str, object]) -> None:
        have, of, speed, came = (_number(message, key) for key in ("have", "of", "speed", "came"))
        source = str(message.get("source"))
        with self._lock:
            if message.get("ready"):
                self._ready.add(host)
            elif source not in ("here", "stream"):
                self._without.add(host)
            samples = self._history.setdefault(host, [])
            samples.append(plan.Sample(time.monotonic(), have, source, speed, came))
            del samples[:-40]
        self.hosts.tell(event="host", host=host, have=have, of=of, source=source, done=False)

    # -- the stream ------------------------------------------------------------------------------------

    def _on_stream(self, host: str) -> str:
        """Return by what hosts find the network of the stream: the bulk address of `host`, if all of the
        stream have one, else its name. udpcast knows IPv4 alone.
        """
        addresses = self.hosts.addresses
        part = {self.plan.sender, *(item.host for item in self.plan.hosts if item.stream)}
        return addresses[host] if all("." in addresses.get(name, "") for name in part) else host

    def _send(self, receivers: list[str], port: int) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and not self._ended.is_set():
            with self._lock:
                if self._ready | self._without | self._over >= set(receivers):
                    break
            time.sleep(0.05)
        with self._lock:
            ready = [host for host in receivers if host in self._ready - self._without - self._over]
        if not ready or self._ended.is_set():
            return
        hosts, wish = self.hosts, self.hosts.wish
        parts = tuple(base_steps.Part(self.images[name], (), shared) for name, shared in self.plan.stream)
        unpacks = frozenset(COMPRESSORS).intersection(*(hosts.tools.get(host, ()) for host in ready))
        step = base_steps.StreamBases(
            self.root,
            parts,
            self.packets,
            wish.codec,
            wish.rate,
            port,
            len(ready),
            self._on_stream(ready[0]),
            tuple(sorted(unpacks)),
        )
        try:
            with hosts.session(self.plan.sender) as session:
                self._stream, self._begun = session, time.monotonic()
                session.begin([step], last=True)
                if self._ended.is_set():
                    session.send(end="stream")
                (self._streamed,) = session.finish()
        except (SemisharedError, OSError, ValueError) as e:
            if not self._ended.is_set():
                hosts.note(
                    self.plan.sender,
                    f"the stream failed: {e.line() if isinstance(e, SemisharedError) else e}",
                )
                # Without the sender no host has the rest: begin the next round at once, with another sender.
                is_lost = isinstance(e, (HostUnreachable, HostFailed))
                self._order(receivers, end="round" if is_lost else "stream")
        finally:
            self._stream = None

    def _end_stream(self) -> None:
        session = self._stream
        try:
            if session:
                session.send(end="stream")
        except (SemisharedError, OSError, ValueError):
            pass  # it has just ended

    def _order(self, hosts: list[str], **order: object) -> None:
        with self._lock:
            sessions = [self._sessions[host] for host in hosts if host in self._sessions]
        for session in sessions:
            try:
                session.send(**order)
            except (SemisharedError, OSError, ValueError):
                continue

    def _watch(self) -> None:
        """Have hosts leave the stream if they hold it up, and sources that are slower than others."""
        while not self._ended.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                history = {
                    host: list(samples) for host, samples in self._history.items() if host not in self._over
                }
                whole = {host: list(samples) for host, samples in self._history.items()}
            if self._begun:
                for host in plan.leave_stream(history, now, self._begun):
                    if host not in self._left:
                        self._left.add(host)
                        self.hosts.note(host, "leaves the stream: too slow, or not reached by it")
                        self._order([host], end="stream")
            for host, source in plan.skips(whole, now):
                if host not in self._over:
                    self.hosts.note(host, f"leaves {source}, which is slower than others")
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
        os.makedirs(disk_names.locks(root), exist_ok=True)
        # Other front-ends draw too; if two draw the same ports, packets name their session.
        candidates = [first + 2 * number for number in range(100)]
        random.shuffle(candidates)
        for port in candidates:
            file = locks.attempt(base_names.port_lock(root, port))
            if file:
                break
        else:
            raise BaseBusy("no free port for a stream: a hundred sessions are under way")
    try:
        yield port
    finally:
        if file:
            locks.remove(base_names.port_lock(root, port))
            file.close()
