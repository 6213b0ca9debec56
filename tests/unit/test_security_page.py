# SPDX-License-Identifier: Apache-2.0
"""The page of who is trusted with what: each line names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/security.md"
LINES = [
    line
    for line in PAGE.read_text().splitlines()
    if line.startswith("|") and not re.match(r"\|( cannot|-)", line)
]


@pytest.mark.parametrize("line", LINES)
def test_each_line_is_held_by_tests_that_there_are(line: str) -> None:
    found = re.findall(r"`(tests/[a-z_/]+\.py)(?:::(test_[a-z0-9_]+))?`", line)
    assert found, "no test is named"
    for file, name in found:
        assert not name or f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
        assert (ROOT / file).exists()


def test_there_are_lines_for_everybody() -> None:
    heads = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert heads == [
        "A tenant",
        "A guest, root in it included",
        "One host that says what it likes",
        "A writer of a store",
        "Another user of a machine",
        "oneadmin of one machine",
        "The operator",
        "Not promised",
    ]
