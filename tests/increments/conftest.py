# SPDX-License-Identifier: Apache-2.0
"""One cloud for all tests of increments: two hosts, two system datastores."""

from __future__ import annotations

from typing import Iterator

import pytest

from lab import connections
from lab.cloud import Cloud

from .rig import Rig


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, systems=(101, 102), installs=True) as up:
        connections.share(up.lab)
        yield up


@pytest.fixture(scope="module")
def rig(
    cloud: Cloud, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    """One for each file, with a disk of every kind."""
    name = request.module.__name__.rpartition("_")[2]
    made = Rig(cloud, tmp_path_factory.mktemp(name), name)
    yield made
    made.close()
