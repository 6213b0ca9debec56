# SPDX-License-Identifier: Apache-2.0
"""The check of a machine's answers to steps, by the types that the steps declare (shapes.py).

A host may send anything: no answer is read before it has its shape.

An image or a record within an answer is "json" here: ImageRef and Record look at those, and
plan/image/disk_image.py compares them with oned's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from ..errors import FalseAnswer
from .refs import Step, answer_of
from .shapes import Misfit, Shape, declared, read, shown, wrong

if TYPE_CHECKING:
    from .base.steps import Listed

EVENTS: dict[str, Shape] = {
    "error": {"id": "text", "detail": "text", "evicted?": ["base"]},
    "warning": {"text?": "text"},
    "progress": {
        **dict.fromkeys(("have?", "of?", "done?", "came?", "speed?"), "count"),
        "source?": "text",
        "ready?": "flag",
    },
    "base": {"name": "base"},
    "ask": {
        "question?": "text",
        "name?": "base",
        "vm?": "count",
        "rests?": "text",
        "needed?": "number",
        "last?": ["text"],
    },
}
"""Shapes of a machine's messages while it works, by event."""
OF_STEPS = {"sent": "SendVm", "came": "FetchBases"}
"""Events that say what the answer to a step does, earlier."""
SENDING = frozenset({"SendVm", "SendManifest", "ServeBase", "ServeExtents"})
"""Steps whose data goes to the front-end."""


_derived: dict[str, Shape] = {}


def shape(step: type[Step]) -> Shape:
    """Return the shape of the answer to a step."""
    name = step.__name__
    if name not in _derived:
        _derived[name] = declared(answer_of(step), step.__module__)
    return _derived[name]


def reported(question: dict[str, Any]) -> Listed:
    """Return the report of ListBases in a machine's question."""
    from .base.steps import ListBases

    report: Listed = _read(question, shape(ListBases), "the host has asked with")
    return report


def heard(machine: str, steps: Sequence[type[Step]], message: dict[str, Any]) -> None:
    """Raise FalseAnswer for a message that no machine of ours sends during these steps."""
    event = message.get("event")
    if event == "done":
        message["results"] = checked(machine, steps, message.get("results"))
        said: Shape = {"moved?": {"*": "count"}, "came?": {"*": "count"}, "evicted?": ["base"]}
    elif isinstance(event, str) and event in OF_STEPS:
        said = next((shape(step) for step in steps if step.__name__ == OF_STEPS[event]), "never")
    elif isinstance(event, str) and event in EVENTS:
        said = EVENTS[event]
    else:
        said = "json"
    found = wrong(message, said)
    if found is not None:
        raise FalseAnswer(f"{machine} has said {found}")


def checked(machine: str, steps: Sequence[type[Step]], answers: object) -> list[Any]:
    """Return a machine's answers to these steps; raise FalseAnswer for one of a wrong shape."""
    if not isinstance(answers, list) or len(answers) != len(steps):
        raise FalseAnswer(f"{machine} has answered {shown(answers)} to {len(steps)} steps")
    return [one(machine, step, answer) for step, answer in zip(steps, answers)]


def one(machine: str, step: type[Step], answer: object) -> Any:
    """Return the answer to a step as its type; raise FalseAnswer."""
    said = shape(step)
    if said is None:
        return None
    return _read(answer, said, f"{machine} has answered", f" to {step.__name__}")


def _read(value: object, said: Shape, before: str, behind: str = "") -> Any:
    try:
        return read(value, said)
    except Misfit as e:
        raise FalseAnswer(f"{before} {e}{behind}") from None
