# SPDX-License-Identifier: Apache-2.0
"""A fresh machine for each test.

Its host sides are forks of one process (lab/fork_server.py): a thousand starts of python would cost four
times as much as all that they do. A test whose point is what a process is started with is marked `starts`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Iterator

import pytest

import schemas
from faults.rig import own_mounts
from lab import caches, fork_server
from semishared.cli import command, main
from semishared.tools import rate_limit
from semishared.wire import session
from tools.world import World

if TYPE_CHECKING:
    from tools.ceph_cluster import LocalCluster
    from tools.ceph_site import Site
    from tools.test_pool import Pool


@pytest.fixture(autouse=True)
def usual_priority() -> Iterator[None]:
    """What a test asks of the library itself, and not of a program, does not leave all that come after it
    behind the others.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    now = os.getpriority(os.PRIO_PROCESS, 0)
    assert (rate_limit._stands_back, now) == (False, before), "this test has left its process at rest"


@pytest.fixture(scope="session")
def _usual_io_class() -> None:
    """Whoever comes back comes back to no class of I/O, also where all tests were started in the idle one."""
    subprocess.run(["ionice", "--ignore", "--class", "0", "--pid", str(os.getpid())], check=True)


@pytest.fixture(scope="session")
def _host_sides(_usual_io_class: None) -> Iterator[fork_server.Starter]:
    # What tests mount is theirs alone, also if one is killed; what starts host sides has to see it.
    if not os.geteuid():
        own_mounts()
    with fork_server.serving(caches.CHECKOUT / "lib") as server:
        yield fork_server.Starter(server, only=session.HERE)


@pytest.fixture(autouse=True)
def forked(
    request: pytest.FixtureRequest, _host_sides: fork_server.Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let what asks this machine's host side in the test's own process get a fork."""
    if not request.node.get_closest_marker("starts"):
        monkeypatch.setattr(session, "subprocess", _host_sides)


@pytest.fixture(autouse=True)
def held_to_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a verb prints as JSON in the test's own process is as its schema says."""
    verbs: list[str] = []
    inner = main._run

    def run(argv: list[str]) -> int:
        verbs.append(next((word for word in argv if not word.startswith("-")), ""))
        return inner(argv)

    def dumps(data: Any, **how: Any) -> str:
        if verbs and schemas.IS_INSTALLED and (schemas.FOLDER / f"{verbs[-1]}.json").exists():
            schemas.compare(verbs[-1], json.loads(json.dumps(data)))
        return json.dumps(data, **how)

    monkeypatch.setattr(main, "_run", run)
    monkeypatch.setattr(command, "json", SimpleNamespace(dumps=dumps))


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
