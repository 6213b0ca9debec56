# SPDX-License-Identifier: Apache-2.0
"""How fast a diff comes into its image, and how many bytes that costs the store: against `qemu-img commit` of the same diff.

    PYTHONPATH=tests:lib bench/commits.py [MIB ...]     (root: file systems of its own, in TMPDIR; a Ceph cluster)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from semishared.model.owner import Owner
from semishared.store.diffs import Diff
from semishared.tools import extents, qemu_img
from store.benches import DirBench, RbdBench
from store.cases import Bench, MiB, of, ref
from store.committing import commit

IMAGE = 2048 * MiB
PATTERNS = ("in large pieces", "scattered 4 KiB")


@contextmanager
def file_system(top: Path, make: List[str], size: int) -> Iterator[Tuple[Path, str]]:
    """Yield a directory on a file system of its own, and the name of its device."""
    file, where = top / "device", top / "mounted"
    with open(file, "wb") as made:
        made.truncate(size)
    where.mkdir()
    subprocess.run([*make, file], check=True)
    device = subprocess.run(["losetup", "--find", "--show", file], check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["mount", device, where], check=True)
    try:
        yield where, os.path.basename(device)
    finally:
        subprocess.run(["umount", where], check=True)
        subprocess.run(["losetup", "-d", device], check=True)
        file.unlink()
        where.rmdir()


def sectors(device: str) -> int:
    """Return how many bytes a block device has been given to write."""
    os.sync()
    return 512 * int(Path(f"/sys/block/{device}/stat").read_text().split()[6]) if device else 0


def diff_of(top: Path, dirty: int, pattern: str) -> Tuple[str, str, str]:
    """Make a base, its manifest, and a layer over it with `dirty` bytes."""
    base, layer, manifest = str(top / "base"), str(top / "layer"), str(top / "manifest")
    with open(base, "wb") as made:
        made.truncate(IMAGE)
        for at in range(0, IMAGE, 64 * MiB):
            made.seek(at)
            made.write(os.urandom(MiB))
    Path(manifest).write_bytes(extents.copy(base, None, "raw", "bench").text())
    qemu_img.create_overlay(layer, base, "raw", 0, "extended_l2=on,cluster_size=128k")
    if pattern == PATTERNS[0]:
        commands = [f"write -P {1 + at % 250} {at * MiB} 1M" for at in range(dirty // MiB)]
    else:
        step = IMAGE // max(dirty // 4096, 1) // 4096 * 4096
        commands = [f"write -P {1 + at % 250} {at * step} 4k" for at in range(dirty // 4096)]
    subprocess.run(["qemu-io", "-f", "qcow2", layer], input="\n".join(commands).encode(), check=True, stdout=subprocess.DEVNULL)
    return base, layer, manifest


def measured(bench: Bench, device: str, top: Path, dirty: int, pattern: str) -> Dict[str, Any]:
    """Commit one diff twice: by `qemu-img commit` into a copy of the image, and as we do."""
    base, layer, manifest = diff_of(top, dirty, pattern)
    images, known = [], extents.copy(base, None, "raw", "bench").generation
    for number in (7, 8):
        made = ref(bench, number)
        with open(base, "rb") as file:
            of(bench).receive(made, IMAGE, extents.data(file.fileno(), IMAGE), lambda: known)
        images.append(made)
    plain, ours = images
    of(bench).begin_session(plain)
    below = plain.source if device else qemu_img.rbd_name(plain.source, plain.access.user, plain.access.conf)
    qemu_img.lay_over(layer, below, "raw")
    argv = ["qemu-img", "commit", "-q", "-d", "-t", "none" if device else "writeback", "-f", "qcow2", layer]
    before, began = sectors(device), time.monotonic()
    subprocess.run(argv, check=True)
    plain_s, plain_bytes = time.monotonic() - began, sectors(device) - before
    owner = Owner(23, 1, 5, known, "h1", bench.access.cloud)
    of(bench).claim(ours, owner)
    before, began = sectors(device), time.monotonic()
    own = os.times()
    done = commit(ours, owner, Diff((layer,), base, "raw", manifest))
    cpu_s = sum(os.times()[:4]) - sum(own[:4])
    ours_s, ours_bytes = time.monotonic() - began, sectors(device) - before
    for made in images:
        of(bench).remove(made)
    allocated = os.stat(layer).st_blocks * 512
    os.unlink(layer)
    return {
        "pattern": pattern, "dirty_mib": dirty // MiB, "how": done.how, "allocated": allocated,
        "sent": done.written, "device_bytes": ours_bytes, "plain_device_bytes": plain_bytes, "hashed": done.hashed,
        "seconds": round(ours_s, 3), "cpu_seconds": round(cpu_s, 3), "plain_seconds": round(plain_s, 3),
        "hash_seconds": round(done.waited, 3), "rate_ratio": round(plain_s / (ours_s - done.waited), 2),
        "bytes_ratio": round(done.written / (allocated or 1), 2),
    }  # fmt: skip


def all_of(bench: Bench, device: str, top: Path, sizes: List[int]) -> Iterator[Dict[str, Any]]:
    """Measure all sizes and patterns on one store."""
    for size in sizes:
        for pattern in PATTERNS if size else PATTERNS[:1]:
            yield measured(bench, device, top, size * MiB, pattern)


def main() -> None:
    """Print a line for each."""
    sizes = [int(word) for word in sys.argv[1:]] or [0, 64, 512]
    for name, make in (("reflink", ["mkfs.xfs", "-q"]), ("journal", ["mkfs.ext4", "-q", "-O", "^metadata_csum"])):
        top = Path(tempfile.mkdtemp(prefix="bench-"))
        with file_system(top, make, 6 << 30) as (where, device):
            for row in all_of(DirBench(where), device, top, sizes):
                print(name, row, flush=True)
        shutil.rmtree(top)
    from tools.ceph_cluster import LocalCluster
    from tools.ceph_site import Site

    top = Path(tempfile.mkdtemp(prefix="ceph-", dir="/var/tmp"))
    cluster = LocalCluster(top / "c", 10)
    try:
        site = Site(cluster.conf)
        site.command("osd set-require-min-compat-client", version="mimic")
        for row in all_of(RbdBench(site), "", top, sizes):
            print("rbd", row, flush=True)
        site.close()
    finally:
        cluster.end()
        shutil.rmtree(top)


if __name__ == "__main__":
    main()
