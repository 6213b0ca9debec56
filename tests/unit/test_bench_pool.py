# SPDX-License-Identifier: Apache-2.0
"""The tables of pools in docs/reference/benchmarks.md are those that bench/ makes: same columns, every budget judged."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/benchmarks.md"


@pytest.fixture()
def bench(monkeypatch: pytest.MonkeyPatch) -> "Any":
    """Import modules of bench/ by name, and forget them: `page` and `tables` are names that others may have."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return __import__(name)

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "bench")):
            del sys.modules[name]


def block(name: str) -> "list[list[str]]":
    """Return the cells of a table of the page, row by row."""
    found = re.search(rf"<!-- bench: {name} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found, f"no table {name} on {PAGE.name}"
    return cells(found.group(1))


def cells(text: str) -> "list[list[str]]":
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in text.splitlines() if line.startswith("| ")]


def reported(names: "dict[str, list[Any]]", quick: bool = False) -> "dict[str, Any]":
    run = {"seconds": 1.0, "load_before": [0.5], "load_after": [1.5], "quick": quick}
    figures = [figure.data() for found in names.values() for figure in found]
    return {"runs": {name: run for name in names}, "figures": figures}


def test_each_table_of_pools_stands_on_the_page_and_nothing_else_does(bench: Any) -> None:
    named = set(re.findall(r"<!-- bench: ([a-z]+) -->", PAGE.read_text()))
    assert set(bench("page_pool").BLOCKS) <= named <= set(bench("page").BLOCKS)


def test_orders_stand_side_by_side_and_the_default_is_held_to_the_least(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = bench("orders")
    monkeypatch.setattr(orders, "POOLS", {"1, 2": (1, 2)})
    made = cells(bench("page_pool").orders(reported({"orders": orders.orders(quick=True)})))
    (head, _, *rows), page = made, block("orders")
    assert page[0] == head and [row[1] for row in rows] == ["hash", "share", "share-scaled", "rendezvous"]
    assert [row[:2] for row in page[2:]] == [[pool, row[1]] for pool in ("1, 2, 4", "4 of 17 and 4 of 35", "16, of 1 to 4") for row in rows]
    for row in (*rows, *page[2:]):
        assert len(row) == len(head) and ("≤ 1.05" in row[head.index("budget, both")]) == (row[1] == "rendezvous")
        assert row[head.index("met")] in (("yes", "**no**") if row[1] == "rendezvous" else ("",))


def test_a_rebalance_is_held_to_the_worst_of_its_runs(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rebalance = bench("rebalance")
    monkeypatch.setattr(rebalance, "POOLS", {"1, 2, 4": (1, 2, 4)})
    made = rebalance.rebalance(quick=True)
    (head, _, *rows), page = cells(bench("page_pool").rebalance(reported({"rebalance": made}))), block("rebalance")
    assert page[0] == head and [row[2] for row in rows] == list(rebalance.STARTS)
    assert len(page) - 2 == 3 * 5, "four pools, and that of 16 once more"
    for row in (*rows, *page[2:]):
        assert len(row) == len(head) and row[-2] == "yes" and row[-3] == "worst ratio ≤ 1.1"
    monkeypatch.setattr(rebalance.pool_moves, "rebalance", lambda devices, items: [])
    idle = [figure.data() for figure in rebalance.rebalance(quick=True)]
    assert {figure["met"] for figure in idle if figure["name"].endswith("anyhow/even")} == {False}, "who moves nothing misses it"


def test_the_worst_is_that_of_all_samples_and_not_their_median(bench: Any) -> None:
    figure = bench("figures").Figure
    values = [1.0, 1.0, 1.2]
    assert figure("x", "", "", values, budget=("worst value", "<=", 1.1)).data()["met"] is False
    assert figure("x", "", "", values, budget=("value", "<=", 1.1)).data()["met"] is True
    found = figure("x", "", "", values, "", [1.0, 1.0, 1.0], budget=("worst ratio", ">=", 1.0)).data()
    assert (found["worst"], found["met"]) == (1.0, True)


@pytest.mark.parametrize("name", ["devices", "plain", "beside", "moved", "memory"])
def test_a_measured_table_says_of_each_row_what_was_expected_and_allowed(bench: Any, name: str) -> None:
    figure = bench("figures").Figure
    row = figure(f"{name}/x", "what", "MiB/s", [9.0] * 6, "against", [10.0] * 6, expected=1.0, budget=("ratio", ">=", 0.95), interval=True)
    head, _, made = cells(bench("page_pool").BLOCKS[name](reported({name: [row]})))
    found = dict(zip(head, made))
    assert (found["baseline"], found["expected"], found["budget"], found["met"]) == ("against: 10", "1", "ratio ≥ 0.95", "**no**")
    assert found["ratio"] == "0.9 (0.9 to 0.9); median with 95 %: 0.9 to 0.9" and found["n"] == "6"
    page = block(name)
    if not page:
        assert f"<!-- bench: {name} -->\nNot taken on a quiet machine yet.\n" in PAGE.read_text()
        return
    assert page[0] == head
    for cell in (dict(zip(head, cells_of)) for cells_of in page[2:]):
        assert cell["expected"] != "-" and (cell["met"] in ("yes", "**no**") or not cell["budget"])


def test_the_papers_charts_stand_beside_what_it_said(bench: Any) -> None:
    figure, page_pool = bench("figures").Figure, bench("page_pool")
    made = [figure(f"extents/D/{what}/{count}", "what", "MiB/s", [9.0], "plain", [10.0], expected=1.0) for what, count in page_pool.PAPER]
    made.append(figure("extents/T/write/1", "what", "MiB/s", [5.0], "plain", [10.0]))
    made.append(figure("extents/wrong", "wrong", "blocks", [1], budget=("value", "<=", 0)))
    rows = cells(page_pool.extents(reported({"extents": made})))
    head, first = rows[0], dict(zip(rows[0], rows[2]))
    assert (first["what"], first["disks"], first["of the plain disk"], first["the paper's"]) == ("write", "1", "0.9", "0.6")
    assert (first["case T of it"], first["case C of it"]) == ("0.5", "-")
    assert len(rows) == 2 + 12 + 3 and rows[-1][-2:] == ["value ≤ 0", "**no**"]
    page = block("extents")
    assert not page or (page[0] == head and [row[:2] for row in page[2:14]] == [row[:2] for row in rows[2:14]])


def test_the_interval_of_a_median_holds_it_with_95_percent(bench: Any) -> None:
    figures = bench("figures")
    assert figures.around_the_median(list(range(1, 21))) == [6, 15], "as tables of the binomial distribution have it"
    assert figures.around_the_median(list(range(1, 7))) == [1, 6]
    assert figures.around_the_median(list(range(1, 13))) == [3, 10]


def test_a_quick_run_is_not_published(bench: Any, tmp_path: Path) -> None:
    page = bench("page")
    for name in page.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("<!-- bench: orders -->\nas it was\n<!-- end -->\n")
    with pytest.raises(ValueError, match="--quick"):
        page.write(reported({"orders": []}, quick=True), tmp_path, ["orders"])
    page.write(reported({}), tmp_path, [])
    assert "as it was" in (tmp_path / page.PAGES[0]).read_text(), "what was not run stays"
    page.write(reported({"orders": []}), tmp_path, ["orders"])
    assert "as it was" not in (tmp_path / page.PAGES[0]).read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_is_a_small_module(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300, f"{path.name}: split it by what it measures"
