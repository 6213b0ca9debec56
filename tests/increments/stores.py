# SPDX-License-Identifier: Apache-2.0
"""Backup datastores on this machine: what OpenNebula's rsync and restic drivers do to keep the backups of a
VM and to merge the oldest of them (`increment_flatten`), with their commands in their order.

How they list and send disks is in lab/stock/datastore, which the drivers of this package call.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Sequence

PASSWORD = "of the repository"
"""RESTIC_PASSWORD, which the process has."""
STRICT = "set -e -o pipefail; shopt -qs failglob\n"


def bash(script: str) -> str:
    """Run a script as these drivers do; return its stdout."""
    done = subprocess.run(["bash", "-s"], input=(STRICT + script).encode(), capture_output=True, check=False)
    assert done.returncode == 0, f"{script}\n{done.stderr.decode()}"
    return done.stdout.decode()


def by_index(paths: Sequence[str]) -> Dict[str, List[str]]:
    """Return files by the word behind `disk.`, as the drivers tell which are of one disk."""
    found: Dict[str, List[str]] = {}
    for path in paths:
        found.setdefault(Path(path).name.split(".")[1], []).append(path)
    return found


def merging(disks: Dict[str, List[str]]) -> str:
    """Return the script that merges each disk's files into the last of them."""
    lines = []
    for paths in disks.values():
        lines += [
            f"qemu-img rebase -u -F qcow2 -b '{before}' '{this}'" for before, this in zip(paths, paths[1:])
        ]
    for paths in disks.values():
        if len(paths) > 1:
            lines.append(f"qemu-img commit -f qcow2 -b '{paths[0]}' '{paths[-1]}'")
        lines.append(f"mv '{paths[0]}' '{paths[-1]}'")
    lines += [f"qemu-img info --output json '{paths[-1]}' > /dev/null" for paths in disks.values()]
    return "\n".join(lines) + "\n"


class Rsync:
    """A directory for each backup, BASE/VM/NAME."""

    driver = "rsync"

    def __init__(self, base: Path, vm: int) -> None:
        self.base, self.vm = base, vm
        self.chain: Dict[int, str] = {}
        """What oned has of the VM's backup: by increment, the driver's name of it."""

    def keep(self, number: int, copies: Path) -> None:
        """Store what a backup has left, as increment `number`."""
        name = os.urandom(3).hex()
        there = self.base / str(self.vm) / name
        bash(f"mkdir -p '{there}'; ls {copies}/disk.* > /dev/null; rsync -aS {copies}/ {there}/")
        self.chain[number] = name

    def _oldest(self, keep_last: int) -> List[int]:
        return list(self.chain)[: max(len(self.chain) - keep_last + 1, 0)]

    def flatten(self, keep_last: int) -> None:
        """Merge the oldest increments until so many are left."""
        merged = self._oldest(keep_last)
        if len(merged) < 2:
            return
        places = [f"{self.base}/{self.vm}/{self.chain[number]}/" for number in merged]
        paths = [path for place in places for path in bash(f"find {place} -type f -name 'disk.*'").split()]
        bash(merging(by_index(paths)) + f"rm -rf {' '.join(places[:-1])}")
        for number in merged[:-1]:
            del self.chain[number]


class Restic(Rsync):
    """A repository for each VM, BASE/VM, and a snapshot in it for each backup."""

    driver = "restic"

    @property
    def _restic(self) -> str:
        return f"restic --repo={self.base}/{self.vm} --json"

    def _backup(self, files: str, *options: str) -> str:
        words = " ".join(["--force", f"--tag=one-{self.vm}", *options])
        said = bash(f"{self._restic} backup {files} {words}")
        summary = [line for line in map(json.loads, said.splitlines()) if line["message_type"] == "summary"]
        name: str = summary[0]["snapshot_id"]
        return name[:8]

    def keep(self, number: int, copies: Path) -> None:
        if not self.chain:
            bash(f"{self._restic} init")
        self.chain[number] = self._backup(f"'{copies}'/disk.* '{copies}'/vm.xml")

    def _snapshots(self, names: Sequence[str]) -> List[Dict[str, Any]]:
        found: List[Dict[str, Any]] = json.loads(
            bash(f"{self._restic} --no-lock snapshots {' '.join(names)}")
        )
        return found

    def flatten(self, keep_last: int) -> None:
        merged = self._oldest(keep_last)
        if len(merged) < 2:
            return
        names = [self.chain[number] for number in merged]
        snapshots = self._snapshots(names)
        files = {one["short_id"]: one["paths"] for one in snapshots}
        disks = [path for name in names for path in files[name] if Path(path).name[5:6].isdigit()]
        others = [path for path in files[names[-1]] if path not in disks]
        # As the driver does, to where they were: on the host the VM's own directory, here too.
        folder = Path(disks[0]).parent
        pulled = [f"install -d '{folder}'"]
        pulled += [
            f"{self._restic} --quiet dump {name} '{path}' > '{path}'"
            for name in names
            for path in files[name]
            if path in disks or name == names[-1]
        ]
        bash("\n".join(pulled) + "\n" + merging(by_index(disks)))
        last = [path for path in files[names[-1]] if path in disks]
        # By time they are sorted, when they are restored.
        when = snapshots[-1]["time"][:19].replace("T", " ")
        kept = self._backup(" ".join(f"'{path}'" for path in (*last, *others)), f"--time='{when}'")
        bash(f"rm -f {' '.join([*disks, *others])}; rmdir {folder}")
        bash(f"{self._restic} forget {' '.join(names)} --prune --max-unused=0")
        for number in merged[:-1]:
            del self.chain[number]
        self.chain[merged[-1]] = kept
