# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: run those tests, in that order, that the file MUTANTS_TESTS names, one a line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import List

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    wanted = {
        name: number for number, name in enumerate(Path(os.environ["MUTANTS_TESTS"]).read_text().splitlines())
    }
    items[:] = sorted((item for item in items if item.nodeid in wanted), key=lambda item: wanted[item.nodeid])
