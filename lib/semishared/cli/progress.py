# SPDX-License-Identifier: Apache-2.0
"""The progress of a verb on many hosts: bars for a terminal, else a line of JSON for each event."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from typing import IO, Callable

from . import terminal
from .command import Row, put_json, shown

WIDTH, NARROW = 30, 10
"""Columns of a bar, and those below which none is drawn."""
BESIDE = 26
"""Columns for what stands behind a bar."""
REDRAW_S = 0.2


class View:
    """The progress of a session, host by host, and its summary."""

    def __init__(self, out: IO[str], now: Callable[[], float] = time.monotonic) -> None:
        self._out, self._now = out, now
        self._lock = threading.Lock()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, **event: object) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Draw nothing more."""

    def summary(self, show: Callable[[], None], outcome: Row) -> None:
        """Print the result: `show` for a person, `outcome` for a program."""
        put_json({"event": "summary", **outcome}, None)


def view(arguments: argparse.Namespace) -> View:
    """Return bars for a terminal, JSON lines for a program."""
    return Bars(sys.stderr) if sys.stdout.isatty() and not arguments.json else Lines(sys.stdout)


class Lines(View):
    """One JSON object per event; per host at most one in `every_s` seconds, and always its last."""

    def __init__(self, out: IO[str], every_s: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(out, now)
        self._every_s = every_s
        self._told: dict[object, float] = {}

    def tell(self, **event: object) -> None:
        with self._lock:
            if event.get("event") == "host" and not event.get("done"):
                if self._now() - self._told.get(event["host"], float("-inf")) < self._every_s:
                    return
                self._told[event["host"]] = self._now()
            self._out.write(json.dumps(event) + "\n")
            self._out.flush()


class Bars(View):
    """A line per host, drawn again in place; notes go above.

    Of more hosts than the terminal has lines those are drawn that are at work, the others are counted.
    """

    def __init__(
        self,
        out: IO[str],
        now: Callable[[], float] = time.monotonic,
        size: Callable[[IO[str]], tuple[int, int]] = terminal.size,
    ) -> None:
        """`size`: columns and lines of the terminal behind `out`."""
        super().__init__(out, now)
        self._size = size
        self._hosts: dict[str, Row] = {}
        self._drawn = 0
        self._last = float("-inf")

    def tell(self, **event: object) -> None:
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
        columns, high = self._size(self._out)
        drawn = bars(list(self._hosts.values()), columns - 1, high - 1)
        # What is drawn no more, as after the terminal was made smaller, goes too.
        up = f"\x1b[{self._drawn}A\x1b[J" if self._drawn else ""
        words = (shown(line, self._out) for line in [*([note] if note else []), *drawn])
        self._out.write(up + "".join(f"\x1b[2K{line}\n" for line in words))
        self._out.flush()
        self._drawn = len(drawn)

    def close(self) -> None:
        with self._lock:
            self._draw("")

    def summary(self, show: Callable[[], None], outcome: Row) -> None:
        show()


def bars(events: list[Row], columns: int, most: int) -> list[str]:
    """Return the lines of hosts: at most `most`, each of at most `columns` characters."""
    drawn, counted = events, ""
    if most < 1:
        return []
    if len(events) > most:
        working = [event for event in events if not event.get("done")]
        drawn = (working + [event for event in events if event.get("done")])[: most - 1]
        left = [event for event in events if not any(event is one for one in drawn)]
        done = sum(bool(event.get("done")) for event in left)
        counted = f"and {len(left)} more: {done} done"
    longest = max((len(str(event["host"])) for event in drawn), default=0)
    width = min(WIDTH, columns - BESIDE - 4 - min(longest, max(NARROW, columns // 3)))
    name = min(longest, columns - BESIDE - (width + 4 if width >= NARROW else 2))
    lines = [
        terminal.cut(bar(event, max(name, min(longest, terminal.LEAST)), width), columns) for event in drawn
    ]
    return [*lines, *([terminal.cut(counted, columns)] if counted else [])]


def bar(event: Row, name: int = 20, width: int = WIDTH) -> str:
    """Return a host's line, its name in `name` columns; no bar, if it would have less than NARROW columns."""
    have, of = event.get("have"), event.get("of")
    share = have / of if isinstance(have, int) and isinstance(of, int) and of else 0.0
    filled = int(share * width)
    source = f" from {event['source']}" if event.get("source") else ""
    text = "has it" if event.get("done") else f"{100 * share:3.0f} %{source}"
    drawn = f" [{'#' * filled}{'.' * (width - filled)}] " if width >= NARROW else "  "
    return f"{terminal.cut(str(event['host']), name):{name}}{drawn}{text}"
