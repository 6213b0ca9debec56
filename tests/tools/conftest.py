# SPDX-License-Identifier: Apache-2.0
"""A fresh machine for each test."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tools.world import World


@pytest.fixture()
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture()
def past() -> float:
    """A time before everything in this test."""
    return time.time() - 100
