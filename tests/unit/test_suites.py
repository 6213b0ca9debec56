# SPDX-License-Identifier: Apache-2.0
"""Every test belongs to a suite: one that no suite runs proves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import suites


@pytest.mark.reads_checkout
def test_every_file_of_tests_is_run_by_exactly_one_suite() -> None:
    paths = [suites.ROOT / path for suite in suites.SUITES.values() for path in suite.get("paths", ())]
    assert [str(path) for path in paths if not path.exists()] == []
    for file in sorted(Path(suites.ROOT, "tests").glob("*/**/test_*.py")):
        found = [path for path in paths if path in (file, *file.parents)]
        assert len(found) == 1, f"{file} is run by {found or 'no suite'}"
