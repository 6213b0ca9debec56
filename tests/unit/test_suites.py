# SPDX-License-Identifier: Apache-2.0
"""Every test belongs to a suite: one that no suite runs proves nothing."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import suites

FILES = {"pytest": "test_*.py", "bats": "*.bats"}
"""Runner -> the files it finds in a directory it is given."""
OF_ITS_OWN = "real"
"""What needs a source of OpenNebula: `make test-real`."""


@pytest.mark.reads_checkout
@pytest.mark.parametrize("runner", FILES)
def test_every_file_of_tests_is_run_by_exactly_one_suite(runner: str) -> None:
    of_runner = [suite for suite in suites.SUITES.values() if suite.get("runner", "pytest") == runner]
    paths = [suites.ROOT / path for suite in of_runner for path in suite.get("paths", ())]
    assert [str(path) for path in paths if not path.exists()] == []
    files = sorted(Path(suites.ROOT, "tests").glob(f"*/**/{FILES[runner]}"))
    assert files
    for file in files:
        if file.parent.name == OF_ITS_OWN:
            continue
        found = [path for path in paths if path in (file, *file.parents)]
        assert len(found) == 1, f"{file} is run by {found or 'no suite'}"


REPORT = """<testsuites><testsuite tests="4" skipped="3">
<testcase name="a"><skipped type="pytest.skip" message="no cargo here">at line 3</skipped></testcase>
<testcase name="b"><skipped type="pytest.skip" message="no cargo here">at line 3</skipped></testcase>
<testcase name="c"><skipped>no sudo</skipped></testcase><testcase name="d"/></testsuite></testsuites>"""
"""As pytest and bats have them."""


def test_the_report_says_why_tests_were_skipped() -> None:
    assert suites.skips(ElementTree.ElementTree(ElementTree.fromstring(REPORT))) == {
        "no cargo here": 2,
        "no sudo": 1,
    }
