# SPDX-License-Identifier: Apache-2.0
"""A VM whose backups are kept as OpenNebula's backup drivers keep them: a full one and increments over it.

What a restored disk must hold is known from what the guest was told to write (`Model`).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from lab.cloud import Cloud
from lab.guest import content

KIB = 1024
WHOLE = re.compile(
    r"all of disk (\d+) is in increment (\d+), not what changed alone: (.*?)(?: \[|$)", re.MULTILINE
)
IMAGE = 900
"""The id of the backup image, where OpenNebula counts on."""


def holes(path: Path) -> List[Any]:
    """Return the parts of a qcow2 file of which it says nothing, not even that they are zero."""
    argv = ["qemu-img", "map", "--output=json", "-f", "qcow2", str(path)]
    found = json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)
    return [part for part in found if not part.get("present", True)]


class Model:
    """What each disk of a VM holds: its size in MiB, and what it began with."""

    def __init__(self, cloud: Cloud, vm: int, disks: Mapping[str, Tuple[int, int, bytes]]) -> None:
        """`disks`: by target, the number of the disk, its MiB, and its first bytes."""
        self.cloud, self.vm = cloud, vm
        self.numbers = {target: number for target, (number, _, _) in disks.items()}
        self._bytes = {
            target: bytearray(first.ljust(mib << 20, b"\0")) for target, (_, mib, first) in disks.items()
        }

    def write(self, seed: str, offset: int, count: int) -> None:
        """Have the guest write `count` KiB at `offset` KiB to each disk."""
        guest = self.cloud.guest(self.vm)
        for target, holds in self._bytes.items():
            guest.write(target, f"{seed}-{target}", offset, count)
            holds[offset * KIB : (offset + count) * KIB] = content(f"{seed}-{target}", offset, count)

    def grow(self, target: str, mib: int) -> None:
        holds = self._bytes[target]
        holds.extend(bytes((mib << 20) - len(holds)))

    def held(self) -> Dict[str, bytes]:
        """Return what the disks hold, by target."""
        return {target: bytes(holds) for target, holds in self._bytes.items()}

    def is_again(self, target: str, held: Mapping[str, bytes]) -> None:
        """Say that a disk holds what it held then."""
        self._bytes[target][:] = held[target]

    def sums(self) -> Dict[int, str]:
        """Return the digest of each disk by its number."""
        return {
            self.numbers[target]: hashlib.sha256(holds).hexdigest() for target, holds in self._bytes.items()
        }


class Kept:
    """The backups of a VM, one directory each, and what oned says of them."""

    def __init__(self, model: Model, where: Path) -> None:
        self.model, self.where = model, where
        self.last = -1
        self._image, self._images = -1, [IMAGE]
        self.sums: List[Dict[int, str]] = []
        self.whole: List[Dict[int, str]] = []
        """Why all of a disk is in a backup, by increment."""
        self.sizes: List[Dict[int, int]] = []
        """KiB that each disk's copy takes, by increment."""

    def xml(self, freeze: str = "NONE", mode: str = "CBT") -> bytes:
        config = (
            f"<FS_FREEZE>{freeze}</FS_FREEZE><MODE>INCREMENT</MODE><INCREMENT_MODE>{mode}</INCREMENT_MODE>"
            f"<LAST_INCREMENT_ID>{self.last}</LAST_INCREMENT_ID>"
            f"<INCREMENTAL_BACKUP_ID>{self._image}</INCREMENTAL_BACKUP_ID>"
        )
        ids = "".join(f"<ID>{image}</ID>" for image in self._images)
        said = (
            f"<BACKUPS><BACKUP_CONFIG>{config}</BACKUP_CONFIG><BACKUP_IDS>{ids}</BACKUP_IDS></BACKUPS></VM>"
        )
        return self.model.cloud.oned.vm(self.model.vm).to_xml().replace("</VM>", said).encode()

    def asked(self) -> Dict[str, int]:
        """Return the fields of a step that say which increment oned wants."""
        return {"since": self.last, "chain": self._image, "newest": max(self._images)}

    def argv(self, action: str) -> List[str]:
        """Return the words of (pre|post)backup(_live), as oned has them."""
        cloud, vm = self.model.cloud, self.model.vm
        record = cloud.oned.vm(vm)
        disks = ":".join(str(number) for number in sorted(self.model.numbers.values()))
        place = f"{record.last.host.name}:{cloud.vm_dir(vm)}"
        words = [f"/var/lib/one/remotes/tm/semishared/{action}", place, disks, record.deploy_id, "-", str(vm)]
        return [*words, str(record.last.ds_id)]

    def call(self, action: str, **how: str) -> subprocess.CompletedProcess[bytes]:
        """Run (pre|post)backup(_live) as oned does."""
        return self.model.cloud.lab.fe.run(
            self.argv(action), user="oneadmin", input=self.xml(**how), check=False, timeout=120
        )

    @property
    def copies(self) -> Path:
        """Return where the copies are on the VM's host, as seen from outside."""
        cloud, vm = self.model.cloud, self.model.vm
        return cloud.lab.node(cloud.oned.vm(vm).last.host.name).path(f"{cloud.vm_dir(vm)}/backup")

    def back_up(self, *, live: bool = True, stores: bool = True, **how: str) -> str:
        """Make a backup, store it unless that fails (`stores`), clean up; return the action's messages."""
        suffix = "_live" if live else ""
        sums = self.model.sums()
        done = self.call(f"prebackup{suffix}", **how)
        said = done.stderr.decode()
        assert done.returncode == 0, said
        if stores:
            self.last += 1
            target = self.where / str(self.last)
            shutil.copytree(self.copies, target)
            found = sorted(path.name for path in target.iterdir())
            assert found == sorted(["vm.xml", *(f"disk.{disk}.{self.last}" for disk in sums)]), found
            self.sums.append(sums)
            self.whole.append({int(disk): why for disk, _, why in WHOLE.findall(said)})
            self.sizes.append(
                {disk: (target / f"disk.{disk}.{self.last}").stat().st_blocks // 2 for disk in sums}
            )
            for disk in self.whole[-1]:
                assert not holes(target / f"disk.{disk}.{self.last}"), (
                    f"disk {disk}: the one before shines through"
                )
            if self.last == 0:
                self._image = max(self._images) + 1
                self._images.append(self._image)
        done = self.call(f"postbackup{suffix}", **how)
        assert done.returncode == 0, done.stderr.decode()
        return said

    def reset(self) -> None:
        """Begin another chain, as `onevm backup --reset` has oned do."""
        self.last, self._image = -1, -1
        shutil.rmtree(self.where)
        self.where.mkdir()
        self.sums, self.whole, self.sizes = [], [], []

    def restored(self, increment: int, disk: int) -> bytes:
        """Return what a disk holds as an increment restores it: each is laid over the one before."""
        chain = self.where / "chain"
        shutil.rmtree(chain, ignore_errors=True)
        chain.mkdir()
        for number in range(increment + 1):
            path = chain / str(number)
            shutil.copy(self.where / str(number) / f"disk.{disk}.{number}", path)
            if number:
                over = ["-F", "qcow2", "-b", f"{chain}/{number - 1}"]
                subprocess.run(["qemu-img", "rebase", "-u", "-f", "qcow2", *over, path], check=True)
        raw = chain / "raw"
        subprocess.run(
            ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", chain / str(increment), raw], check=True
        )
        found = raw.read_bytes()
        shutil.rmtree(chain)
        return found

    def check(self, since: int = 0) -> None:
        """See that each increment from `since` on restores what the disks held then."""
        wrong = [
            f"increment {increment}, disk {disk}: {self.whole[increment].get(disk, 'what changed')}"
            for increment in range(since, len(self.sums))
            for disk, wanted in self.sums[increment].items()
            if hashlib.sha256(self.restored(increment, disk)).hexdigest() != wanted
        ]
        assert not wrong, wrong
