# SPDX-License-Identifier: Apache-2.0
"""A host that answers what it likes: nothing that another machine is then asked to do names an image but as
oned has it.

Every case of a plan (plan/cases) is played again with each image in each answer changed, one field at a time;
then no message to any machine may hold what was made up. What the plan's own host is told of its own files is
its own affair.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest

sys.path.insert(0, str(Path(__file__).parent / "plan"))

from exchanges import played  # noqa: E402
from test_cases import CASES, PLANNERS, changed_record, name_of  # noqa: E402

from semishared.errors import SemisharedError  # noqa: E402

LIES = {
    "store": 666,
    "id": 666,
    "source": "one/one-666",
    "user": "evil",
    "reader": "evil",
    "bridge_user": "evil",
    "remote": "evil",
    "conf": "/var/lib/one/datastores/100/5/evil.conf",
    "hosts": ["evil"],
    "secret": "66666666-6666-4666-8666-666666666666",
    "data_pool": "evil",
    "cloud": "6" * 32,
}
MADE_UP = ("666", "evil", "6" * 32)
Place = Tuple[Any, ...]


def _images(node: Any, place: Place = ()) -> Iterator[Place]:
    """Yield where there are images with an access in what was answered."""
    if isinstance(node, dict):
        if "source" in node and "access" in node and node["access"].get("kind") == "rbd":
            yield place
        for key, value in node.items():
            yield from _images(value, (*place, key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _images(value, (*place, number))


def _changed(exchange: List[Dict[str, Any]], place: Place, field: str) -> List[Dict[str, Any]]:
    lied = copy.deepcopy(exchange)
    image: Any = lied
    for key in place:
        image = image[key]
    (image if field in image else image["access"])[field] = LIES[field]
    return lied


def _answers(case: Dict[str, Any]) -> Iterator[Place]:
    for number, entry in enumerate(case.get("exchange", [])):
        if "answered" in entry and "oned" not in entry["asked"]:
            for place in _images(entry["answered"]):
                yield (number, "answered", *place)


# Their one host is the hypervisor's own, whose records they read: what it opens it could open without us.
OF_OTHERS = [path for path in CASES if not path.parent.name.startswith(("vmm_", "cli_detach"))]
WITH_IMAGES = [path for path in OF_OTHERS if any(True for _ in _answers(json.loads(path.read_text())))]


@pytest.mark.fault(
    25,
    "no machine is asked to work on an image, as a user or by a configuration that a host's "
    "answer has made up",
)
@pytest.mark.parametrize("path", WITH_IMAGES, ids=name_of)
def test_no_step_names_what_a_host_has_made_up(path: Path) -> None:
    case = json.loads(path.read_text())
    for place in _answers(case):
        for field in LIES:
            found: List[Any] = []
            exchange = _changed(case["exchange"], place, field)
            try:
                played(
                    PLANNERS[path.parent.name](case),
                    exchange,
                    lambda what, given: changed_record(case, what, given),
                    found,
                )
            except (SemisharedError, IndexError, KeyError, TypeError):
                pass  # refused; or not what the case has answers for
            asked = [
                json.dumps(entry.get("asked", "")) for entry in found if "oned" not in entry.get("asked", {})
            ]
            assert not [text for text in asked if any(word in text for word in MADE_UP)], (place, field)


def test_there_are_cases_of_answers_with_images() -> None:
    assert len(WITH_IMAGES) > 12
