# SPDX-License-Identifier: Apache-2.0
"""Sets of extents as ranges (first, last + 1), in order: a few numbers where most of an image is meant."""

from __future__ import annotations

from bisect import bisect_right
from typing import Iterable, Tuple

from ...errors import BadArguments

Ranges = Tuple[Tuple[int, int], ...]
ALL: Ranges = ((0, 1 << 62),)


def ranges(indices: Iterable[int]) -> Ranges:
    """Return sorted indices as ranges."""
    found: list[list[int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1][1] = index + 1
        else:
            found.append([index, index + 1])
    return tuple((first, last) for first, last in found)


def within(wanted: Ranges, indices: Iterable[int]) -> list[int]:
    """Return those of `indices` that are in the ranges."""
    firsts = [first for first, _ in wanted]
    found = []
    for index in indices:
        at = bisect_right(firsts, index) - 1
        if at >= 0 and index < wanted[at][1]:
            found.append(index)
    return found


def from_data(data: object) -> Ranges:
    """Return the ranges in JSON data; raise BadArguments."""
    try:
        return tuple((int(first), int(last)) for first, last in data)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise BadArguments(f"no ranges: {str(data)[:200]}") from None
