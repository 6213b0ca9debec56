# SPDX-License-Identifier: Apache-2.0
"""Machines for the kill suite: three mount namespaces that see their own disks, and one store, at the same
paths.

    <rig>/live/a, b, fe     what each machine's <rig>/datastores is (bind mount)
    <rig>/live/store        what all of them see as <rig>/datastores/100
    <rig>/in                files to upload

A whole rig is saved and restored in milliseconds, which makes a fresh one per killed step affordable.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import struct
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, Type

from lab import fork_server, forks
from rot import copied
from semishared.wire import session as ssh

CHECKOUT = Path(__file__).resolve().parents[2]
MACHINES = ("a", "b", "fe")
STORE = 100
Listing = Dict[str, Tuple[object, ...]]


def own_mounts() -> None:
    """Give this process mounts of its own, which vanish with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000) != 0:  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


MARK = r"ss-[0-9a-f]{16}"
"""What is random in the name of a mark."""
MARKED = r"\.snap/[0-9]+$"
"""Layers with marks, whose names are random: what a guest reads of them is compared elsewhere."""


class Rig:
    """Three machines and a store below one directory of its own, in memory. Call `own_mounts` before."""

    def __init__(self, forked: bool = False) -> None:
        """`forked`: its front-end's programs are not started but forked, as host sides always are."""
        self.top = Path(tempfile.mkdtemp(prefix="semishared-rig-"))
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g,mode=755", "rig", self.top], check=True)
        self.datastores = self.top / "datastores"
        self._seen: Dict[Tuple[str, ...], str] = {}
        self._machines: Dict[str, subprocess.Popen[bytes]] = {}
        self._servers: Dict[str, socket.socket] = {}
        for part in ("datastores", "in", "saved", "live/store", "forks"):
            (self.top / part).mkdir(parents=True)
        for name in MACHINES:
            (self.top / "live" / name / str(STORE)).mkdir(parents=True)
            (self.top / "live" / name / "101").mkdir()
            self._power_on(name)
        self._programs = forks.start(self.top / "forks", self._within("fe")) if forked else None

    def _power_on(self, name: str) -> None:
        live = self.top / "live"
        words = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "/usr/bin/python3",
            "-I",
            fork_server.__file__,
            str(CHECKOUT / "lib"),
        ]
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words += [str(live / name), str(self.datastores), str(live / "store")]
        self._machines[name] = subprocess.Popen(words, stdin=theirs.fileno())
        theirs.close()
        assert ours.recv(100) == b"ready"
        self._servers[name] = ours

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if self._programs:
            self._programs.kill()
            self._programs.wait()
        for name, process in self._machines.items():
            self._servers[name].close()
            process.wait()
        subprocess.run(["umount", "--lazy", self.top], check=True)
        self.top.rmdir()

    # -- files ----------------------------------------------------------------------------------

    def store(self, name: str = "") -> Path:
        """Return the outside path of something in the store."""
        return self.top / "live/store" / name

    def on(self, machine: str, name: str = "") -> Path:
        """Return the outside path of something below a machine's datastores."""
        return self.top / "live" / machine / name

    def inside(self, name: str) -> str:
        """Return the path by which every machine knows something below its datastores."""
        return f"{self.datastores}/{name}"

    def outside(self, machine: str, inside: str) -> Path:
        """Return where a machine's path leads, seen from outside."""
        name = os.path.relpath(inside, self.datastores)
        if name.split("/")[0] == str(STORE):
            return self.store(name.partition("/")[2])
        return self.on(machine, name)

    def _within(self, machine: str) -> List[str]:
        return ["nsenter", f"--mount=/proc/{self._machines[machine].pid}/ns/mnt", "--wd=/", "--"]

    def run(
        self, machine: str, argv: Sequence[str], check: bool = True, **options: object
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program as seen by a machine."""
        done = subprocess.run([*self._within(machine), *argv], capture_output=True, check=False, **options)  # type: ignore[call-overload]
        assert not check or done.returncode == 0, f"{argv}: {done.stderr.decode(errors='replace')}"
        return done

    def save(self, name: str) -> None:
        """Keep the state of all machines and the store."""
        shutil.rmtree(self.top / "saved" / name, ignore_errors=True)
        subprocess.run(
            ["cp", "-a", "--sparse=always", self.top / "live", self.top / "saved" / name], check=True
        )

    def restore(self, name: str) -> None:
        """Go back to a kept state. The mount points themselves stay."""
        for part in (*MACHINES, "store"):
            for entry in os.scandir(self.top / "live" / part):
                if entry.name == str(STORE) and part != "store":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        subprocess.run(
            ["cp", "-a", "--sparse=always", f"{self.top}/saved/{name}/.", self.top / "live"], check=True
        )
        copied(self.top / "live" / "store")

    # -- programs of ours -----------------------------------------------------------------------

    @contextmanager
    def sessions(self, environment: Dict[str, Dict[str, str]]) -> Iterator[None]:
        """Let Session('a'|'b'|'fe') start the host side on that machine, with its extra environment."""
        rig, real = self, ssh.Session

        class OnRig(real):  # type: ignore[misc, valid-type]
            def __init__(
                self, host: str, action: str, config: object, *, bulk: bool = False, address: str = ""
            ) -> None:
                ssh.subprocess = fork_server.Starter(rig._servers[host])  # type: ignore[assignment, attr-defined]
                extra = environment.get(host, {})
                os.environ.update(extra)
                try:
                    super().__init__("localhost", action, config, bulk=bulk)
                finally:
                    ssh.subprocess = subprocess  # type: ignore[attr-defined] # replaced above
                    for name in extra:
                        del os.environ[name]
                self.host = host

        ssh.Session = OnRig  # type: ignore[misc]
        try:
            yield
        finally:
            ssh.Session = real  # type: ignore[misc]

    def datastore(
        self, action: str, xml: str, environment: Dict[str, str]
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a datastore action on the front-end as one_datastore does."""
        python = [f"{self.top}/forks/python3", "-IS"] if self._programs else []
        return self.run(
            "fe",
            [*python, f"{CHECKOUT}/datastore/{action}", "1"],
            check=False,
            input=base64.b64encode(xml.encode()),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **environment},
        )

    # -- what is there --------------------------------------------------------------------------

    def listing(self, opaque: Sequence[str] = ()) -> Listing:
        """List every file with mode, links and content; what is random by nature is replaced by what it must
        be.

        Content of paths that match `opaque` (file systems with a UUID) is replaced by the file system's name.
        """
        found: Listing = {}
        inodes: Dict[Tuple[int, int], str] = {}
        names: Dict[str, str] = {}
        for part in (*MACHINES, "store"):
            # Words, not Paths: this is asked a thousand times, and to take those apart is half of it.
            top = f"{self.top}/live/{part}"
            for folder, folders, files in os.walk(top):
                folders.sort()
                for name in sorted([*folders, *files]):
                    path = f"{folder}/{name}"
                    shown = self._shown(part + path[len(top) :], names)
                    if path == f"{top}/{STORE}":
                        continue
                    info = os.lstat(path)
                    mode = f"{stat.S_IMODE(info.st_mode):o}"
                    if stat.S_ISLNK(info.st_mode):
                        found[shown] = ("link", os.readlink(path).replace(str(self.top), ""))
                    elif stat.S_ISDIR(info.st_mode):
                        found[shown] = ("directory", mode)
                    else:
                        first = inodes.setdefault((info.st_dev, info.st_ino), shown)
                        found[shown] = ("file", mode, first, *self._content(Path(path), shown, opaque))
        return found

    @staticmethod
    def _shown(path: str, names: Dict[str, str]) -> str:
        def known(match: re.Match[str]) -> str:
            return names.setdefault(match.group(0), f"IMAGE{len(names) + 1}")

        path = re.sub(MARK, "ss-MARK", path)
        return re.sub(r"(?<=/)[0-9a-f]{32}(?=/|\Z)", known, path)

    def _content(self, path: Path, shown: str, opaque: Sequence[str]) -> Tuple[object, ...]:
        name = path.name
        if name == "session":
            return ("a token", path.stat().st_size)
        if name == "generation.json":
            header = json.loads(path.read_bytes())
            return (
                "generation",
                header["generation"],
                header["format"],
                header["size"],
                self._is_current(path),
            )
        if name.startswith("vm-") and path.parent.name == "locks":
            return ("deletions of", *sorted(json.loads(path.read_bytes() or b"{}").get("epochs", ())))
        if name == "migration.json":
            return ("proof", *sorted(json.loads(path.read_bytes())))
        if name == "marks.json":
            known = json.loads(path.read_bytes())["marks"]
            return ("marks", *((mark["number"], mark["disks"]) for mark in known))
        if MARKED in opaque and re.search(MARKED, shown):
            return ("a layer with marks",)
        if any(re.search(pattern, shown) for pattern in opaque):
            return ("file system", file_system(path))
        return (path.stat().st_size, file_digest(path))

    def _is_current(self, header: Path) -> bool:
        known = json.loads(header.read_text())
        image = header.parents[2] / header.parent.name
        session = header.parent / "session"
        return (
            known["session"] == (session.read_text().strip() if session.exists() else "")
            and image.exists()
            and known["mtime_ns"] == image.stat().st_mtime_ns
            and known["size"] == image.stat().st_size
            and (known["ctime_ns"], known["inode"]) == (image.stat().st_ctime_ns, image.stat().st_ino)
        )

    def _target(self, machine: str, file: Path, name: str) -> Path:
        """Return where a link or a backing name in `file` leads, seen from outside."""
        return (
            self.outside(machine, name)
            if name.startswith("/")
            else Path(os.path.normpath(file.parent / name))
        )

    def guest_sees(self, machine: str, path: str, format: str) -> str:
        """Return the hash of what a guest would read from a disk, through all of its backing files, after a
        check.

        The same bytes over the same backing bytes are looked at only once.
        """
        key = [format]
        file: Optional[Path] = self.outside(machine, path)
        while file:
            while file.is_symlink():
                file = self._target(machine, file, os.readlink(file))
            key.append(file_digest(file))
            link = backing_of(file) if len(key) > 2 or format == "qcow2" else None
            file = self._target(machine, file, link) if link else None
        known = self._seen.get(tuple(key))
        if known:
            return known
        if format == "qcow2":
            self.run(machine, ["qemu-img", "check", "-q", "-f", format, path])
        out = self.top / "guest-sees"
        self.run(machine, ["qemu-img", "convert", "-f", format, "-O", "raw", path, str(out)])
        seen = file_digest(out)
        out.unlink()
        self._seen[tuple(key)] = seen
        return seen


def backing_of(path: Path) -> Optional[str]:
    """Return the backing file that a qcow2 header names, None for other files."""
    with path.open("rb") as file:
        data = file.read(4096)
    if not data.startswith(b"QFI\xfb"):
        return None
    offset, size = struct.unpack(">QI", data[8:20])
    return data[offset : offset + size].decode() or None


_file_systems: Dict[str, str] = {}


def file_system(path: Path) -> str:
    """Name the file system in a raw or qcow2 image, after its own checker has found it clean."""
    key = file_digest(path)
    if key not in _file_systems:
        _file_systems[key] = _checked_file_system(path)
    return _file_systems[key]


def _checked_file_system(path: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        raw = f"{folder}/raw"
        with path.open("rb") as file:
            format = "qcow2" if file.read(4) == b"QFI\xfb" else "raw"
        subprocess.run(["qemu-img", "convert", "-f", format, "-O", "raw", str(path), raw], check=True)
        kind = subprocess.run(
            ["blkid", "-p", "-o", "value", "-s", "TYPE", raw], capture_output=True, check=False
        ).stdout
        name = kind.decode().strip()
        if name.startswith("ext"):
            subprocess.run(["e2fsck", "-fn", raw], check=True, capture_output=True)
        return f"{name} {os.path.getsize(raw)}"


BLOCK = 64 << 10
ZEROS = bytes(BLOCK)


def digest(data: bytes) -> str:
    """Return the hash of content, as `file_digest` computes it."""
    found = hashlib.sha256(str(len(data)).encode())
    for offset in range(0, len(data), BLOCK):
        block = data[offset : offset + BLOCK]
        if block != ZEROS[: len(block)]:
            found.update(b"%d:" % offset + block)
    return found.hexdigest()


def file_digest(path: Path) -> str:
    """Return the hash of a file's content; zeros count the same whether they are a hole or not, and cost
    nothing.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        found = hashlib.sha256(str(size).encode())
        offset = 0
        while offset < size:
            try:
                offset = os.lseek(fd, offset, os.SEEK_DATA) // BLOCK * BLOCK
            except OSError:
                break  # no data after here
            block = os.pread(fd, BLOCK, offset)
            if block != ZEROS[: len(block)]:
                found.update(b"%d:" % offset + block)
            offset += BLOCK
        return found.hexdigest()
    finally:
        os.close(fd)


def pattern(size: int, seed: str) -> bytes:
    """Return `size` bytes that look random and are the same each time."""
    return hashlib.shake_256(seed.encode()).digest(size)


@cache
def image_bytes(seed: str, size: int = 8 << 20, data: int = 256 << 10) -> bytes:
    """Return the content of a small image: data at its start and in its second extent, zeros elsewhere.

    The same object each time: what it hashes to is known then.
    """
    content = bytearray(size)
    content[:data] = pattern(data, seed)
    content[5 << 20 : (5 << 20) + 65536] = pattern(65536, seed + "-far")
    return bytes(content)


def points(trace: Path) -> List[str]:
    """Return the names of the points that a run passed."""
    if not trace.exists():
        return []
    return [line.partition(" ")[2] for line in trace.read_text().splitlines()]
