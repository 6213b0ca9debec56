# SPDX-License-Identifier: Apache-2.0
"""What a commit makes of ranges: how much it copies on the way."""

from __future__ import annotations

from typing import Any

import pytest

from semishared.store.commit import change
from semishared.store.commit.change import Range

PIECE = 4096
MANY = 20_000


class Counted(list):  # type: ignore[type-arg]
    """A list that counts the bytes that slices of it copy."""

    copied = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        if isinstance(at, slice):
            self.copied += 8 * len(found)
        return found


@pytest.mark.fault(
    41, "what is common to two lists of ranges is found by copying at most twice what the guest changed"
)
def test_ranges_are_compared_without_copying_what_is_left_for_each() -> None:
    below = Counted(Range(2 * at * PIECE, 2 * PIECE, 1, 2 * at * PIECE) for at in range(MANY))
    was = Counted(Range(2 * at * PIECE, PIECE, change.HOLE, 0) for at in range(MANY))
    found = list(change._common(below, was))
    assert found == [Range(2 * at * PIECE, PIECE, 1, 2 * at * PIECE) for at in range(MANY)]
    assert below.copied + was.copied <= 2 * MANY * PIECE
