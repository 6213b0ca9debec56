# SPDX-License-Identifier: Apache-2.0
"""Faults that `make mutants` puts into the package."""

from __future__ import annotations

import ast

import pytest

from mutants.mutate import Mutant, apply, mutants

SOURCE = '''\
"""What is outside of functions is left alone: 1 == 2."""
LIMIT = 3


def judge(size: int = 7, name: "str | None" = None) -> bool:
    """Tell whether."""
    if size == 1 and not name:
        raise ValueError(f"no {size + 1}")
    for part in range(2):
        if part in (
            size,
            LIMIT,
        ):
            continue
        print(part)
    return size - 1 < LIMIT
'''


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_each_is_one_fault_in_one_place() -> None:
    found = list(mutants("file.py", SOURCE))
    assert {(mutant.line, mutant.what) for mutant in found} == {
        (7, "the condition is its opposite"),
        (7, "And is Or"),
        (7, "Eq is NotEq"),
        (7, "1 is 2"),
        (7, "without not"),
        (8, "raises nothing"),
        (9, "2 is 3"),
        (10, "the condition is its opposite"),
        (10, "In is NotIn"),
        (14, "continue is break"),
        (15, "the call is left out"),
        (16, "returns None"),
        (16, "Lt is LtE"),
        (16, "Lt is GtE"),
        (16, "Sub is Add"),
        (16, "1 is 2"),
    }
    for mutant in found:
        changed = apply(mutant, SOURCE)
        ast.parse(changed)
        assert changed != SOURCE and len(lines(changed)) == len(lines(SOURCE)), mutant
        others = [
            number for number, pair in enumerate(zip(lines(SOURCE), lines(changed)), 1) if pair[0] != pair[1]
        ]
        assert mutant.statement <= others[0] <= mutant.line, mutant


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("Eq is NotEq", "    if (size != 1) and not name:"),
        ("without not", "    if size == 1 and (name):"),
        ("raises nothing", "        pass"),
    ],
)
def test_it_stands_where_the_right_words_stood(what: str, line: str) -> None:
    (mutant,) = [mutant for mutant in mutants("file.py", SOURCE) if mutant.what == what]
    assert line in lines(apply(mutant, SOURCE))


def test_a_place_is_of_bytes() -> None:
    source = 'def f(x):\n    y = "ä"; return x == 1\n'
    (mutant,) = [mutant for mutant in mutants("file.py", source) if mutant.what == "Eq is NotEq"]
    assert isinstance(mutant, Mutant) and apply(mutant, source) == 'def f(x):\n    y = "ä"; return (x != 1)\n'
