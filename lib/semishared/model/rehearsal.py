# SPDX-License-Identifier: Apache-2.0
"""A plan rehearsed, for `semishared plan`: looks are carried out, changes are noted.

Looks are sent as long as nothing acts before them: then they see what the action would see. From the first
step that acts on, every step is noted and has no answer: a plan that reads one ends there. A rehearsal never
makes up an answer.
"""

from __future__ import annotations

from typing import Any, Callable

from ..named import NamedTuple
from ..named import to_data as data_of
from .exchange import AskOned, Exchange, Feed, Fetch, Here, On, Part, Relay, While, drive
from .refs import Step
from .steps import UnsettledDisk, is_look, look_instead, to_data

HERE = "this machine"


class Noted(NamedTuple):
    """One message of a rehearsed plan."""

    machine: str
    steps: tuple[Step, ...]
    answers: tuple[object, ...] | None = None
    """What the machine has answered: its steps only look. None: it was not sent."""
    during: str = ""
    """The machine that waits meanwhile."""
    follows: str = ""
    """What its bytes would be: a file, an URL, or a step of another machine."""

    def to_data(self) -> dict[str, Any]:
        """Return the message as JSON data: its answers, if it was sent."""
        row: dict[str, Any] = {"host": self.machine, "steps": [to_data(step) for step in self.steps]}
        if self.answers is not None:
            row["answers"] = data_of(self.answers)
        more = {"during": self.during, "follows": self.follows}
        return {**row, **{name: value for name, value in more.items() if value}}


class Script(NamedTuple):
    """A rehearsed plan: all its messages, or (`is_open`) those until it depends on the answer of a step that
    acts.
    """

    messages: list[Noted]
    is_open: bool
    answer: str = ""
    """What would go to stdout."""

    def to_data(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        return {
            "plan": [message.to_data() for message in self.messages],
            "open": self.is_open,
            "stdout": self.answer,
        }


class _Open(BaseException):
    """The plan has read an answer that does not exist. No Exception: no undo is to begin for it."""


class _Unanswered:
    """The answer of a machine that was not asked: a plan that reads it ends."""

    def _look(self, *_: object) -> Any:
        raise _Open

    __getattribute__ = __getitem__ = __iter__ = __bool__ = __len__ = __contains__ = __eq__ = __str__ = _look


class _Rehearsal:
    """Carries out a plan without its changes; `do` and `look` are those of `rehearsed`."""

    def __init__(self, do: Callable[[Exchange], Any], look: Callable[[Step], Step | None]) -> None:
        self._do = do
        self._look = look
        self._acts = False
        self.noted: list[Noted] = []

    def do(self, wanted: Exchange) -> Any:
        if isinstance(wanted, On):
            return self._on(wanted)
        if isinstance(wanted, Feed):
            return self._note(wanted.target, follows=wanted.source[0])
        if isinstance(wanted, While):
            return self._note(wanted.first), self._note(wanted.then, during=wanted.first.machine)
        if isinstance(wanted, Fetch):
            return self._note(wanted.source), _Unanswered()
        if isinstance(wanted, Relay):
            self._note(wanted.source)
            self._note(
                wanted.target, follows=f"{wanted.source.machine}'s {type(wanted.source.steps[0]).__name__}"
            )
            return _Unanswered()
        if isinstance(wanted, Here):
            return self._here(wanted.step)
        return self._do(wanted) if isinstance(wanted, AskOned) else None

    def _here(self, step: Step) -> Any:
        look = None if self._acts else self._look(step)
        if look is None:
            return self._note(On(HERE, (step,)))[0]
        found = self._do(Here(look))
        self.noted.append(Noted(HERE, (step,), (found,)))
        return found

    def _on(self, on: On) -> list[object]:
        looks = 0
        while not self._acts and looks < len(on.steps) and may_be_sent(on.steps[looks]):
            looks += 1
        found: list[object] = []
        if looks or not (self._acts or on.steps):
            sent = On(on.machine, tuple(map(look_instead, on.steps[:looks])))
            answers = self._do(sent)
            if looks:
                self.noted.append(Noted(on.machine, on.steps[:looks], tuple(answers)))
            found = [_Unanswered() if isinstance(answer, UnsettledDisk) else answer for answer in answers]
        return found + (self._note(On(on.machine, on.steps[looks:])) if on.steps[looks:] else [])

    def _note(self, on: On, *, during: str = "", follows: str = "") -> list[object]:
        self._acts = True
        self.noted.append(Noted(on.machine, on.steps, during=during, follows=follows))
        return [_Unanswered() for _ in on.steps]


def may_be_sent(step: Step) -> bool:
    """Tell whether a step changes nothing, or there is one that answers the same and changes nothing."""
    return is_look(look_instead(step))


def rehearsed(
    plan: Part[str | None], do: Callable[[Exchange], Any], look: Callable[[Step], Step | None]
) -> Script:
    """Rehearse a plan; raise what would refuse the action. `do` carries out what only looks, `look` says what
    of Here's does.
    """
    rehearsal = _Rehearsal(do, look)
    try:
        answer = drive(plan, rehearsal.do)
        return Script(rehearsal.noted, False, answer or "")
    except _Open:
        return Script(rehearsal.noted, True)
