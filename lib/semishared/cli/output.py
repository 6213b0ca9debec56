# SPDX-License-Identifier: Apache-2.0
"""The one writer of what the operator's command prints: names from stores, hosts and OpenNebula are shown,
and control nothing.

No control character (ESC, U+009B, newline), none that turns the direction of writing, no half of a pair, and
none that the terminal's locale has not leaves it: `?` is shown for each.
"""

from __future__ import annotations

import json
import sys
from typing import IO, Optional


def shown(text: object, to: Optional[IO[str]] = None) -> str:
    """Return a text as a terminal may have it: one line."""
    encoding = getattr(to or sys.stdout, "encoding", None) or "utf-8"  # a file in memory has none
    return (
        "".join(c if c.isprintable() else "?" for c in str(text)).encode(encoding, "replace").decode(encoding)
    )


def put(line: object = "", to: Optional[IO[str]] = None, flush: bool = False) -> None:
    """Print one line."""
    print(shown(line, to), file=to or sys.stdout, flush=flush)


def put_all(text: str, to: Optional[IO[str]] = None) -> None:
    """Print lines that are ours: in what was not written by us a newline is a line too."""
    for line in text.removesuffix("\n").split("\n"):
        put(line, to)


def put_json(data: object, indent: Optional[int] = 1) -> None:
    """Print data as JSON, in which all but ASCII is escaped."""
    print(json.dumps(data, indent=indent), flush=True)


def table(lines: list[list[str]]) -> None:
    """Print rows as columns."""
    lines = [[shown(word) for word in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        put("  ".join(word.ljust(width) for word, width in zip(line, widths)).rstrip())
