# SPDX-License-Identifier: Apache-2.0
"""Steps on shares (model/share/steps.py) to functions: fields of a step are arguments of its function."""

from __future__ import annotations

from typing import Any, Callable

from . import inspection, keys, life, registered, snapshots

VERBS: dict[str, Callable[..., Any]] = {
    "FindDirectory": registered.found,
    "GiveKey": keys.give,
    "ListKeys": keys.listed,
    "ShowKey": keys.shown,
    "ListShares": life.listed,
    "ListSnapshots": snapshots.listed,
    "LookAtRoot": inspection.of_root,
    "LookAtShareHost": inspection.of_host,
    "MakeShare": life.make,
    "MakeSnapshot": snapshots.make,
    "MarkRoot": life.mark,
    "MeasureRoot": life.capacity,
    "RemoveShare": life.remove,
    "RemoveSnapshot": snapshots.remove,
    "ResizeShare": life.resize,
    "TakeKeys": keys.take,
}


def do(step: Any) -> Any:
    """Carry out a step; return what it found out (JSON data) or None."""
    return VERBS[type(step).__name__](*step)
