# SPDX-License-Identifier: Apache-2.0
"""The undo stack: register the undo right after the effect, keep when all is well."""

from __future__ import annotations

from types import TracebackType
from typing import Callable


class Undo:
    """`with Undo() as undo: effect(); undo.add(inverse); ...; undo.keep()`. An inverse that fails is passed
    over.
    """

    def __init__(self) -> None:
        self._stack: list[Callable[[], object]] = []

    def add(self, inverse: Callable[[], object]) -> None:
        """Run `inverse` if the block ends without `keep`."""
        self._stack.append(inverse)

    def keep(self) -> None:
        """Keep all effects so far."""
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
