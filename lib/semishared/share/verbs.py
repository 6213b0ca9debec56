# SPDX-License-Identifier: Apache-2.0
"""Steps on shares (model/steps_share.py) to functions: the fields of a step are the arguments of its function."""

from __future__ import annotations

from typing import Any

from . import life

VERBS = {
    "FindDirectory": "found",
    "ListShares": "listed",
    "MakeShare": "make",
    "MarkRoot": "mark",
    "MeasureRoot": "capacity",
    "RemoveShare": "remove",
    "ResizeShare": "resize",
}


def do(step: Any) -> Any:
    """Carry out a step; return what it found out (JSON data) or None."""
    return getattr(life, VERBS[type(step).__name__])(*step)
