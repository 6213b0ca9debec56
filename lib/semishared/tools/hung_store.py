# SPDX-License-Identifier: Apache-2.0
"""A question to a store that may hang: whoever asks waits for so long, and the thread that got no answer is left to itself."""

from __future__ import annotations

import threading
from typing import Callable, List, TypeVar

Answer = TypeVar("Answer")
LIMIT_S = 10.0
"""Seconds: a mounted store that answers does so at once; one whose server is away holds its callers for ever."""


def unless_it_hangs(look: Callable[[], Answer], otherwise: Answer, limit_s: float = LIMIT_S) -> Answer:
    """Return what `look` returns, or raise what it raises; return `otherwise` if it does neither within `limit_s` seconds."""
    found: List[Answer] = []
    failed: List[BaseException] = []

    def run() -> None:
        try:
            found.append(look())
        except BaseException as e:  # noqa: BLE001 - whoever waits gets it
            failed.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if failed:
        raise failed[0]
    return found[0] if found else otherwise
