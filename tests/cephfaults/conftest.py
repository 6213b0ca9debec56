# SPDX-License-Identifier: Apache-2.0
"""What a test itself asks of this machine is forked, too; what is killed is forked with all that it starts
(lab/forks.py).
"""

from __future__ import annotations

from typing import Iterator

import pytest

from cephstore.conftest import _host_sides, forked
from tools.ceph_cluster import running
from tools.ceph_site import Site

WATCH_S = 10
"""Seconds after which the cluster forgets a client that was killed. With fewer a healthy client that a busy
machine holds up would lose its watch, too.
"""

__all__ = ["WATCH_S", "_host_sides", "forked", "site"]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with running(WATCH_S) as cluster:
        site = Site(cluster.conf)
        try:
            yield site
        finally:
            site.close()
