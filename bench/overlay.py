# SPDX-License-Identifier: Apache-2.0
"""Overlays against raw files, under qemu-storage-daemon and fio: which options, and what the chosen ones
cost.

A round measures raw and every variant once, each round in another order; a ratio compares only within its
round. "Raw" is the strictest there is: a file whose every block was written before, so that raw never
allocates. Sparse images (too large to be written in full) are compared with a sparse raw file, as a stock
full copy would be. Writes are a fixed number of random ones, none twice: a time limit would let slow variants
off the rest of the work.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import block
from block import Disk, GiB, KiB, MiB, TiB
from figures import Figure, rounds_within

from semishared.config import Config
from semishared.plan.image import placement
from semishared.tools import qemu_img

SMALL = 2 * GiB
WINDOW = 640 * MiB
"""The range that is written to, so that writes are dense although runs are short: many short pairs get even a
busy machine out of the ratios. 8192 writes of 4 KiB are 5 % of it, 1.6 for each cluster of 128 KiB; 1536 of
64 KiB are 15 %.
"""
LARGE = {"2 TiB, 640 MiB of it used": (2 * TiB, WINDOW), "500 GiB": (500 * GiB, 0), "2 TiB": (2 * TiB, 0)}
"""Virtual size, and the range that is written to (0: all of it, so that nearly every write needs another L2
table).
"""
CHOSEN = placement.overlay_options(Config().overlays_options, SMALL)
VARIANTS: Dict[str, str] = {
    "64k": "",
    "64k lazy_refcounts": "lazy_refcounts=on",
    "64k extended_l2": "extended_l2=on",
    "128k extended_l2": "extended_l2=on,cluster_size=128k",
    "256k extended_l2": "extended_l2=on,cluster_size=256k",
    "512k extended_l2": "extended_l2=on,cluster_size=512k",
    "1M extended_l2": "extended_l2=on,cluster_size=1M",
    "2M extended_l2": "extended_l2=on,cluster_size=2M",
    "128k extended_l2 prealloc": "extended_l2=on,cluster_size=128k,preallocation=metadata",
    "64k extended_l2 +size": "extended_l2=on",
    "128k extended_l2 +size": "extended_l2=on,cluster_size=128k",
    "256k extended_l2 +size": "extended_l2=on,cluster_size=256k",
}
"""`+size`: the new file's length is set to what it can grow to. No block is allocated, and no write extends
the file.
"""
CONTENDERS = (
    "64k",
    "128k extended_l2",
    "256k extended_l2",
    "128k extended_l2 +size",
    "256k extended_l2 +size",
)
"""What is also tried on large images."""

# Written before anything was measured here: a raw write is one I/O; an overlay's first 4 KiB write in a
# cluster without subclusters also reads and writes the rest of it (64 KiB), with subclusters of 4 KiB (128k /
# 32) it does not. Preallocated metadata save the allocation. 64 KiB writes fill their clusters and pay only
# for metadata.
EXPECTED: Dict[str, Tuple[float, float]] = {
    "64k": (0.5, 0.8),
    "64k lazy_refcounts": (0.5, 0.8),
    "64k extended_l2": (0.8, 0.75),
    "128k extended_l2": (0.85, 0.75),
    "256k extended_l2": (0.7, 0.8),
    "512k extended_l2": (0.65, 0.8),
    "1M extended_l2": (0.6, 0.85),
    "2M extended_l2": (0.55, 0.9),
    "128k extended_l2 prealloc": (0.95, 0.6),
    # These came last, after a trial had shown 0.8 to 0.9 and 0.9 to 1.3.
    "64k extended_l2 +size": (0.85, 0.9),
    "128k extended_l2 +size": (0.9, 1.0),
    "256k extended_l2 +size": (0.7, 1.0),
}
CPU = "copy on write moves the rest of the (sub)cluster; metadata"
LOST = (
    "what is written for the first time also changes the overlay's tables, an entry with its "
    "bitmap and a count of references, and has the "
    "host's file system find room; the raw file had all that before"
)
"""Where the rest of first writes goes."""
SCATTER = (
    "where this comes from was not found out: no table changes then, and ways that are the same "
    "for it (`choice`: 128 KiB clusters, with "
    "metadata and ahead) differ by as much among themselves"
)
"""Of rewrites and reads."""

WORKLOADS: Dict[str, Tuple[str, int, int]] = {
    "4k first write": ("randwrite", 4 * KiB, 8192),
    "4k rewrite": ("randwrite", 4 * KiB, 8192),
    "64k first write": ("randwrite", 64 * KiB, 1536),
}
LARGE_SHARE = 16
"""Fewer writes where nearly each needs another L2 table: they are slow there."""
FLUSHES = 4
"""Flushes per run of writes, as a guest's journal would send some."""

Samples = Dict[Tuple[str, str], List[float]]


def _create(path: Path, base: Path, name: str) -> float:
    seconds = block.create_overlay(path, base, VARIANTS[name])
    if name.endswith("+size"):
        size = base.stat().st_size
        os.truncate(path, size + size // 256 + 64 * MiB)
    return seconds


def settle(path: Path) -> None:
    """Bring a file or directory to the disk; not all there is: others write on this machine as well."""
    opened = os.open(path, os.O_RDONLY)
    os.fsync(opened)
    os.close(opened)


def _write(folder: Path, disk: Disk, workload: str, seed: int, share: int = 1, window: int = 0) -> float:
    rw, size, count = WORKLOADS[workload]
    count //= share
    with block.exported(folder, [disk]) as address:
        return block.fio(
            address[disk.name], rw, size, count=count, seed=seed, flush=count // FLUSHES, window=window
        )


def _round(
    folder: Path, base: Path, size: int, window: int, names: Sequence[str], number: int, samples: Samples
) -> None:
    """Measure raw and all variants once; files are removed only at the end, trimming would disturb the next
    one.

    With `size` the raw disk is a new sparse file; with 0 it is the base file itself, whose content nobody
    looks at.
    """
    share = 1 if window or not size else LARGE_SHARE
    order = ["raw", *names]
    random.Random(number).shuffle(order)
    # Raw is what all others are divided by: once more, and the mean of both.
    order.append("raw")
    raws: Dict[str, List[float]] = defaultdict(list)
    made: List[Path] = []
    for name in order:
        for kinds in (("4k first write", "4k rewrite"), ("64k first write",)):
            path = folder / f"disk-{len(made)}"
            made.append(path)
            disk = Disk("d", path, str(base))
            if name != "raw":
                _create(path, base, name)
            elif size:
                block.sparse(path, size)
                disk = Disk("d", path)
            else:
                disk = Disk("d", base)
            assert disk.path
            settle(disk.path)
            for workload in kinds:
                value = _write(folder, disk, workload, number + 1, share, window)
                (raws[workload] if name == "raw" else samples[name, workload]).append(value)
    for workload, values in raws.items():
        samples["raw", workload].append(sum(values) / len(values))
    for path in made:
        path.unlink(missing_ok=True)
    settle(folder)


def _reads(
    folder: Path, base: Path, names: Sequence[str], rounds: int, seconds: float, samples: Samples
) -> None:
    """Read the same base through fresh overlays and bare, all exported at once, in turns."""
    disks = [Disk("raw", base, writable=False)]
    for i, name in enumerate(names):
        path = folder / f"read-{i}.qcow2"
        if name in VARIANTS:
            _create(path, base, name)
        else:
            qemu_img.create_overlay(str(path), str(base), "raw", 0, name)
        disks.append(Disk(name, path, str(base)))
    with block.exported(folder, disks) as address:
        block.fio(address["raw"], "randread", 64 * KiB, seconds=1)
        for number in range(rounds):
            order = [disk.name for disk in disks]
            random.Random(number).shuffle(order)
            for name in order:
                value = block.fio(address[name], "randread", 4 * KiB, seconds=seconds, seed=number + 1)
                samples[name, "4k read"].append(value)
    for disk in disks[1:]:
        assert disk.path
        disk.path.unlink()


def _figures(group: str, where: str, names: Sequence[str], samples: Samples) -> List[Figure]:
    found = []
    for name in names:
        for workload in (*WORKLOADS, "4k read"):
            if (name, workload) not in samples:
                continue
            expected = {"4k first write": EXPECTED[name][0], "64k first write": EXPECTED[name][1]}.get(
                workload, 1.0
            )
            found.append(
                Figure(
                    f"{group}/{where}/{name}/{workload}",
                    f"{workload}, {where}, overlay {name}",
                    "IOPS",
                    samples[name, workload],
                    "raw",
                    samples["raw", workload],
                    expected=expected,
                    because=CPU,
                )
            )
    return found


def _creation(folder: Path, base: Path, where: str, size: int, rounds: int) -> List[Figure]:
    """Return what creating each kind of overlay over an image of `size` costs."""
    block.sparse(base, size)
    samples: Samples = defaultdict(list)
    for _ in range(rounds):
        for name in VARIANTS:
            path = folder / "created"
            samples[name, "create"].append(_create(path, base, name))
            samples[name, "allocated"].append(path.stat().st_blocks * 512 / KiB)
            path.unlink()
    found = []
    for name in VARIANTS:
        for key, unit, what in (
            ("create", "s", "creation"),
            ("allocated", "KiB", "size on disk after creation"),
        ):
            found.append(
                Figure(
                    f"overlay-create/{where}/{name}/{key}",
                    f"{what}, {where}, overlay {name}",
                    unit,
                    samples[name, key],
                    "64k" if name != "64k" else "",
                    samples["64k", key] if name != "64k" else [],
                    paired=False,
                )
            )
    return found


def options(quick: bool) -> List[Figure]:
    """Compare options of local overlays on an image of 2 GiB that is full of data."""
    with tempfile.TemporaryDirectory(prefix="semishared-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        base = folder / "base"
        block.fill(base, SMALL)
        samples: Samples = defaultdict(list)
        for number in rounds_within(170, 1 if quick else 6):
            _round(folder, base, 0, WINDOW, list(VARIANTS), number, samples)
        _reads(folder, base, list(VARIANTS), 2 if quick else 3, 0.3 if quick else 0.5, samples)
        return _figures("overlay-options", "2 GiB", list(VARIANTS), samples)


def creation(quick: bool) -> List[Figure]:
    """Measure what creating overlays of all variants costs, on images of any size."""
    found: List[Figure] = []
    with tempfile.TemporaryDirectory(prefix="semishared-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        for where, size in {
            "2 GiB": SMALL,
            "64 GiB": 64 * GiB,
            "500 GiB": 500 * GiB,
            "2 TiB": 2 * TiB,
        }.items():
            found += _creation(folder, folder / "base", where, size, 1 if quick else 3)
    return found


def large(quick: bool) -> List[Figure]:
    """Compare the contenders on large sparse images."""
    found: List[Figure] = []
    with tempfile.TemporaryDirectory(prefix="semishared-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        base = folder / "base"
        for where, (size, window) in LARGE.items():
            print(f"  {where}", flush=True)
            block.sparse(base, size)
            samples: Samples = defaultdict(list)
            for number in rounds_within(30, 1 if quick else 4):
                _round(folder, base, size, window, CONTENDERS, number, samples)
            found += _figures("overlay-options", where, CONTENDERS, samples)
    return found


def io(quick: bool) -> List[Figure]:
    """Compare the chosen overlay options with raw, in many pairs: the budget of overlay I/O."""
    pairs = 2 if quick else 40
    samples: Samples = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="semishared-bench-", dir="/var/tmp") as name:
        folder = Path(name)
        base = folder / "base"
        block.fill(base, SMALL)
        for number in rounds_within(45, pairs):
            made: List[Path] = []
            for kinds in (("4k first write", "4k rewrite"), ("64k first write",)):
                path = folder / f"disk-{len(made)}"
                made.append(path)
                qemu_img.create_overlay(str(path), str(base), "raw", 0, CHOSEN)
                disks = [("overlay", Disk("d", path, str(base))), ("raw", Disk("d", base))]
                settle(path)
                for workload in kinds:
                    # Forth, then back: what drifts within a round does not favour one side.
                    for which, disk in disks if number % 2 else reversed(disks):
                        samples[which, workload].append(
                            _write(folder, disk, workload, number + 1, window=WINDOW)
                        )
            for path in made:
                path.unlink()
            settle(folder)
        reads: Samples = defaultdict(list)
        _reads(folder, base, [CHOSEN], 3 if quick else 16, 0.3, reads)
        samples["raw", "4k read"], samples["overlay", "4k read"] = (
            reads["raw", "4k read"],
            reads[CHOSEN, "4k read"],
        )
    budgets = {
        "4k first write": (0.85, 0.95),
        "64k first write": (0.75, 0.95),
        "4k read": (1.0, 0.98),
        "4k rewrite": (1.0, 1.0),
    }
    return [
        Figure(
            f"overlay-io/{workload}",
            f"{workload} of an overlay ({CHOSEN})",
            "IOPS",
            samples["overlay", workload],
            "raw file, fully written",
            samples["raw", workload],
            expected=expected,
            because=CPU,
            interval=True,
            budget=("ratio", ">=", limit),
            budget_from="overlay I/O",
            if_missed=LOST if "first" in workload else SCATTER,
        )
        for workload, (expected, limit) in budgets.items()
    ]
