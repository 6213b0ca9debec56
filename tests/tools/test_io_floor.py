# SPDX-License-Identifier: Apache-2.0
"""The idle class of I/O on a disk whose scheduler gives it nothing beside others: a copy leaves it, and goes
on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

from semishared.tools.io_floor import LEAST, LOOK_S, WINDOW_S, Look, is_starved
from tools.slow_disk import SlowDisk
from tools.world import MiB

LIB = Path(__file__).resolve().parents[2] / "lib"
GUESTS = 64
"""Writes of a guest that the disk has at once. It does no more than 20 of them in a burst (a tenth of its
rate, as QEMU's throttle has it), so that at no moment it has none of them, however busy this machine is.
"""
# No libaio: how many of its requests there may be at once is a limit of the whole machine (fs.aio-max-nr),
# which others have used up.
ALWAYS = [
    "nice",
    "-n",
    "-20",
    "fio",
    "--name=guest",
    "--rw=randwrite",
    "--bs=4k",
    "--direct=1",
    "--ioengine=psync",
    "--thread",
]
ALWAYS += ["--time_based", "--runtime=120", f"--numjobs={GUESTS}"]
CHUNKS = 12
COPY = """if True:
    import mmap, os, sys
    from semishared.tools.rate_limit import standing_back
    from semishared.tools.run import run, work
    kind, path, chunks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with standing_back():
        if kind == "program":
            work(["dd", "if=/dev/zero", f"of={path}", "bs=256K", f"count={chunks}", "oflag=direct", "conv=notrunc", "status=none"])
        else:
            fd, content = os.open(path, os.O_WRONLY | os.O_DIRECT), mmap.mmap(-1, 256 << 10)
            for number in range(chunks):
                os.pwrite(fd, content, number * len(content))
        print(run(["ionice"]))
    print(run(["ionice"]))
"""  # noqa: E501


def looks(rate: float, waits: float, seconds: float = WINDOW_S) -> list[Look]:
    """Return what is seen of a copy of that rate, as the kernel counts it, which waits for its device that
    part of the time.
    """
    count = int(seconds / LOOK_S) + 1
    return [
        Look(n * LOOK_S, int(rate * n * LOOK_S), int(n * waits) != int((n - 1) * waits)) for n in range(count)
    ]


@pytest.mark.parametrize(
    ("seen", "answer"),
    [
        (looks(25 << 10, 1), True),
        (looks(LEAST * 0.9, 0.9), True),
        (looks(LEAST * 1.1, 1), False),
        (looks(0, 1, WINDOW_S / 2), False),  # it may come yet
        (looks(0, 0.3), False),  # it waits for a peer, or is held to a rate
        ([], False),
    ],
)
def test_starved_is_who_waits_for_the_device_and_gets_next_to_nothing(seen: list[Look], answer: bool) -> None:
    assert is_starved(seen) == answer


def waiting(disk: SlowDisk) -> int:
    """Return how many requests a disk has and has not done (Documentation/block/stat.rst)."""
    return int(Path(f"/sys/block/{os.path.basename(disk.device)}/stat").read_text().split()[8])


@pytest.fixture()
def disk(tmp_path: Path) -> Iterator[SlowDisk]:
    """A slow disk with a guest that always writes to it, both in the usual class; its scheduler is Debian's
    for what is no NVMe.
    """
    disk, guest = SlowDisk(tmp_path, 256 * MiB, {"x-iops-total": 200}), None
    try:
        scheduler = Path(f"/sys/block/{os.path.basename(disk.device)}/queue/scheduler")
        if "mq-deadline" not in scheduler.read_text():
            pytest.skip("this kernel has no mq-deadline")
        scheduler.write_text("mq-deadline")
        for name, size in (("guest", 4096 * GUESTS), ("ours", CHUNKS * MiB // 4)):
            (disk.mount / name).write_bytes(bytes(size))
        os.sync()
        argv = [*ALWAYS, f"--filename={disk.mount}/guest", f"--size={4096 * GUESTS}", "--output=/dev/null"]
        guest = subprocess.Popen(argv)
        deadline = time.monotonic() + 30
        while waiting(disk) < GUESTS * 3 // 4:
            assert guest.poll() is None and time.monotonic() < deadline, (
                f"no guest that writes: {guest.poll()}"
            )
            time.sleep(0.1)
        yield disk
    finally:
        if guest:
            guest.terminate()
            guest.wait()
        disk.end()


@pytest.mark.parametrize("kind", ["program", "itself"])
def test_a_copy_ends_beside_a_guest_that_always_writes(disk: SlowDisk, kind: str) -> None:
    """In the idle class each of its requests takes ten seconds there, two minutes in all."""
    argv = [sys.executable, "-c", COPY, kind, str(disk.mount / "ours"), str(CHUNKS)]
    env = {**os.environ, "PYTHONPATH": str(LIB)}
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=env, timeout=90)
    then, afterwards = (line for line in done.stdout.splitlines() if line)
    assert then == "best-effort: prio 7", "it was never starved: this has proved nothing"
    assert afterwards == "none: prio 0"
