# SPDX-License-Identifier: Apache-2.0
"""One cloud for all tests of staging: a front-end and four hosts, of which some are cut off, slowed down or
killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Optional

import pytest

from staging.world import Staging


@pytest.fixture(scope="session")
def staging() -> Iterator[Staging]:
    with Staging.up(hosts=4) as up:
        yield up


@pytest.fixture(autouse=True)
def afresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Empty the base stores after each test; nodes that are down or cut off come back."""
    world: Optional[Staging] = (
        request.getfixturevalue("staging") if "staging" in request.fixturenames else None
    )
    yield
    if world:
        world.reset()
