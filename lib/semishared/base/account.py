# SPDX-License-Identifier: Apache-2.0
"""What a host tells the front-end while a base comes, and what the front-end says to it meanwhile."""

from __future__ import annotations

import time
from typing import Any, Callable

from .targets import Targets

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
