# SPDX-License-Identifier: Apache-2.0
"""The hosts of a staging session: one ssh to each, all spoken to at once, and how it went on each."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import Callable, Iterator, Mapping, Sequence

from ..config import Config
from ..errors import NotSupported, SemisharedError
from ..model.base import steps as base_steps
from ..model.refs import ImageRef
from ..named import NamedTuple
from ..opennebula.xml import Host
from ..wire.session import Session


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
