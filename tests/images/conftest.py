# SPDX-License-Identifier: Apache-2.0
"""A datastore to upload to, and a disk with data at its beginning, in its middle and at its very end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tools.test_datastore import Store
from tools.test_refusal import sshd  # noqa: F401 - a fixture

MiB = 1 << 20
SIZE = 12 * MiB + 5 * 512
"""No whole MiB, no whole cylinders, no whole grains."""


@pytest.fixture()
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


@pytest.fixture(scope="session")
def content() -> bytes:
    """Return the content of a disk of SIZE bytes, two thirds of it holes."""
    bytes_of = random.Random(31).randbytes
    disk = bytearray(SIZE)
    for at in (0, 5 * MiB, 10 * MiB + 4096, SIZE - MiB):
        disk[at : at + MiB] = bytes_of(MiB)
    return bytes(disk)


@pytest.fixture()
def raw(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "content"
    path.write_bytes(content)
    return path
