# SPDX-License-Identifier: Apache-2.0
"""What fits on a terminal: its size, texts cut to a width, tables whose widest columns give way.

A line that is wider than its terminal wraps, and what is drawn again in place then stays there twice.
"""

from __future__ import annotations

import os
from typing import IO, Iterable, List, Sequence, Tuple

USUAL = (80, 24)
"""Columns and lines where there is no terminal."""
LEAST = 4
"""Columns that each column of a table keeps."""
CUT = ".."
GAP = 2


def size(out: IO[str]) -> Tuple[int, int]:
    """Return columns and lines of the terminal behind `out`, USUAL if there is none."""
    try:
        found = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):
        return USUAL
    return found.columns or USUAL[0], found.lines or USUAL[1]


def cut(text: str, width: int) -> str:
    """Return a text of at most `width` characters; one that is longer ends with CUT."""
    if len(text) <= width:
        return text
    return text[: max(0, width - len(CUT))] + CUT[: max(0, width)]


def rows(head: str, lines: Iterable[Sequence[str]], width: int) -> List[str]:
    """Return a table as lines of at most `width` characters; `|` separates its heads in `head`.

    The widest columns are cut. Every word is one that is safe to print (command.shown).
    """
    words = [head.split("|"), *lines]
    widths = [max(map(len, column)) for column in zip(*words)]
    while sum(widths) + GAP * (len(widths) - 1) > width and max(widths) > LEAST:
        widths[widths.index(max(widths))] -= 1
    return [
        cut((" " * GAP).join(cut(word, to).ljust(to) for word, to in zip(line, widths)).rstrip(), width)
        for line in words
    ]
