# SPDX-License-Identifier: Apache-2.0
"""Say of every recording whether it passed, failed or is not yet to be matched."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Dict

import pytest

_RECORDING = re.compile(r"test_(generated|player)\.py::test_recording\[(.+)\]$")
_RESULTS: Dict[str, Dict[str, str]] = {"generated": {}, "player": {}}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the result of a recording; a failure in set-up or tear-down counts as one of the recording."""
    match = _RECORDING.search(report.nodeid)
    if match is None:
        return
    results, name = _RESULTS[match.group(1)], match.group(2)
    if report.failed:
        results[name] = "failed"
    elif report.skipped:
        text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        results[name] = text.split("Skipped: ", 1)[-1]
    elif report.when == "call":
        results.setdefault(name, "passed")


def pytest_sessionfinish() -> None:
    """Leave the table where the suite's figures belong."""
    path = os.environ.get("SEMISHARED_FIGURES")
    if not path or not any(_RESULTS.values()):
        return
    figures: Dict[str, object] = dict(_RESULTS)
    for kind, results in _RESULTS.items():
        figures[f"{kind}_matched"] = sum(result == "passed" for result in results.values())
        figures[f"{kind}_total"] = len(results)
    Path(path).write_text(json.dumps(figures, indent=1))
