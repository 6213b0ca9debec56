# SPDX-License-Identifier: Apache-2.0
"""One cloud for all tests of increments: two hosts, two system datastores."""

from __future__ import annotations

from typing import Iterator

import pytest

from lab import connections
from lab.cloud import Cloud


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, systems=(101, 102), installs=True) as up:
        connections.share(up.lab)
        yield up
