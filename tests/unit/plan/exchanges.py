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
recorded object
{"asked": ..., "failed": {"id": "SS010", "detail": "..."}}                      in place of an answer
{"said": [["warn", "..."]]}                                                     Say
"""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Optional

from semishared.errors import from_id
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
from semishared.model.steps import to_data

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
            if isinstance(wanted, AskOned):
                given = recorded(wanted.what, given)
            if isinstance(wanted, Fetch):
                given = given[0], File(*given[1])
        found.append(entry)
