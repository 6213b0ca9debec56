# SPDX-License-Identifier: Apache-2.0
"""The page of benchmarks says whether its tables are of one run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture()
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import bench/page.py, and forget it: it is a name that others may have."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    before = set(sys.modules)
    yield __import__("page")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(ROOT / "bench")):
            del sys.modules[name]


def report(*of: "Dict[str, str] | None") -> Dict[str, Any]:
    runs = {str(at): {"seconds": 600, "load_before": [0.1], "load_after": [1], **({"of": run} if run else {})} for at, run in enumerate(of)}
    return {"machine": {"cores": 2, "memory_gib": 4, "kernel": "6.1", "python": "3.11"}, "runs": runs}


def test_page_says_whether_it_is_of_one_run(page: Any) -> None:
    one, other = ({"began": f"2026-01-01 1{hour}:00:00", "commit": "abc"} for hour in (0, 1))
    assert "All in one run of 20 minutes, of commit abc" in page.machine(report(one, one))
    assert "Put together from 2 runs" in page.machine(report(one, other))
    assert "Put together from several runs" in page.machine(report(one, None))
