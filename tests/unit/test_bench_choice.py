# SPDX-License-Identifier: Apache-2.0
"""What a run of `bench/run.py choice` says of options for overlays: the way whose worst is best, unless what
is in force is as good.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/overlay-options.md"


@pytest.fixture()
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import modules of bench/ by name, and forget them: `page` and `tables` are names that others may
    have.
    """
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)
    yield __import__
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "bench")):
            del sys.modules[name]


def measured(choice: Any, rates: Callable[[str, str, str, str], float]) -> dict[str, Any]:
    """Return a report in which each way of each kind has the ratios to raw that `rates` says, in eight
    rounds.
    """
    figures = []
    for what, kind in choice.KINDS.items():
        for system in choice.MAKE:
            samples = {("raw", workload): [1000.0] * 8 for workload in choice.WANTED}
            samples.update(
                {
                    (way, workload): [1000 * rates(what, system, way, workload)] * 8
                    for way in kind.ways
                    for workload in choice.WANTED
                }
            )
            figures += [figure.data() for figure in choice._figures(what, system, kind, samples)]
    run = {"seconds": 1.0, "load_before": [0.5], "load_after": [1.5], "quick": False}
    return {"runs": {"choice": run}, "figures": figures}


def marked(text: str) -> list[list[str]]:
    """Return (way, mark) of each row that has a mark, kind by kind."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return [[row[0], row[-2]] for row in rows if row[-2] not in ("", "---")]


def test_what_is_in_force_stays_unless_another_is_better_by_more_than_a_little(
    bench: Callable[[str], Any],
) -> None:
    choice, page = bench("choice"), bench("page_choice")
    now = [choice.in_force(kind.size) for kind in choice.KINDS.values()]
    assert now == ["128k", "256k", "256k", "256k"]
    alike = measured(choice, lambda *_: 0.97)
    assert marked(page.choice(alike)) == [[way, "in force, **chosen**"] for way in now]
    a_little = measured(choice, lambda _, __, way, ___: 0.98 if way == "64k" else 0.97)
    assert marked(page.choice(a_little))[0] == ["128k", "in force, **chosen**"]


def test_one_bad_ratio_costs_a_way_the_choice(bench: Callable[[str], Any]) -> None:
    choice, page = bench("choice"), bench("page_choice")

    def rates(kind: str, system: str, way: str, workload: str) -> float:
        if way == "128k, metadata":
            return 0.54 if (system, workload) == ("XFS", "64k first write") else 1.04
        return 1.0 if way == "128k, ahead" else 0.9

    assert marked(page.choice(measured(choice, rates)))[:2] == [
        ["128k", "in force"],
        ["128k, ahead", "**chosen**"],
    ]


def test_each_way_in_force_is_held_to_what_is_wanted(bench: Callable[[str], Any]) -> None:
    choice = bench("choice")
    held = [figure for figure in measured(choice, lambda *_: 0.96)["figures"] if figure["budget"]]
    assert {figure["name"].split("/")[3] for figure in held} == {"128k", "256k"}
    # First writes of 0.96 are enough, rewrites and reads are not; two kinds of disks, on two file systems.
    assert sorted(figure["met"] for figure in held) == [False] * 8 + [True] * 8
    assert all(
        (figure["if_missed"] == choice.LOST) == ("first write" in figure["name"]) and figure["if_missed"]
        for figure in held
    )


def test_table_has_its_place(bench: Callable[[str], Any]) -> None:
    assert "choice" in bench("page").BLOCKS and re.search(
        r"<!-- bench: choice -->\n.+\n<!-- end -->", PAGE.read_text(), re.DOTALL
    )
