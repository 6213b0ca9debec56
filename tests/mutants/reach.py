# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for a copy of this checkout (mutants/copies.py): which lines of the package each test reaches, in every process.

Reached is what this machine runs: the test's own process, forks, and programs started without ssh. What a lab's nodes run is not seen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest

from mutants.collector import FOLDER

HOOK = """
import importlib.util as _u
_s = _u.spec_from_file_location("mutants_collector", {collector!r})
_c = _u.module_from_spec(_s)
_s.loader.exec_module(_c)
_collector = _c.begin({top!r})
"""
"""What is added to the package's __init__.py."""
TESTS: Dict[str, Dict[str, Any]] = {}


def hook(copy: Path) -> None:
    """Let the package of a copy tell what of it is run."""
    top = copy / "lib/semishared"
    init = top / "__init__.py"
    init.write_text(init.read_text() + HOOK.format(collector=str(copy / "tests/mutants/collector.py"), top=str(top)))


def _taken() -> List[str]:
    """Return what has been hit since the last look."""
    hits = Path(FOLDER, "hits")
    if not hits.exists():
        return []
    taken = hits.with_name(f"taken-{os.getpid()}")
    hits.rename(taken)
    found = sorted(set(taken.read_text().split()))
    taken.unlink()
    return found


def _forget() -> None:
    collector = getattr(sys.modules.get("semishared"), "_collector", None)
    if collector is not None:
        collector.forget()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _taken()
    _forget()
    began = time.monotonic()
    yield
    TESTS[item.nodeid] = {**TESTS.get(item.nodeid, {}), "seconds": round(time.monotonic() - began, 3), "lines": _taken()}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        TESTS.setdefault(report.nodeid, {})["failed"] = True


def pytest_sessionfinish() -> None:
    Path(os.environ["MUTANTS_REACH"]).write_text(json.dumps(TESTS))
