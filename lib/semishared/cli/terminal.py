# SPDX-License-Identifier: Apache-2.0
"""What fits on a terminal: its size, texts cut to a width, tables whose widest columns are cut or wrapped.

A line that is wider than its terminal wraps, and what is drawn again in place then stays there twice.
"""

from __future__ import annotations

import os
from typing import IO, Iterable, List, Optional, Sequence, Tuple

USUAL = (80, 24)
"""Columns and lines where there is no terminal."""
LEAST = 4
"""Columns that each column of a table keeps."""
CUT = ".."
GAP = 2
"""Spaces between columns of a table."""


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


def rows(
    head: str, lines: Iterable[Sequence[str]], width: Optional[int], *, wraps: bool = False
) -> List[str]:
    """Return a table as lines; `|` separates its heads in `head`. A `width` of None is no limit.

    The widest columns give way. They are cut, and each row is a line of at most `width` characters; or, with
    `wraps`, they are broken between words, as far as the longest words allow. Every word is one that is safe
    to print (command.shown).
    """
    words = [head.split("|"), *lines]
    widths = [max(map(len, column)) for column in zip(*words)]
    if width is not None:
        longest = [
            max(len(word) for cell in column for word in cell.split() or [""]) for column in zip(*words)
        ]
        widths = _fitted(widths, longest if wraps else [LEAST] * len(widths), width)
    found = []
    for row in words:
        cells = [wrapped(word, to) if wraps else [cut(word, to)] for word, to in zip(row, widths)]
        for number in range(max(map(len, cells))):
            parts = (cell[number] if number < len(cell) else "" for cell in cells)
            line = (" " * GAP).join(part.ljust(to) for part, to in zip(parts, widths)).rstrip()
            found.append(line if wraps or width is None else cut(line, width))
    return found


def _fitted(widths: Sequence[int], least: Sequence[int], most: int) -> List[int]:
    """Return widths that make `most` columns, as far as the `least` ones allow."""
    found = list(widths)
    while sum(found) + GAP * (len(found) - 1) > most:
        widest = max(range(len(found)), key=lambda column: (found[column] > least[column], found[column]))
        if found[widest] <= least[widest]:
            break
        found[widest] -= 1
    return found


def wrapped(text: str, width: int) -> List[str]:
    """Return the lines of a text, broken between words; one for an empty text."""
    if len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines
