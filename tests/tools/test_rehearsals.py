# SPDX-License-Identifier: Apache-2.0
"""`semishared plan ACTION`, over its whole command line: it says what the action would do, and nothing changes anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from semishared.front import transfer
from tools.oned_site import HERE, STORE, ActionSite
from tools.test_dry_run import things

Words = List[str]
Situation = Callable[[ActionSite], Words]
SITUATIONS: Dict[str, Tuple[Situation, List[str]]] = {}
"""By name (its first word is the action): what leads to it, and returns the arguments; the steps that are said to follow.

`...` at the end of these: what comes next depends on what the last of them answers.
"""


def situation(name: str, *steps: str) -> Callable[[Situation], Situation]:
    def add(made: Situation) -> Situation:
        SITUATIONS[name] = made, list(steps)
        return made

    return add


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path / "one") as up:
        yield up


def place(site: ActionSite, vm: int, number: int = 0) -> str:
    return f"{HERE}:{site.disk(vm, number)}"


def from_image(site: ActionSite, image: int) -> Words:
    vm = site.vm(image)
    return [f"fe:{site.source(image)}", place(site, vm), str(vm), str(STORE)]


@situation("clone", "StageBase", "PrepareVm", "CreateOverlay")
def overlay(site: ActionSite) -> Words:
    return from_image(site, site.image())


@situation("clone as a copy", "PrepareVm", "CopyImage")
def copy(site: ActionSite) -> Words:
    return from_image(site, site.image(SEMISHARED_LOCAL="copy"))


@situation("clone on the store", "PrepareVm", "CloneOnStore")
def shared(site: ActionSite) -> Words:
    return from_image(site, site.image(SEMISHARED_PLACE="shared"))


@situation("ln", "PrepareVm", "LinkInPlace")
def in_place(site: ActionSite) -> Words:
    return from_image(site, site.image(persistent=True))


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.fault(21, "`semishared plan` changes nothing on any machine: no name, byte, time or attribute")
def test_a_rehearsal_says_the_steps_and_changes_nothing(site: ActionSite, name: str) -> None:
    made, steps = SITUATIONS[name]
    words = made(site)
    before = things(site.location)
    said: Dict[str, Any] = json.loads(site.cli("plan", "--json", name.split()[0], *words).stdout)
    assert things(site.location) == before
    found = [step["step"] for part in said["plan"] if "answers" not in part for step in part["steps"]]
    assert found + ["..."] * said["open"] == steps
    site.tm(name.split()[0].upper(), *words)
    assert things(site.location) != before


def test_every_action_is_rehearsed_here() -> None:
    assert {name.split()[0] for name in SITUATIONS} == set(transfer.PLANNED)
