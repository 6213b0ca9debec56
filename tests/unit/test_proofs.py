# SPDX-License-Identifier: Apache-2.0
"""What is left to `make test-full` is proved by a test that is there, and is not left out itself."""

from __future__ import annotations

import ast

import pytest

import proofs
from suites import ROOT, SUITES
from unit.sources import nodes

pytestmark = pytest.mark.reads_checkout


def function(test: str) -> ast.FunctionDef:
    file, _, name = test.partition("[")[0].partition("::")
    *_, last = name.split("::")
    found = [
        node
        for node in nodes((ROOT / file).read_text())
        if isinstance(node, ast.FunctionDef) and node.name == last
    ]
    assert found, f"{test} is not there"
    return found[0]


@pytest.mark.parametrize("row", proofs.rows(), ids=lambda row: row.left.rpartition("::")[2])
def test_what_is_left_out_is_proved_by_another(row: proofs.Row) -> None:
    function(row.left)
    marks = [ast.unparse(mark) for mark in function(row.stays).decorator_list]
    assert "pytest.mark.long" not in marks
    left = {other.left for other in proofs.rows()}
    assert not {row.stays, row.stays.partition("[")[0]} & left, "the one that is to prove it is left out too"
    file = row.stays.partition("::")[0]
    assert any(
        file.startswith(path)
        for suite in SUITES.values()
        if not suite.get("full")
        for path in suite.get("paths", ())
    )


def test_no_test_is_left_out_twice() -> None:
    left = [row.left for row in proofs.rows()]
    assert len(left) == len(set(left))
    assert proofs.TABLE.read_text().count("\n| `") == len(left), "a row that is not read as one"
