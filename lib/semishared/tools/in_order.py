# SPDX-License-Identifier: Apache-2.0
"""One thing done to many items, several side by side, of which few are in memory at a time."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Iterable, Iterator, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")


def in_order(work: Callable[[Item], Found], items: Iterable[Item], at_once: int) -> Iterator[Found]:
    """Yield what `work` returns of each item, in their order, `at_once` side by side; raise what it raises.

    Items are taken as they are needed, by who asks for what was found.
    """
    with ThreadPoolExecutor(at_once) as pool:
        waiting: deque[Future[Found]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * at_once:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
