# SPDX-License-Identifier: Apache-2.0
"""What all suites share: the markers, and how long hypothesis looks for counter-examples."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings

import matrix
import proofs
from lab import cgroups, state
from lab.cloud import Cloud

MARKERS = {
    "starts": "starts host sides as processes of their own, where its suite forks them "
    "(tests/tools/conftest.py)",
    "reads_checkout": "looks at the files of this checkout, as a linter does",
    "runs_python": "starts python, the one thing a unit test may start, and says why",
    "fault(number, claim)": "proves a row of docs/reference/faults.md: tests/against.py says what an older "
    "version does",
}
MOST = int(os.environ.get("SEMISHARED_MOST", "5"))
"""How many tests the section on what took most processor names."""
# HYPOTHESIS_EXAMPLES=2000 for a long look; no deadline, since the machine is shared with labs.
TOLERATED = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.function_scoped_fixture,
]
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "25"))
# Nobody calls hypothesis.target, and without that its phase only looks for shorter examples of what holds,
# for a quarter of the time.
PHASES = [phase for phase in Phase if phase is not Phase.target]
settings.register_profile(
    "semishared", max_examples=EXAMPLES, deadline=None, suppress_health_check=TOLERATED, phases=PHASES
)
settings.load_profile("semishared")
pytest.register_assert_rewrite("store.cases")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: List[pytest.Item]) -> None:
    """Leave to test-full what tests/proofs.md says that others prove."""
    left = {row.left for row in proofs.rows()}
    for item in items:
        if item.nodeid in left or item.nodeid.partition("[")[0] in left:
            item.add_marker("long")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what a test, with its fixtures and its labs, took of the processors: what waits is cheap, however
    long it takes.

    What is left after one that failed, when its fixtures have removed its VMs, is no fault of a later one.
    What one leaves that passed is not forgiven: the next one that looks finds it.
    """
    before = cgroups.used()
    yield
    if before is not None:
        TAKEN[item.nodeid] = (cgroups.used() or before) - before
    if item.stash.get(FAILED, False):
        for cloud in list(Cloud.standing):
            cloud.forgive()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if TAKEN:
        terminalreporter.section("most processor")
        for seconds, name in sorted(((seconds, name) for name, seconds in TAKEN.items()), reverse=True)[
            :MOST
        ]:
            terminalreporter.line(f"{seconds:.2f}s cpu      {name}")


UMASK = 0o022
PASSED = pytest.StashKey[bool]()
FAILED = pytest.StashKey[bool]()
TAKEN: Dict[str, float] = {}
"""Seconds of processor per test of this run."""
LEFT_OUT: Dict[str, int] = {}
"""How many tests of each file this run has left out by their markers: `long` ones, without --full."""
PROVED: set[matrix.Cell] = set()
"""Cells of the matrix that passed tests have reported in this run."""


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        file = item.nodeid.partition("::")[0]
        LEFT_OUT[file] = LEFT_OUT.get(file, 0) + 1


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.stash[PASSED] = report.passed
    if report.failed:
        item.stash[FAILED] = True


@pytest.fixture(scope="session", autouse=True)
def _umask_of_labs() -> None:
    """What labs lay out must be open to other users, whatever the tests were started with."""
    os.umask(UMASK)


@pytest.fixture(scope="session", autouse=True)
def _apart_on_disk(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have each test's directory be where none has just removed its files, as labs have (lab/state.py)."""
    state.spread(tmp_path_factory.getbasetemp())


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Commands that are called in this process set their own; the next test's files must be open to other
    users again.
    """
    os.umask(UMASK)
    yield
    os.umask(UMASK)


@pytest.fixture()
def cell(request: pytest.FixtureRequest) -> Iterator[Callable[..., None]]:
    """Return a function that says which cells of tests/matrix.py this test proves; they count if it
    passes.
    """
    reported: set[matrix.Cell] = set()

    def report(
        action: object, place: object, format: object, mode: object, devices: object = "plain"
    ) -> None:
        reported.update(matrix.expand(action, place, format, mode, devices))

    yield report
    if request.node.stash.get(PASSED, False):
        PROVED.update(reported)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add the proved cells, what was left out, and what each test took, to the figures of this suite, for
    tests/suites.py.
    """
    path = os.environ.get("SEMISHARED_FIGURES")
    if path and (PROVED or TAKEN or LEFT_OUT):
        file = Path(path)
        figures = json.loads(file.read_text()) if file.exists() else {}
        if PROVED:
            figures["cells"] = sorted(PROVED)
        if LEFT_OUT:
            figures["left out"] = LEFT_OUT
        figures["cpu"] = {name: round(seconds, 1) for name, seconds in TAKEN.items() if seconds >= 1}
        file.write_text(json.dumps(figures))
