# SPDX-License-Identifier: Apache-2.0
"""One cloud with a real Ceph cluster for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.ceph import Cluster
from lab.cloud import Cloud


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, systems=(101, 102), ceph=True, forks=True) as up:
        yield up


@pytest.fixture(scope="session")
def os_image(cloud: Cloud) -> int:
    """An image to boot from, of the mounted store, of which each VM has a disk of its own."""
    return cloud.os_image()


@pytest.fixture(scope="session")
def ceph(cloud: Cloud) -> Cluster:
    return cloud.lab.ceph
