# SPDX-License-Identifier: Apache-2.0
"""What eight guests read at boot from one base, replayed at once: the base on disk, and a copy of it in
memory (SEMISHARED_BASES = ram).

Each guest is one process with QEMU's block layer (qemu-io), its overlay on the disk, the base below it opened
as libvirt opens both. OpenNebula ships cache = "none" (vmm_exec_kvm.conf): QEMU reads the base past the page
cache, which then serves no guest, whatever it holds. That row decides. The others say what the page cache
would give where an administrator has chosen another mode: with all of the base in it, and with nothing.

The trace is made, not recorded: a loader that reads kernel and initramfs in order, then what a system reads
at its start, small and scattered. All guests read the same, as guests of one image do.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Dict, List, Sequence, Tuple

import block
import memory
from block import KiB
from figures import Figure, rounds_within
from throttle import MiB, Throttle

from faults.rig import own_mounts

GUESTS = 8
BASE = 512 * MiB
LOADER, LOADER_PIECE = 40 * MiB, 64 * KiB
SYSTEM, SYSTEM_PIECES, SYSTEM_AT_ONCE = 88 * MiB, (4, 4, 4, 8, 16, 16, 32, 64, 128), 4
"""Bytes, KiB of a read, each as often as it is here, and how many reads are under way at once."""
SATA, OPERATIONS = 480 * MiB, 75000
"""What a SATA SSD gives per second."""
DISKS: Dict[str, str] = {"ssd": "a SATA SSD", "here": "the disk of this machine"}
MODES: Dict[str, str] = {
    "none": "cache=none, as OpenNebula ships it",
    "warm": "through the page cache, which has all of it",
    "cold": "through the page cache, which has nothing of it",
}
FIRST = ("chrt", "--fifo", "1")
"""Guests come before all else on this machine: beside other work, what is measured would be their turns on
its processors, for both bases the same.
"""
PAUSE = 1.0
"""Seconds after each boot, for that other work."""
ROUNDS = 7
WORTH = 1.3
"""Times that guests must gain, or copies in memory are not worth their room."""


def trace() -> List[Sequence[Tuple[int, int]]]:
    """Return what one guest reads: groups of reads that are under way at once, of offset and size."""
    draw = random.Random("boot")
    found: List[Sequence[Tuple[int, int]]] = [((at, LOADER_PIECE),) for at in range(0, LOADER, LOADER_PIECE)]
    left = SYSTEM
    while left > 0:
        sizes = [draw.choice(SYSTEM_PIECES) * KiB for _ in range(SYSTEM_AT_ONCE)]
        found.append([(draw.randrange(LOADER, BASE - size, 4 * KiB), size) for size in sizes])
        left -= sum(sizes)
    return found


def _words(reads: Sequence[Sequence[Tuple[int, int]]]) -> bytes:
    lines = []
    for group in reads:
        if len(group) == 1:
            lines += [f"read -q {at} {size}" for at, size in group]
        else:
            lines += [*(f"aio_read -q {at} {size}" for at, size in group), "aio_flush"]
    return "\n".join([*lines, "quit", ""]).encode()


class Host:
    """A host with a base of real files on this machine's disk, a copy of it in memory, and an overlay for
    each guest.
    """

    def __init__(self) -> None:
        self.top = Path(tempfile.mkdtemp(prefix="bench-hot-", dir="/var/tmp"))
        self.ram = self.top / "memory"
        found = os.stat(self.top).st_dev
        device = Path(f"/sys/dev/block/{os.major(found)}:{os.minor(found)}").resolve()
        if (device / "partition").exists():
            device = device.parent
        self.number = (device / "dev").read_text().strip()

    def fill(self) -> None:
        """Make base, copy and overlays."""
        self.base = self.top / "base"
        self.bases = {"disk": self.base, "memory": self.ram / "base"}
        with self.base.open("wb") as file:
            tar = subprocess.Popen(["tar", "-C", "/usr", "-cf", "-", "lib", "bin"], stdout=subprocess.PIPE)
            assert tar.stdout
            while file.tell() < BASE and (data := tar.stdout.read(min(MiB, BASE - file.tell()))):
                file.write(data)
            tar.stdout.close()
            tar.wait()
            if file.tell() < BASE:
                raise RuntimeError(f"/usr has less than {BASE >> 20} MiB")
            os.fsync(file.fileno())
        shutil.copy(self.base, self.bases["memory"])
        os.sync()
        for guest in range(GUESTS):
            block.create_overlay(self.top / f"overlay{guest}", self.base, memory.OPTIONS)

    def boot(self, where: str, mode: str, words: bytes) -> float:
        """Let all guests read at once; return the seconds until the last one is done."""
        if mode == "warm":
            self.bases[where].read_bytes()
        elif mode == "cold":
            _forget(self.bases[where])
        guests = [self._guest(guest, where, mode) for guest in range(GUESTS)]
        for process in guests:  # each has opened its disk when it has read the first block of it
            assert process.stdin and process.stdout
            process.stdin.write(b"read 500M 4k\n")
            process.stdin.flush()
            while b"ops/sec" not in process.stdout.readline():
                if process.poll() is not None:
                    raise RuntimeError(f"a guest ended with {process.returncode}")
        began = time.monotonic()
        for process in guests:
            assert process.stdin
            process.stdin.write(words)
            process.stdin.close()
        codes = [process.wait() for process in guests]
        took = time.monotonic() - began
        if any(codes):
            raise RuntimeError(f"guests ended with {codes}")
        time.sleep(PAUSE)
        return took

    def _guest(self, guest: int, where: str, mode: str) -> "subprocess.Popen[bytes]":
        direct = mode == "none"

        def file(path: Path) -> Dict[str, object]:
            return {
                "driver": "file",
                "filename": str(path),
                "aio": "io_uring" if direct else "threads",
                "cache": {"direct": direct, "no-flush": False},
            }

        below = {"driver": "raw", "read-only": True, "file": {**file(self.bases[where]), "read-only": True}}
        disk = {
            "driver": "qcow2",
            "file": file(self.top / f"overlay{guest}"),
            "backing": below,
            "cache": {"direct": direct, "no-flush": False},
        }
        return subprocess.Popen(
            [*FIRST, "stdbuf", "-oL", "qemu-io", f"json:{json.dumps(disk)}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def hot(quick: bool) -> List[Figure]:
    """Measure every disk, mode and base in turns."""
    seconds: Dict[Tuple[str, str, str], List[float]] = defaultdict(list)
    reads = trace()
    words, size = _words(reads), sum(length for group in reads for _, length in group)
    own_mounts()  # another lab that comes up meanwhile would have the memory mounted, and keep it
    made = Host()
    try:
        with memory._memory(made.ram), Throttle() as throttle:
            made.fill()
            for number in rounds_within(240, 1 if quick else ROUNDS):
                for disk in DISKS:
                    limits = (SATA, OPERATIONS) if disk == "ssd" else (0, 0)
                    throttle.direct(made, *limits)
                    ways = [(mode, where) for mode in MODES for where in made.bases]
                    for mode, where in random.Random(f"{number}/{disk}").sample(ways, len(ways)):
                        seconds[disk, mode, where].append(made.boot(where, mode, words))
                throttle.direct(made, 0, 0)
    finally:
        shutil.rmtree(made.top)
    return [
        Figure(
            f"hot/{disk}/{mode}",
            f"{GUESTS} guests read {size >> 20} MiB each of one base at boot, base in memory; {how}; disk: "
            f"{what}",
            "MiB/s",
            [GUESTS * size / MiB / took for took in seconds[disk, mode, "memory"]],
            "base on disk",
            [GUESTS * size / MiB / took for took in seconds[disk, mode, "disk"]],
            expected=1.0 if mode == "warm" else 2.0,
            because="the page cache is memory, too"
            if mode == "warm"
            else "memory is faster than the disk, and eight guests take turns there",
            budget=("ratio", ">=", WORTH) if mode == "none" else None,
            budget_from="or copies in memory go",
        )
        for disk, what in DISKS.items()
        for mode, how in MODES.items()
    ]
