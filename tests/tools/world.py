# SPDX-License-Identifier: Apache-2.0
"""One machine with a shared store and host directories, all below a temporary directory; every tool is the
real one.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Callable, Iterable, Iterator

from semishared.config import Config
from semishared.model import steps as s
from semishared.named import to_data
from semishared.tools import extents
from semishared.wire.session import Session

MiB = 1 << 20
OVERLAY_OPTIONS = "extended_l2=on,cluster_size=128k"
COMMAND = re.compile(r"(read|write) -P (\w+) (\d+)([kM]?) (\d+)([kM]?)")
UNITS = {"": 1, "k": 1 << 10, "M": MiB}


def _parsed(command: str) -> tuple[str, int, bytes]:
    """Return what a command does, where, and the bytes; ('', 0, b'') for one that has no pattern."""
    found = COMMAND.fullmatch(command)
    if not found:
        return "", 0, b""
    verb, pattern, offset, unit, count, units = found.groups()
    return verb, int(offset) * UNITS[unit], bytes([int(pattern, 0)]) * (int(count) * UNITS[units])


def qemu_io(path: object, format: str, *commands: str) -> None:
    """Write (`write -P 0xab 4M 64k`) or check (`read -P ...`) patterns as a guest would see them; what is raw
    is read as it is.
    """
    reads = all(command.startswith("read -P") for command in commands)
    if format == "raw" and reads:
        with open(str(path), "rb") as file:
            for _, at, wanted in map(_parsed, commands):
                assert wanted and os.pread(file.fileno(), len(wanted), at) == wanted, (
                    f"{path}: verification failed at {at}"
                )
        return
    how = ["-r"] if reads else []
    argv = [
        "qemu-io",
        *how,
        "-f",
        format,
        *(word for command in commands for word in ("-c", command)),
        str(path),
    ]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60)
    said = done.stdout.decode()
    failed = done.returncode != 0 or "verification failed" in said or "error" in said.lower()
    assert not failed, f"{' '.join(argv)}: {said}"


@cache
def _made(format: str, size: int, *writes: str) -> tuple[int, tuple[tuple[int, bytes], ...]]:
    """Have QEMU's programs make an image; return the length of its file, and its data with their offsets."""
    if format == "raw":
        return size, tuple((at, content) for _, at, content in map(_parsed, writes))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/image"
        subprocess.run(["qemu-img", "create", "-q", "-f", format, path, str(size)], check=True)
        qemu_io(path, format, *writes)
        with open(path, "rb") as file:
            at = 0
            found: list[tuple[int, bytes]] = []
            while True:
                try:
                    at = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError:
                    return os.path.getsize(path), tuple(found)
                found.append(
                    (at, os.pread(file.fileno(), os.lseek(file.fileno(), at, os.SEEK_HOLE) - at, at))
                )
                at += len(found[-1][1])


def make_image(path: Path, format: str, size: int, *writes: str) -> None:
    """Make an image with some patterns in it; one that is not raw as QEMU's programs made it once, which cost
    50 ms.
    """
    length, data = _made(format, size, *writes)
    with path.open("wb") as file:
        file.truncate(length)
        for at, content in data:
            os.pwrite(file.fileno(), content, at)


def lay_over(path: Path, backing: object, format: str = "raw") -> Path:
    """Make a qcow2 of 1 MiB that names another file as its backing file, whatever that is; return it."""
    over = ["-f", "qcow2", "-u", "-F", format, "-b", str(backing)]
    subprocess.run(["qemu-img", "create", "-q", *over, str(path), "1M"], check=True)
    return path


def allocated(path: object) -> int:
    return os.lstat(str(path)).st_blocks * 512


class World:
    """Image store 100, system datastores 101 and 103, and plans for this machine."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.location = top / "datastores"
        self.store = self.location / "100"
        self.system = self.location / "101"
        self.root = self.location / ".semishared"
        self.moved: dict[str, int] = {}
        for directory in (self.store, self.system):
            directory.mkdir(parents=True)

    def image(
        self, name: str = "image", format: str = "raw", size: int = 64 * MiB, pattern: int = 0xA1
    ) -> s.ImageRef:
        """Make an image with a pattern at 1 MiB and at its end."""
        path = self.store / name
        make_image(path, format, size, f"write -P {pattern} 1M 64k", f"write -P {pattern} {size - 65536} 64k")
        return s.ImageRef(100, 7, format, str(path))

    def disk(self, vm: int = 5, number: int = 1, system: int = 101) -> s.DiskRef:
        return s.DiskRef(vm, number, str(self.location / str(system) / str(vm)))

    def on(self, *steps: s.Step, seq: int = -1, data: Iterable[bytes] = (), sha256: str = "") -> list[object]:
        """Carry out steps through the host side of this machine, as planned at a SEQ of the VM's history."""
        with Session("localhost", "test", Config()) as session:
            session.seq = seq
            results = session.run(steps, data, sha256)
            self.moved = session.moved
        return [to_data(one) for one in results]  # as it crossed

    @contextmanager
    def begun(self, disk: s.DiskRef) -> Iterator[Callable[..., list[object]]]:
        """Yield what carries out steps that are part of an action on the VM of `disk` which has begun now."""
        with Session("localhost", "test", Config()) as session:
            session.run([s.DescribeVm(disk.vm, disk.vm_dir)])
            yield lambda *steps: [to_data(one) for one in session.run(steps)]

    def cloning(self, image: s.ImageRef, disk: s.DiskRef, min_size: int = 0) -> list[s.Step]:
        """Return the steps of `tm/clone`."""
        return [
            s.StageBase(str(self.root), image),
            s.PrepareVm(disk.vm, disk.vm_dir),
            s.CreateOverlay(disk, image, min_size, OVERLAY_OPTIONS),
        ]

    def clone(self, image: s.ImageRef, disk: s.DiskRef, min_size: int = 0) -> Path:
        """Clone as `tm/clone` plans it; return the overlay."""
        self.on(*self.cloning(image, disk, min_size))
        return Path(disk.path)

    def link(self, image: s.ImageRef, disk: s.DiskRef, *, readonly: bool = False) -> Path:
        """Attach in place as `tm/ln` plans it."""
        self.on(s.PrepareVm(disk.vm, disk.vm_dir), s.LinkInPlace(disk, image, readonly, session=not readonly))
        return Path(disk.path)

    def bases(self) -> list[Path]:
        return sorted((self.root / "bases").glob("*")) if (self.root / "bases").is_dir() else []

    def leases(self) -> list[str]:
        return sorted(
            f"{path.parent.parent.name}/{path.name}" for path in (self.root / "bases").glob("*/leases/*")
        )

    def leftovers(self) -> list[str]:
        """Return what no finished action may leave: staged files and staging directories."""
        beside = (".incoming-", ".outgoing-", ".removed-")
        found = [
            str(path)
            for path in self.top.rglob("*")
            if ".staged-" in path.name or path.name.startswith(beside)
        ]
        return found + [str(path) for path in (self.root / "staging").glob("*")]

    def content(self, path: object) -> extents.Manifest:
        return extents.copy(str(path), None, "raw", "test")
