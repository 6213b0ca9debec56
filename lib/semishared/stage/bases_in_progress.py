# SPDX-License-Identifier: Apache-2.0
"""The bases that are being made on this host at once: extents go wherever their hash belongs.

The host tells the front-end what came (Account), and the front-end says what is to end (Orders).
"""

from __future__ import annotations

import time
from typing import IO, Any, Callable, Iterable, Sequence

from ..errors import SemisharedError
from ..model.base.names import within
from ..model.base.steps import Part
from ..tools import extents
from .partial import Partial


class Target:
    """One of them. `lock`: that of its image, if it is freed as soon as this base is over."""

    def __init__(self, root: str, part: Part, lock: IO[str] | None = None) -> None:
        self.part, self.partial, self._lock = part, Partial(root, part.image), lock
        self.error: SemisharedError | None = None
        """Why the store could not give it, or why it cannot be used."""
        self.is_over = self.is_published = False

    def shared(self) -> list[int]:
        """Return which of the extents that the session shares have not come."""
        return within(self.part.shared, self.partial.missing())

    def rest(self) -> list[int]:
        """Return which of the others have not come."""
        shared = set(self.shared())
        return [index for index in self.partial.missing() if index not in shared]

    @property
    def is_known(self) -> bool:
        """Tell whether its manifest has come."""
        return self.partial.manifest is not None

    @property
    def lacks(self) -> bool:
        """Tell whether something has not come that the session does not share."""
        return bool(self.rest()) if self.is_known else not self.part.shared

    def end(self) -> None:
        """Let go of it, whatever has become of it."""
        self.is_over = True
        self.partial.close()
        if self._lock:
            self._lock.close()


class Targets:
    """All of them, for a receiver; `settle` is called with each base that is whole, to end it."""

    def __init__(self, settle: Callable[[Target], None]) -> None:
        self.all: list[Target] = []
        self._settle = settle
        self._places: dict[str, list[tuple[Target, int]]] = {}

    @property
    def open(self) -> list[Target]:
        """Those that are not over."""
        return [target for target in self.all if not target.is_over]

    def add(self, target: Target) -> None:
        """Take in one more."""
        self.all.append(target)
        self._begun(target)

    def _begun(self, target: Target) -> None:
        for index, digest in target.partial.manifest.extents.items() if target.partial.manifest else ():
            self._places.setdefault(digest, []).append((target, index))
        # A killed action may have left all of it.
        self._look(target)

    def _look(self, target: Target) -> None:
        if target.partial.is_complete and not target.is_over:
            self._settle(target)

    def begin(self, text: bytes) -> None:
        """Take a manifest, if it is that of one of the bases."""
        generation = extents.generation_of(text)
        for target in self.open:
            if target.partial.generation == generation and not target.is_known:
                target.partial.begin(text)
                self._begun(target)

    def adopt(self, target: Target, manifest: extents.Manifest) -> None:
        """Take a base whose file was made whole."""
        target.partial.adopt(manifest)
        self._look(target)

    def put(self, index: int, content: bytes | memoryview, digest: str = "") -> bool:
        """Take the extent with that hash wherever it is lacking (`index` is the sender's); tell whether
        anybody has it now.
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
        """Take an extent as `put` does, from an open file that nobody changes and has it at extent `at`;
        return how often.
        """
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
        found = {
            target.partial.manifest.extents[at]: None
            for target, indices in lacking
            if target.partial.manifest
            for at in indices
        }
        return list(found)

    @property
    def count(self) -> int:
        """Extents that have come."""
        return sum(len(target.partial.have) for target in self.all)

    @property
    def total(self) -> int:
        """Extents that are to come, as far as manifests are known."""
        return sum(len(target.partial.manifest.extents) for target in self.all if target.partial.manifest)

    @property
    def has_shared(self) -> bool:
        """Tell whether all has come that the session shares."""
        return all(
            not target.part.shared or (target.is_known and not target.shared()) for target in self.open
        )

    def close(self) -> None:
        """Let go of all; what has come stays, to be gone on with."""
        for target in self.open:
            target.end()


Tell = Callable[..., None]
"""Sends an event to the front-end."""
TELL_S = 0.5


class Account:
    """What came from where, told to the front-end as it comes."""

    def __init__(self, target: Targets, tell: Tell) -> None:
        self._target, self._tell, self._told = target, tell, 0.0
        self.sources: dict[str, dict[str, int]] = {}
        self.troubles: list[str] = []

    def came(self, source: str, extents_before: int, packed: int, **more: Any) -> None:
        """Note that `packed` bytes came from `source`, and that before them `extents_before` extents were
        there.
        """
        here = self._target.count - extents_before
        # A stream that brought nothing is no source; what is read ahead brings its bytes first.
        if packed or here:
            self.count(source, here, packed)
        self.tell(source, **more)

    def count(self, source: str, extents: int, size: int) -> None:
        """Note that extents, in `size` bytes, came from `source`."""
        entry = self.sources.setdefault(source, {"extents": 0, "bytes": 0})
        entry["extents"] += extents
        entry["bytes"] += size

    def data(self) -> dict[str, object]:
        """Return what there is to be said in the end."""
        return {"sources": self.sources, "troubles": self.troubles}

    def tell(self, source: str, *, now: bool = False, **more: object) -> None:
        """Say how far it is, not more often than the front-end can want to know."""
        if now or time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            self._tell(
                event="progress",
                have=self._target.count,
                of=self._target.total,
                source=source,
                came=self.sources.get(source, {}).get("bytes", 0),
                **more,
            )


class Orders:
    """What the front-end says while a base is received: {"skip": HOST}, {"end": "stream"} and, when nothing
    more can come in this round, {"end": "round"}.
    """

    def __init__(self, poll: Callable[[], object]) -> None:
        self._poll = poll
        self._skipped: set[str] = set()
        self.stream_ended = self.ended = False

    def skip(self, host: str) -> bool:
        """Tell whether `host` is to be left; once."""
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
