# SPDX-License-Identifier: Apache-2.0
"""Answers for a host that asks, while it carries out a plan, for a base or for room (base/room.py: Ask)."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Callable, Dict, Iterator

from ..config import Config

Answer = Callable[[Dict[str, object]], object]
"""Returns the answer to a host's question."""


@contextmanager
def answering(root: str, host: str, config: Config) -> Iterator[Answer]:
    """Yield the answerer of `host`, with base store `root`; at the end, note which bases the host has.

    What knows about staging is loaded only when the host asks: most actions are warm.
    """
    asked: set[str] = set()

    def answer(question: dict[str, object]) -> object:
        from . import questions

        asked.add(str(question.get("name", "")))
        return questions.answer(root, question, host, config)

    has_it = False
    try:
        yield answer
        has_it = True
    finally:
        for name in asked:
            from . import questions

            questions.arrived(root, name, host, has_it)
