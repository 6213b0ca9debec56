# SPDX-License-Identifier: Apache-2.0
"""The lint of words, and the counts of tests/house.py, on texts that were made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import house
import words


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The host waits for whoever has it.\n", [(1, "whoever")]),
        ("One line.\nNobody\nreads `who` here.\n", [(2, "Nobody")]),
        ("It is had by none, and the host is\ntold of it.\n", [(1, "is had")]),
        ('The line says "somebody writes" and `nobody`.\n', []),
        ("Run this:\n\n    who am i\n\n    whoami who\n\nThen see who.\n", [(7, "who")]),
        ("```console\nwho\n```\nwhole, whose\n", []),
        ("<!-- bench: a -->\n| who |\n<!-- end -->\n\nwhom\n", [(5, "whom")]),
    ],
)
def test_words_of_a_page_are_found_but_for_what_is_quoted(text: str, found: list[tuple[int, str]]) -> None:
    assert list(words.in_text(text)) == found


def test_words_of_a_module_are_those_of_docstrings_and_comments() -> None:
    source = '"""Of whom."""\nX = "nobody"  # who\nY = 1\n"""Whoever."""\n'
    said = [word for _, text in words.prose(source) for _, word in words.in_text(text)]
    assert sorted(said) == ["Whoever", "who", "whom"]


def test_house_counts_modules_steps_sites_and_questions(tmp_path: Path) -> None:
    for name, text in {
        "model/steps.py": "class A(T): ...\nclass B(T): ...\nclass C(T): ...\nclass _D(T): ...\n",
        "host/execute.py": "class On:\n    def A(self): ...\n    def B(self): ...\n    def C(self): ...\n",
        "store/verbs.py": 'VERBS = {"A": 1, "B": 2, "C": 3, "X": 4}\nFEW = {"A": 1}\n',
        "model/answers.py": 'SHAPES = {"A": 1, "B": 2, "C": 3}\n',
        "disk/create.py": "a = devices.device_of(1) or offline.where(2)\nb = c.has_bridge\n",
        "device/devices.py": "x = devices.device_of(1)\n",
        "device/folders.py": "x = devices.link_of(1)\ny = isinstance(x, str)\nz = x.uuid\n",
        "stage/fetch.py": "x = folders.at(1).uuid\ny = folders.at(1).fails()\n",
    }.items():
        path = tmp_path / "lib/semishared" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = house.House(tmp_path)
    assert (len(found.texts), found.lines(), found.slivers()) == (8, 19, 8)
    assert found.steps() == {"A", "B", "C"}
    assert sorted(found.sites()) == [("host/execute.py", 3), ("store/verbs.py", 3)]
    assert (found.pool_questions(), found.bridge_questions()) == ((3, 2, 2), (1, 1))
