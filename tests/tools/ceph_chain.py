# SPDX-License-Identifier: Apache-2.0
"""A VM of one disk on a real Ceph cluster that is off, and its backups in increments, kept and merged as
OpenNebula's backup drivers do it.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, List

import rbd

from semishared.config import Config
from semishared.model import steps as s
from semishared.model.store import image_steps as i
from semishared.wire.session import Session
from tools.world import MiB, World

if TYPE_CHECKING:
    from tools.ceph_site import Site

VM, DISK, SIZE = 5, 1, 16 * MiB


def qemu_img(*words: object) -> bytes:
    return subprocess.run(["qemu-img", *map(str, words)], check=True, stdout=subprocess.PIPE).stdout


class Chain:
    """A VM of one disk on Ceph that is off, and its backups."""

    def __init__(self, site: Site, world: World, top: Path, how: str = "in-place", number: int = 7) -> None:
        self.site, self.disk, self.top = site, world.disk(VM, DISK), top
        self.image = site.make(number, SIZE)
        self.name = f"one-{number}" if how == "in-place" else f"one-{number}-{VM}-{DISK}"
        if how != "in-place":
            site.on(i.CloneStored(self.image, f"one/{self.name}", 0))
        made = s.PrepareVm(VM, self.disk.vm_dir)
        record = i.RecordNetwork(self.disk, self.image, site.network(f"one/{self.name}"), how, readonly=False)
        site.on(made, record)
        self.random = random.Random(number)
        self.last, self.chain = -1, -1
        self.sums: List[str] = []
        self.sizes: List[int] = []
        """Bytes that the copies hold, zeros aside."""
        self.whole: List[str] = []

    @property
    def directory(self) -> str:
        return f"{self.disk.vm_dir}/backup"

    def step(self) -> s.BackUp:
        back_up = s.BackUp(VM, self.disk.vm_dir, self.directory, (str(DISK),), "", "NONE", "PFZNPjwvVk0+")
        return back_up._replace(since=self.last, chain=self.chain, newest=max(self.chain, 899))

    def write(self) -> None:
        """Write and discard here and there, also at odd offsets."""
        with rbd.Image(self.site.ioctx, self.name) as image:
            for _ in range(6):
                length = self.random.choice([512, 4096, 65536, 300 * 1024])
                offset = self.random.randrange(0, (image.size() - length) // 512) * 512
                if self.random.random() < 0.3:
                    image.discard(offset, length)
                else:
                    image.write(bytes([self.random.randrange(1, 256)]) * length, offset)
            image.flush()

    def marks(self, name: str = "") -> List[str]:
        found = self.site.snapshots(name or self.name)
        return [one for one in found if one.startswith("semishared-backup-")]

    def end(self) -> None:
        self.site.on(s.EndBackup(VM, self.disk.vm_dir, self.directory, ""))

    def back_up(self, *, stores: bool = True) -> str:
        """Make a backup, and have the store keep it unless that fails; return why it is whole, '' if not."""
        with Session("localhost", "test", Config()) as session:
            session.run([self.step()])
            said = session.warnings
        if stores:
            self.stored("".join(one for one in said if "all of disk" in one))
        self.end()
        return "".join(said)

    def stored(self, why: str = "") -> None:
        self.last += 1
        self.chain = 900
        path = self.top / f"disk.{DISK}.{self.last}"
        shutil.copy(f"{self.directory}/{path.name}", path)
        self.sums.append(hashlib.sha256(self.site.content(self.name)).hexdigest())
        self.whole.append(why)
        parts = json.loads(qemu_img("map", "--output=json", "-f", "qcow2", path))
        self.sizes.append(sum(part["length"] for part in parts if part["data"]))

    def check(self) -> None:
        """Lay each increment over the one before, and compare what it restores."""
        wrong = []
        for number, wanted in enumerate(self.sums):
            path, before = self.top / f"disk.{DISK}.{number}", self.top / f"disk.{DISK}.{number - 1}"
            if number:
                qemu_img("rebase", "-u", "-f", "qcow2", "-F", "qcow2", "-b", before, path)
            qemu_img("convert", "-f", "qcow2", "-O", "raw", path, self.top / "raw")
            if hashlib.sha256((self.top / "raw").read_bytes()).hexdigest() != wanted:
                wrong.append(f"increment {number}: {self.whole[number] or 'what changed'}")
        assert not wrong, wrong

    def merged(self) -> str:
        """Merge all, as KEEP_LAST = 1 has the store do it; return the digest of the result."""
        first, last = self.top / f"disk.{DISK}.0", self.top / f"disk.{DISK}.{self.last}"
        qemu_img("commit", "-q", "-f", "qcow2", "-b", first, last)
        qemu_img("convert", "-f", "qcow2", "-O", "raw", first, self.top / "raw")
        return hashlib.sha256((self.top / "raw").read_bytes()).hexdigest()
