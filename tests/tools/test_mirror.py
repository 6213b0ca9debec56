# SPDX-License-Identifier: Apache-2.0
"""QEMU mirrors a layer into a copy of what that lies over, in our units, while somebody writes to it: both
are equal then.

What lies below is slow to read. So with units that are smaller than clusters what was read of a cluster
before a write comes into the copy behind what was written, within seconds: so it did with those that QEMU
takes by itself.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Callable

import pytest

from semishared.errors import MissingImage
from semishared.guest import block_jobs, domain
from semishared.tools import qemu_img

MiB = 1 << 20
SIZE = 64 * MiB
BLOCK = 32 << 10
BEFORE = 256
"""Blocks that are there when the mirror begins: it must be at work while others are written."""

SLOW = """--object throttle-group,id=slow,limits.iops-total=400 --blockdev file,node-name=f0,filename=base
--blockdev raw,node-name=r0,file=f0 --blockdev throttle,node-name=t0,file=r0,throttle-group=slow"""
SERVED = """--chardev socket,id=c,path=qmp,server=on,wait=off --monitor chardev=c --nbd-server addr.type=unix,addr.path=nbd
--export nbd,id=e,node-name=delta,name=delta,writable=on"""  # noqa: E501


class Daemon:
    """QEMU's storage daemon with the layer `delta` over `layer` over the file `base`, and the file `copy`."""

    def __init__(self, directory: Path) -> None:
        layers = []
        for name, below in (("layer", "t0"), ("delta", "layer"), ("copy", None)):
            opened = {
                "driver": "qcow2",
                "node-name": name,
                "file": {"driver": "file", "filename": name},
                "backing": below,
            }
            layers += ["--blockdev", json.dumps(opened)]
        self.process = subprocess.Popen(
            ["qemu-storage-daemon", *SLOW.split(), *layers, *SERVED.split()], cwd=directory
        )
        while not (directory / "nbd").exists():
            assert self.process.poll() is None
            time.sleep(0.02)
        line = socket.socket(socket.AF_UNIX)
        line.connect(str(directory / "qmp"))
        self._line = line.makefile("rw")
        self._line.readline()
        self.ask("qmp_capabilities")

    def ask(self, command: str, **arguments: object) -> Any:
        self._line.write(json.dumps({"execute": command, "arguments": arguments}) + "\n")
        self._line.flush()
        while True:
            answer = json.loads(self._line.readline())
            assert "error" not in answer, answer
            if "return" in answer:
                return answer["return"]

    def end(self) -> None:
        self.ask("quit")
        self.process.wait(10)


def write(directory: Path, blocks: range, then: Callable[[], object] = lambda: None) -> None:
    """Write blocks, one after the other; `then` is called when the first of them is written."""
    words = ["qemu-io", "-f", "raw", "-t", "none", f"nbd+unix:///delta?socket={directory}/nbd"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin and writer.stdout
        for number in blocks:
            writer.stdin.write(
                f"write {'-q' if number > blocks[0] else ''} -P {1 + number % 250} {number * BLOCK} {BLOCK}\n"
            )
            if number == blocks[0]:
                writer.stdin.flush()
                assert writer.stdout.readline()
                then()
        writer.stdin.close()
        assert writer.wait(120) == 0


@pytest.mark.parametrize("options", ["extended_l2=on,cluster_size=128k", "extended_l2=on,cluster_size=256k"])
def test_what_is_written_while_it_is_mirrored_is_in_the_copy(tmp_path: Path, options: str) -> None:
    (tmp_path / "base").write_bytes(os.urandom(MiB) * (SIZE // MiB))
    for name, below, kind, how in (
        ("layer", "base", "raw", options),
        ("copy", "base", "raw", options),
        ("delta", "layer", "qcow2", ""),
    ):
        qemu_img.create_overlay(str(tmp_path / name), below, kind, SIZE, how, look=False)
    daemon = Daemon(tmp_path)
    try:
        unit = block_jobs.unit(str(tmp_path / "copy"))
        write(tmp_path, range(BEFORE))
        begin = {"job-id": "job", "device": "delta", "target": "copy", "sync": "top", "granularity": unit}
        write(tmp_path, range(BEFORE, SIZE // BLOCK), lambda: daemon.ask("blockdev-mirror", **begin))
        while not (job := daemon.ask("query-block-jobs")[0])["ready"] or job["len"] != job["offset"]:
            time.sleep(0.02)
        daemon.ask("block-job-complete", device="job")
        while daemon.ask("query-block-jobs"):
            time.sleep(0.02)
    finally:
        daemon.end()
    words = ["qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", "delta", "copy"]
    done = subprocess.run(words, cwd=tmp_path, check=False, capture_output=True)
    assert done.returncode == 0, done.stdout


def test_disk_that_the_guest_has_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domain, "disks", lambda _: {"vda": "/ds/0/7/disk.0.snap/1"})
    assert block_jobs.find("one-7", "/ds/0/7/disk.0.snap/0") == ("vda", "/ds/0/7/disk.0.snap/1")
    with pytest.raises(MissingImage, match=r"domain one-7 on \S+ has no disk /ds/0/7/disk.1.snap/0"):
        block_jobs.find("one-7", "/ds/0/7/disk.1.snap/0")
