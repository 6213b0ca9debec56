# SPDX-License-Identifier: Apache-2.0
"""What a guest notices while its own disk goes to another device of its host's pool, at a limited rate
(`semishared pool drain`).

In a lab, on devices that give so many bytes a second and no more, with a real guest that reads, or writes, as
much as it can; in turns with a time in which nothing moves. Only that disk is on the pool; the base of a disk
with layers is empty, so that what is moved is the guest's own.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Tuple

import block
from figures import Figure, rounds_within
from throttle import MiB, Throttle

from lab.cloud import STORE, Cloud
from lab.guest import LINUX
from pool.devices import Disk

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
DEVICES = {"/mnt/a": 320, "/mnt/b": 320}
FAST, OPERATIONS = 200 * MiB, 8000
"""Of each device, per second: as beside another's move (device/devices.py)."""
MEMORY = "/dev/shm"
"""Where their blocks are, so that only the limit makes them slow: below a file on this machine's disk a flush
takes what that takes.
"""
RATE = 10_000_000
OWN_KIB, LOOP_KIB = 12 << 10, 4 << 10
"""What the guest has written before, which it reads; and what it writes, behind that."""
SIZE_MIB = {"layers": 32, "raw": 32}
BUSY = 5000
"""Blocks of 64 KiB per second: more than it can."""
KINDS: Dict[str, Dict[str, Any]] = {"layers": {}, "raw": {"SEMISHARED_LOCAL": "copy"}}
"""A disk whose layers are copied beside QEMU, which mirrors a delta alone; and one that QEMU copies whole,
with the guest's writes.
"""
PAIRS = {"reads": 20, "writes": 2}
STILL_S, WRITES_S = 1.0, 22.0
"""How long is read while nothing moves; and how long writers may take."""
Samples = Dict[str, Tuple[List[float], List[float]]]


class Slow(Disk):
    """A device of a host that has all of its blocks, and is as slow as `Throttle` lets it be: only the limit
    makes it so.
    """

    def __init__(self, node: Any, path: str, mib: int, folder: Path) -> None:
        block.fill(folder / f"{node.name}{path.replace('/', '-')}", mib * MiB)
        super().__init__(node, path, mib, folder)

    @property
    def number(self) -> str:
        """Return what a control group knows it by."""
        found = os.stat(self.loop).st_rdev
        return f"{os.major(found)}:{os.minor(found)}"


class Rig:
    """One VM on h1; its second disk is on the pool, the one that it boots from is on the store."""

    def __init__(self, cloud: Cloud, kind: str) -> None:
        self.cloud, self.seconds = cloud, 0.0
        size = SIZE_MIB[kind] * MiB
        path = cloud.upload_file(f"{kind}.img")
        block.fill(path, MiB if kind == "layers" else size)
        os.truncate(path, size)
        cloud.give(path)
        data = cloud.oned.image_create(
            STORE, kind, path=f"/var/tmp/{path.name}", type="DATABLOCK", prefix="vd", attributes=KINDS[kind]
        )
        path.unlink()
        system = cloud.os_image(f"os-{kind}", system=LINUX, persistent=True)
        self.vm = cloud.deploy(kind, [{"IMAGE_ID": str(image)} for image in (system, data)])
        self.guest = cloud.guest(self.vm)
        self.guest.write("vdb", "own", 0, OWN_KIB)
        self.guest.write("vdb", "loop", OWN_KIB, LOOP_KIB)
        self.guest.sync()

    def _pool(self, *words: str) -> str:
        done = self.cloud.lab.fe.run([COMMAND, "pool", *words, "--json"], check=False, timeout=300)
        if done.returncode:
            raise RuntimeError(
                f"pool {' '.join(words)}: {done.stdout.decode()[-1000:]} {done.stderr.decode()[-1000:]}"
            )
        return done.stdout.decode()

    def _layers(self) -> Dict[str, List[str]]:
        """Return the directories on each device that have, or are about to have, the layers of its disk."""
        host = self.cloud.lab.node("h1")
        return {
            path: [str(found) for found in host.path(f"{path}/.semishared/layers").glob(f"{self.vm}-1-*")]
            for path in DEVICES
        }

    def _device(self) -> str:
        (found,) = [path for path, names in self._layers().items() if names]
        return found

    def window(self, what: str, *, moves: bool) -> Tuple[float, float]:
        """Let the guest read or write while its disk moves, or while nothing does; return how often a second,
        and its longest wait in ms.

        A move counts from when there is a directory for the layers on their new device until the command has
        ended.
        """
        guest, device = self.guest, self._device()
        if what == "reads":
            guest.loop_read("vdb", 0, OWN_KIB)
        else:
            guest.loop("vdb", "loop", OWN_KIB, LOOP_KIB, BUSY)
        time.sleep(0.5)
        if moves:
            rate = self._while_it_moves(device, what)
        else:
            before, began = guest.loop_stat("vdb")[what], time.monotonic()
            time.sleep(STILL_S if what == "reads" else self.seconds)
            rate = (guest.loop_stat("vdb")[what] - before) / (time.monotonic() - began)
        counts = guest.loop_stop("vdb")
        if counts["errors"] or counts["mismatches"]:
            raise RuntimeError(f"moves {moves}: {counts}")
        return rate, counts["maxgap_ms"]

    def _while_it_moves(self, device: str, what: str) -> float:
        (target,) = set(DEVICES) - {device}
        with ThreadPoolExecutor(1) as pool:
            command = pool.submit(self._pool, "drain", "h1", device, "--rate", str(RATE))
            while not self._layers()[target] and not command.done():
                time.sleep(0.01)
            before, began = self.guest.loop_stat("vdb")[what], time.monotonic()
            command.result()
            self.seconds = time.monotonic() - began
        rate = (self.guest.loop_stat("vdb")[what] - before) / (time.monotonic() - began)
        if self._device() != target:
            raise RuntimeError(f"the disk is on {self._device()}, and was to move to {target}")
        self._pool("add", "h1")  # the one that was emptied is one of the pool again
        return rate


def moved(quick: bool) -> List[Figure]:
    """Measure; `quick`: one pair of each kind."""
    found: List[Figure] = []
    # All of the lab is in the throttle's group, and so are its guests: whatever they do to these devices.
    with (
        Throttle() as throttle,
        Cloud.up(hosts=1) as cloud,
        tempfile.TemporaryDirectory(prefix="bench-moved-", dir=MEMORY) as top,
    ):
        (host,) = cloud.lab.hosts
        disks: List[Slow] = []
        try:
            for path, mib in DEVICES.items():
                disks.append(Slow(host, path, mib, Path(top)))
                throttle.direct(disks[-1], FAST, OPERATIONS)
            cloud.oned.host_update(cloud.oned.host("h1").id, {"SEMISHARED_POOL": " ".join(DEVICES)})
            cloud.lab.fe.run([COMMAND, "pool", "add", "h1"])
            for kind in KINDS:
                rig = Rig(cloud, kind)
                rig.window("reads", moves=True)  # the first one finds nothing prepared
                for what, pairs in PAIRS.items():
                    found += _figures(kind, what, *_pairs(rig, what, 1 if quick else pairs))
                rig.guest.check("vdb", "own", 0, OWN_KIB)
                cloud.delete_all()
        finally:
            cloud.delete_all()
            for disk in disks:
                disk.close()
    return found


def _pairs(rig: Rig, what: str, pairs: int) -> "Tuple[Samples, List[float]]":
    samples: Samples = {"rate": ([], []), "gap": ([], [])}
    seconds = []
    # Of readers there have to be as many pairs as the budget names.
    for number in rounds_within(WRITES_S if what == "writes" else math.inf, pairs):
        for moves in random.Random(number).sample((True, False), 2):
            for name, value in zip(samples, rig.window(what, moves=moves)):
                samples[name][not moves].append(value)
        seconds.append(rig.seconds)
    if what == "reads":
        limit = FAST / (256 << 10)
        still = sorted(samples["rate"][1])[len(seconds) // 2]
        if not 0.5 * limit < still < 1.2 * limit:
            raise RuntimeError(
                f"a guest reads {still:.0f} pieces a second of a device that is to give {limit:.0f}"
            )
    return samples, seconds


EXPECTED = {
    "layers/reads": (0.97, 1.5),
    "raw/reads": (0.95, 1.5),
    "layers/writes": (0.9, 3.0),
    "raw/writes": (0.8, 2.0),
}
"""Of the rate and of the longest wait, to those without a move."""
BECAUSE = {
    "layers/reads": "10 MB/s of 200 MiB/s are read beside it while layers are copied, nothing when they "
    "are read again",
    "raw/reads": "10 MB/s of 200 MiB/s are read beside it, until the guest has gone over",
    "layers/writes": "the guest stands still when it goes to a delta, and when it leaves it, which is "
    "mirrored as "
    "it is written",
    "raw/writes": "each write waits for both devices, one after the other; the guest stands still as often",
}
IF_MISSED = {
    "layers/reads": "what layers are copied at is taken from the device that the guest reads, and "
    "the command "
    "from its processor",
    "raw/reads": "4.8 % of the device are the move's by its rate alone: 0.2 % are left for the "
    "command and for "
    "the guest's standing still",
}
WHAT = {"layers": "layers are copied, a delta is mirrored", "raw": "a raw layer is copied whole"}
DOES = {
    "reads": "pieces of 256 KiB that a guest reads",
    "writes": "blocks of 64 KiB that a guest writes, and reads again",
}


def _figures(kind: str, what: str, samples: Samples, seconds: List[float]) -> List[Figure]:
    (rate, idle), (gap, still) = samples["rate"], samples["gap"]
    key = f"{kind}/{what}"
    how = f"while its disk moves at 10 MB/s ({WHAT[kind]})"
    found = [
        Figure(
            f"moved/{key}/rate",
            f"{DOES[what]} in a second, {how}",
            "1/s",
            rate,
            "nothing moves",
            idle,
            expected=EXPECTED[key][0],
            because=BECAUSE[key],
            interval=True,
            if_missed=IF_MISSED.get(key, ""),
            pairs=PAIRS[what] if what == "reads" else 0,
            budget=("ratio", ">=", 0.95) if what == "reads" else None,
            budget_from="loss of a reader's rate while rebalancing",
        ),
        Figure(
            f"moved/{key}/gap",
            f"longest wait of a guest that {what}, {how}",
            "ms",
            gap,
            "nothing moves",
            still,
            expected=EXPECTED[key][1],
            because=BECAUSE[key],
        ),
    ]
    if what == "reads":
        found.append(
            Figure(
                f"moved/{kind}/seconds",
                f"how long it moves ({WHAT[kind]})",
                "s",
                seconds,
                expected={"layers": 5.0, "raw": 5.0}[kind],
                because="16 MiB, copied and read again; or 32 MiB, copied; one second for the command",
            )
        )
    return found
