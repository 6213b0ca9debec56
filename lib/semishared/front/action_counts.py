# SPDX-License-Identifier: Apache-2.0
"""Counts of ended actions, which outlive every process: the lines of front/action_lines.py, each counted
once.

    semishared_metrics/lock
    semishared_metrics/actions      lines to which actions append
    semishared_metrics/taken.<n>    lines that a run has taken aside
    semishared_metrics/counts       {"version": 1, "folded": N, "actions": {...}, ...}: all of `taken.1` to
                                    `taken.<N>` is in it

A run renames `actions` to the next number, adds what all numbers beyond N hold, publishes the counts with
their new N, and removes what is in them. It may be killed anywhere: before the counts are published the next
run finds the same lines again, after that it removes them. So no line is counted twice, and no counter goes
down.

What may be lost: the line of an action that was stopped between open(2) and write(2) for longer than
SETTLE_S; lines that a power failure keeps from the disk; those beyond action_lines.MOST. If the counts are
lost or damaged, counting begins at 0, which Prometheus takes for a restart.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, List, Optional

from .. import table
from ..errors import BadRecord, catalogue
from ..model.disk import names as disk_names
from ..model.disk.place import PLACES
from ..named import NamedTuple
from ..plan.care.metrics import BYTES, MOST, NONE, OK, SECONDS, SOURCES, Counted, Key
from ..plan.store import datastore
from ..tools import files
from ..tools.effects import point
from . import action_lines

VERSION = 1
SETTLE_S = 0.1
"""What an action needs at most from the open(2) of its file to the write(2)."""
TAKEN = "taken."
LARGEST_COUNTS = 4 << 20
"""Bytes of the counts, of MOST combinations."""
ACTIONS = {
    *(f"tm/{name}" for name in (*table.ACTIONS, "monitor")),
    *(f"datastore/{name}" for name in datastore.ACTIONS),
}
WORDS = (ACTIONS, {*PLACES, NONE}, {*SOURCES}, {OK, *(error.id for error in catalogue())})
"""What the first words of a line may be."""


class Counts(NamedTuple):
    """All that was counted."""

    folded: int = 0
    """The number of the last lines that are in it."""
    actions: Dict[Key, Counted] = {}
    uncounted: int = 0
    """Lines that are none, and those of combinations beyond MOST."""


def lock() -> str:
    """Return the lock of runs, in its directory, which is there then; raise OSError."""
    os.makedirs(action_lines.directory(), 0o750, exist_ok=True)
    return f"{action_lines.directory()}/lock"


def _counts() -> str:
    return f"{action_lines.directory()}/counts"


def _taken(number: int) -> str:
    return f"{action_lines.directory()}/{TAKEN}{number}"


def fold(warn: Callable[[str], None]) -> Counts:
    """Count all lines that are not counted yet; return all counts. The caller has the lock.

    `warn` says that counting begins at 0. Raise OSError, SemisharedError.
    """
    files.remove_stale(action_lines.directory())
    known = _known(warn)
    left = _numbers()
    newest = max([known.folded, *left]) + 1
    try:
        os.rename(action_lines.path(), _taken(newest))
    except FileNotFoundError:
        pass
    else:
        point("took lines of actions")
        left.append(newest)
        time.sleep(SETTLE_S)
    new = [number for number in left if number > known.folded]
    if new:
        known = _with_lines(known, new)._replace(folded=max(new))
        _write(known)
    for number in left:
        files.unlink(_taken(number))
        point("removed lines that are counted")
    return known


def _numbers() -> List[int]:
    """Return the numbers of lines that were taken aside."""
    names = (name.partition(TAKEN) for name in os.listdir(action_lines.directory()))
    return sorted(int(number) for before, _, number in names if not before and disk_names.is_number(number))


def _with_lines(counts: Counts, numbers: List[int]) -> Counts:
    actions, uncounted = dict(counts.actions), counts.uncounted
    for number in numbers:
        # An action that found less than MOST has appended its line.
        text = files.read(_taken(number), 2 * action_lines.MOST)
        for line in text.decode("ascii", "replace").splitlines():
            words = line.split(" ")
            key = _key(words[:4])
            if key and _are_amounts(words[4:]) and (key in actions or len(actions) < MOST):
                actions[key] = actions.get(key, Counted()).and_one(int(words[4]), int(words[5]))
            else:
                uncounted += 1
    return counts._replace(actions=actions, uncounted=uncounted)


def _key(words: List[str]) -> Optional[Key]:
    """Return the combination that words name, None if one of them is not known."""
    if len(words) != len(WORDS) or not all(word in known for word, known in zip(words, WORDS)):
        return None
    action, place, source, outcome = words
    return action, place, source, outcome


def _are_amounts(words: List[str]) -> bool:
    """Tell whether words are milliseconds and bytes, as action_lines has them."""
    longest = len(str(action_lines.LARGEST))
    return len(words) == 2 and all(disk_names.is_number(word) and len(word) <= longest for word in words)


# -- the file of counts -----------------------------------------------------------------------------


def _write(counts: Counts) -> None:
    data = {
        "version": VERSION,
        "seconds": list(SECONDS),
        "bytes": list(BYTES),
        "folded": counts.folded,
        "uncounted": counts.uncounted,
        "actions": {" ".join(key): list(counted) for key, counted in counts.actions.items()},
    }
    files.write_json(_counts(), data, LARGEST_COUNTS)


def _known(warn: Callable[[str], None]) -> Counts:
    """Return what is counted by now; without a file that can be read nothing is."""
    try:
        data = files.read_json(_counts(), LARGEST_COUNTS)
        return Counts() if data is None else _from_data(data)
    except BadRecord as e:
        warn(f"actions are counted from 0 again: {e.detail}")
        return Counts()


def _from_data(data: Dict[str, Any]) -> Counts:
    """Return the counts in a file; raise BadRecord for other bounds than today's, or what is no count."""
    if (data.get("version"), data.get("seconds"), data.get("bytes")) != (VERSION, [*SECONDS], [*BYTES]):
        raise BadRecord(f"{_counts()} is of another version")
    said = data.get("actions")
    numbers = [data.get("folded"), data.get("uncounted")]
    if not isinstance(said, dict) or not all(map(_is_count, numbers)):
        raise BadRecord(f"{_counts()} is damaged")
    actions = {}
    for words, values in said.items():
        key = _key(words.split(" "))
        if key is not None:  # else of a version that had another action, or error
            actions[key] = _counted(values)
    return Counts(data["folded"], actions, data["uncounted"])


def _counted(values: object) -> Counted:
    like = Counted()
    if isinstance(values, list) and len(values) == len(like):
        fields: Any = [tuple(value) if isinstance(value, list) else value for value in values]
        if all(map(_is_like, fields, like)):
            return Counted(*fields)
    raise BadRecord(f"{_counts()} is damaged")


def _is_like(value: object, like: object) -> bool:
    """Tell whether a value is a count, or as many counts as another has."""
    if isinstance(like, tuple):
        return isinstance(value, tuple) and len(value) == len(like) and all(map(_is_count, value))
    return _is_count(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
