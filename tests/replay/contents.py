# SPDX-License-Identifier: Apache-2.0
"""What stands for a guest: patterns written to a VM's disks by QEMU's own block layer, and expected back."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Protocol, Sequence, Tuple
from xml.etree import ElementTree

from lab import domains
from lab.ceph import Cluster

KIB64 = 1 << 16
UUID = re.compile(r"[0-9a-f-]{36}")
HMP = 1  # VIR_DOMAIN_QEMU_MONITOR_COMMAND_HMP
# Pattern byte by offset; 64 KiB each. What an uploaded image begins and ends with:
Content = Dict[int, int]
UPLOADED: Content = {0: 0x5A, 15 << 20: 0x5B}
EMPTY: Content = {0: 0}


class Machine(Protocol):
    """The part of a lab node that is used here."""

    name: str

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
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


def place(record: Dict[str, Any]) -> str:
    """Return what QEMU's programs on a host open to see the disk of a record."""
    network = record.get("network")
    return f"rbd:{network['name']}:id={network['user']}" if network else str(record["path"])


def check(node: Machine, path: str, format_: str, content: Content) -> None:
    """Fail unless every expected pattern is read back."""
    if path.startswith("rbd:"):
        _shell(node, [_reader(path, format_, content, False)])
    else:
        check_files(node, [(path, format_, content)])


def check_files(node: Machine, images: Sequence[Tuple[str, str, Content]]) -> None:
    """Fail unless every expected pattern is read back from images in files: path, format, content. What is
    raw is read as it is.
    """
    commands = []
    for path, format_, content in images:
        if format_ != "raw":
            commands.append(_reader(path, format_, content, False))
            continue
        with node.path(path).open("rb") as file:
            for offset, pattern in content.items():
                file.seek(offset)
                assert file.read(KIB64) == bytes([pattern]) * KIB64, (
                    f"{node.name}: {path}: verification failed at {offset}"
                )
    if commands:
        _shell(node, commands)


def check_on_ceph(cluster: Cluster, images: Dict[str, Content]) -> None:
    """Fail unless every expected pattern is read back from images in a pool, POOL/NAME each."""
    found = cluster.patterns({image: list(content) for image, content in images.items()}, KIB64)
    for image, content in images.items():
        assert found[image] == list(content.values()), (
            f"{image}: verification failed: {content}, not {found[image]}"
        )


def _reader(path: str, format_: str, content: Content, running: bool) -> str:
    """Write the command that reads patterns back; beside a running QEMU it shares the lock."""
    words = ["qemu-io", "-r", *(["-U"] if running else []), "-f", format_]
    for offset, pattern in content.items():
        words += ["-c", f"read -P {pattern} {offset} {KIB64}"]
    return shlex.join([*words, path]) if content else "true"


def _shell(node: Machine, commands: List[str]) -> str:
    """Run commands in one go (entering a node costs more than most of them); any failure fails."""
    done = node.run(["sh", "-ec", "\n".join(commands)], user="oneadmin", check=False)
    said = (done.stdout + done.stderr).decode(errors="replace")
    wrong = [line for line in said.splitlines() if "verification failed" in line]
    assert done.returncode == 0 and not wrong, f"{node.name}: {wrong or said[-400:]} from {commands}"
    return done.stdout.decode()


@dataclass
class Guest:
    """The disks of one VM and what is on them; a running domain writes through its own QEMU."""

    vm: int
    disks: Dict[int, Content] = field(default_factory=dict)
    targets: Dict[int, str] = field(default_factory=dict)
    running: str = ""
    writes: int = 0

    def boot(self, domain: str, vm: str) -> None:
        """Note the running domain and the devices of its disks, as the VM's XML has them."""
        self.running = domain
        disks = ElementTree.fromstring(vm).findall("TEMPLATE/DISK")
        self.targets = {int(disk.findtext("DISK_ID", "")): disk.findtext("TARGET", "") for disk in disks}

    def check(self, node: Machine, directory: str) -> None:
        """Check every disk of the VM where it is now."""
        commands = []
        for number, content in self.disks.items():
            record = self.record(node, directory, number)
            if not record.get("network"):
                # What the domain names and what the driver noted must be one file.
                ends = [
                    f'"$(readlink -e {shlex.quote(path)})"'
                    for path in (f"{directory}/disk.{number}", record["path"])
                ]
                commands.append(f"[ {ends[0]} = {ends[1]} ]")
            commands.append(_reader(place(record), record["format"], content, bool(self.running)))
        _shell(node, commands)

    def write(self, node: Machine, directory: str, *numbers: int) -> None:
        """Write something new to every disk, or to some; whether it arrived shows the next check."""
        commands = []
        for number in numbers or self.disks:
            self.writes += 1
            offset, pattern = (1 << 20) + (self.writes % 96) * KIB64, 1 + (self.vm + self.writes) % 250
            self.disks[number][offset] = pattern
            write = f"write -P {pattern} {offset} {KIB64}"
            if self.running:
                device = f"/machine/peripheral/virtio-disk{ord(self.targets[number][-1]) - 97}/virtio-backend"
                commands += [f'qemu-io -d {device} "{command}"' for command in (write, "flush")]
            else:
                record = self.record(node, directory, number)
                _shell(node, [shlex.join(["qemu-io", "-f", record["format"], "-c", write, place(record)])])
        if commands:
            import libvirt_qemu  # here: most of the lab does without

            with domains.libvirt_of(node) as connection:  # type: ignore[arg-type]
                look_up = (
                    connection.lookupByUUIDString if UUID.fullmatch(self.running) else connection.lookupByName
                )
                domain = look_up(self.running)
                # What qemu-io prints goes to QEMU's own log.
                said = [libvirt_qemu.qemuMonitorCommand(domain, command, HMP).strip() for command in commands]
            assert not any(said), f"{node.name} {self.running}: {said}"

    @staticmethod
    def record(node: Machine, directory: str, number: int) -> Dict[str, Any]:
        """Read what the driver noted about a disk."""
        record: Dict[str, Any] = json.loads(
            node.path(f"{directory}/.semishared/disk.{number}.json").read_text()
        )
        return record
