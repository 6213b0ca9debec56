# SPDX-License-Identifier: Apache-2.0
"""A plan played against the exchange of a case: what it yields is compared, what the case has in answer is
given to it.

{"asked": {"machine": "h1", "steps": [...]}, "answered": [...]}                 On; one answer per step
{"asked": {..., "feeds": "/path"}, "answered": [...]}                           Feed; or an URL
{"asked": {..., "fetched": true}, "answered": [[...], ["/path", "sha256"]]}      Fetch
{"asked": {..., "to": {"machine": ..., "steps": [...]}}, "answered": {...}}      Relay
{"asked": {"machine": "h2", "end": "sha256"}, "answered": [...]}                 End
{"asked": {..., "then": {"machine": ..., "steps": [...]}}, "answered": [[...], [...]]}     While
{"asked": {"here": {"step": ...}}, "answered": ...}                             Here
{"asked": {"oned": "datastore", "id": 105}, "answered": {...}}                  AskOned; changes to the
recorded object; [] or addresses for front_ends
{"asked": ..., "failed": {"id": "SS010", "detail": "..."}}                      in place of an answer
{"said": [["warn", "..."]]}                                                     Say
"""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Optional

from semishared.errors import from_id
from semishared.model import answers, shapes
from semishared.model.exchange import (
    AskOned,
    End,
    Exchange,
    Feed,
    Fetch,
    File,
    Here,
    On,
    Plan,
    Relay,
    Say,
    While,
)
from semishared.model.rehearsal import _Unanswered
from semishared.model.steps import Step, to_data

Entry = Dict[str, Any]


def message(on: On) -> Entry:
    return {"machine": on.machine, "steps": [to_data(step) for step in on.steps]}


def as_data(wanted: Exchange) -> Entry:
    """Return what a plan has yielded as JSON data: {"asked": ...} or {"said": ...}."""
    if isinstance(wanted, Say):
        return {"said": [list(line) for line in wanted.lines(*wanted.about)]}
    if isinstance(wanted, Here):
        return {"asked": {"here": to_data(wanted.step)}}
    if isinstance(wanted, AskOned):
        return {"asked": {"oned": wanted.what, "id": wanted.id}}
    if isinstance(wanted, While):
        return {"asked": {**message(wanted.first), "then": message(wanted.then)}}
    if isinstance(wanted, Feed):
        return {"asked": {**message(wanted.target), "feeds": wanted.source[0]}}
    if isinstance(wanted, Fetch):
        return {"asked": {**message(wanted.source), "fetched": True}}
    if isinstance(wanted, Relay):
        return {"asked": {**message(wanted.source), "to": message(wanted.target)}}
    if isinstance(wanted, End):
        return {"asked": {"machine": wanted.machine, "end": wanted.sha256}}
    return {"asked": message(wanted)}


def silence(wanted: Exchange) -> Any:
    """Return what machines answer that have nothing to say."""
    if isinstance(wanted, While):
        return [silence(wanted.first), silence(wanted.then)]
    if isinstance(wanted, (On, Feed)):
        return [None] * len((wanted if isinstance(wanted, On) else wanted.target).steps)
    return [] if isinstance(wanted, End) else None if isinstance(wanted, Here) else {}


def typed(wanted: Exchange, given: Any) -> Any:
    """Return what machines answer, in JSON data, as the types that their steps declare."""
    if isinstance(wanted, On):
        return [told(step, answer) for step, answer in zip(wanted.steps, given)]
    if isinstance(wanted, Feed):
        return typed(wanted.target, given)
    if isinstance(wanted, Fetch):
        return typed(wanted.source, given[0]), File(*given[1])
    if isinstance(wanted, While):
        return typed(wanted.first, given[0]), typed(wanted.then, given[1])
    if isinstance(wanted, (Here, Relay)):
        return told(wanted.step if isinstance(wanted, Here) else wanted.source.steps[0], given)
    return given


def told(step: Step, answer: Any) -> Any:
    """Return an answer, of which anything may be left out that the plan does not read."""
    shape = answers.shape(type(step))
    return _nothing(shape) if answer is None else _filled(answer, shape)


def _nothing(shape: Any) -> Any:
    """Return the answer of a machine that has nothing to say."""
    if isinstance(shape, tuple):
        return _nothing(shape[-1])
    if isinstance(shape, shapes.Object):
        said = {name: _nothing(inner) for name, inner in shape.items() if name[-1] != "?"}
        return shape.kind(**said)
    if isinstance(shape, (list, dict)):
        return type(shape)()
    return {"text": "", "flag": False, "count": 0, "number": 0}.get(shape) if isinstance(shape, str) else None


def _filled(value: Any, shape: Any) -> Any:
    if isinstance(shape, tuple):
        return None if value is None else _filled(value, max(shape, key=lambda one: _fit(value, one)))
    if isinstance(shape, list):
        return type(value)(_filled(item, shape[0]) for item in value)
    if not isinstance(shape, dict):
        return value
    if "*" in shape or "#" in shape:
        return {key: _filled(item, next(iter(shape.values()))) for key, item in value.items()}
    of = {name.rstrip("?"): inner for name, inner in shape.items()}
    said = {name: _filled(value[name.rstrip("_")], of[name]) for name in of if name.rstrip("_") in value}
    if not isinstance(shape, shapes.Object):
        return said
    given = {**dict.fromkeys(of, _Unanswered()), **shape.kind._field_defaults, **said}
    return shape.kind(**given)


def _fit(value: Any, shape: Any) -> int:
    """Return how many fields of a value a shape has, less those that the value lacks."""
    if not isinstance(shape, dict) or not isinstance(value, dict):
        return -99 if shape is None else 0
    return sum(2 * (name.rstrip("?_") in value) - (name[-1] != "?") for name in shape)


def played(
    plan: Plan, exchange: List[Entry], recorded: Callable[[str, Entry], Any], found: List[Entry]
) -> Any:
    """Run a plan with the answers of `exchange` and append what it yields, and was given, to `found`; raise
    what it raises.

    Return what it returns. `recorded` returns the recorded object of oned that is called so, with changes.
    """
    given: Any = None
    error: Optional[Exception] = None
    while True:
        try:
            wanted = plan.throw(error) if error else plan.send(given)
        except StopIteration as e:
            return e.value
        # Through JSON, as it travels.
        entry = json.loads(json.dumps(as_data(wanted)))
        at = exchange[len(found)] if len(found) < len(exchange) else {}
        given, error = None, None
        if "failed" in at:
            entry["failed"] = at["failed"]
            error = from_id(at["failed"]["id"], at["failed"]["detail"])
        elif "asked" in entry:
            entry["answered"] = given = at.get("answered", silence(wanted))
            if not isinstance(wanted, AskOned):
                given = typed(wanted, given)
            elif wanted.what != "front_ends":
                given = recorded(wanted.what, given)
        found.append(entry)
