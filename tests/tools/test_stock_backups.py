# SPDX-License-Identifier: Apache-2.0
"""Increments as OpenNebula's own drivers make them, by their commands, restored into disks of this package.

A qcow2 disk that is off: what has changed since a bitmap is read through NBD, copied on read into a file
whose header names that server, gone by then. RBD: tests/cephstore/test_stock_backups.py.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Iterator

import pytest

from increments.stores import Rsync
from tools.backup_site import IN_PLACE, OVERLAY, RAW, SIZE, Backups, MiB, backups


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Backups]:
    with backups(tmp_path, Rsync) as site:
        yield site


class StockDisk:
    """A disk of a VM of OpenNebula's qcow2 driver."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holds = bytearray(SIZE * MiB)
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, f"{SIZE}M"], check=True)

    def write(self, pattern: int, at: int, count: int) -> None:
        how = f"write -q -z {at}k {count}k" if not pattern else f"write -q -P {pattern} {at}k {count}k"
        subprocess.run(["qemu-io", "-f", "qcow2", "-c", how, self.path], check=True)
        self.holds[at * 1024 : (at + count) * 1024] = bytes([pattern]) * (count * 1024)

    def mark(self, number: int) -> None:
        subprocess.run(["qemu-img", "bitmap", "--add", self.path, f"one-7-{number}"], check=True)

    def full(self, target: Path) -> None:
        words = ["-m", "4", "-O", "qcow2", str(self.path), str(target)]
        subprocess.run(["qemu-img", "convert", *words], check=True)

    def increment(self, number: int, target: Path) -> None:
        bitmap, socket = f"one-7-{number - 1}", f"{self.path}.socket"
        server = subprocess.Popen(
            ["qemu-nbd", "-r", "-k", socket, "-f", "qcow2", "-t", "-B", bitmap, self.path]
        )
        try:
            deadline = time.monotonic() + 30
            while not Path(socket).exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            # The real one asks nbdinfo; QEMU has what is dirty as what is no data.
            source = f"driver=nbd,server.type=unix,server.path={socket}"
            dirty = f"{source},x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}"
            said = subprocess.run(
                ["qemu-img", "map", "--output=json", "--image-opts", dirty],
                check=True,
                stdout=subprocess.PIPE,
            )
            uri = f"nbd+unix:///?socket={socket}"
            words = ["-q", "-f", "qcow2", "-F", "raw", "-b", uri, str(target)]
            subprocess.run(["qemu-img", "create", *words], check=True)
            script = f"open -C -t none -i native -o driver=qcow2 {target}\n"
            for part in json.loads(said.stdout):
                if not part["data"]:
                    script += f"read -q {part['start']} {part['length']}\n"
            subprocess.run(["qemu-io"], input=script.encode(), check=True, stdout=subprocess.DEVNULL)
        finally:
            server.terminate()
            server.wait()
            Path(socket).unlink(missing_ok=True)
        subprocess.run(["qemu-img", "bitmap", "--remove", self.path, bitmap], check=True)


@pytest.mark.fault(93, "a chain of the stock qcow2 driver is restored into disks and images of this package")
def test_chain_of_the_qcow2_driver(made: Backups, tmp_path: Path) -> None:
    disks = {number: StockDisk(tmp_path / f"stock.{number}") for number in (OVERLAY, IN_PLACE, RAW)}
    for number in range(3):
        copies = tmp_path / f"backup.{number}"
        copies.mkdir()
        (copies / "vm.xml").write_text("")
        for disk, stock in disks.items():
            stock.write(0x40 + number + 8 * disk, 512 + 1024 * number, 300)
            if number:
                # What was written before is partly zeros now.
                stock.write(0, 512 + 1024 * (number - 1), 64)
                stock.increment(number, copies / f"disk.{disk}.{number}")
            else:
                stock.full(copies / f"disk.{disk}.{number}")
            stock.mark(number)
        made.store.keep(number, copies)
        made.held.append({disk: bytes(stock.holds) for disk, stock in disks.items()})
    made.restore(1, RAW)
    made.check({RAW: made.held[1][RAW]})
    made.check_image(2, OVERLAY)
    for increment in (2, 0):
        made.restore(increment)
        made.check(made.held[increment])
    made.store.flatten(2)
    for increment in (1, 2):
        made.restore(increment, IN_PLACE)
        made.check({IN_PLACE: made.held[increment][IN_PLACE]})
