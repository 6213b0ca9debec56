# SPDX-License-Identifier: Apache-2.0
"""[backup] rate for a VM that is off: each way in which a disk is copied keeps to it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Optional

from semishared.disk import backup, epochs
from semishared.model import steps as s
from semishared.tools import block_sums, copy_on_read, qemu_img
from tools.world import MiB, World, qemu_io

RATE = 8 * MiB
CHANGED_MIB = 12
LEAST_S = CHANGED_MIB * MiB / RATE / 2
"""Half of what it takes: a limit counts what has been copied before it waits."""


def test_what_changed_is_read_at_its_rate(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(CHANGED_MIB * MiB))
    qemu_img.create(str(target), "qcow2", CHANGED_MIB * MiB)
    node = {"driver": "raw", "file": {"driver": "file", "filename": str(source)}}
    began = time.monotonic()
    copy_on_read.copy(node, str(target), [(0, CHANGED_MIB * MiB)], rate=RATE)
    assert time.monotonic() - began > LEAST_S
    assert target.stat().st_size > CHANGED_MIB * MiB
    began = time.monotonic()
    block_sums.take(str(source), "raw", str(tmp_path / "sums"), rate=RATE)
    assert time.monotonic() - began > LEAST_S


def test_copies_of_a_vm_that_is_off_go_at_their_rate(world: World) -> None:
    layered, raw = world.disk(5, 0), world.disk(5, 1)
    paths = {
        "qcow2": world.clone(world.image(size=17 * MiB), layered),
        "raw": world.link(world.image("own", size=17 * MiB), raw),
    }
    directory = Path(layered.vm_dir, "backup")
    ways: dict[str, tuple[Optional[int], str]] = {
        "a full backup": (None, "0"),
        "the first of a chain": (-1, "0"),
        "what changed": (0, "0"),
        "whole": (1, "1"),
    }
    for number, (way, (since, disk)) in enumerate(ways.items()):
        for format, path in paths.items():
            qemu_io(path, format, f"write -P {number + 1} 4M {CHANGED_MIB}M")
        step = s.BackUp(5, layered.vm_dir, str(directory), (disk,), "", "NONE", "<VM/>", rate=RATE)
        chained = step._replace(since=since, chain=1 if since is not None and since >= 0 else -1)
        began = time.monotonic()
        backup.back_up(chained, epochs.arrived(-1, [step], {}), None)
        assert time.monotonic() - began > LEAST_S, way
        copies = [path for path in directory.iterdir() if path.name.startswith("disk.")]
        assert sum(path.stat().st_size for path in copies) >= CHANGED_MIB * MiB, way
