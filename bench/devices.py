# SPDX-License-Identifier: Apache-2.0
"""What a pool of devices gives to those who read its disks: all that its devices have, also while something
is moved between them.

The pool, its disks and the moves are those of the real host side (tests/tools/world.py) on file systems of
their own. Readers are fio, past the page cache as a guest with cache=none, on the paths that guests open.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Tuple

import block
from block import Disk, KiB
from figures import Figure, rounds_within
from throttle import Device, MiB, Throttle, sectors_read

from semishared.config import Config
from semishared.model import steps as s
from semishared.model.device import steps as device_steps
from semishared.wire.session import Session
from tools.world import World

READERS = 8
IMAGE = 64 * MiB
SIZES = {1: (1024,), 2: (1024, 512), 4: (1024, 1024, 512, 512)}
"""MiB of the devices of each pool; a device gives as many bytes a second as it is large."""
RATE = 40 * MiB
"""Of a device of 1 GiB, per second."""
FAST = 200 * MiB
"""Of a device beside a move: half of what a SATA SSD gives. A reader that takes all of it is the one who
loses most.
"""
OPERATIONS = 8000
"""Per second, of that device."""
MOVED, LIMIT = 16 * MiB, 10_000_000
"""What is moved in a round, and at how many bytes a second: 1.7 s for the copy, and as much to read it
again.
"""
PAIRS, WINDOW = 20, 2.5
DRAWS = 20
"""How often a pool is made anew, with other names: of few files a device may get none, by the order that
spreads them.
"""


class Site:
    """A host with a pool of devices, and an image of IMAGE bytes of data in its store."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="bench-pool-", dir="/var/tmp"))
        self.devices: List[Device] = []
        try:
            for number, mib in enumerate(sizes):
                self.devices.append(Device(self.top, f"device{number}", mib))
            self.world = World(self.top)
            self.world.on(
                device_steps.SetDevices(
                    str(self.world.root), tuple(str(device.mount) for device in self.devices)
                )
            )
            self.image = self.new_image(7, IMAGE)
        except BaseException:
            self.end()
            raise

    def new_image(self, number: int, size: int) -> s.ImageRef:
        """Put an image of `size` bytes, all of them data, into the store."""
        path = self.world.store / f"image{number}"
        block.fill(path, size)
        return s.ImageRef(100, number, "raw", str(path))

    def disk(self, vm: int, image: "s.ImageRef | None" = None) -> "tuple[str, Device]":
        """Make VM `vm` with a full copy of the image as its disk; return its path, and the device on which
        the pool has put it.
        """
        disk = self.world.disk(vm)
        self.world.on(s.PrepareVm(vm, disk.vm_dir), s.CopyImage(disk, image or self.image, 0))
        return disk.path, self.under(disk.path)

    def under(self, path: str) -> Device:
        """Return the device on which a path ends."""
        where = os.path.realpath(path)
        return next(device for device in self.devices if where.startswith(f"{device.mount}/"))

    def end(self) -> None:
        """Take all of it away."""
        for device in self.devices:
            device.end()
        shutil.rmtree(self.top)


@contextmanager
def site(sizes: Sequence[int]) -> Iterator[Site]:
    """Yield such a host."""
    made = Site(sizes)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def spread(sizes: Sequence[int], count: int) -> "Iterator[tuple[Site, Dict[str, Device]]]":
    """Yield such a host, and so many disks with the device of each: at least one on every device."""
    for _ in range(DRAWS):
        with site(sizes) as made:
            disks = dict(made.disk(10 + number) for number in range(count))
            if {device.mount for device in disks.values()} == {device.mount for device in made.devices}:
                yield made, disks
                return
    raise RuntimeError("a device of the pool has taken no disk")


def read(paths: Sequence[str], seconds: float, written: Sequence[str] = ()) -> List[float]:
    """Return the MiB per second that a reader of each of these files gets, all at once: in pieces of 1 MiB,
    over and over.

    And then those of who writes to each of the others meanwhile.
    """
    argv = [
        "fio",
        "--output-format=json",
        "--bs=1M",
        "--direct=1",
        "--ioengine=psync",
        "--thread",
        "--time_based=1",
        f"--runtime={int(seconds * 1000)}ms",
        "--ramp_time=200ms",
    ]
    for rw, names in (("read", paths), ("write", written)):
        for number, path in enumerate(names):
            argv += [f"--name={rw}{number}", f"--rw={rw}", f"--filename={path}", f"--size={IMAGE}"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=120)
    text = done.stdout.decode()
    if done.returncode:
        raise RuntimeError(f"fio: {done.stderr.decode()[-500:]} {text[-500:]}")
    return [
        (job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / MiB
        for job in json.loads(text[text.index("{") :])["jobs"]
    ]


# -- readers on several devices ---------------------------------------------------------------------


def devices(quick: bool) -> List[Figure]:
    """Let 8 disks of a pool be read at once, and each device alone."""
    rounds, seconds = (1, 1.0) if quick else (4, 1.2)
    found = []
    for count, sizes in SIZES.items():
        with Throttle() as throttle, spread(sizes, READERS) as (made, disks):
            for device, mib in zip(made.devices, sizes):
                throttle.reads(device, RATE * mib // 1024)
            together, alone = [], []
            for _ in rounds_within(40, rounds):
                each = [
                    read([next(path for path in disks if disks[path] is device)], seconds)[0]
                    for device in made.devices
                ]
                limit = RATE * sum(sizes) / 1024 / MiB
                if not 0.5 * limit < sum(each) < 1.1 * limit:
                    raise RuntimeError(
                        f"devices that are to give {limit} MiB/s give {each}: their limits do not hold"
                    )
                alone.append(sum(each))
                together.append(sum(read(list(disks), seconds)))
        what = f"{READERS} disks of a pool of {count} {'device' if count == 1 else 'devices'}, read at once"
        found.append(
            Figure(
                f"devices/{count}",
                what,
                "MiB/s",
                together,
                "the devices, one after the other",
                alone,
                expected=1.0,
                because="files are spread by size and fill, and opened as they are",
                budget=("ratio", ">=", 0.95),
                budget_from="the sum of the devices",
            )
        )
    return found


# -- one disk beside a file ---------------------------------------------------------------------------


LARGE = 256 * MiB
WORKLOADS: Dict[str, Tuple[str, int, int]] = {
    "sequential write": ("write", MiB, 192),
    "sequential read": ("read", MiB, 192),
    "random write": ("randwrite", 4 * KiB, 8000),
    "random read": ("randread", 4 * KiB, 8000),
}
PAPER = {"sequential write": 0.6, "sequential read": 0.91, "random write": 1.0, "random read": 1.0}
"""What a pool of one device gave of the plain device in the paper on Share for hosts (its figures 3, 4 and
5).
"""


def plain(quick: bool) -> List[Figure]:
    """Compare a disk on a pool with a file on the same device, which is the slowest part of both: a layer's
    further reads would be seen.
    """
    rates: Dict[str, Tuple[List[float], List[float]]] = {name: ([], []) for name in WORKLOADS}
    with Throttle() as throttle, site((1024,)) as made:
        path, device = made.disk(10, made.new_image(8, LARGE))
        beside = device.mount / "plain"
        block.fill(beside, LARGE)
        throttle.direct(device, FAST, OPERATIONS)
        both = {"pool": Disk("pool", Path(path)), "plain": Disk("plain", beside)}
        with block.exported(made.top, list(both.values())) as address:
            for number in rounds_within(65, 1 if quick else 12):
                for name, (rw, size, count) in WORKLOADS.items():
                    order = list(both)
                    random.Random(f"{number}/{name}").shuffle(order)
                    for way in order:
                        rate = block.fio(address[way], rw, size, count=count, seed=number, window=LARGE)
                        limit = min(FAST / size, OPERATIONS)
                        if not 0.3 * limit < rate < 1.2 * limit:
                            raise RuntimeError(
                                f"{name}: {rate:.0f} operations per second of a device that is to "
                                f"give {limit:.0f}"
                            )
                        rates[name][way == "plain"].append(rate * size / MiB)
    return [
        Figure(
            f"plain/{name}",
            f"{name}, a disk on a pool of one device",
            "MiB/s",
            ours,
            "a file on the same device",
            file,
            expected=1.0,
            because=f"a link is followed when the disk is opened, and never again; the paper's driver: "
            f"{PAPER[name]}",
            interval=True,
            budget=("ratio", ">=", 0.97),
            budget_from="of the plain device",
        )
        for name, (ours, file) in rates.items()
    ]


# -- readers beside a move ----------------------------------------------------------------------------


class Mover:
    """A disk that goes from one of two devices to the other, and back the next time, through the step that
    `rebalance` sends.
    """

    def __init__(self, made: Site) -> None:
        self._site = made
        self.path, _ = made.disk(20, made.new_image(9, MOVED))
        self._error = ""

    def _row(self) -> Dict[str, object]:
        (answer,) = self._site.world.on(device_steps.ListHeld(str(self._site.world.root)))
        assert isinstance(answer, dict)
        (row,) = [row for row in answer["items"] if row.get("vm") == 20]
        return {
            **row,
            "to": next(device["uuid"] for device in answer["devices"] if device["uuid"] != row["device"]),
        }

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Begin a move; yield when it copies, and wait for its end: it must have gone on until then."""
        row, source = self._row(), self._site.under(self.path)
        target = next(device for device in self._site.devices if device is not source)
        with open(self.path, "rb") as file:
            # What is to be moved was not read just now, as a rule.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        step = device_steps.MoveLayers(
            s.DiskRef(20, 1, str(row["vm_dir"])), "", str(row["name"]), str(row["to"]), LIMIT
        )
        thread = threading.Thread(target=self._run, args=(step,))
        thread.start()
        try:
            while thread.is_alive() and not any(target.mount.glob(".semishared/layers/20-*")):
                time.sleep(0.005)
            yield
            was_over = not thread.is_alive()
        finally:
            thread.join()
        if self._error or was_over or self._site.under(self.path) is not target:
            raise RuntimeError(f"the move did not last: {self._error or 'it was over before its reader'}")

    def _run(self, step: device_steps.MoveLayers) -> None:
        with Session("localhost", "pool", Config()) as session:
            answer = session.ask(step, answer=lambda question: {"why": ""})
        self._error = answer.error

    def read_meanwhile(self) -> float:
        """Return how often a move reads what it moves from the devices, so that readers do lose something to
        it.
        """
        before = [sectors_read(device) for device in self._site.devices]
        with self.moving():
            pass
        return sum(sectors_read(device) - was for device, was in zip(self._site.devices, before)) / MOVED


def beside(quick: bool) -> List[Figure]:
    """Read a disk of each of two devices while another is moved between them at 10 MB/s, and without."""
    rates: Dict[str, Tuple[List[float], List[float]]] = {"from": ([], []), "to": ([], [])}
    with Throttle() as throttle, spread((1024, 1024), 2) as (made, disks):
        for device in made.devices:
            throttle.reads(device, FAST)
        mover = Mover(made)
        if mover.read_meanwhile() < 1.9:
            raise RuntimeError("a move reads nothing from its devices: there is nothing to be seen")
        for number in rounds_within(math.inf, 2 if quick else PAIRS):
            source = made.under(mover.path)
            for is_moving in random.Random(number).sample((True, False), 2):
                if is_moving:
                    with mover.moving():
                        got = read(list(disks), WINDOW)
                else:
                    got = read(list(disks), WINDOW)
                for rate, device in zip(got, disks.values()):
                    rates["from" if device is source else "to"][not is_moving].append(rate)
    return [
        Figure(
            f"beside/{key}",
            f"a reader that takes all of the device {key} which a disk is moved at 10 MB/s",
            "MiB/s",
            moving,
            "without a move",
            idle,
            expected=0.975,
            because=f"it shares {FAST // MiB} MiB/s with 10 MB/s in half of the time",
            interval=True,
            pairs=PAIRS,
            budget=("ratio", ">=", 0.95),
            budget_from="loss of a reader beside a rebalance",
        )
        for key, (moving, idle) in rates.items()
    ]
