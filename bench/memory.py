# SPDX-License-Identifier: Apache-2.0
"""What a disk in memory (SEMISHARED_CLASS = ram) gives: against a raw file in the same memory, and against
the same disk on a device.

The pool and its disks are made by the real host side; its memory is zram with XFS, as semishared-ram makes
it, but for the dm-crypt between the two, without which direct I/O may be mixed up: it is measured what it
takes, not what it holds (brd where there is no zram).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List, Tuple

import block
from block import Disk, KiB
from devices import Site
from figures import Figure, rounds_within
from throttle import MiB

from semishared.model import steps as s
from semishared.model.device import steps as device_steps

IMAGE, MEMORY = 1024 * MiB, 2560 * MiB
PART = 64 * MiB
"""Each round has one of its own for random and one for sequential operations: no block of it was written
before.
"""
ROUNDS = IMAGE // PART // 2
RANDOM, SEQUENTIAL = 8000, 256
WORKLOADS: Dict[str, Tuple[str, int, int, int]] = {
    "4k first write": ("randwrite", 4 * KiB, PART // 4 // KiB, 0),
    "4k rewrite": ("randwrite", 4 * KiB, RANDOM, 0),
    "4k read": ("randread", 4 * KiB, RANDOM, 0),
    "first write in pieces of 1 MiB": ("write", MiB, PART // MiB, 1),
    "rewrite in pieces of 1 MiB": ("write", MiB, SEQUENTIAL, 1),
    "read in pieces of 1 MiB": ("read", MiB, SEQUENTIAL, 1),
}
"""Kind, size, number, and which of the round's parts."""
EXPECTED = {
    "4k first write": 0.6,
    "4k rewrite": 0.95,
    "4k read": 0.97,
    "first write in pieces of 1 MiB": 0.85,
    "rewrite in pieces of 1 MiB": 1.0,
    "read in pieces of 1 MiB": 1.0,
}
OPTIONS = "extended_l2=on,cluster_size=128k"


@contextmanager
def _memory(mount: Path) -> Iterator[None]:
    """Mount an XFS in memory."""
    mount.mkdir()
    subprocess.run(["modprobe", "-q", "zram"], check=False)
    is_zram = Path("/sys/class/zram-control").exists()
    if is_zram:
        argv = ["zramctl", "--find", "--size", str(MEMORY)]
        device = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    else:
        subprocess.run(["modprobe", "brd", "rd_nr=1", f"rd_size={MEMORY >> 10}"], check=True)
        device = "/dev/ram0"
    try:
        subprocess.run(["mkfs.xfs", "-q", "-f", device], check=True)
        subprocess.run(
            ["mount", "-t", "xfs", "-o", "noatime,nosuid,nodev,discard", device, mount], check=True
        )
        yield
    finally:
        subprocess.run(["umount", mount], check=False)
        argv = ["zramctl", "--reset", device] if is_zram else ["rmmod", "brd"]
        # Whoever makes a mount namespace meanwhile has it mounted for a moment, too.
        for left in range(100, 0, -1):
            if subprocess.run(argv, check=left == 1, capture_output=True).returncode == 0:
                break
            time.sleep(0.2)


class Host(Site):
    """A host whose pool is a device and memory, with the same disk on each."""

    def __init__(self) -> None:
        super().__init__((3072,))
        try:
            self.devices[0].past_the_cache()
        except BaseException:
            self.end()
            raise
        self.ram = self.top / "memory"

    def fill(self) -> Dict[str, Disk]:
        """Make the disks: in memory, a raw file in the same memory, on the device."""
        self.world.on(
            device_steps.SetDevices(str(self.world.root), (str(self.devices[0].mount), f"{self.ram}=ram"))
        )
        image = self.new_image(8, IMAGE)
        found = {"raw": Disk("raw", self.ram / "raw")}
        block.fill(self.ram / "raw", IMAGE)
        for vm, (name, classes) in enumerate((("ram", ("ram",)), ("disk", ("fast",)))):
            disk = self.world.disk(10 + vm)
            steps = (
                device_steps.PlaceLayers(disk, classes, IMAGE, IMAGE),
                *self.world.cloning(image, disk),
                device_steps.NoteClasses(disk, classes),
            )
            self.world.on(s.PrepareVm(disk.vm, disk.vm_dir), *steps)
            if os.path.realpath(disk.path).startswith(f"{self.ram}/") != (name == "ram"):
                raise RuntimeError(f"the disk of class {name} is at {os.path.realpath(disk.path)}")
            base = os.path.realpath(next((self.world.root / "bases").glob("*/image")))
            found[name] = Disk(name, Path(os.path.realpath(disk.path)), base=base)
        return found


def memory(quick: bool) -> List[Figure]:
    """Measure all three in turns."""
    rates: Dict[Tuple[str, str], List[float]] = defaultdict(list)
    made = Host()
    try:
        with _memory(made.ram):
            disks = made.fill()
            with block.exported(made.top, list(disks.values())) as address:
                for number in rounds_within(60, 1 if quick else ROUNDS):
                    for name, (rw, size, count, part) in WORKLOADS.items():
                        for way in random.Random(f"{number}/{name}").sample(sorted(disks), len(disks)):
                            rate = block.fio(
                                address[way],
                                rw,
                                size,
                                count=count,
                                seed=number,
                                window=PART,
                                at=(2 * number + part) * PART,
                            )
                            rates[way, name].append(rate * size / MiB)
    finally:
        shutil.rmtree(made.ram, ignore_errors=True)
        made.end()
    return [figure for name in WORKLOADS for figure in _figures(name, rates)]


def _figures(name: str, rates: Dict[Tuple[str, str], List[float]]) -> List[Figure]:
    return [
        Figure(
            f"memory/{name}/raw",
            f"{name}, a disk of class ram",
            "MiB/s",
            rates["ram", name],
            "a raw file in the same memory",
            rates["raw", name],
            expected=EXPECTED[name],
            because="what is new costs an overlay its tables; what is there, a look at them",
            budget=("ratio", ">=", 0.9),
            budget_from="of a raw file on the same zram",
            if_missed="an overlay's tables, which are written with what is new" if "first" in name else "",
        ),
        Figure(
            f"memory/{name}/disk",
            f"{name}, a disk of class ram",
            "MiB/s",
            rates["ram", name],
            "the same on the disk of this machine",
            rates["disk", name],
            expected=3.0,
            because="4.7 was found for 4 KiB writes, raw",
        ),
    ]
