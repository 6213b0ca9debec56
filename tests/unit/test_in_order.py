# SPDX-License-Identifier: Apache-2.0
"""One thing done to many items: in order, side by side, few at a time, and what fails is told."""

from __future__ import annotations

import threading
from typing import Iterator, List

import pytest

from semishared.store.commit.change import in_order


def test_what_is_found_comes_in_order_though_it_is_made_side_by_side() -> None:
    both = threading.Barrier(2, timeout=60)

    def work(item: int) -> int:
        both.wait()
        return item * 2

    assert list(in_order(work, range(8), 2)) == [0, 2, 4, 6, 8, 10, 12, 14]


def test_items_are_not_taken_long_before_they_are_needed() -> None:
    taken: List[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    found = in_order(lambda item: item, items(), 2)
    assert next(found) == 0
    assert len(taken) <= 5
    found.close()  # type: ignore[attr-defined]


def test_what_fails_is_raised_and_ends_it() -> None:
    done: List[int] = []

    def work(item: int) -> None:
        if item == 3:
            raise OSError("no space")
        done.append(item)

    with pytest.raises(OSError, match="no space"):
        list(in_order(work, range(1000), 2))
    assert len(done) < 20
