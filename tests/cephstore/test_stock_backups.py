# SPDX-License-Identifier: Apache-2.0
"""Increments as OpenNebula's own Ceph driver makes them, by its commands (from 7.0 on), restored into disks
of this package: a snapshot for each, and what `rbd export-diff` says written over the one before.
"""

from __future__ import annotations

import struct
import subprocess
import time
from pathlib import Path
from typing import Iterator, List, Tuple

import pytest
import rbd

from increments.stores import Rsync
from tools.backup_site import IN_PLACE, OVERLAY, RAW, SIZE, MiB, backups
from tools.ceph_site import FEATURES, POOL, Site

NAME = "stock"


def records(diff: bytes) -> Iterator[Tuple[str, int, int, bytes]]:
    """Yield what a diff says: w(ritten) or z(ero), offset, length, content."""
    head = b"rbd diff v1\n"
    assert diff.startswith(head)
    at = len(head)
    while True:
        tag = diff[at : at + 1].decode()
        at += 1
        if tag == "e":
            return
        if tag in "ft":
            at += 4 + struct.unpack_from("<I", diff, at)[0]
        elif tag == "s":
            at += 8
        else:
            offset, length = struct.unpack_from("<QQ", diff, at)
            at += 16
            content = diff[at : at + length] if tag == "w" else b""
            at += len(content)
            yield tag, offset, length, content


class StockImage:
    """The image of a disk of a VM of OpenNebula's Ceph driver."""

    def __init__(self, site: Site) -> None:
        self.site, self.holds = site, bytearray(SIZE * MiB)
        site.rbd.create(site.ioctx, NAME, SIZE * MiB, old_format=False, features=FEATURES)

    def write(self, pattern: int, offset: int, count: int) -> None:
        """Write bytes, or let go of them (0), of whole 64 KiB: Ceph keeps what is in part of those."""
        with rbd.Image(self.site.ioctx, NAME) as image:
            image.write(bytes([pattern]) * count, offset) if pattern else image.discard(offset, count)
        self.holds[offset : offset + count] = bytes([pattern]) * count

    def keep(self, number: int) -> str:
        with rbd.Image(self.site.ioctx, NAME) as image:
            image.create_snap(f"one_backup_{number}")
        return f"rbd:{POOL}/{NAME}@one_backup_{number}:id=admin:conf={self.site.conf}"

    def full(self, target: Path) -> None:
        subprocess.run(["qemu-img", "convert", "-f", "rbd", "-O", "qcow2", self.keep(0), target], check=True)

    def increment(self, number: int, target: Path) -> None:
        self.keep(number)
        before = f"one_backup_{number - 1}"
        diff = target.with_suffix(".rdiff")
        words = ["--id", "admin", "--conf", self.site.conf, "export-diff", "--no-progress"]
        there = [f"{POOL}/{NAME}@one_backup_{number}", str(diff)]
        subprocess.run(["rbd", *words, "--from-snap", before, *there], check=True)
        over = f"rbd:{POOL}/{NAME}@{before}:id=admin:conf={self.site.conf}"
        words = ["-q", "-f", "qcow2", "-b", over, "-F", "rbd", str(target), str(SIZE * MiB)]
        subprocess.run(["qemu-img", "create", *words], check=True)
        socket = f"{target}.socket"
        server = subprocess.Popen(["qemu-nbd", "-k", socket, "-f", "qcow2", "-t", target])
        try:
            deadline = time.monotonic() + 60
            while not Path(socket).exists():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            script: List[str] = []
            for piece, (tag, offset, length, content) in enumerate(records(diff.read_bytes())):
                if tag == "w":
                    file = target.parent / f"piece.{piece}"
                    file.write_bytes(content)
                    script.append(f"write -s {file} {offset} {length}")
                else:
                    script.append(f"write -z {offset} {length}")
            said = subprocess.run(
                ["qemu-io", "-f", "raw", f"nbd+unix:///?socket={socket}"],
                input="\n".join([*script, "flush", "quit", ""]).encode(),
                check=True,
                stdout=subprocess.PIPE,
            )
            assert said.stdout.count(b"wrote") == len(script), said.stdout
        finally:
            server.terminate()
            server.wait()
            Path(socket).unlink(missing_ok=True)
        subprocess.run(["qemu-img", "rebase", "-u", "-b", "", "-F", "qcow2", target], check=True)
        for path in (diff, *target.parent.glob("piece.*")):
            path.unlink()


@pytest.mark.fault(93, "a chain of the stock Ceph driver is restored into disks of this package")
def test_chain_of_the_ceph_driver(site: Site, tmp_path: Path) -> None:
    with backups(tmp_path, Rsync) as made:
        stock = StockImage(site)
        for number in range(3):
            copies = tmp_path / f"backup.{number}"
            copies.mkdir()
            (copies / "vm.xml").write_text("")
            # At no border of a cluster, across the objects of RBD, and partly zeros later.
            stock.write(0x50 + number, (number + 1) * MiB - 1536, 300 * 1024)
            stock.write(0x60 + number, 4 * MiB - 4096 * (number + 1), 8192)
            if number:
                stock.write(0, number * MiB, 128 * 1024)
                stock.increment(number, copies / f"disk.0.{number}")
            else:
                stock.full(copies / "disk.0.0")
            # The VM has several disks, with the same content.
            for disk in (IN_PLACE, RAW):
                target = copies / f"disk.{disk}.{number}"
                subprocess.run(["cp", copies / f"disk.0.{number}", target], check=True)
            made.store.keep(number, copies)
            made.held.append({disk: bytes(stock.holds) for disk in (OVERLAY, IN_PLACE, RAW)})
        for increment in (2, 0, 1):
            made.restore(increment)
            made.check(made.held[increment])
        made.store.flatten(1)
        made.restore(-1, OVERLAY)
        made.check({OVERLAY: made.held[2][OVERLAY]})
