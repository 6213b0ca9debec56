# SPDX-License-Identifier: Apache-2.0
"""Roots of shares on file systems of their own: btrfs on a loop device, and CephFS; clouds whose hosts have
them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shares.ceph import CephShares
from shares.guests import Shares


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what needs the cluster last: its daemons take processor as long as they are up, whether or not
    anybody asks them.
    """
    here = Path(__file__).parent
    items.sort(key=lambda item: here in item.path.parents and "cloud" in getattr(item, "fixturenames", ()))


def run(*words: object) -> str:
    """Run a program to its end."""
    return subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def make_btrfs(file: Path, mib: int = 512) -> None:
    """Make an empty btrfs in a sparse file."""
    with open(file, "wb") as made:
        made.truncate(mib << 20)
    # It looks at all that is mounted, and gives up at a device of another suite that has died.
    run("unshare", "-m", "sh", "-c", 'umount -a -l -t fuse; exec mkfs.btrfs -q "$0"', file)


@contextmanager
def mounted_btrfs(top: Path) -> Iterator[Path]:
    """Yield a btrfs of 512 MiB with its quotas on, in a file below `top`."""
    file, where = top / "file", top / "mounted"
    make_btrfs(file)
    where.mkdir()
    run("mount", "-o", "loop", file, where)
    try:
        run("btrfs", "quota", "enable", where)
        yield where
    finally:
        run("umount", where)
        file.unlink()


def loop_of(where: Path) -> str:
    """Return the device that is mounted at a path."""
    return str(json.loads(run("findmnt", "-J", "-o", "SOURCE", where))["filesystems"][0]["source"])


@pytest.fixture(scope="session")
def btrfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return one for all tests here."""
    with mounted_btrfs(tmp_path_factory.mktemp("btrfs")) as where:
        yield where


@pytest.fixture(scope="session")
def hosts(btrfs: Path) -> Iterator[Shares]:
    """Return a cloud whose two hosts have that one mounted; each file leaves it so, without VMs and
    shares.
    """
    with Shares.up(loop_of(btrfs)) as shares:
        yield shares


@pytest.fixture(scope="session")
def cloud() -> Iterator[CephShares]:
    """Return a cloud with shares on CephFS; each test leaves it without any."""
    with CephShares.up() as cloud:
        yield cloud
