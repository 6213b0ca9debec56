# SPDX-License-Identifier: Apache-2.0
"""A plan rehearsed: machines are only looked at, what they would be made to do is noted. `semishared plan` shows it.

Looks are sent as long as nothing acts before them: then what they see is what the action would see. From the first step
that acts on everything is noted, and its answers are nobody's to look at: a plan that does look ends there. Nothing is
ever answered in a machine's stead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..model.exchange import AskOned, Exchange, Feed, Fetch, Here, On, Part, Relay, While
from ..model.steps import LOOKS, Step, look_instead
from .action import Action, Sessions, ask_oned, drive


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


class Script(NamedTuple):
    """A rehearsed plan: all its messages, or (`is_open`) those until it depends on the answer of a step that acts."""

    messages: list[Noted]
    is_open: bool
    answer: str = ""
    """What would go to stdout."""


class _Open(BaseException):
    """The plan has looked at an answer that nobody has given. No Exception: no undo is to begin for it."""


class _Unanswered:
    """What a machine would answer: whoever looks at it ends the plan."""

    def _look(self, *_: object) -> Any:
        raise _Open

    __getattribute__ = __getitem__ = __iter__ = __bool__ = __len__ = __contains__ = __eq__ = __str__ = _look


class _Rehearsal:
    """Stands where Sessions stand."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
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
            self._note(wanted.target, follows=f"{wanted.source.machine}'s {type(wanted.source.steps[0]).__name__}")
            return _Unanswered()
        if isinstance(wanted, Here):
            return self._here(wanted.step)
        return ask_oned(wanted) if isinstance(wanted, AskOned) else None

    def _here(self, step: Step) -> Any:
        from ..model.steps_front import LOOKS as OWN

        if self._acts or type(step).__name__ not in OWN:
            return self._note(On("this machine", (step,)))[0]
        found = self._sessions.action.here(step)
        self.noted.append(Noted("this machine", (step,), (found,)))
        return found

    def _on(self, on: On) -> list[object]:
        looks = 0
        while not self._acts and looks < len(on.steps) and is_look(on.steps[looks]):
            looks += 1
        found: list[object] = []
        if looks or not (self._acts or on.steps):
            sent = On(on.machine, tuple(map(look_instead, on.steps[:looks])))
            answers = self._sessions.run(sent)
            if looks:
                self.noted.append(Noted(on.machine, on.steps[:looks], tuple(answers)))
            found = [_Unanswered() if answer == {"unsettled": True} else answer for answer in answers]
        return found + (self._note(On(on.machine, on.steps[looks:])) if on.steps[looks:] else [])

    def _note(self, on: On, *, during: str = "", follows: str = "") -> list[object]:
        self._acts = True
        self.noted.append(Noted(on.machine, on.steps, during=during, follows=follows))
        return [_Unanswered() for _ in on.steps]


def is_look(step: Step) -> bool:
    """Tell whether a step changes nothing, or there is one that answers the same and changes nothing."""
    return type(look_instead(step)).__name__ in LOOKS


def rehearse(plan: Part[str | None], action: Action) -> Script:
    """Rehearse a plan; raise what would refuse the action."""
    with Sessions(action) as sessions:
        rehearsal = _Rehearsal(sessions)
        try:
            answer = drive(plan, rehearsal.do)
            return Script(rehearsal.noted, False, answer or "")
        except _Open:
            return Script(rehearsal.noted, True)
