# SPDX-License-Identifier: Apache-2.0
"""What a report of tests becomes in docs/runs, and in the table of docs/reference/support.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import runs

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
import runs_table  # type: ignore[import-not-found]  # noqa: E402

REPORT = """<testsuites><testsuite>
<testcase classname="tests.real.test_life" name="test_a"/>
<testcase classname="tests.real.test_life" name="test_b[x]"><failure/></testcase>
<testcase classname="tests.real.test_ceph" name="test_c"><skipped/></testcase>
<testcase classname="tests.real.test_ceph" name="test_d"><error/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_noted_by_file_and_a_later_run_of_one_replaces_that_alone(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    first = runs.noted({}, "X 1.0", runs.of_report(report, "2026-01-01", "abc"))
    assert first["files"]["real/test_life"]["passed"] == 1
    assert first["files"]["real/test_ceph"]["failed"] == ["test_d"]
    row = runs_table.row(first)
    assert row == "| X 1.0 | 2026-01-01, on abc | 2 | 1 | `test_b[x]`, `test_d` | 1 |\n"
    report.write_text('<testsuite><testcase classname="tests.real.test_ceph" name="test_d"/></testsuite>')
    both = runs.noted(first, "X 1.0", runs.of_report(report, "2026-01-02", "def"))
    said = runs_table.row(both)
    assert "| 2 | `test_b[x]` | 0 |" in said and "real/test_ceph: 2026-01-02, on def" in said


def test_rows_stand_between_the_marks_the_newest_version_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_table, "RUNS", tmp_path)
    outcome = {"date": "d", "commit": "c", "passed": 1, "failed": [], "skipped": []}
    for version in ("6.10.5", "7.2.0"):
        note = {"title": version, "files": {"f": outcome}}
        (tmp_path / f"one-{version}.json").write_text(json.dumps(note))
    text = runs_table.with_runs("a\n<!-- runs one -->\nold\n<!-- end -->\nb\n")
    assert text.index("| 7.2.0 |") < text.index("| 6.10.5 |") and "old" not in text and text.endswith("b\n")
