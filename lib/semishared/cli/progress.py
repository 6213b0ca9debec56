# SPDX-License-Identifier: Apache-2.0
"""How far a session is, host by host: bars where somebody looks on, JSON lines where a program does."""

from __future__ import annotations

import json
import threading
import time
from typing import IO, Callable

from .command import shown

WIDTH = 30
REDRAW_S = 0.2
Event = dict[str, object]


class Lines:
    """One JSON object per event; of hosts at most one in `every_s` seconds, but all that end."""

    def __init__(self, out: IO[str], every_s: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self._out, self._every_s, self._now = out, every_s, now
        self._told: dict[object, float] = {}
        self._lock = threading.Lock()

    def tell(self, **event: object) -> None:
        """Print an event."""
        with self._lock:
            if event.get("event") == "host" and not event.get("done"):
                if self._now() - self._told.get(event["host"], float("-inf")) < self._every_s:
                    return
                self._told[event["host"]] = self._now()
            self._out.write(json.dumps(event) + "\n")
            self._out.flush()

    def close(self) -> None:
        """Nothing is left to be drawn."""


class Bars:
    """A line per host, drawn again in place; notes go above."""

    def __init__(self, out: IO[str], now: Callable[[], float] = time.monotonic) -> None:
        self._out, self._now = out, now
        self._hosts: dict[str, Event] = {}
        self._drawn = 0
        self._last = float("-inf")
        self._lock = threading.Lock()

    def tell(self, **event: object) -> None:
        """Take an event in and draw what has changed."""
        with self._lock:
            if event.get("event") == "host":
                self._hosts[str(event["host"])] = event
                if self._now() - self._last >= REDRAW_S or event.get("done"):
                    self._draw("")
            elif event.get("event") == "plan":
                self._draw(f"{event['transport']} from {event['sender']} to {len(event['hosts'])} hosts")  # type: ignore[arg-type]
            elif event.get("event") == "vm":
                self._draw(f"VM {event['vm']}: {event.get('why') or event['how']}")
            elif event.get("event") == "note":
                self._draw(f"{event['host']}: {event['text']}")

    def _draw(self, note: str) -> None:
        self._last = self._now()
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        lines = [note] if note else []
        self._out.write(
            up
            + "".join(
                f"\x1b[2K{shown(line, self._out)}\n" for line in [*lines, *map(bar, self._hosts.values())]
            )
        )
        self._out.flush()
        self._drawn = len(self._hosts)

    def close(self) -> None:
        """Draw the last state."""
        with self._lock:
            self._draw("")


def bar(event: Event) -> str:
    """Return a host's line."""
    have, of = event.get("have"), event.get("of")
    share = have / of if isinstance(have, int) and isinstance(of, int) and of else 0.0
    filled = int(share * WIDTH)
    source = f" from {event['source']}" if event.get("source") else ""
    text = "has it" if event.get("done") else f"{100 * share:3.0f} %{source}"
    return f"{str(event['host'])[:20]:20} [{'#' * filled}{'.' * (WIDTH - filled)}] {text}"
