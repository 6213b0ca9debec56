# SPDX-License-Identifier: Apache-2.0
"""What pages name is there: tests by file and function; of ids of errors and states of failure each one."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from semishared import errors
from semishared.opennebula.states import LcmState, name_of

pytestmark = pytest.mark.reads_checkout

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
PAGES = sorted((ROOT / "docs").glob("*/*.md"))
FAILED = (ROOT / "docs/how-to/failed-vms.md").read_text()


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    for file, name in NAMED.findall(page.read_text()):
        assert re.search(rf"^def {name}\(", text(file), re.MULTILINE), (file, name)


def test_each_id_of_an_error_has_one_way_out_of_a_failure() -> None:
    said = re.findall(r"SS\d{3}", FAILED.partition("## By id")[2])
    known = {
        kind.id
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.SemisharedError)
    }
    assert sorted(said) == sorted(known)


def test_each_state_of_failure_has_its_row() -> None:
    rows = [line for line in FAILED.splitlines() if line.startswith("| ")]
    for state in LcmState.FAILURES:
        name = name_of(state, LcmState)
        assert sum(name in line.split("|")[1].replace(",", " ").split() for line in rows) == 1, name
