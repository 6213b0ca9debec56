# SPDX-License-Identifier: Apache-2.0
"""One cloud for all tests of pools: two hosts, two system datastores, three devices of 1:2:4 on each host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lab import Node
from lab.cloud import Cloud

DEVICES = {"/mnt/a": 256, "/mnt/b": 512, "/mnt/c": 1024}
"""Where each is mounted, and its size in MiB."""
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"


def take_away(node: Node, path: str) -> None:
    """Let a device be gone: with all that it holds, until it is brought back."""
    node.run(["mkdir", "-p", f"{path}-away"], user="root")
    node.run(["mount", "--move", path, f"{path}-away"], user="root")


def bring_back(node: Node, path: str) -> None:
    node.run(["mount", "--move", f"{path}-away", path], user="root")


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, systems=(101, 102)) as up:
        for host in up.lab.hosts:
            for path, size in DEVICES.items():
                host.run(["mkdir", "-p", path], user="root")
                host.run(["mount", "-t", "tmpfs", "-o", f"size={size}m,mode=755", "device", path], user="root")
                host.run(["chown", "oneadmin:oneadmin", path], user="root")
        yield up
        for host in up.lab.hosts:
            for path in DEVICES:
                host.run(["umount", "-l", path], user="root", check=False)
