# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for a copy of this checkout: which lines of the package each test reaches, in all
processes, those of labs' nodes too.

What emulated machines run (suite nfs) is not seen.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest

FOLDER = "MUTANTS_FOLDER"
"""In the environment, where hits are told: below /tmp, where unit tests may write as well; nodes of labs have
it by the same path.
"""
COLLECTOR = "_collector"
HOOK = f"""
from os.path import dirname as _dirname
from .{COLLECTOR} import begin as _begin
_collecting = _begin(_dirname(__file__), {{folder!r}})
"""
"""What is added to the package's __init__.py."""
TESTS: Dict[str, Dict[str, Any]] = {}


def hook(copy: Path, folder: Path) -> None:
    """Let the package of a copy, wherever that is installed, tell in a folder what of it is run."""
    top = copy / "lib/semishared"
    (top / f"{COLLECTOR}.py").write_text((copy / "tests/mutants/collector.py").read_text())
    init = top / "__init__.py"
    init.write_text(init.read_text() + HOOK.format(folder=str(folder)))


def _taken() -> List[str]:
    """Return what has been hit since the last look."""
    hits = Path(os.environ[FOLDER], "hits")
    taken, new = hits.with_name("taken"), hits.with_name("new")
    new.touch()
    new.chmod(0o666)  # of other users, too
    if hits.exists():
        hits.rename(taken)
    new.rename(hits)
    if not taken.exists():
        return []
    found = sorted(set(taken.read_text().split()))
    taken.unlink()
    return found


def _forget() -> None:
    collector = getattr(sys.modules.get("semishared"), "_collecting", None)
    if collector is not None:
        collector.forget()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    _taken()
    _forget()
    began = time.monotonic()
    yield
    TESTS[item.nodeid] = {
        **TESTS.get(item.nodeid, {}),
        "seconds": round(time.monotonic() - began, 3),
        "lines": _taken(),
    }


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        TESTS.setdefault(report.nodeid, {})["failed"] = True


def pytest_sessionfinish() -> None:
    Path(os.environ["MUTANTS_REACH"]).write_text(json.dumps(TESTS))
