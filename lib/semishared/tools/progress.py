# SPDX-License-Identifier: Apache-2.0
"""Signs of life and counts of bytes of the running plan; the host side reports them (hostside.py)."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from typing import Callable, Iterator

moved: Counter[str] = Counter()
"""Bytes by what was done with them: `store_read`, `store_written`, `received`, `sent`, `reused` (of other
bases).
"""
last = time.monotonic()
last_words: list[Callable[[], None]] = []
"""What is to be done yet if the front-end dies now: a guest that rests for us must not rest for ever."""


@contextmanager
def if_we_die(do: Callable[[], None]) -> Iterator[None]:
    """Have `do` done by the host side if its front-end dies within the block."""
    last_words.append(do)
    try:
        yield
    finally:
        last_words.remove(do)


def touch() -> None:
    """Say that work goes on."""
    global last
    last = time.monotonic()


def count(what: str, size: int) -> None:
    """Count `size` bytes of `what`."""
    moved[what] += size
    touch()


@contextmanager
def waiting() -> Iterator[None]:
    """Wait, within the block, for something that has a limit of its own: that is no standstill."""
    global last
    last = float("inf")
    try:
        yield
    finally:
        touch()
