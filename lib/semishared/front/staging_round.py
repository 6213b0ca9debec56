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
from ..model.base import names as base_names
from ..model.base import steps as base_steps
from ..model.disk import names as disk_names
from ..model.refs import ImageRef
from ..named import NamedTuple
from ..opennebula.xml import Host
from ..plan.base import staging as plan
from ..plan.base.sharing import Assignment, Plan
from ..tools import locks
from ..wire.packets import Session as Packets
from ..wire.session import Session
from . import questions

# The hosts of a staging session: one ssh to each, all spoken to at once, and how it went on each.


class Wish(NamedTuple):
    """How a session is wanted."""

    transport: str
    codec: str
    rate: int
    """Bytes per second, 0 for no limit."""
    wait: bool


class Wanted(NamedTuple):
    """A base that a host is to have; of the image's current generation if it names none."""

    image: ImageRef
    bridge: str = ""
    """The machine that changes the image, '' if all that is to be known of it lies beside it in a mounted
    store.
    """


class Outcome:
    """How it went on one host."""

    def __init__(self) -> None:
        self.ok = False
        """It has all its bases."""
        self.lacks: set[str] = set()
        """The names of those that it has not, as far as they were found out."""
        self.sources: dict[str, dict[str, int]] = {}
        self.troubles: list[str] = []
        self.why = self.refused = ""
        """Why it has not all of them: as it went last, and of images that nobody could have."""

    def add(self, sources: object) -> None:
        """Add what came from where in one round."""
        for name, entry in (sources if isinstance(sources, dict) else {}).items():
            known = self.sources.setdefault(name, {"extents": 0, "bytes": 0})
            for key in known:
                known[key] += int(entry[key])

    def fail(self, why: str, name: str) -> None:
        """Note that a base cannot be had, and why."""
        self.refused = why
        self.lacks.add(name)

    def data(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            "sources": self.sources,
            "troubles": self.troubles,
            "why": self.why,
            "lacks": sorted(self.lacks),
        }


class Hosts:
    """The hosts that are to have bases, by name."""

    def __init__(self, hosts: Sequence[Host], wish: Wish, config: Config, tell: Callable[..., None]) -> None:
        self.all = {host.name: host for host in hosts}
        self.wish, self.config, self.tell = wish, config, tell
        self.outcomes = {name: Outcome() for name in self.all}
        self.tools: dict[str, frozenset[str]] = {}
        """Programs for what travels, as each host has said last: compressors, and those of udpcast."""
        self._conversations: dict[str, Session] = {}
        """Those with hosts that were asked, and are not done."""

    def session(self, host: str) -> Session:
        """Return the conversation with a host for its next plan: the one that is under way, or a new one."""
        return self._conversations.pop(host, None) or Session(host, "stage", self.config, bulk=True)

    def close(self) -> None:
        """End the conversations that are under way."""
        for session in self._conversations.values():
            session.close(is_over=False)

    def on(self, hosts: Sequence[str], work: Callable[[str], None]) -> None:
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

    def describe(
        self, root: str, wants: Mapping[str, Sequence[ImageRef]]
    ) -> dict[str, list[dict[str, object]]]:
        """Return what each host answers about the bases of images, in their order; a host that does not
        answer is not in it.
        """
        found: dict[str, list[dict[str, object]]] = {}

        def ask(name: str) -> None:
            if self.all[name].is_offline:
                raise NotSupported("the host is offline in OpenNebula")
            with self._kept(name) as session:
                answers = session.run([base_steps.DescribeBase(root, image) for image in wants[name]])
                found[name] = [answer for answer in answers if isinstance(answer, dict)]

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
        """Yield a conversation that is gone on with: what a host is to do next goes the same way.

        An ssh more is half a second of its processor.
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
"""Until receivers of a stream must be ready: after that it begins without the others."""
TICK_S = 0.5


class Round:
    """One plan on its way: hosts that receive, the stream, and the watch over both."""

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
        """`evict`: what goes first on each host; `where`: the devices on which bases are to be made there, by
        their names.
        """
        self.hosts, self.root, self.images, self.plan, self._evict = hosts, root, images, chosen, evict
        self._where, self._from_store = where, from_store
        self.packets = Packets.new().text
        self._sessions: dict[str, Session] = {}
        self._history: plan.History = {}
        self._ready: set[str] = set()
        self._without: set[str] = set()
        """Those that go on without the stream, or have not come to it: it is not theirs to begin."""
        self._over: set[str] = set()
        self._lock = threading.Lock()
        self._begun = 0.0
        self._left: set[str] = set()
        self._stream: Session | None = None
        self._streamed: dict[str, object] = {}
        self._ended = threading.Event()

    def run(self) -> dict[str, object]:
        """Carry it out; return what the sender says of the stream."""
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
        wish = hosts.wish
        step = base_steps.FetchBases(
            self.root,
            parts,
            item.sources,
            self._from_store,
            self.packets,
            wish.codec,
            self.plan.rate(wish.rate),
            self.plan.unique_rate(wish.rate),
            (port, self.plan.sender) if item.stream else (),
            self._evict.get(item.host, ()),
            wish.wait,
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
                        self._done(item, outcome, message)
                        break
                    if message.get("event") == "came":
                        self._came(outcome, message)
                    if message.get("event") == "base":
                        self._base(item, outcome, str(message.get("name")))
                    if message.get("event") == "progress":
                        self._progress(item.host, message)
        except BaseBusy as e:
            outcome.why = e.line()
            raise
        except (HostUnreachable, HostFailed):
            if item.host == self.plan.sender:
                # What it lacks nobody has: the others need not wait for it to come. One that lives says
                # itself what it has not.
                self._order([other.host for other in self.plan.hosts if other.host != item.host], end="round")
            raise
        finally:
            with self._lock:
                self._over.add(item.host)
                self._sessions.pop(item.host, None)
        hosts.tell(event="host", host=item.host, have=1, of=1, source="", done=True)

    def _done(self, item: Assignment, outcome: Outcome, message: dict[str, object]) -> None:
        results = message.get("results")
        outcome.lacks -= {way.name for way in item.ways}
        self._came(
            outcome,
            results[0] if isinstance(results, list) and results and isinstance(results[0], dict) else {},
        )
        outcome.ok, outcome.why = True, ""

    def _base(self, item: Assignment, outcome: Outcome, name: str) -> None:
        """Note that a host has one of its bases: others can have it from there, whatever becomes of the
        rest.
        """
        if name in {way.name for way in item.ways}:
            outcome.lacks.discard(name)
            try:
                questions.arrived(self.root, name, item.host, True)
            except (SemisharedError, OSError):
                pass  # a hint; it is noted again in the end
            self.hosts.tell(event="base", host=item.host, name=name)

    def _came(self, outcome: Outcome, found: dict[str, object]) -> None:
        """Note what a host has got, also one that could not get all."""
        outcome.add(found.get("sources"))
        troubles = found.get("troubles")
        outcome.troubles += [str(text) for text in troubles] if isinstance(troubles, list) else []

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
            ready[0],
            tuple(sorted(unpacks)),
        )
        try:
            with hosts.session(self.plan.sender) as session:
                self._stream, self._begun = session, time.monotonic()
                session.begin([step], last=True)
                if self._ended.is_set():
                    session.send(end="stream")
                (answer,) = session.finish()
                self._streamed = answer if isinstance(answer, dict) else {}
        except (SemisharedError, OSError, ValueError) as e:
            if not self._ended.is_set():
                hosts.note(
                    self.plan.sender,
                    f"the stream failed: {e.line() if isinstance(e, SemisharedError) else e}",
                )
                # Without the sender there is nobody who has the rest: at once to the next round, and to
                # another one.
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
        """Leave behind who holds the others up."""
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
        # Other front-ends draw too; should they meet all the same, the packets tell whose they are.
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
