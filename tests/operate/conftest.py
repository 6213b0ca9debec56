# SPDX-License-Identifier: Apache-2.0
"""One cloud for all tests of what an operator uses: two hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.cloud import Cloud


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, forks=True) as up:
        yield up
