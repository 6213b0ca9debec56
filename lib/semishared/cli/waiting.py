# SPDX-License-Identifier: Apache-2.0
"""What a person at a terminal sees of work that takes longer than two seconds; a program sees nothing."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

QUIET_S = 2


class Waiting:
    """`with Waiting("asking", 30) as waiting:` ... `waiting.done()` for each of the 30; one line that is
    rewritten.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._count = what, total, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def done(self) -> None:
        """Count one."""
        self._count += 1

    def _show(self) -> None:
        began = time.monotonic()
        shown = False
        while not self._ended.wait(0.5):
            if time.monotonic() - began >= QUIET_S:
                print(
                    f"\r{self._what}: {self._count} of {self._total} ...", end="", file=sys.stderr, flush=True
                )
                shown = True
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
