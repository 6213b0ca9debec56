# SPDX-License-Identifier: Apache-2.0
"""What a guest notices while its own disk goes to another device of its host's pool, at a limited rate (`semishared pool drain`).

In a lab, with a real guest that writes and reads as many blocks as it can; in turns with as long a time in which nothing moves. Only
that disk is on the pool; the base of a disk with layers is empty, so that what is moved is the guest's own.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Tuple

import block
from figures import Figure, rounds_within

from lab.cloud import STORE, Cloud
from pool.devices import Disk

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
DEVICES = {"/mnt/a": 512, "/mnt/b": 512}
RATE = "10M"
SIZE_MIB, OWN_KIB, LOOP_KIB = 64, 16 << 10, 16 << 10
"""Of the disk, of what its guest has written before, and of what it writes meanwhile."""
BUSY = 2000
"""Blocks of 64 KiB per second: more than it can."""
KINDS = {"layers": {}, "raw": {"SEMISHARED_LOCAL": "copy"}}
"""A disk whose delta QEMU mirrors, what is below being copied beside it; and one that QEMU copies whole, with the guest's writes."""
PAIRS = 8
Samples = Dict[str, Tuple[List[float], List[float]]]


class Rig:
    """One VM on h1; its second disk is on the pool, the one that it boots from is on the store."""

    def __init__(self, cloud: Cloud, kind: str) -> None:
        self.cloud, self.seconds = cloud, 0.0
        path = cloud.upload_file(f"{kind}.img")
        block.fill(path, (1 if kind == "layers" else SIZE_MIB) << 20)
        with open(path, "r+b") as file:
            file.truncate(SIZE_MIB << 20)
        cloud.give(path)
        data = cloud.oned.image_create(STORE, kind, path=f"/var/tmp/{path.name}", type="DATABLOCK", prefix="vd", attributes=KINDS[kind])
        path.unlink()
        system = cloud.os_image(f"os-{kind}", persistent=True)
        self.vm = cloud.deploy(kind, [{"IMAGE_ID": str(image)} for image in (system, data)])
        self.guest = cloud.guest(self.vm)
        self.guest.write("vdb", "own", 2 * LOOP_KIB, OWN_KIB)
        self.guest.sync()

    def _said(self, *words: str) -> "list[Dict[str, object]]":
        done = self.cloud.lab.fe.run([COMMAND, *words, "--json"], timeout=300)
        text = done.stdout.decode()
        return [json.loads(line) for line in text.splitlines()] if words[1] == "drain" else [json.loads(text)]

    def _device(self) -> str:
        (found,) = self._said("status", f"vm:{self.vm}")
        return next(str(row["device"]) for row in found["disks"] if row["disk"] == 1)  # type: ignore[attr-defined]

    def window(self, *, moves: bool) -> Tuple[float, float]:
        """Let the guest write while its disk moves, or for as long as that took; return its writes per second, and its longest wait."""
        device = self._device()
        self.guest.loop("vdb", "loop", 0, LOOP_KIB, BUSY)
        time.sleep(1)
        before, started = self.guest.loop_stat("vdb")["writes"], time.monotonic()
        if moves:
            *_, summary = self._said("pool", "drain", "h1", device, "--rate", RATE)
            self.seconds = time.monotonic() - started
            if not summary["empty"]:
                raise RuntimeError(f"the disk did not move: {summary}")
        else:
            time.sleep(self.seconds)
        rate = (self.guest.loop_stat("vdb")["writes"] - before) / (time.monotonic() - started)
        counts = self.guest.loop_stop("vdb")
        if counts["errors"] or counts["mismatches"]:
            raise RuntimeError(f"moves {moves}: {counts}")
        if moves and self._device() == device:
            raise RuntimeError(f"the disk is on {device} as before")
        self._said("pool", "add", "h1")
        return rate, counts["maxgap_ms"]


def moved(quick: bool) -> List[Figure]:
    """Measure; `quick`: one pair of each kind."""
    found: List[Figure] = []
    with Cloud.up(hosts=1) as cloud, tempfile.TemporaryDirectory(prefix="bench-moved-", dir="/var/tmp") as top:
        (host,) = cloud.lab.hosts
        disks = []
        try:
            for path, mib in DEVICES.items():
                disks.append(Disk(host, path, mib, Path(top)))
            cloud.oned.host_update(cloud.oned.host("h1").id, {"SEMISHARED_POOL": " ".join(DEVICES)})
            cloud.lab.fe.run([COMMAND, "pool", "add", "h1"])
            for kind in KINDS:
                found += _figures(kind, *_pairs(Rig(cloud, kind), quick))
                cloud.delete_all()
        finally:
            cloud.delete_all()
            for disk in disks:
                disk.close()
    return found


def _pairs(rig: Rig, quick: bool) -> "Tuple[Samples, List[float]]":
    samples: Samples = {"rate": ([], []), "gap": ([], [])}
    seconds = []
    rig.window(moves=True)  # how long it takes is known from now on
    for number in rounds_within(170, 1 if quick else PAIRS):
        for moves in random.Random(number).sample((True, False), 2):
            for name, value in zip(samples, rig.window(moves=moves)):
                samples[name][not moves].append(value)
        seconds.append(rig.seconds)
    return samples, seconds


EXPECTED = {"layers": (0.9, 3.0), "raw": (0.8, 2.0)}
"""Of the rate and of the longest wait, to those without a move; said before the first measurement."""
BECAUSE = {
    "layers": "the guest stands still twice, when it goes to a delta and when it leaves it; its delta is mirrored as it is written",
    "raw": "each write waits for both devices; the guest stands still once",
}
WHAT = {"layers": "layers are copied, a delta is mirrored", "raw": "a raw layer is copied whole"}


def _figures(kind: str, samples: Samples, seconds: List[float]) -> List[Figure]:
    (rate, idle), (gap, still) = samples["rate"], samples["gap"]
    how = f"while its disk moves at {RATE}iB/s ({WHAT[kind]})"
    return [
        Figure(
            f"moved/{kind}/rate", f"blocks of 64 KiB that a guest writes in a second, {how}", "1/s", rate, "nothing moves", idle,
            expected=EXPECTED[kind][0], because=BECAUSE[kind], interval=True,
        ),
        Figure(
            f"moved/{kind}/gap", f"longest wait of its writes, {how}", "ms", gap, "nothing moves", still,
            expected=EXPECTED[kind][1], because=BECAUSE[kind],
        ),
        Figure(
            f"moved/{kind}/seconds", f"how long that takes, {how}", "s", seconds,
            expected=10.0, because="32 MiB, copied and read again; or 64 MiB, copied; three seconds for the command",
        ),
    ]  # fmt: skip
