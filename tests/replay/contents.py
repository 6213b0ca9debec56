# SPDX-License-Identifier: Apache-2.0
"""What stands for a guest: patterns written to a VM's disks by QEMU's own block layer, and expected back."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Protocol, Sequence

KIB64 = 1 << 16
# Pattern byte by offset; 64 KiB each. What an uploaded image begins and ends with:
Content = Dict[int, int]
UPLOADED: Content = {0: 0x5A, 15 << 20: 0x5B}
EMPTY: Content = {0: 0}


class Machine(Protocol):
    """The part of a lab node that is used here."""

    name: str

    def run(self, argv: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[bytes]":
        """Run a command inside the node."""

    def path(self, path: str) -> Path:
        """Return a path of the node as seen from outside."""


def upload(path: Path) -> None:
    """Make the file that the recordings upload: 16 MiB, two patterns in it."""
    with path.open("wb") as file:
        file.truncate(16 << 20)
        for offset, pattern in UPLOADED.items():
            file.seek(offset)
            file.write(bytes([pattern]) * KIB64)


def write(node: Machine, path: str, format_: str, offset: int, pattern: int) -> None:
    """Write one pattern through QEMU."""
    _qemu_io(node, path, format_, [f"write -P {pattern} {offset} {KIB64}"])


def check(node: Machine, path: str, format_: str, content: Content) -> None:
    """Fail unless every expected pattern is read back."""
    if content:
        _qemu_io(node, path, format_, [f"read -P {pattern} {offset} {KIB64}" for offset, pattern in content.items()])


def _qemu_io(node: Machine, path: str, format_: str, commands: List[str]) -> None:
    words = ["qemu-io", "-f", format_]
    for command in commands:
        words += ["-c", command]
    done = node.run([*words, path], user="oneadmin", check=False)
    said = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0 and "verification failed" not in said, f"{node.name}:{path}: {said[-400:]}"


@dataclass
class Guest:
    """The disks of one VM and what is on them."""

    vm: int
    disks: Dict[int, Content] = field(default_factory=dict)
    writes: int = 0

    def check(self, node: Machine, directory: str) -> None:
        """Check every disk of the VM where it is now."""
        for number, content in self.disks.items():
            record = self.record(node, directory, number)
            check(node, record["path"], record["format"], content)
            ends = [_end(node, path) for path in (f"{directory}/disk.{number}", record["path"])]
            assert ends[0] == ends[1], f"disk.{number} is {ends[0]}, QEMU would open {ends[1]}"

    def write(self, node: Machine, directory: str) -> None:
        """Write something new to every disk."""
        for number in self.disks:
            self.write_one(node, directory, number)

    def write_one(self, node: Machine, directory: str, number: int) -> None:
        """Write something new to one disk."""
        record = self.record(node, directory, number)
        self.writes += 1
        content = self.disks[number]
        offset, pattern = (1 << 20) + (self.writes % 96) * KIB64, 1 + (self.vm + self.writes) % 250
        write(node, record["path"], record["format"], offset, pattern)
        content[offset] = pattern

    @staticmethod
    def record(node: Machine, directory: str, number: int) -> Dict[str, Any]:
        """Read what the driver noted about a disk."""
        record: Dict[str, Any] = json.loads(node.path(f"{directory}/.semishared/disk.{number}.json").read_text())
        return record


def _end(node: Machine, path: str) -> str:
    return node.run(["readlink", "-e", path], user="oneadmin").stdout.decode().strip()
