# SPDX-License-Identifier: Apache-2.0
"""A run of all benchmarks ends in time and goes on where one fails; its page says whether its tables are of
one run.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List

import pytest

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.fixture()
def page(bench: Callable[[str], Any]) -> Any:
    return bench("page")


def report(*of: Dict[str, str] | None) -> Dict[str, Any]:
    runs = {
        str(at): {"seconds": 600, "load_before": [0.1], "load_after": [1], **({"of": run} if run else {})}
        for at, run in enumerate(of)
    }
    return {"machine": {"cores": 2, "memory_gib": 4, "kernel": "6.1", "python": "3.11"}, "runs": runs}


def test_page_says_whether_it_is_of_one_run(page: Any) -> None:
    one, other = ({"began": f"2026-01-01 1{hour}:00:00", "commit": "abc"} for hour in (0, 1))
    assert "All in one run of 20 minutes, of commit abc" in page.machine(report(one, one))
    assert "Put together from 2 runs" in page.machine(report(one, other))
    assert "Put together from several runs" in page.machine(report(one, None))


def test_table_of_runs_says_how_long_each_took_and_how_busy_it_was(page: Any) -> None:
    found = report({"began": "2026-01-01 10:00:00", "commit": "abc"})
    found["runs"]["0"].update(pace=0.5, error="RuntimeError: no")
    assert page.runs(found).splitlines()[2] == "| 0 | 600 | 0.1 | 1 | 0.5 | failed |"
    assert "Failed, and so not in it: 0." in page.machine(found)


def pages(page: Any, folder: Path, *names: str) -> Callable[[], str]:
    """Lay out pages with these tables; return what reads the first of them."""
    text = "".join(f"<!-- bench: {name} -->\nas it was\n<!-- end -->\n" for name in names)
    for name in page.PAGES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return (folder / page.PAGES[0]).read_text


def test_a_table_that_was_not_taken_is_not_left_from_before(page: Any, tmp_path: Path) -> None:
    found = {**report({"began": "2026-01-01 10:00:00", "commit": "abc"}), "figures": []}
    run = {**found["runs"]["0"], "quick": False}
    found["runs"] = {"peer": {**run, "error": "RuntimeError: no"}, "io": run}
    read = pages(page, tmp_path, "peer", "guests", "overlay")
    page.write(found, tmp_path, [])
    text = read()
    assert (
        "<!-- bench: peer -->\nIt failed in this run.\n" in text
        and "<!-- bench: guests -->\nNot taken in this run.\n" in text
    )
    assert "<!-- bench: overlay -->\n| what |" in text, "which io has"


def test_tables_of_two_runs_on_a_page_are_said_to_be(page: Any, tmp_path: Path) -> None:
    found = {**report({"began": "2026-01-01 10:00:00", "commit": "abc"}), "figures": []}
    found["runs"] = {"guests": {**found["runs"]["0"], "quick": False}}
    read = pages(page, tmp_path, "machine", "guests", "peer")
    page.write(found, tmp_path, ["guests"])
    assert (
        "Of that, on this page: guests. All other tables are of a run before." in read()
        and read().count("as it was") == 1
    )


def test_a_benchmark_that_fails_is_named_and_leaves_no_figures(
    bench: Callable[[str], Any], tmp_path: Path, capsys: Any
) -> None:
    run, figure = bench("run"), bench("figures").Figure

    def fails(quick: bool) -> List[Any]:
        pytest.fail("what the lab does, too: no Exception, but a BaseException")

    run.this_run = lambda: {"began": "2026-01-01 10:00:00", "commit": "abc"}
    run.BENCHMARKS.update(io=fails, clone=lambda quick: [figure("clone/x", "x", "s", [1.0])])
    before = {
        "runs": {},
        "figures": [{"name": "io/x", "benchmark": "io"}, {"name": "ceph/x", "benchmark": "ceph"}],
    }
    assert run.run(["io", "clone"], False, before, tmp_path / "bench.json") == ["io"]
    written = json.loads((tmp_path / "bench.json").read_text())
    assert [found["name"] for found in written["figures"]] == ["ceph/x", "clone/x"]
    assert written["runs"]["io"]["error"].startswith("Failed: ") and written["runs"]["clone"]["error"] == ""
    assert "== io: FAILED" in capsys.readouterr().out


def test_what_no_name_is_needed_for_is_what_the_page_shows(bench: Callable[[str], Any]) -> None:
    run, schedule, page = bench("run"), bench("schedule"), bench("page")
    assert set(schedule.SECONDS) < set(run.BENCHMARKS)
    shown = {page.OF.get(name, name) for name in page.BLOCKS} - set(page.OF_ALL)
    assert shown <= {*schedule.SECONDS, *page.APART, "pool"} and not set(page.APART) & set(schedule.SECONDS)
    assert sum(schedule.SECONDS.values()) <= schedule.LIMIT_S < schedule.END_S < 80 * 60


def test_who_is_late_makes_others_take_fewer_rounds(
    bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, figures = bench("schedule"), bench("figures")
    last = list(schedule.SECONDS)[-1]
    due = schedule.LIMIT_S - schedule.SECONDS[last]
    assert schedule.pace(last, due) == pytest.approx(1.0)
    assert (
        schedule.pace(last, due - 600) == schedule.QUICKEST
        and schedule.pace(last, due + 600) == schedule.SLOWEST
    )
    figures.Pace.factor, now = 0.5, [0.0]
    monkeypatch.setattr(figures, "time", SimpleNamespace(monotonic=lambda: now[0]))
    counted = []
    for number in figures.rounds_within(8, 10):
        counted.append(number)
        now[0] += 2
    assert len(counted) == 2, "of the four for which there is time"


def test_what_hangs_is_ended(bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, before = bench("schedule"), signal.getsignal(signal.SIGUSR2)
    monkeypatch.setattr(schedule, "SECONDS", {"io": 0.1})
    monkeypatch.setattr(schedule, "PATIENCE", 0.1)
    with pytest.raises(TimeoutError), schedule.ends("io"):
        time.sleep(5)
    with schedule.ends("options"):
        pass
    with pytest.raises(TimeoutError, match="no time left"), schedule.ends("io", schedule.END_S):
        raise AssertionError("it is not begun")
    assert signal.getsignal(signal.SIGUSR2) == before
