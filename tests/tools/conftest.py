# SPDX-License-Identifier: Apache-2.0
"""A fresh machine for each test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Iterator

import pytest

from semishared.tools import rate_limit
from tools.world import World

if TYPE_CHECKING:
    from tools.ceph_cluster import LocalCluster
    from tools.ceph_site import Site
    from tools.test_pool import Pool


@pytest.fixture(autouse=True)
def usual_priority() -> Iterator[None]:
    """What a test asks of the library itself, and not of a program, does not leave all that come after it behind the others."""
    yield
    assert not rate_limit._stands_back and not os.getpriority(os.PRIO_PROCESS, 0), "this test has left its process at rest"


@pytest.fixture()
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture()
def pool(world: World) -> Iterator[Pool]:
    """Devices on that machine, which are no pool yet."""
    from tools.test_pool import Pool

    made = Pool(world)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def ceph() -> Iterator[LocalCluster]:
    from tools.ceph_cluster import running

    with running() as cluster:
        yield cluster


@pytest.fixture()
def site(ceph: LocalCluster) -> Iterator[Site]:
    """An empty pool of it, seen by its admin."""
    from tools.ceph_site import Site

    site = Site(ceph.conf)
    site.wipe()
    try:
        yield site
    finally:
        site.close()
