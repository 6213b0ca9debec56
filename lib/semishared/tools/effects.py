# SPDX-License-Identifier: Apache-2.0
"""Crash points between effects, the undo stack, and the result of one step of many.

Tests kill a process at its points, as an action may be killed after any effect. Without the environment
variables a point costs one comparison. ssh does not pass them on.

    SEMISHARED_KILL_AT=N    SIGKILL to this process at its N-th point
    SEMISHARED_STOP_AT=N    SIGSTOP to this process at its N-th point: it stays until a signal ends it
    SEMISHARED_TRACE=FILE   append the points' names to FILE
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Callable, Dict, Iterator

from ..errors import SemisharedError

_kill_at = int(os.environ.get("SEMISHARED_KILL_AT", "0") or 0)
_stop_at = int(os.environ.get("SEMISHARED_STOP_AT", "0") or 0)
_file = os.environ.get("SEMISHARED_TRACE", "")
_count = 0


def is_on() -> bool:
    """Return True if a test uses the points of this process."""
    return bool(_kill_at or _stop_at or _file)


def point(name: str) -> None:
    """Mark that the effect called `name` has just happened."""
    global _count
    if not is_on():
        return
    _count += 1
    if _file:
        with open(_file, "a", encoding="utf-8") as file:
            file.write(f"{_count} {name}\n")
    if _count in (_kill_at, _stop_at):
        import signal  # 19,000 instructions, which an action can do without

        os.kill(os.getpid(), signal.SIGKILL if _count == _kill_at else signal.SIGSTOP)


class Undo:
    """`with Undo() as undo: effect(); undo.add(inverse); ...; undo.keep()`; a failing inverse is skipped.

    Register the inverse right after the effect; `keep` drops all inverses.
    """

    def __init__(self) -> None:
        self._stack: list[Callable[[], object]] = []

    def add(self, inverse: Callable[[], object]) -> None:
        """Run `inverse` if the block ends without `keep`."""
        self._stack.append(inverse)

    def keep(self) -> None:
        """Keep all effects so far: drop their inverses."""
        self._stack.clear()

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        while self._stack:
            try:
                self._stack.pop()()
            except Exception:  # noqa: BLE001 - the first error is the one to report; a rerun converges
                continue


@contextmanager
def told(**answer: object) -> Iterator[Dict[str, Any]]:
    """Yield the answer to a step, for the block to fill in; add "seconds", "error" and "id".

    "error" is the line of the SemisharedError or OSError that ended the block, '' for none. The block's
    caller then continues with its other steps.
    """
    began = time.monotonic()
    answer.update(error="", id="")
    try:
        yield answer
    except SemisharedError as e:
        answer.update(error=e.line(), id=e.id)
    except OSError as e:
        answer.update(error=f"on {os.uname().nodename}: {e}", id="SS012")
    answer["seconds"] = round(time.monotonic() - began, 2)
