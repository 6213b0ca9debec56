# SPDX-License-Identifier: Apache-2.0
"""The bases that this host is receiving: it stores each extent in every base that lists its hash.

The host reports progress to the front-end (Account) and hears from it what to end (Orders).
"""

from __future__ import annotations

import time
from typing import IO, Any, Callable, Iterable, Sequence

from ..errors import SemisharedError
from ..model.base.names import within
from ..model.base.steps import Fetched, FromSource, Part
from ..tools import extents, progress
from .partial import Partial


class Target:
    """One base that is being received. `lock`: its image's lock, which `end` frees; None if the caller's."""

    def __init__(self, root: str, part: Part, lock: IO[str] | None = None) -> None:
        self.part, self.partial, self._lock = part, Partial(root, part.image), lock
        self.error: SemisharedError | None = None
        """Why the store could not deliver it, or why it is unusable."""
        self.is_over = self.is_published = False

    def shared(self) -> list[int]:
        """Return the missing extents that the session shares."""
        return within(self.part.shared, self.partial.missing())

    def rest(self) -> list[int]:
        """Return the missing extents that the session does not share."""
        shared = set(self.shared())
        return [index for index in self.partial.missing() if index not in shared]

    @property
    def is_known(self) -> bool:
        """Return True once its manifest is here."""
        return self.partial.manifest is not None

    @property
    def lacks(self) -> bool:
        """Return True while an extent is missing that the session does not share."""
        return bool(self.rest()) if self.is_known else not self.part.shared

    def end(self) -> None:
        """Close its files and free its lock; the extents that came stay on disk."""
        self.is_over = True
        self.partial.close()
        if self._lock:
            self._lock.close()


class Targets:
    """All bases of a receiver. It calls `settle` with each complete base, which publishes and ends it."""

    def __init__(self, settle: Callable[[Target], None]) -> None:
        self.all: list[Target] = []
        self._settle = settle
        self._places: dict[str, list[tuple[Target, int]]] = {}

    @property
    def open(self) -> list[Target]:
        """Return the bases that have not ended."""
        return [target for target in self.all if not target.is_over]

    def add(self, target: Target) -> None:
        """Add a base; settle it at once if a killed action left it complete."""
        self.all.append(target)
        self._begun(target)

    def _begun(self, target: Target) -> None:
        for index, digest in target.partial.manifest.extents.items() if target.partial.manifest else ():
            self._places.setdefault(digest, []).append((target, index))
        # A killed action may have left it complete.
        self._look(target)

    def _look(self, target: Target) -> None:
        if target.partial.is_complete and not target.is_over:
            self._settle(target)

    def begin(self, text: bytes) -> None:
        """Take a manifest for every open base of its generation; ignore any other manifest."""
        generation = extents.generation_of(text)
        for target in self.open:
            if target.partial.generation == generation and not target.is_known:
                target.partial.begin(text)
                self._begun(target)

    def adopt(self, target: Target, manifest: extents.Manifest) -> None:
        """Complete a base whose image file was copied and hashed as a whole."""
        target.partial.adopt(manifest)
        self._look(target)

    def put(self, index: int, content: bytes | memoryview, digest: str = "") -> bool:
        """Store an extent in every base that lacks its hash; return True if any base has it now.

        `index` is the sender's and not used: the hash says where the extent belongs.
        """
        found = False
        for target, at in self._places.get(digest, ()):
            if target.is_over:
                found = found or target.is_published
            elif target.partial.put(at, content, digest):
                found = True
                self._look(target)
        return found

    def put_from(self, source: int, at: int, digest: str, content: bytes) -> int:
        """Store extent `at` of the unchanging file `source`, as `put` does; return how many bases took it."""
        taken = 0
        for target, index in self._places.get(digest, ()):
            if (
                not target.is_over
                and index not in target.partial.have
                and target.partial.put_from(source, at, index, content)
            ):
                taken += 1
                self._look(target)
        return taken

    def digests(self, lacking: Iterable[tuple[Target, Sequence[int]]]) -> list[str]:
        """Return the hashes of extents, each once."""
        known = ((target.partial.manifest, indices) for target, indices in lacking)
        return list(dict.fromkeys(found.extents[at] for found, indices in known if found for at in indices))

    @property
    def count(self) -> int:
        """Count the extents that all bases have."""
        return sum(len(target.partial.have) for target in self.all)

    @property
    def total(self) -> int:
        """Count the extents of all bases whose manifests are known."""
        return sum(len(target.partial.manifest.extents) for target in self.all if target.partial.manifest)

    @property
    def has_shared(self) -> bool:
        """Return True if no open base lacks an extent that the session shares."""
        return all(
            not target.part.shared or (target.is_known and not target.shared()) for target in self.open
        )

    def close(self) -> None:
        """End every open base; what came stays, and the next run resumes from it."""
        for target in self.open:
            target.end()


Tell = Callable[..., None]
"""Sends an event to the front-end."""
TELL_S = 0.5


SAID = {"store": "the store", "stream": "the stream", "here": "bases here", "another session": ""}
"""Sources that are no hosts, in words."""


class Account:
    """What each source delivered; progress goes to the front-end."""

    def __init__(self, target: Targets, tell: Tell) -> None:
        self._target, self._tell, self._told = target, tell, 0.0
        self.sources: dict[str, FromSource] = {}
        self.troubles: list[str] = []

    def came(self, source: str, extents_before: int, packed: int, **more: Any) -> None:
        """Count `packed` bytes from `source`; `extents_before` is the total of extents before these bytes."""
        here = self._target.count - extents_before
        # A stream without data is no source. Reading ahead counts bytes before their extents.
        if packed or here:
            self.count(source, here, packed)
        self.tell(source, **more)

    def count(self, source: str, extents: int, size: int) -> None:
        """Add to what `source` delivered; `size` in bytes."""
        entry = self.sources.get(source, FromSource(0, 0))
        self.sources[source] = FromSource(entry.extents + extents, entry.bytes + size)
        if source not in SAID:
            progress.came[source] += size

    def data(self) -> Fetched:
        """Return the account as the answer to the front-end."""
        return Fetched(self.sources, self.troubles)

    def tell(self, source: str, *, now: bool = False, **more: object) -> None:
        """Report progress to the front-end, at most once in TELL_S seconds unless `now`."""
        of = self._target.total * extents.EXTENT
        # One that was asked and had nothing is no source: what comes slowly then seems to come from there.
        name = SAID.get(source, source) if source in self.sources else ""
        progress.reached(self._target.count * extents.EXTENT, of, name)
        if now or time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            self._tell(
                event="progress",
                have=self._target.count,
                of=self._target.total,
                source=source,
                came=self.sources.get(source, FromSource(0, 0)).bytes,
                **more,
            )


class Orders:
    """What the front-end orders during a reception.

    {"skip": HOST} leaves that host, {"end": "stream"} the stream; {"end": "round"} ends the whole round.
    """

    def __init__(self, poll: Callable[[], object]) -> None:
        self._poll = poll
        self._skipped: set[str] = set()
        self.stream_ended = self.ended = False

    def skip(self, host: str) -> bool:
        """Return True if the receiver is to leave `host`; each order to skip holds once."""
        self.hear()
        if self.ended:
            return True
        if host in self._skipped:
            self._skipped.discard(host)
            return True
        return False

    def hear(self) -> None:
        while True:
            message = self._poll()
            if not isinstance(message, dict):
                return
            if "skip" in message:
                self._skipped.add(str(message["skip"]))
            if "end" in message:
                self.stream_ended = True
                self.ended = self.ended or message["end"] == "round"
