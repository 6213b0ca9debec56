# SPDX-License-Identifier: Apache-2.0
"""A cluster for this suite, whose dead clients are out of sight sooner than a real one's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator

import pytest

from tools.conftest import site

if TYPE_CHECKING:
    from tools.ceph_cluster import LocalCluster

__all__ = ["site"]
WATCH_S = 10


@pytest.fixture(scope="session")
def ceph() -> Iterator[LocalCluster]:
    from tools.ceph_cluster import running

    with running(WATCH_S) as cluster:
        yield cluster
