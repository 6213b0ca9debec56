# SPDX-License-Identifier: Apache-2.0
"""What a guest loses while its host works for others: staging, scrub, full copies, commit and backup, at
their default limits: none.

Two devices, one in a file on the other: a control group holds the lower one to so many bytes a second, the
upper one, where guests and bases lie, has a queue that knows classes of I/O (bfq). So who stands back does
where it matters: before a device that has no more to give.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Tuple

import block
import devices
from figures import Figure, rounds_within
from throttle import Device, MiB, Throttle

from semishared.model import steps as s
from semishared.model.base.steps import VerifyBase
from semishared.model.disk import commit_steps as c
from tools.world import OVERLAY_OPTIONS, World

RATE, OPERATIONS = 200 * MiB, 20000
"""Of the device, read and as much written: half of what a SATA SSD gives."""
LOWER, UPPER = 2560, 2048
"""MiB of the devices."""
SIZE = 160 * MiB
"""What is worked on: that alone takes the device 0.8 s, and twice that if it has to share."""
PAIRS, WINDOW, TRIALS = 20, 0.6, 3
LONG_S = 30.0
"""For which a guest keeps its disk busy while it is measured what our own work gets: what stands back gets
its part at the latest then.
"""
SCHEDULERS = {
    "bfq": (2.0, "it waits for the guest's next request before it serves who is idle"),
    "mq-deadline": (40.0, "it serves who is idle whenever the guest has no request waiting"),
}
"""Of the device, each with what is expected, in MiB/s, and why."""
SEEN = 0.8
"""What a guest has at most beside somebody who does not stand back: else nothing could be seen here."""
EXPECTED = 0.98
READS, WRITES = "reads", "writes"
WORKS: Dict[str, Tuple[str, str]] = {
    "staging": (WRITES, "a base being made of an image of the store"),
    "copy": (READS, "a full copy being made of a base"),
    "scrub": (READS, "a base being compared with its manifest"),
    "commit": (READS, "a disk being committed to its image"),
    "backup": (READS, "a disk being copied for a backup"),
}
"""Each with what its guest does: that of which the work does most."""


class Site:
    """A host on the device, a guest's disk beside it, and a store elsewhere."""

    def __init__(self, top: Path, device: Path, queue: Path) -> None:
        self.world, self._guest, self.queue = World(device / "host"), device / "guest.img", queue
        away = top / "store"
        away.mkdir()
        subprocess.run(["mount", "--bind", away, self.world.store], check=True)
        block.fill(self._guest, devices.IMAGE)
        block.fill(self.world.store / "image", SIZE)
        self.image = s.ImageRef(100, 1, "raw", str(self.world.store / "image"))
        self.world.clone(self.image, self.world.disk(4))
        self.disk = self._copied(5)

    def end(self) -> None:
        """Let go of the store."""
        subprocess.run(["umount", self.world.store], check=True)

    def guest(self, what: str) -> float:
        """Return the MiB per second that a guest gets which reads, or writes, as fast as it can."""
        disk = str(self._guest)
        return devices.read([], WINDOW, [disk])[0] if what == WRITES else devices.read([disk], WINDOW)[0]

    def _base(self) -> Path:
        (base,) = (self.world.root / "bases").glob("100-1-*")
        return base

    def _copied(self, vm: int) -> s.DiskRef:
        disk = self.world.disk(vm)
        self.world.on(s.PrepareVm(vm, disk.vm_dir), s.CopyImage(disk, self.image, 0))
        return disk

    # -- each prepares a work, and returns what does it --------------------------------------------------

    def staging(self) -> Callable[[], object]:
        for base in (self.world.root / "bases").glob("100-2-*"):
            shutil.rmtree(base)
        path = self.world.store / "other"
        block.fill(path, SIZE)
        return lambda: self.world.on(s.StageBase(str(self.world.root), s.ImageRef(100, 2, "raw", str(path))))

    def copy(self) -> Callable[[], object]:
        shutil.rmtree(self.world.disk(7).vm_dir, ignore_errors=True)
        _forget(self._base() / "image")
        return lambda: self._copied(7)

    def scrub(self) -> Callable[[], object]:
        return lambda: self.world.on(VerifyBase(str(self.world.root), self._base().name, 0))

    def commit(self) -> Callable[[], object]:
        path, disk = self.world.store / "persistent", self.world.disk(6)
        block.sparse(path, SIZE)
        image = s.ImageRef(100, 3, "raw", str(path))
        shutil.rmtree(disk.vm_dir, ignore_errors=True)
        attach = (s.PrepareVm(6, disk.vm_dir), c.CreateDiff(disk, image, 0, OVERLAY_OPTIONS))
        self.world.on(s.StageBase(str(self.world.root), image), *attach)
        layer = os.path.realpath(disk.path)
        words = [
            word for at in range(0, SIZE // MiB, 16) for word in ("-c", f"write -P {1 + at % 250} {at}M 16M")
        ]
        subprocess.run(
            ["qemu-io", "-f", "qcow2", *words, "-c", "flush", layer], check=True, stdout=subprocess.DEVNULL
        )
        _forget(Path(layer))
        return lambda: self.world.on(c.FinishDisk(disk))

    def backup(self) -> Callable[[], object]:
        directory = f"{self.disk.vm_dir}/backup"
        shutil.rmtree(directory, ignore_errors=True)
        _forget(Path(os.path.realpath(self.disk.path)))
        return lambda: self.world.on(
            s.BackUp(5, self.disk.vm_dir, directory, (str(self.disk.disk),), "", "NONE", "<VM/>")
        )

    def share(self, scheduler: str) -> float:
        """Return the MiB per second that a full copy gets beside a guest that reads all the time."""
        self.schedule(scheduler)
        work, made, disk = self.copy(), Path(self.world.disk(7).vm_dir), str(self._guest)
        thread = threading.Thread(target=work)
        guest = threading.Thread(target=devices.read, args=([disk], LONG_S))
        guest.start()
        time.sleep(0.5)
        started, seconds, size = time.monotonic(), LONG_S, 0
        thread.start()
        while guest.is_alive():
            time.sleep(0.05)
            # What is there when the guest is still at it; who is done before it ends was quicker.
            now, size = time.monotonic() - started, max(size, _allocated(made))
            if not thread.is_alive() or now > LONG_S - 1:
                seconds = now
                break
        guest.join()
        thread.join()
        self.schedule("bfq")
        return size / seconds / MiB

    def schedule(self, scheduler: str) -> None:
        """Have the device's queue be another one."""
        self.queue.write_text(scheduler)

    def another(self, what: str) -> Callable[[], object]:
        """Prepare what another guest would do."""
        disk, seconds = self.disk.path, 3 * WINDOW
        return lambda: devices.read([], seconds, [disk]) if what == WRITES else devices.read([disk], seconds)


def _allocated(folder: Path) -> int:
    """Return the bytes that files below a folder take on the device."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += 512 * path.lstat().st_blocks
        except FileNotFoundError:
            pass  # it has got its name
    return found


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _site() -> Iterator[Site]:
    with ExitStack() as stack:
        top, throttle = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-guests-", dir="/var/tmp"))),
            Throttle(),
        )
        stack.enter_context(throttle)
        lower = Device(top, "lower", LOWER)
        stack.callback(lower.end)
        throttle.direct(lower, RATE, OPERATIONS)
        upper = Device(lower.mount, "upper", UPPER)
        stack.callback(upper.end)
        upper.past_the_cache()
        queue = Path(f"/sys/block/{os.path.basename(upper.loop)}/queue/scheduler")
        # A loop device that is let go is the next one's who wants one.
        stack.callback(queue.write_text, queue.read_text().partition("[")[2].partition("]")[0])
        queue.write_text("bfq")
        site = Site(top, upper.mount, queue)
        stack.callback(site.end)
        yield site


def guests(quick: bool) -> List[Figure]:
    """Have a guest at its disk beside each work, and alone, in an order that is drawn for each round."""
    beside: Dict[str, List[float]] = {name: [] for name in WORKS}
    alone: Dict[str, List[float]] = {READS: [], WRITES: []}
    with _site() as site:
        for what in (READS, WRITES):
            got = site.guest(what)
            if not 0.8 * RATE < got * MiB < 1.1 * RATE:
                raise RuntimeError(
                    f"a device of {RATE // MiB} MiB/s {what} {got:.0f}: its limit does not hold"
                )
            if _beside(site, what, site.another(what)) > SEEN * got:
                raise RuntimeError(
                    f"a guest that {what} loses nothing to another one: there is nothing to be seen"
                )
        own = {scheduler: [] if quick else [site.share(scheduler)] for scheduler in SCHEDULERS}
        for number in rounds_within(math.inf, 2 if quick else PAIRS):
            for name in random.Random(number).sample([*beside, *alone], len(beside) + len(alone)):
                if name in alone:
                    alone[name].append(site.guest(name))
                else:
                    beside[name].append(_busy(site, name))
    return [
        Figure(
            f"guests/{name}",
            f"a guest that {does} as much as the device does, beside {what}",
            "MiB/s",
            beside[name],
            "alone",
            alone[does],
            expected=EXPECTED,
            because="what is copied is read and written in the idle class of I/O",
            interval=True,
            pairs=PAIRS,
            budget=("ratio", ">=", 0.95),
            budget_from="guest I/O beside our own work",
        )
        for name, (does, what) in WORKS.items()
    ] + [
        Figure(
            f"guests/own/{scheduler}",
            f"what a full copy gets beside a guest that reads all the time, {scheduler}",
            "MiB/s",
            got,
            expected=SCHEDULERS[scheduler][0],
            because=SCHEDULERS[scheduler][1],
        )
        for scheduler, got in own.items()
        if got
    ]


class OverEarly(RuntimeError):
    """A work was done before its guest."""


def _busy(site: Site, name: str) -> float:
    """Return what a guest gets beside a work; once more, where that was over before its guest, and no more
    than a few times.
    """
    for left in range(TRIALS, 0, -1):
        try:
            return _beside(site, WORKS[name][0], getattr(site, name)())
        except OverEarly:
            if left == 1:
                raise
            print("    it was over before its guest: once more", flush=True)
    raise AssertionError


def _beside(site: Site, what: str, work: Callable[[], object]) -> float:
    """Return what a guest gets while something is done, which must last as long."""
    failed: List[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - raised below
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.15)  # until it is at work: a host side starts within that
    got = site.guest(what)
    was_over = not thread.is_alive()
    thread.join()
    if failed:
        raise RuntimeError(f"the work failed: {failed}")
    if was_over:
        raise OverEarly("the work did not last: it was over before its guest")
    return got
