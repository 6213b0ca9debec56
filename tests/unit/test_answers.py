# SPDX-License-Identifier: Apache-2.0
"""What a machine may answer to a step: each has a shape, what ours answer has it, and nothing else has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from semishared import store, table
from semishared.errors import FalseAnswer
from semishared.model import answers, job_steps, leftover_steps, shapes
from semishared.model import steps as s
from semishared.model.base import steps as base_steps
from semishared.model.device import steps as device_steps
from semishared.model.disk import commit_steps
from semishared.model.refs import Step
from semishared.model.share import steps as share_steps
from semishared.model.store import image_steps
from semishared.named import to_data
from semishared.wire.session import MOST_SAID, Hearing

CASES = sorted((Path(__file__).parent / "plan/cases").rglob("*.json"))


def vocabulary() -> Dict[str, Any]:
    """Return the steps that cross the wire, by name."""
    found = dict(s.STEPS)
    for module in (
        base_steps,
        device_steps,
        commit_steps,
        share_steps,
        image_steps,
        leftover_steps,
        job_steps,
    ):
        steps = (cls for cls in vars(module).values() if getattr(cls, "__base__", None) is Step)
        found.update({cls.__name__: cls for cls in steps})
    return found


SHAPES = {name: answers.shape(step) for name, step in vocabulary().items()}
ANSWERED = sorted(name for name, shape in SHAPES.items() if shape is not None)


def said() -> Iterator[Tuple[str, Any]]:
    """Yield each step in a plan's case with what it is answered there."""
    for path in CASES:
        for entry in json.loads(path.read_text()).get("exchange", []):
            asked, answered = entry.get("asked", {}), entry.get("answered")
            steps = [step["step"] for step in asked.get("steps", [])]
            if "to" in asked and isinstance(answered, dict):
                yield "SendVm", answered
            elif "then" in asked and answered:
                yield from zip(steps, answered[0])
                yield from zip([step["step"] for step in asked["then"]["steps"]], answered[1])
            elif steps and isinstance(answered, list):
                yield from zip(steps, answered)


def abridged(shape: Any) -> Any:
    """Return a shape of which anything may be left out, as cases of plans do."""
    if isinstance(shape, tuple):
        return tuple(map(abridged, shape))
    if isinstance(shape, list):
        return type(shape)(map(abridged, shape))
    if isinstance(shape, dict):
        return {
            name if name in "*#" else f"{name.rstrip('?_')}?": abridged(inner)
            for name, inner in shape.items()
        }
    return shape


def test_what_plans_are_told_in_their_cases_could_be_said() -> None:
    told = list(said())
    assert len({name for name, answer in told if answer is not None}) >= 40
    for name, answer in told:
        if answer is not None:
            assert SHAPES[name] is not None, f"{name} answers {answer}, and has no shape"
            assert shapes.wrong(answer, abridged(SHAPES[name])) is None, (name, answer)


NOTHING = {"SendManifest": "its data is the answer"}


def test_each_step_that_answers_has_a_shape() -> None:
    found = {name for name in vocabulary() if _answers(table.STEPS[name])}
    assert sorted(found - set(ANSWERED) - set(NOTHING)) == []


def _answers(row: str) -> bool:
    function = getattr(store.Bridged, row[1:]) if row.startswith(".") else table.loaded(row)
    return function.__annotations__.get("return") not in (None, "None")


# -- what nobody of ours says ---------------------------------------------------------------------------


def a(shape: Any) -> Any:
    """Return something of a shape."""
    if isinstance(shape, tuple):
        return a(shape[0])
    if isinstance(shape, list):
        return [a(inner) for inner in shape]
    if isinstance(shape, dict):
        there = {name: inner for name, inner in shape.items() if inner != "never"}
        return {name.rstrip("?_") if name not in "*#" else "0": a(inner) for name, inner in there.items()}
    if shape is None:
        return None
    words = [
        "x",
        "5",
        7,
        True,
        {},
        "0" * 32,
        "/a/b",
        "a/b",
        "1-2",
        f"1-2-{'0' * 32}",
        ".staged-x",
    ]
    return next(word for word in words if shapes.FORMS[shape](word))


LONG = "x" * (2 << 20)


def spoilt(value: Any, shape: Any) -> Iterator[Any]:
    """Yield what a value of a shape is when one place of it is false."""
    if isinstance(shape, tuple):
        yield from (
            one
            for one in spoilt(value, shape[0])
            if all(shapes.wrong(one, other) is not None for other in shape[1:])
        )
        return
    yield from (
        one for one in (object(), float("nan"), float("inf"), 1 << 70, LONG, "\ud800") if shape != "json"
    )
    if isinstance(shape, list):
        yield from ([one, *value[1:]] for one in spoilt(value[0], shape[0]))
        yield {}
        if isinstance(shape, shapes.Fixed):
            yield value[1:]
    if isinstance(shape, dict):
        yield from (None, [], "x", 5)
        for name, inner in shape.items():
            if inner == "never":
                continue
            key = name.rstrip("?_") if name not in "*#" else "0"
            yield from ({**value, key: one} for one in spoilt(value[key], inner))
            if key == name:
                yield {other: one for other, one in value.items() if other != key}


def within(part: Any, whole: Any) -> bool:
    """Tell whether `whole` is `part`, but for more keys of its objects."""
    if isinstance(part, dict):
        return all(key in whole and within(value, whole[key]) for key, value in part.items())
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(within, part, whole))
    return bool(part == whole)


@pytest.mark.fault(
    25,
    "no answer is looked at that has another kind, a size that is none, or a path or name that "
    "leads elsewhere",
)
@pytest.mark.parametrize("name", ANSWERED)
def test_an_answer_that_is_none_is_refused(name: str) -> None:
    step, right = vocabulary()[name], a(SHAPES[name])
    made = answers.one("h", step, right)
    assert answers.one("h", step, to_data(made)) == made
    assert within(to_data(made), right), "but for defaults"
    for false in spoilt(right, SHAPES[name]):
        with pytest.raises(FalseAnswer, match=f"h has answered .* to {name}"):
            answers.one("h", step, false)


FALSE: List[Tuple[str, Any]] = [
    ("StageImage", "../one-5"),
    ("StageImage", "one/one-5@x"),
    ("StageImage", "one/one-5:conf=/x"),
    ("LendContent", {"generation": "", "snapshot": "a@b"}),
    ("MakeShare", {"source": "/a/../etc"}),
    ("MakeShare", {"source": "/a\n/../etc"}),
    ("FindDirectory", {"source": "etc"}),
    ("WriteProbe", {"name": "../.staged-x"}),
    ("WriteProbe", {"name": ".semishared/.staged-x/../../y"}),
    ("MeasureStore", [1, 2]),
    ("MeasureStore", [1, -2, 3]),
    ("DigestImage", ["<x>", 5]),
    ("SeeImage", {"frozen": 1, "generation": ""}),
    (
        "ListBases",
        {**a(SHAPES["ListBases"]), "bases": [{**a(SHAPES["ListBases"]["bases"][0]), "name": "1-../x"}]},
    ),
]


@pytest.mark.parametrize(("name", "answer"), FALSE)
def test_what_leads_elsewhere_is_no_answer(name: str, answer: Any) -> None:
    with pytest.raises(FalseAnswer):
        answers.one("h", vocabulary()[name], answer)


def test_what_a_step_that_answers_nothing_says_is_not_looked_at() -> None:
    assert answers.checked("h", [s.PrepareVm], [{"on_store": 5}]) == [None]


def test_nothing_is_nested_without_end() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = [deep]
    with pytest.raises(FalseAnswer):
        answers.one("h", s.DescribeVm, {"records": [deep]})
    for message in (
        {"event": "progress", "have": deep},
        {"event": "error", "id": deep, "detail": ""},
        {"event": deep},
        {"x": deep},
    ):
        with pytest.raises(FalseAnswer):
            Hearing("h", [s.PrepareVm]).check(message, 0)


@pytest.mark.fault(
    29, "a host that talks without end, or sends what nobody has asked for, is listened to no longer"
)
def test_a_host_that_talks_without_end_is_heard_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    hearing = Hearing("h", [s.PrepareVm])
    with pytest.raises(FalseAnswer, match="data that nobody has asked for"):
        hearing.check(b"data", 0)
    Hearing("h", [s.SendVm]).check(b"data", 0)
    assert MOST_SAID < 1 << 22
    monkeypatch.setattr("semishared.wire.session.MOST_SAID", 10)
    with pytest.raises(FalseAnswer, match="without end"):
        for _ in range(11):
            hearing.check({"event": "alive"}, 0)
