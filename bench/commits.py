# SPDX-License-Identifier: Apache-2.0
"""How fast a diff comes into its image, and how many bytes that costs the store: against `qemu-img commit` of
the same diff.

On file systems of its own, one that has reflinks and one that has none, and a Ceph cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from figures import Figure, rounds_within

from semishared.model.refs import Owner
from semishared.store.commit.claims import Diff
from semishared.tools import extents, qemu_img
from store.benches import DirBench, RbdBench
from store.cases import Bench, MiB, of, ref
from store.committing import commit

IMAGE = 2048 * MiB
PATTERNS = ("in large pieces", "scattered 4 KiB")
MAKE = {"reflink": ["mkfs.xfs", "-q"], "journal": ["mkfs.ext4", "-q", "-O", "^metadata_csum"]}


@contextmanager
def file_system(top: Path, make: List[str], size: int) -> Iterator[Tuple[Path, str]]:
    """Yield a directory on a file system of its own, and the name of its device.

    It is as fast as the disk below it, not as this machine's page cache; and all of it was written before, or
    whoever comes first to a block would wait until the file system below has found one.
    """
    file, where = top / "device", top / "mounted"
    subprocess.run(
        ["dd", "if=/dev/zero", f"of={file}", "bs=16M", f"count={size >> 24}", "oflag=direct", "status=none"],
        check=True,
    )
    where.mkdir()
    subprocess.run([*make, file], check=True)
    argv = ["losetup", "--direct-io=on", "--find", "--show", str(file)]
    device = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
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
    subprocess.run(
        ["qemu-io", "-t", "writeback", "-f", "qcow2", layer],
        input="\n".join(commands).encode(),
        check=True,
        stdout=subprocess.DEVNULL,
    )
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
        "pattern": pattern,
        "dirty_mib": dirty // MiB,
        "how": done.how,
        "allocated": allocated,
        "sent": done.written,
        "device_bytes": ours_bytes,
        "plain_device_bytes": plain_bytes,
        "hashed": done.hashed,
        "seconds": round(ours_s, 3),
        "cpu_seconds": round(cpu_s, 3),
        "plain_seconds": round(plain_s, 3),
        "hash_seconds": round(done.waited, 3),
        "rate_ratio": round(plain_s / (ours_s - done.waited), 2),
        "bytes_ratio": round(done.written / (allocated or 1), 2),
    }


def _scattered(layer: str, dirty: int, first: int) -> None:
    """Write 4 KiB in each 16 KiB of a layer, until that is `dirty` bytes."""
    commands = (f"write -P {1 + (first + at) % 250} {at * 16}k 4k" for at in range(dirty // 4096))
    subprocess.run(
        ["qemu-io", "-t", "writeback", "-f", "qcow2", layer],
        input="\n".join(commands).encode(),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def rate_of_two(bench: Bench, top: Path, dirty: int) -> float:
    """Return the bytes per second of two commits in a row, each of `dirty` bytes scattered over an image of
    four times that.
    """
    base, size, seconds = str(top / "base"), 4 * dirty, 0.0
    with open(base, "wb") as made:
        made.truncate(size)
    manifest, image = str(top / "manifest"), ref(bench, 9)
    found = extents.copy(base, None, "raw", "bench")
    Path(manifest).write_bytes(found.text())
    of(bench).receive(image, size, iter(()), lambda: found.generation)
    owner, layers = (
        Owner(23, 1, 5, found.generation, "h1", bench.access.cloud),
        [str(top / "first"), str(top / "second")],
    )
    of(bench).claim(image, owner)
    for number, layer in enumerate(layers):
        below, format = (layers[0], "qcow2") if number else (base, "raw")
        qemu_img.create_overlay(layer, below, format, 0, "extended_l2=on,cluster_size=128k")
        _scattered(layer, dirty, number)
        began = time.monotonic()
        commit(image, owner, Diff(tuple(layers[: number + 1]), base, "raw", manifest, str(top / "last")))
        seconds += time.monotonic() - began
    of(bench).remove(image)
    for path in (base, manifest, str(top / "last"), *layers):
        os.unlink(path)
    return 2 * dirty / seconds


def scattered(little: int, much: int) -> Figure:
    """Compare the rate of two commits of much with that of little: nothing that a commit does may grow faster
    than what it brings.
    """
    top = Path(tempfile.mkdtemp(prefix="bench-", dir="/var/tmp"))
    # The image, the journal of the second commit, and what the file system has for itself.
    with file_system(top, MAKE["reflink"], max(3 * much * MiB, 1 << 30)) as (where, _):
        bench = DirBench(where)
        few, many = (rate_of_two(bench, top, size * MiB) for size in (little, much))
    shutil.rmtree(top)
    return Figure(
        f"commit/scattered/{much}",
        f"two commits in a row of {much} MiB of scattered 4 KiB",
        "bytes/s",
        [many],
        f"of {little} MiB",
        [few],
        expected=1.0,
        because="no step looks at all ranges for each",
        budget=("ratio", ">=", 0.5),
        budget_from="commit",
    )


def all_of(bench: Bench, device: str, top: Path, sizes: List[int]) -> Iterator[Dict[str, Any]]:
    """Measure all sizes in large pieces, and one scattered, on one store."""
    for size in sizes:
        for pattern in PATTERNS if size == SIZES[1] else PATTERNS[:1]:
            yield measured(bench, device, top, size * MiB, pattern)


def rows(sizes: List[int], rounds: int) -> Iterator[Tuple[str, Dict[str, Any]]]:
    """Yield the kind of store and what was measured on it, one diff after the other."""
    for name, make in MAKE.items():
        top = Path(tempfile.mkdtemp(prefix="bench-", dir="/var/tmp"))
        with file_system(top, make, 6 << 30) as (where, device):
            bench = DirBench(where)
            for _ in rounds_within(KIND_S[name], rounds):
                for row in all_of(bench, device, top, sizes):
                    yield name, row
        shutil.rmtree(top)
    from tools.ceph_cluster import LocalCluster
    from tools.ceph_site import Site

    top = Path(tempfile.mkdtemp(prefix="ceph-", dir="/var/tmp"))
    cluster = LocalCluster(top / "c", 10)
    try:
        site = Site(cluster.conf)
        site.command("osd set-require-min-compat-client", version="mimic")
        for _ in rounds_within(KIND_S["rbd"], rounds):
            for row in all_of(RbdBench(site), "", top, sizes):
                yield "rbd", row
        site.close()
    finally:
        cluster.end()
        shutil.rmtree(top)


SIZES = [0, 64, 512]
KIND_S = {"reflink": 55, "journal": 65, "rbd": 125}
"""For all rounds on one kind of store: so that there are four of each."""
LIMITS = {"reflink": (0.7, 1.05), "rbd": (0.7, 1.05), "journal": (0.4, 2.1)}
"""Rate of ours to that of plain `qemu-img commit`, and bytes written to bytes of the diff and 8 MiB."""
MISSED = {
    (
        "rbd",
        64,
    ): "what is the same for every size, the snapshot that makes the commit known first of all, is a "
    "good part of so small a one",
    (
        "rbd",
        512,
    ): "not taken apart; what is read goes through Python on its way, and a snapshot makes the "
    "commit known first of all",
}


def commits(quick: bool) -> List[Figure]:
    """Measure; `quick`: little, once."""
    found: Dict[Tuple[str, int, str], List[Dict[str, Any]]] = defaultdict(list)
    for kind, row in rows([0, 64] if quick else SIZES, 1 if quick else 5):
        print(f"  {kind} {row}", flush=True)
        found[kind, row["dirty_mib"], row["pattern"]].append(row)
    figures = [
        figure
        for (kind, dirty, pattern), measured in found.items()
        for figure in _figures(kind, dirty, pattern, measured)
    ]
    return [*figures, scattered(8, 64) if quick else scattered(512, 4096)]


def _figures(kind: str, dirty: int, pattern: str, of_it: List[Dict[str, Any]]) -> List[Figure]:
    name, what = f"{kind}/{dirty}/{pattern}", f"{dirty} MiB {pattern} into an image ({kind})"
    seconds = Figure(
        f"commit/seconds/{name}",
        f"commit of {what}: plain `qemu-img commit`",
        "s",
        [row["plain_seconds"] for row in of_it],
        "ours, until all was sent",
        [row["seconds"] - row["hash_seconds"] for row in of_it],
        expected=0.4 if kind == "journal" else 0.8,
        because="ours hashes what it brings, for the manifest",
        budget=("ratio", ">=", LIMITS[kind][0]) if dirty else None,
        budget_from="commit",
        if_missed=MISSED.get((kind, dirty), ""),
    )
    if not dirty:
        return [seconds]
    return [
        seconds,
        Figure(
            f"commit/hashed/{name}",
            f"the same by ours, until {of_it[0]['hashed'] // MiB} MiB are hashed, too",
            "s",
            [row["seconds"] for row in of_it],
            "plain",
            [row["plain_seconds"] for row in of_it],
        ),
        Figure(
            f"commit/bytes/{name}",
            f"written to the store by a commit of {what}",
            "bytes",
            [row["device_bytes"] or row["sent"] for row in of_it],
            "what the diff occupies, and 8 MiB",
            [row["allocated"] + 8 * MiB / LIMITS[kind][1] for row in of_it],
            expected=2.0 if kind == "journal" else 1.0,
            because="to the journal and from there" if kind == "journal" else "each block once",
            budget=("ratio", "<=", LIMITS[kind][1]),
            budget_from="commit",
            is_exact=True,
        ),
    ]
