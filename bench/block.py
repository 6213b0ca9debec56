# SPDX-License-Identifier: Apache-2.0
"""Images exported by qemu-storage-daemon over NBD on a unix socket, and fio as their only user.

A guest under TCG would measure TCG; this is QEMU's block layer as a guest's disk has it, and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

from lab import Node

KiB, MiB, GiB, TiB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
DEPTH = 16


@dataclass(frozen=True)
class Disk:
    """A disk to export; with `base`, a raw file, or `network` it is a qcow2 overlay over that, without it is
    raw itself.

    Without a `path` it is what `network` says, in QEMU's words.
    """

    name: str
    path: Optional[Path]
    base: str = ""
    network: Optional[Dict[str, Any]] = None
    writable: bool = True
    detect_zeroes: str = "off"


def _file(node: str, path: str, writable: bool) -> Dict[str, Any]:
    """Return a file node as libvirt makes it for cache=none."""
    return {
        "node-name": node,
        "driver": "file",
        "filename": path,
        "read-only": not writable,
        "auto-read-only": False,
        "aio": "io_uring",
        "cache": {"direct": True, "no-flush": False},
        "discard": "unmap",
    }


def _nodes(disks: Sequence[Disk]) -> List[Dict[str, Any]]:
    nodes: List[Dict[str, Any]] = []
    bases = {base: f"base-{i}" for i, base in enumerate(sorted({disk.base for disk in disks if disk.base}))}
    for base, node_name in bases.items():
        nodes += [
            _file(f"file-{node_name}", base, False),
            {"node-name": node_name, "driver": "raw", "file": f"file-{node_name}", "read-only": True},
        ]
    for i, disk in enumerate(disks):
        if disk.path is None:
            nodes.append({**(disk.network or {}), "node-name": f"disk-{i}", "read-only": not disk.writable})
            continue
        nodes.append(_file(f"file-{i}", str(disk.path), disk.writable))
        node: Dict[str, Any] = {"node-name": f"disk-{i}", "file": f"file-{i}", "read-only": not disk.writable}
        if disk.detect_zeroes != "off":
            node["detect-zeroes"] = disk.detect_zeroes
        if disk.network:
            nodes.append({**disk.network, "node-name": f"below-{i}", "read-only": True})
        if disk.base or disk.network:
            # No l2-cache-size: what libvirt gives its guests is QEMU's own choice.
            backing = bases[disk.base] if disk.base else f"below-{i}"
            node.update({"driver": "qcow2", "backing": backing, "discard": "unmap"})
        else:
            node["driver"] = "raw"
        nodes.append(node)
    return nodes


@contextmanager
def exported(folder: Path, disks: Sequence[Disk], machine: Optional[Node] = None) -> Iterator[Dict[str, str]]:
    """Export disks and yield the NBD address of each by its name; on a `machine` of a lab all paths are those
    that it sees.
    """
    here = machine.path(folder) if machine else folder
    socket, ready = here / "nbd.sock", here / "qsd.pid"
    for old in (socket, ready):
        old.unlink(missing_ok=True)
    argv = ["qemu-storage-daemon"]
    for node in _nodes(disks):
        argv += ["--blockdev", json.dumps(node)]
    argv += ["--nbd-server", f"addr.type=unix,addr.path={folder / 'nbd.sock'}"]
    for i, disk in enumerate(disks):
        writable = "on" if disk.writable else "off"
        argv += ["--export", f"type=nbd,id=export-{i},node-name=disk-{i},name=disk-{i},writable={writable}"]
    argv += ["--pidfile", str(folder / "qsd.pid")]
    daemon = (
        machine.popen(argv, user="root", stdin=subprocess.DEVNULL)
        if machine
        else subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    )
    try:
        while not ready.exists():
            if daemon.poll() is not None:
                raise RuntimeError(f"qemu-storage-daemon ended with {daemon.returncode}")
            time.sleep(0.005)
        yield {disk.name: f"nbd+unix:///disk-{i}?socket={socket}" for i, disk in enumerate(disks)}
    finally:
        daemon.terminate()
        daemon.wait()


def fio(
    address: str,
    rw: str,
    size: int,
    *,
    count: int = 0,
    seconds: float = 0.0,
    seed: int = 1,
    flush: int = 0,
    window: int = 0,
    at: int = 0,
) -> float:
    """Return the I/O operations per second of `count` random ones (none twice), or of as many as fit in
    `seconds`.

    With `flush`, one flush per so many writes is part of the time: cached metadata must reach the disk, too.
    With `window`, only so many bytes are used, from offset `at`.
    """
    argv = [
        "fio",
        "--name=bench",
        "--output-format=json",
        "--ioengine=nbd",
        f"--uri={address}",
        f"--rw={rw}",
        f"--bs={size}",
        f"--iodepth={DEPTH}",
        "--random_generator=lfsr",
        f"--randseed={seed}",
        "--refill_buffers=0",
        "--thread",
    ]
    if count:
        argv.append(f"--io_size={count * size}")
    if window:
        argv.append(f"--size={window}")
    if at:
        argv.append(f"--offset={at}")
    if seconds:
        argv += ["--time_based=1", f"--runtime={int(seconds * 1000)}ms"]
    if flush:
        argv.append(f"--fsync={flush}")
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=120)
    text = done.stdout.decode()
    if done.returncode:
        raise RuntimeError(f"fio {rw}: {done.stderr.decode()[-500:]} {text[-500:]}")
    job = json.loads(text[text.index("{") :])["jobs"][0]
    part = job["read" if "read" in rw else "write"]
    if count and part["total_ios"] != count:
        raise RuntimeError(f"fio {rw}: {part['total_ios']} operations instead of {count}")
    return float(part["total_ios"] / (part["runtime"] / 1000))


def fill(path: Path, size: int) -> None:
    """Write a file of incompressible bytes, every block on the disk."""
    block = os.urandom(4 * MiB)
    with path.open("wb") as file:
        for number in range(size // len(block)):
            file.write(number.to_bytes(8, "little") + block[8:])
        os.fsync(file.fileno())


def sparse(path: Path, size: int) -> None:
    """Make a file of `size` bytes without any data."""
    with path.open("wb") as file:
        file.truncate(size)


def create_overlay(path: Path, base: Path, options: str) -> float:
    """Create an overlay as tools/qemu_img.py does; return the seconds it took."""
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(base)]
    if options:
        argv += ["-o", options]
    before = time.monotonic()
    # Without a limit: subprocess would look for the end again and again, less often each time, and that would
    # be what is measured.
    subprocess.run([*argv, str(path)], stdin=subprocess.DEVNULL, check=True)
    return time.monotonic() - before
