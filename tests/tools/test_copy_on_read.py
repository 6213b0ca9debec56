# SPDX-License-Identifier: Apache-2.0
"""Parts of a disk in a qcow2 file, by the real qemu-io: these alone, zeros too, and no failure unheard."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any, Dict

import pytest

from semishared.errors import NoSpace, ToolFailed
from semishared.tools import copy_on_read, qemu_img

SIZE = (4 << 20) + 512
KIB = 1024


def node(path: Path) -> Dict[str, Any]:
    return {"driver": "raw", "file": {"driver": "file", "filename": str(path)}}


@pytest.fixture()
def disk(tmp_path: Path) -> Path:
    """A disk whose second MiB is zero."""
    path = tmp_path / "disk"
    data = bytearray(random.Random(7).randbytes(SIZE))
    data[1 << 20 : 2 << 20] = bytes(1 << 20)
    path.write_bytes(data)
    return path


def test_parts_hide_what_they_are_laid_over(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_on_read, "MOST", 3)
    target, before = str(tmp_path / "target"), tmp_path / "before"
    qemu_img.create(target, "qcow2", SIZE)
    parts = [(SIZE - 10, 10), (1000 * KIB, 100 * KIB), (0, 1), (1080 * KIB, 300 * KIB)]
    copy_on_read.copy(node(disk), target, parts)
    assert "backing-filename" not in qemu_img.info(target, "qcow2")
    found = json.loads(
        subprocess.run(
            ["qemu-img", "map", "--output=json", "-f", "qcow2", target], check=True, stdout=subprocess.PIPE
        ).stdout
    )
    there = [(part["start"], part["length"], part["data"]) for part in found if part["present"]]
    clusters = {at for start, length, _ in there for at in range(start, start + length, 64 * KIB)}
    assert clusters == {0, *range(960 * KIB, 1408 * KIB, 64 * KIB), 4 << 20}
    assert sum(length for _, length, is_data in there if is_data) == 2 * 64 * KIB + 512
    before.write_bytes(b"\x55" * SIZE)
    qemu_img.lay_over(target, str(before), "raw")
    qemu_img.convert(target, "qcow2", str(tmp_path / "laid"), "raw")
    wanted = bytearray(before.read_bytes())
    for start, length, _ in there:
        wanted[start : start + length] = disk.read_bytes()[start : start + length]
    assert (tmp_path / "laid").read_bytes() == wanted
    assert disk.stat().st_size == SIZE


def test_nothing_is_copied_of_nothing(disk: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    qemu_img.create(target, "qcow2", SIZE)
    copy_on_read.copy(node(disk), target, [])
    assert not any(part["present"] for part in qemu_img.mapped(target))


def test_a_disk_that_is_not_there_and_one_that_cannot_be_read_are_said(disk: Path, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    qemu_img.create(target, "qcow2", SIZE)
    with pytest.raises(ToolFailed, match="No such file"):
        copy_on_read.copy(node(tmp_path / "other"), target, [(0, 512)])
    broken = {"driver": "blkdebug", "image": node(disk)["file"], "inject-error": [{"event": "read_aio"}]}
    failing = {"driver": "raw", "file": broken}
    with pytest.raises(ToolFailed, match="Input/output error"):
        copy_on_read.copy(failing, target, [(0, 512)])


def test_a_full_file_system_is_said(disk: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        target = str(small / "target")
        qemu_img.create(target, "qcow2", SIZE)
        with pytest.raises(NoSpace):
            copy_on_read.copy(node(disk), target, [(0, SIZE)])
        assert os.path.exists(target)
    finally:
        subprocess.run(["umount", str(small)], check=True)
