# SPDX-License-Identifier: Apache-2.0
"""One cloud for all tests of pools: two hosts, two system datastores, three devices of 1:2:4 on each host."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from lab.cloud import Cloud
from pool.devices import Disk

DEVICES = {"/mnt/a": 320, "/mnt/b": 640, "/mnt/c": 1280}
"""Where each is mounted, and its size in MiB."""
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"


class Site(Cloud):
    """A cloud whose hosts have devices."""

    disks: dict[tuple[str, str], Disk]
    """By host and path. /mnt/a of h1 can fail, its /mnt/b is ext4, which becomes read-only when something is
    wrong.
    """


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site.up(hosts=2, systems=(101, 102), forks=True) as up:
        assert isinstance(up, Site)
        folder, up.disks = tmp_path_factory.mktemp("devices"), {}
        try:
            for host, (path, mib) in product(up.lab.hosts, DEVICES.items()):
                kind = "ext4" if path == "/mnt/b" else "xfs"
                up.disks[host.name, path] = Disk(
                    host, path, mib, folder, kind, can_fail=(host.name, path) == ("h1", "/mnt/a")
                )
            yield up
        finally:
            up.delete_all()
            for disk in up.disks.values():
                disk.close()


@pytest.fixture(autouse=True)
def only_this_test(cloud: Site) -> Iterator[None]:
    """Remove the VMs that a failing test leaves, so that the next one is judged for itself."""
    yield
    cloud.delete_all()
