# SPDX-License-Identifier: Apache-2.0
"""Images and datastores that oned no longer has, while a host says that a disk is of one: it is kept, and one
line says so.

Each case of a plan (plan/cases) in which a host's image is compared with oned's is played again, with oned
having lost it by then.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List

import pytest

sys.path.insert(0, str(Path(__file__).parent / "plan"))

from exchanges import played  # noqa: E402
from test_cases import CASES, PLANNERS, changed_record, name_of  # noqa: E402

from semishared.errors import GoneFromOned, SemisharedError  # noqa: E402

POOL = ("image", "datastore")


def sources(node: Any) -> Iterator[str]:
    """Yield the images on Ceph in what a host has answered."""
    if isinstance(node, dict):
        if "source" in node and "access" in node and node["access"].get("kind") == "rbd":
            yield node["source"]
        for value in node.values():
            yield from sources(value)
    elif isinstance(node, list):
        for value in node:
            yield from sources(value)


def first_said(exchange: List[Dict[str, Any]]) -> int:
    """Return the number of the first answer of a host that names an image, -1 if there is none."""
    answers = (
        (number, entry.get("answered"))
        for number, entry in enumerate(exchange)
        if "oned" not in entry.get("asked", {})
    )
    return next((number for number, answer in answers if any(sources(answer))), -1)


def compared(path: Path) -> bool:
    """Tell whether a case has a host's image compared with what oned says: then oned is asked for it."""
    exchange = json.loads(path.read_text()).get("exchange", [])
    asked = [
        number
        for number, entry in enumerate(exchange)
        if entry.get("asked", {}).get("oned") in POOL and "answered" in entry
    ]
    return bool(asked) and -1 < first_said(exchange) < asked[-1]


COMPARED = [path for path in CASES if compared(path)]


@pytest.mark.fault(
    25,
    "nothing is done by a host's word to an image that oned no longer has: what the host has is "
    "kept, and a line says so",
)
@pytest.mark.parametrize("path", COMPARED, ids=name_of)
def test_what_oned_has_no_more_is_kept(path: Path) -> None:
    case = json.loads(path.read_text())
    exchange = copy.deepcopy(case["exchange"])
    said = first_said(exchange)
    for entry in exchange[said:]:
        what = entry.get("asked", {}).get("oned")
        if what in POOL:
            entry.pop("answered", None)
            entry["failed"] = {"id": "SS183", "detail": f"Error getting {what} [{entry['asked']['id']}]."}
    gone = next(number for number, entry in enumerate(exchange) if "failed" in entry and number > said)
    found: List[Dict[str, Any]] = []
    with pytest.raises(SemisharedError) as caught:
        played(
            PLANNERS[path.parent.name](case),
            exchange,
            lambda what, given: changed_record(case, what, given),
            found,
        )
    assert (
        isinstance(caught.value, GoneFromOned)
        and "is kept: OpenNebula has no more image" in caught.value.detail
    ), caught.value.line()
    after = {step["step"] for entry in found[gone:] for step in entry.get("asked", {}).get("steps", [])}
    assert after <= {"UnmarkVm"}, "but for the mark of a move that is off"


def test_there_are_cases_of_removals_and_of_commits() -> None:
    assert {"delete", "mvds"} <= {path.parent.name for path in COMPARED}
