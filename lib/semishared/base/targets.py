# SPDX-License-Identifier: Apache-2.0
"""The bases that are being made on this host at once: what comes is put wherever its hash belongs."""

from __future__ import annotations

from typing import Iterable, Sequence

from ..errors import SemisharedError
from ..model.ranges import within
from ..model.steps_base import Part
from ..tools import extents
from .partial import Partial


class Target:
    """One of them."""

    def __init__(self, root: str, part: Part) -> None:
        self.part, self.partial = part, Partial(root, part.image)
        self.error: SemisharedError | None = None
        """Why the store could not give it."""
        self.is_published = False

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


class Targets:
    """All of them, as whoever receives sees them."""

    def __init__(self) -> None:
        self.all: list[Target] = []
        self._places: dict[str, list[tuple[Partial, int]]] = {}

    def add(self, target: Target) -> None:
        """Take in one more."""
        self.all.append(target)
        self._index(target.partial)

    def _index(self, partial: Partial) -> None:
        for index, digest in partial.manifest.extents.items() if partial.manifest else ():
            self._places.setdefault(digest, []).append((partial, index))

    def begin(self, text: bytes) -> None:
        """Take a manifest, if it is that of one of the bases."""
        generation = extents.generation_of(text)
        for target in self.all:
            if target.partial.generation == generation and not target.is_known:
                target.partial.begin(text)
                self._index(target.partial)

    def put(self, index: int, content: bytes | memoryview, digest: str = "") -> bool:
        """Take the extent with that hash wherever it is lacking (`index` is the sender's); tell whether anybody has it now."""
        return any([partial.put(at, content, digest) for partial, at in self._places.get(digest, ())])

    def places(self, digest: str) -> list[tuple[Partial, int]]:
        """Return where an extent with that hash is lacking."""
        return [(partial, index) for partial, index in self._places.get(digest, ()) if index not in partial.have]

    def digests(self, lacking: Iterable[tuple[Target, Sequence[int]]]) -> list[str]:
        """Return the hashes of extents, each once."""
        found = {target.partial.manifest.extents[at]: None for target, indices in lacking if target.partial.manifest for at in indices}
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
    def is_complete(self) -> bool:
        return all(target.partial.is_complete for target in self.all)

    @property
    def has_shared(self) -> bool:
        """Tell whether all has come that the session shares."""
        return all(not target.part.shared or (target.is_known and not target.shared()) for target in self.all)

    def close(self) -> None:
        for target in self.all:
            target.partial.close()
