# SPDX-License-Identifier: Apache-2.0
"""What the fault suites share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

from .cloud import Cloud

figures: Dict[str, Any] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs root (namespaces, mounts) where there is none."""
    if os.geteuid():
        for item in items:
            if "faults" in Path(str(item.fspath)).parts:
                item.add_marker(pytest.mark.skip(reason="needs root: it makes namespaces and mounts"))
    # Machines are made once for all tests of a site (going_over.py).
    own = {at: _site(item) for at, item in enumerate(items) if _site(item)}
    for at, item in zip(own, [items[at] for at in sorted(own, key=lambda at: own[at])]):
        items[at] = item


def _site(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return str(callspec.params.get("site", "")) if callspec else ""


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    """One lab for all modules that start drivers as oned does; each lets oned know its own images and VMs,
    and leaves none.
    """
    with Cloud.up() as up:
        yield up


@pytest.fixture(scope="session")
def forking_cloud() -> Iterator[Cloud]:
    """The same where drivers are forked: half of what an action costs is the start of python."""
    with Cloud.up(forks=True) as up:
        yield up


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Let fixtures see how their test ended."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.called = report  # type: ignore[attr-defined]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of actions killed at every step."""
    if "retry" in figures:
        terminalreporter.section("retry and overlap")
        for name, result in figures["retry"].items():
            terminalreporter.line(f"{name:70} {result}")
    if "freed" in figures:
        terminalreporter.section("seconds until a black-holed host frees the driver")
        for name, seconds in figures["freed"].items():
            terminalreporter.line(f"{name:40} {seconds:6.1f}")
    if "actions" in figures:
        terminalreporter.section("killed at every step")
        terminalreporter.line(f"{'action':34} {'points':>6} {'reruns':>6} {'deletes':>7} {'passed':>6}")
        for name, row in figures["actions"].items():
            terminalreporter.line(
                f"{name:34} {row['points']:6} {row['reruns']:6} {row['deletes']:7} {row['passed']:6}"
            )
        total = {
            key: sum(row[key] for row in figures["actions"].values())
            for key in ("points", "reruns", "deletes", "passed")
        }
        terminalreporter.line(
            f"{'all':34} {total['points']:6} {total['reruns']:6} {total['deletes']:7} {total['passed']:6}"
        )


def pytest_sessionfinish() -> None:
    """Leave the figures where the report takes them from."""
    path = os.environ.get("SEMISHARED_FIGURES")
    if path and figures:
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")
