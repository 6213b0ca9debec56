# SPDX-License-Identifier: Apache-2.0
"""Which options overlays are to have, by the size of the disk: what `by-size` (plan/image/placement.py)
chooses, beside what it could.

On ext4 and XFS, each on a loop device past this machine's page cache. A round takes raw twice and each way
once, in another order each time; a ratio compares within its round. Overlays are made as the product makes
them, so each has its file's length set.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Sequence, Tuple

import block
from block import Disk, GiB, MiB, TiB
from commits import file_system
from figures import Figure, rounds_within
from overlay import FLUSHES, LARGE_SHARE, LOST, SCATTER, SMALL, WINDOW, WORKLOADS, settle

from semishared.config import Config
from semishared.plan.image import placement
from semishared.tools import qemu_img

DEVICE = 8 * GiB
MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "XFS": ["mkfs.xfs", "-q"],
}
AHEAD = WINDOW + 64 * MiB
"""Bytes at the beginning of an overlay's file: all that a run writes, and its tables, come to lie there."""


class Way(NamedTuple):
    """How an overlay is made and opened."""

    options: str
    is_ahead: bool = False
    """The first AHEAD bytes of its file are allocated on the host before the guest comes."""
    detect_zeroes: str = "off"


class Kind(NamedTuple):
    """A kind of disk: its size, the range that is written to (0: all of it), the ways that it could be
    made.
    """

    size: int
    window: int
    ways: Sequence[str]
    seconds: int


SUB = "extended_l2=on,cluster_size="
WAYS: Dict[str, Way] = {
    "64k, no subclusters": Way("cluster_size=64k"),
    "64k": Way(f"{SUB}64k"),
    "128k": Way(f"{SUB}128k"),
    "256k": Way(f"{SUB}256k"),
    "512k": Way(f"{SUB}512k"),
    "1M": Way(f"{SUB}1M"),
    "2M": Way(f"{SUB}2M"),
    "128k, metadata": Way(f"{SUB}128k,preallocation=metadata"),
    "128k, ahead": Way(f"{SUB}128k", True),
    "128k, detect_zeroes": Way(f"{SUB}128k", False, "unmap"),
}
"""`extended_l2` (subclusters) but for the first."""
LARGER = ("128k", "256k", "512k", "1M", "2M")
KINDS: Dict[str, Kind] = {
    "2 GiB": Kind(SMALL, WINDOW, tuple(name for name in WAYS if name not in LARGER[1:]), 85),
    "500 GiB, 640 MiB of it used": Kind(500 * GiB, WINDOW, LARGER[:2], 45),
    "500 GiB": Kind(500 * GiB, 0, LARGER[:3], 20),
    "2 TiB": Kind(2 * TiB, 0, LARGER, 20),
}
"""The small one is full of data, and raw is a file whose every block was written before; the others are
sparse, and so is raw.
"""
WANTED = {"4k first write": 0.95, "64k first write": 0.95, "4k rewrite": 1.0, "4k read": 0.98}
READ = ("randread", *WORKLOADS["4k rewrite"][1:])
"""What was written just now, in the same order."""
EXPECTED: Dict[str, Tuple[float, float]] = {
    "64k, no subclusters": (0.5, 0.9),
    "64k": (0.9, 0.9),
    "128k": (0.93, 0.91),
    "256k": (0.85, 0.92),
    "512k": (0.75, 0.92),
    "1M": (0.65, 0.92),
    "2M": (0.5, 0.92),
    "128k, metadata": (1.04, 0.54),
    "128k, ahead": (0.97, 1.0),
    "128k, detect_zeroes": (0.9, 0.85),
}
"""Of first writes of 4 and 64 KiB, near to where the guest wrote before: what a quiet machine had, else what
should follow from it.
"""

Samples = Dict[Tuple[str, str], List[float]]


def in_force(size: int) -> str:
    """Return by which of the ways a disk of that size is made."""
    options = placement.overlay_options(Config().overlays_options, size)
    return next(name for name, way in WAYS.items() if way == Way(options))


def _made(path: Path, base: Path, way: Way) -> Disk:
    qemu_img.create_overlay(str(path), str(base), "raw", 0, way.options)
    if way.is_ahead:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, AHEAD)
    settle(path)
    return Disk("d", path, str(base), detect_zeroes=way.detect_zeroes)


def _raw(path: Path, base: Path, kind: Kind) -> Disk:
    if kind.size == SMALL:
        return Disk("d", base)
    block.sparse(path, kind.size)
    settle(path)
    return Disk("d", path)


def _round(folder: Path, base: Path, kind: Kind, number: int, samples: Samples) -> None:
    """Measure raw and each way once; files are removed at the end: trimming would disturb the next one."""
    order = ["raw", *kind.ways]
    random.Random(number).shuffle(order)
    order.append("raw")
    raws: Dict[str, List[float]] = defaultdict(list)
    made: List[Path] = []
    for name in order:
        for workloads in (("4k first write", "4k rewrite", "4k read"), ("64k first write",)):
            made.append(folder / f"disk-{len(made)}")
            disk = _raw(made[-1], base, kind) if name == "raw" else _made(made[-1], base, WAYS[name])
            for workload in workloads:
                rw, size, count = WORKLOADS.get(workload, READ)
                count //= 1 if kind.window else LARGE_SHARE
                with block.exported(folder, [disk]) as address:
                    flush = count // FLUSHES if rw != "randread" else 0
                    rate = block.fio(
                        address["d"], rw, size, count=count, seed=number + 1, flush=flush, window=kind.window
                    )
                (raws[workload] if name == "raw" else samples[name, workload]).append(rate)
    for workload, values in raws.items():
        samples["raw", workload].append(sum(values) / len(values))
    for path in made:
        path.unlink(missing_ok=True)
    settle(folder)


def choice(quick: bool) -> List[Figure]:
    """Measure all kinds of disks on both file systems."""
    return list(_all(quick))


def _all(quick: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="bench-choice-", dir="/var/tmp") as name:
        for system, make in MAKE.items():
            with file_system(Path(name), make, DEVICE) as (folder, _):
                base = folder / "base"
                for what, kind in KINDS.items():
                    print(f"  {what}, {system}", flush=True)
                    block.fill(base, kind.size) if kind.size == SMALL else block.sparse(base, kind.size)
                    samples: Samples = defaultdict(list)
                    for number in rounds_within(kind.seconds, 1 if quick else 24):
                        _round(folder, base, kind, number, samples)
                    yield from _figures(what, system, kind, samples)
                    base.unlink()


def _figures(what: str, system: str, kind: Kind, samples: Samples) -> Iterator[Figure]:
    now = in_force(kind.size)
    for name in kind.ways:
        for workload, wanted in WANTED.items():
            expected = {"4k first write": EXPECTED[name][0], "64k first write": EXPECTED[name][1]}.get(
                workload, 1.0
            )
            yield Figure(
                f"choice/{what}/{system}/{name}/{workload}",
                f"{workload}, a disk of {what} on {system}, clusters {name}",
                "IOPS",
                samples[name, workload],
                "raw",
                samples["raw", workload],
                expected=expected if kind.window else 0.1,
                because="copy on write, tables, growth of the file",
                interval=True,
                budget=("ratio", ">=", wanted) if name == now and kind.window else None,
                budget_from="overlay I/O",
                if_missed=LOST if "first" in workload else SCATTER,
            )
