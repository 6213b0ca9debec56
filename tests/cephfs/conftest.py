# SPDX-License-Identifier: Apache-2.0
"""One cloud whose image store lies on CephFS, mounted by each node itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab.cloud import Cloud


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, systems=(101, 102), cephfs=True, forks=True) as up:
        yield up


@pytest.fixture(scope="session")
def os_image(cloud: Cloud) -> int:
    return cloud.os_image()


@pytest.fixture(autouse=True)
def only_this_test(cloud: Cloud) -> Iterator[None]:
    """Remove the VMs that a failing test leaves, so that the next one is judged for itself."""
    yield
    cloud.delete_all()
