# SPDX-License-Identifier: Apache-2.0
"""The tables of pools and of shares in docs/reference/benchmarks.md are those that bench/ makes: same
columns, every budget judged.
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/benchmarks.md"


@pytest.fixture()
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import modules of bench/ by name, and forget them: `page` and `tables` are names that others may
    have.
    """
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return __import__(name)

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "bench")):
            del sys.modules[name]


def block(name: str) -> list[list[str]]:
    """Return the cells of a table of the page, row by row."""
    found = re.search(rf"<!-- bench: {name} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert found, f"no table {name} on {PAGE.name}"
    return cells(found.group(1))


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]


def reported(names: dict[str, list[Any]], quick: bool = False) -> dict[str, Any]:
    run = {"seconds": 1.0, "load_before": [0.5], "load_after": [1.5], "quick": quick}
    figures = [figure.data() for found in names.values() for figure in found]
    return {"runs": {name: run for name in names}, "figures": figures}


def test_each_table_of_pools_stands_on_the_page_and_nothing_else_does(bench: Any) -> None:
    named = set(re.findall(r"<!-- bench: ([a-z]+) -->", PAGE.read_text()))
    assert set(bench("page_pool").BLOCKS) <= named <= set(bench("page").BLOCKS)


def test_orders_stand_side_by_side_and_the_default_is_held_to_the_least(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = bench("orders")
    monkeypatch.setattr(orders, "POOLS", {"1, 2": (1, 2)})
    made = cells(bench("page_pool").orders(reported({"orders": orders.orders(quick=True)})))
    (head, _, *rows), page = made, block("orders")
    assert page[0] == head and [row[1] for row in rows] == ["hash", "share", "rendezvous"]
    assert [row[:2] for row in page[2:]] == [
        [pool, row[1]] for pool in ("1, 2, 4", "4 of 17 and 4 of 35", "16, of 1 to 4") for row in rows
    ]
    for row in (*rows, *page[2:]):
        assert len(row) == len(head) and ("≤ 1.05" in row[head.index("budget, both")]) == (
            row[1] == "rendezvous"
        )
        assert row[head.index("met")] in (("yes", "**no**") if row[1] == "rendezvous" else ("",))


def test_a_rebalance_is_held_to_the_worst_of_its_runs(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rebalance = bench("rebalance")
    monkeypatch.setattr(rebalance, "POOLS", {"1, 2, 4": (1, 2, 4)})
    made = rebalance.rebalance(quick=True)
    (head, _, *rows), page = (
        cells(bench("page_pool").rebalance(reported({"rebalance": made}))),
        block("rebalance"),
    )
    assert page[0] == head and [row[2] for row in rows] == list(rebalance.STARTS)
    assert len(page) - 2 == 3 * 5, "four pools, and that of 16 once more"
    for row in (*rows, *page[2:]):
        assert len(row) == len(head) and row[-2] == "yes" and row[-3] == "worst ratio ≤ 1.1"
    monkeypatch.setattr(rebalance.balance, "rebalance", lambda devices, items: [])
    idle = [figure.data() for figure in rebalance.rebalance(quick=True)]
    assert {figure["met"] for figure in idle if figure["name"].endswith("anyhow/even")} == {False}, (
        "who moves nothing misses it"
    )


def test_the_worst_is_that_of_all_samples_and_not_their_median(bench: Any) -> None:
    figure = bench("figures").Figure
    values = [1.0, 1.0, 1.2]
    assert figure("x", "", "", values, budget=("worst value", "<=", 1.1)).data()["met"] is False
    assert figure("x", "", "", values, budget=("value", "<=", 1.1)).data()["met"] is True
    found = figure(
        "x", "", "", values, "", [1.0, 1.0, 1.0], budget=("worst ratio", ">=", 1.0), is_exact=True
    ).data()
    assert (found["worst"], found["met"]) == (1.0, True)


def test_a_ratio_of_few_samples_is_not_judged_unless_it_is_counted(bench: Any) -> None:
    figure = bench("figures").Figure
    for count, is_exact, met in ((3, False, None), (4, False, True), (1, True, True)):
        row = figure(
            "x", "", "s", [1.0] * count, "", [1.0] * count, budget=("ratio", "<=", 1.1), is_exact=is_exact
        )
        assert row.data()["met"] is met and row.holds(), (count, is_exact)


def test_a_budget_of_pairs_is_missed_with_fewer(bench: Any) -> None:
    figure = bench("figures").Figure
    for count, met in ((19, False), (20, True)):
        row = figure(
            "x", "", "s", [1.0] * count, "", [1.0] * count, budget=("ratio", ">=", 0.95), pairs=20
        ).data()
        assert row["met"] is met and bool(row["if_missed"]) == (not met)


def test_a_ratio_of_no_pairs_is_as_far_apart_as_its_samples(bench: Any) -> None:
    row = bench("figures").Figure("x", "", "s", [2.0, 4.0, 6.0], "", [2.0, 2.0], paired=False).data()
    assert (row["ratio"], row["ratio_spread"]) == (2.0, [1.0, 3.0])


@pytest.mark.parametrize("name", ["devices", "plain", "beside", "moved", "memory"])
def test_a_measured_table_says_of_each_row_what_was_expected_and_allowed(bench: Any, name: str) -> None:
    figure = bench("figures").Figure
    row = figure(
        f"{name}/x",
        "what",
        "MiB/s",
        [9.0] * 6,
        "against",
        [10.0] * 6,
        expected=1.0,
        budget=("ratio", ">=", 0.95),
        interval=True,
    )
    head, _, made = cells(bench("page_pool").BLOCKS[name](reported({name: [row]})))
    found = dict(zip(head, made))
    assert (found["baseline"], found["expected"], found["budget"], found["met"]) == (
        "against: 10",
        "1",
        "ratio ≥ 0.95",
        "**no**",
    )
    assert found["ratio"] == "0.9 (0.9 to 0.9); median with 95 %: 0.9 to 0.9" and found["n"] == "6"
    page = block(name)
    if not page:
        assert f"<!-- bench: {name} -->\nNot taken " in PAGE.read_text()
        return
    assert page[0] == head
    for cell in (dict(zip(head, cells_of)) for cells_of in page[2:]):
        assert cell["expected"] != "-" and (cell["met"] in ("yes", "**no**") or not cell["budget"])


def test_a_budget_that_is_missed_has_its_reason_below_the_table(bench: Any) -> None:
    figure, page_pool = bench("figures").Figure, bench("page_pool")
    rows = [
        figure(
            f"moved/{name}",
            name,
            "1/s",
            [value] * 4,
            "still",
            [10.0] * 4,
            budget=("ratio", ">=", 0.95),
            if_missed="it waits",
        )
        for name, value in (("kept", 9.6), ("lost", 9.4))
    ]
    text = page_pool.BLOCKS["moved"](reported({"moved": rows}))
    assert text.endswith("|\n\nMissed, lost: it waits.\n") and text.count("Missed") == 1


@pytest.mark.parametrize("name", ["moved", "extents"])
def test_what_has_a_budget_has_a_reason_should_it_be_missed(bench: Any, name: str) -> None:
    one = (([1.0] * 6, [1.0] * 6), [1.0] * 6)
    if name == "moved":
        moved = bench("moved")
        samples = {"rate": one[0], "gap": one[0]}
        made = [
            row
            for kind in moved.KINDS
            for what in moved.PAIRS
            for row in moved._figures(kind, what, samples, one[1])
        ]
    else:
        extents = bench("extents")
        kinds = ("write", "read", "seek", "moved", "least", "fullest", "seconds", "wrong", "ios", "wait")
        rates = {f"D/{what}/plain": [1.0] for what in ("write", "read", "seek")}
        made = extents._figures_grown([dict.fromkeys(kinds, 1.0)] * 2, rates)
    held = [row for row in made if row.budget]
    assert held and all(row.if_missed for row in held)


def test_the_papers_charts_stand_beside_what_it_said(bench: Any) -> None:
    figure, page_pool = bench("figures").Figure, bench("page_pool")
    made = [
        figure(f"extents/D/{what}/{count}", "what", "MiB/s", [9.0], "plain", [10.0], expected=1.0)
        for what, count in page_pool.PAPER
    ]
    made.append(figure("extents/T/write/1", "what", "MiB/s", [5.0], "plain", [10.0]))
    made.append(figure("extents/wrong", "wrong", "blocks", [1], budget=("value", "<=", 0)))
    rows = cells(page_pool.extents(reported({"extents": made})))
    head, character, first = rows[0], dict(zip(rows[0], rows[2])), dict(zip(rows[0], rows[3]))
    assert character["what"] == "character" and character["the paper's"].startswith("about 1")
    assert (first["what"], first["disks"], first["of the plain disk"], first["the paper's"]) == (
        "write",
        "1",
        "0.9",
        "0.6",
    )
    assert (first["case T of it"], first["case C of it"]) == ("0.5", "-")
    assert len(rows) == 2 + 13 + 3 and rows[-1][-3:] == ["value ≤ 0", "**no**", "1"]
    page = block("extents")
    assert not page or (
        page[0] == head and [row[:2] for row in page[2:15]] == [row[:2] for row in rows[2:15]]
    )


def test_the_interval_of_a_median_holds_it_with_95_percent(bench: Any) -> None:
    figures = bench("figures")
    assert figures.around_the_median(list(range(1, 21))) == [6, 15], (
        "as tables of the binomial distribution have it"
    )
    assert figures.around_the_median(list(range(1, 7))) == [1, 6]
    assert figures.around_the_median(list(range(1, 13))) == [3, 10]


def test_a_quick_run_is_not_published(bench: Any, tmp_path: Path) -> None:
    page = bench("page")
    for name in page.PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("<!-- bench: orders -->\nas it was\n<!-- end -->\n")
    with pytest.raises(ValueError, match="--quick"):
        page.write(reported({"orders": []}, quick=True), tmp_path, ["orders"])
    page.write(reported({}), tmp_path, ["machine"])
    assert "as it was" in (tmp_path / page.PAGES[0]).read_text(), "what nobody asked for stays"
    page.write(reported({"orders": []}), tmp_path, ["orders"])
    assert "as it was" not in (tmp_path / page.PAGES[0]).read_text()


WAYS = ("virtual", "client", "directory", "native")
"""To a parallel file system: in the order of the paper's figure 4, the slowest first."""


def ways(**rates: list[float]) -> dict[str, list[float]]:
    """Return samples of each way, the same whatever is done."""
    found = {
        f"{way}/{what}": rates[way] for way in WAYS for what in ("write", "read", "create", "stat", "unlink")
    }
    for daemon in ("virtiofsd", "ceph-fuse"):
        found.update({f"cpu/{daemon}/{way}/{what}": [2.0, 2.0] for way in WAYS for what in ("write", "read")})
    return {**found, "crc/host": [1000.0, 1000.0], "crc/guest": [100.0, 100.0]}


def test_each_way_stands_over_the_virtual_server_of_its_own_round(bench: Any) -> None:
    figures = bench("access_figures")
    assert figures.aggregate(16, [2.0, 4.0]) == 8.0, "both are done when the slower one is"
    made = figures.all_of(
        ways(virtual=[5.0, 10.0], client=[10.0, 5.0], directory=[10.0, 30.0], native=[20.0, 100.0])
    )
    rows = cells(bench("page_shares").shares(reported({"shares": made})))
    found = {(row[0], row[1]): dict(zip(rows[0], row)) for row in rows[2:22]}
    assert found["read", "directory into the guest"]["of the virtual server"] == "2.5 (2 to 3)"
    assert found["written", "client in the guest"]["of the virtual server"] == "1.25 (0.5 to 2)"
    assert [found["written", way]["the paper's"] for way in figures.WAYS.values()] == [
        "",
        "1.9",
        "2.2",
        "above 3",
    ]
    assert {row["expected"] for (_, way), row in found.items() if way != "a virtual server"}.isdisjoint(
        {"", "-"}
    )
    page = block("shares")
    if page:
        assert [row[:2] for row in page[:22]] == [row[:2] for row in rows[:22]] and len(page) == len(rows)
    else:
        assert "<!-- bench: shares -->\nNot taken " in PAGE.read_text()


def test_the_order_that_is_asserted_is_the_papers_and_nothing_more(bench: Any) -> None:
    figures, paper = bench("access_figures"), bench("page_shares").PAPER
    for what in ("write", "read"):
        said = {
            "virtual": 1.0,
            **{way: float(re.findall(r"[\d.]+", text)[0]) for (of, way), text in paper.items() if of == what},
        }
        follows = {(pair.first, pair.second) for pair in figures.ORDER if pair.what == what}
        for middle in WAYS:
            follows |= {(a, d) for a, b in follows for c, d in follows if b == c == middle}
        assert follows == {(a, b) for a in WAYS for b in WAYS if said[a] > said[b]}
    right = ways(virtual=[1.0] * 4, client=[2.0] * 4, directory=[3.0] * 4, native=[4.0] * 4)
    assert {figure.data()["met"] for figure in figures.order(right)} == {True}
    for first, second in ((2, 1), (3, 2), (3, 1), (4, 3)):
        places = dict(zip(WAYS, [[1.0] * 4, [2.0] * 4, [3.0] * 4, [4.0] * 4]))
        places[WAYS[first - 1]], places[WAYS[second - 1]] = places[WAYS[second - 1]], places[WAYS[first - 1]]
        missed = {
            figure.name.rpartition("/")[2]
            for figure in figures.order(ways(**places))
            if figure.data()["met"] is False
        }
        assert f"{WAYS[first - 1]}-{WAYS[second - 1]}" in missed


def test_what_a_client_reads_is_what_the_other_one_has_written(
    bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    inside: dict[str, Any] = {}
    exec((ROOT / "bench/access_inside.py").read_text(), inside)
    assert inside["write"](f"{tmp_path}/file", 4, 2) > 0 and inside["read"](f"{tmp_path}/file", 4, 2) > 0
    for seed, mib in ((5, 2), (4, 3)):
        with pytest.raises(RuntimeError, match="is not what was written"):
            inside["read"](f"{tmp_path}/file", seed, mib)


def test_a_daemons_processor_time_is_told_in_less_than_ticks(bench: Any) -> None:
    access, before = bench("access"), time.process_time()
    assert before <= access.cpu([os.getpid()]) <= time.process_time()


@pytest.mark.parametrize("path", sorted((ROOT / "bench").glob("*.py")), ids=lambda path: path.name)
def test_a_benchmark_is_a_small_module(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450, f"{path.name}: split it by what it measures"
