# SPDX-License-Identifier: Apache-2.0
"""Talk to the agent in a guest: one command line, one answer line, over the serial console's unix socket."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import socket
import struct
import time
from typing import Optional, Union

from lab.node import Node

Seed = Union[str, int]
WORD = 0xFFFFFFFFFFFFFFFF
RATE = 50 if os.environ.get("SEMISHARED_FULL") else 10
"""Blocks that a background load writes, and reads again, per second: five disks at 50 keep an emulated
processor busy, and Ceph.
"""


class GuestError(Exception):
    """The guest answered `ERR ...`, or did not answer."""


def serial_path(vm_name: str) -> str:
    """Return where a VM's serial console is on whatever host runs it."""
    return f"/run/one/{vm_name}.serial"


def console_path(serial: str) -> str:
    """Return where a host keeps all that a guest there has said on its serial console, whether anybody
    listened or not.
    """
    return serial[: -len(".serial")] + ".console"


def serial_xml(vm_name: str) -> str:
    """Return what goes into a VM template's RAW/DATA to give the VM a serial console under this name."""
    path = serial_path(vm_name)
    source = f"<source mode='bind' path='{path}'/><log file='{console_path(path)}' append='on'/>"
    return f"<devices><serial type='unix'>{source}<target port='0'/></serial></devices>"


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def content(seed: Seed, offset_kib: int, count_kib: int) -> bytes:
    """Compute what `write` puts on a disk, to compare or prepare images outside (about 0.1 s per MiB)."""
    if seed == "zero":
        return bytes(count_kib * 1024)
    start = 0xCBF29CE484222325
    for byte in str(seed).encode():
        start = ((start ^ byte) * 0x100000001B3) & WORD
    words: list[int] = []
    for kib in range(offset_kib, offset_kib + count_kib):
        x = _mix(start ^ _mix(kib)) | 1
        for _ in range(128):
            x ^= (x << 13) & WORD
            x ^= x >> 7
            x ^= (x << 17) & WORD
            words.append(x)
    return struct.pack(f"<{len(words)}Q", *words)


class Guest:
    """The agent in one guest. Disks are named as in the guest (`vda`); offsets and counts are in KiB."""

    def __init__(self, node: Node, serial: str) -> None:
        """Describe the guest; it is on `node` and its console at `serial` (see `serial_path`)."""
        self.node = node
        self.serial = serial
        self.transcript = b""
        self._line: Optional[socket.socket] = None
        self._pending = b""
        self._dirty = True  # an answer to an earlier command may still come

    def moved(self, node: Node) -> None:
        """Follow the guest to another host."""
        self.close()
        self.node = node

    def close(self) -> None:
        """Let go of the console; the next command takes it again."""
        if self._line:
            self._line.close()
        self._line, self._pending, self._dirty = None, b"", True

    def console(self) -> str:
        """Return the end of what the guest has said on this host, for messages: why it has ended, or begun
        anew.
        """
        try:
            said = self.node.path(console_path(self.serial)).read_bytes()
        except OSError:
            said = self.transcript
        return f"console on {self.node.name}: {said[-3000:].decode(errors='replace')!r}"

    def _connect(self) -> socket.socket:
        if not self._line:
            self._line = socket.socket(socket.AF_UNIX)
            self._line.settimeout(5)
            try:
                self._line.connect(str(self.node.path(self.serial)))
            except OSError:
                self.close()
                raise
        return self._line

    def _read(self, deadline: float) -> str:
        """Return the next answer line; what else is on the console only goes into the transcript."""
        while True:
            line, found, rest = self._pending.partition(b"\n")
            if found:
                self._pending = rest
                if line.startswith((b"OK", b"ERR")):
                    return line.decode(errors="replace").rstrip("\r")
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                raise socket.timeout("no answer")
            connection = self._connect()
            connection.settimeout(left)
            data = connection.recv(65536)
            if not data:
                raise ConnectionResetError("the console is closed")
            self.transcript += data
            self._pending += data

    def _send(self, line: str) -> None:
        self.transcript += f"> {line}\n".encode()
        self._connect().sendall(line.encode() + b"\n")

    def _synchronise(self, deadline: float) -> None:
        word = secrets.token_hex(4)
        self._connect().sendall(f"ping {word}\n".encode())  # not worth a line in the transcript
        while self._read(deadline) != f"OK {word}":
            pass
        self._dirty = False

    def wait_up(self, timeout: float = 90) -> Guest:
        """Wait until the agent answers: after boot, or after the guest has moved."""
        deadline, patience = time.monotonic() + timeout, 0.5
        while True:
            try:
                self._synchronise(min(deadline, time.monotonic() + patience))
                return self
            except (OSError, RuntimeError) as error:
                if not isinstance(error, socket.timeout):
                    self.close()
                if time.monotonic() > deadline:
                    raise GuestError(
                        f"the guest did not answer in {timeout} s ({error}); {self.console()}"
                    ) from error
                # On a busy machine an answer takes longer, and who asks again meanwhile never hears it.
                patience = min(2 * patience, 15.0) if isinstance(error, socket.timeout) else patience
                time.sleep(0.05)

    def command(self, line: str, timeout: float = 60) -> str:
        """Send one command and return what follows `OK`; `ERR` is a GuestError."""
        deadline = time.monotonic() + timeout
        try:
            if self._dirty:
                self._synchronise(deadline)
            self._dirty = True
            self._send(line)
            answer = self._read(deadline)
            self._dirty = False
        except OSError as error:
            if not isinstance(error, socket.timeout):
                self.close()
            raise GuestError(f"{line}: {error}") from error
        if not answer.startswith("OK"):
            raise GuestError(f"{line}: {answer[4:]}")
        return answer[3:]

    def write(self, disk: str, seed: Seed, offset: int, count: int, timeout: float = 120) -> None:
        """Write reproducible content (seed `zero`: zeros) and flush it."""
        self.command(f"write {disk} {seed} {offset} {count}", timeout)

    def check(self, disk: str, seed: Seed, offset: int, count: int, timeout: float = 120) -> None:
        """Read with direct I/O and compare; a GuestError says how much differs and where it begins."""
        self.command(f"check {disk} {seed} {offset} {count}", timeout)

    def sum(self, disk: str, offset: int = 0, count: Optional[int] = None, timeout: float = 300) -> str:
        """Return the sha256 of a disk or a part of it (about 15 MiB/s under TCG)."""
        return self.command(f"sum {disk}" + (f" {offset} {count}" if count is not None else ""), timeout)

    def discard(self, disk: str, offset: int, count: int) -> None:
        """Trim a range."""
        self.command(f"discard {disk} {offset} {count}")

    def disks(self) -> dict[str, int]:
        """Return the disks and their sizes in bytes."""
        pairs = (word.partition(":") for word in self.command("disks").split())
        return {name: int(size) for name, _, size in pairs}

    def wait_disk(self, disk: str, present: bool = True, timeout: float = 30) -> None:
        """Wait until a hot-attached disk is there, or a detached one is gone."""
        deadline = time.monotonic() + timeout
        while (disk in self.disks()) != present:
            if time.monotonic() > deadline:
                raise GuestError(f"{disk} is {'not there' if present else 'still there'} after {timeout} s")
            time.sleep(0.1)

    def loop(self, disk: str, seed: Seed, offset: int = 0, count: int = 16384, rate: int = RATE) -> None:
        """Start writing and verifying 64 KiB blocks in the background, `rate` per second."""
        self.command(f"loop {disk} {seed} {offset} {count} {rate}")

    def loop_read(self, disk: str, offset: int = 0, count: int = 16384) -> None:
        """Start reading 256 KiB anywhere in a range, as often as it can; `maxgap_ms` is the longest that one
        of these took.
        """
        self.command(f"loop {disk} read {offset} {count}")

    def loop_memory(self, mib: int, rate: int) -> None:
        """Start writing and verifying memory, `rate` MiB (a word in each page) per second; its disk is called
        `memory`.
        """
        self.command(f"loop memory {mib} {rate}")

    def _counts(self, line: str, timeout: float = 120) -> dict[str, int]:
        try:
            answer = self.command(line, timeout)
        except GuestError as error:  # an agent that knows of no loop is another one than was told to begin it
            raise GuestError(f"{error}; {self.console()}") from error
        return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", answer)}

    def loop_stat(self, disk: str) -> dict[str, int]:
        """Return writes, reads, errors, mismatches, maxgap_ms and verified so far."""
        return self._counts(f"loop-stat {disk}")

    def wait_written(self, disk: str, count: int = 10, timeout: float = 120) -> None:
        """Wait until it has written more than so many blocks: how long a machine takes for that is no
        fault.
        """
        deadline = time.monotonic() + timeout
        while (counts := self.loop_stat(disk))["writes"] <= count:
            if time.monotonic() > deadline:
                raise GuestError(f"{disk}: {counts} after {timeout} s")
            time.sleep(0.1)

    def loop_stop(self, disk: str) -> dict[str, int]:
        """Stop it, flush, read all it wrote once more, and return the counts; on a busy machine a flush alone
        can take minutes.
        """
        return self._counts(f"loop-stop {disk}", 300)

    def context(self) -> dict[str, str]:
        """Return the variables of the context ISO, wherever it is attached."""
        text = self.command("context").replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\")
        words = shlex.split(text, comments=True)
        return dict(word.split("=", 1) for word in words if "=" in word)

    def file(self, path: str, data: bytes = b"") -> bytes:
        """Write to a file of the guest in one go, or return what it holds."""
        return bytes.fromhex(self.command(f"file {path} {data.hex()}".rstrip()))

    def run(self, script: str, timeout: float = 60) -> tuple[int, str]:
        """Run a script of busybox's shell, of at most 2047 bytes; return its exit code and what it said (16
        KiB).
        """
        code, _, output = self.command(f"run {script.encode().hex()}", timeout).partition(" ")
        return int(code), bytes.fromhex(output).decode(errors="replace")

    def _asked(self, line: str) -> str:
        try:
            self.command(line)
        except GuestError as error:
            return str(error)[len(line) + 2 :]
        return ""

    def lock(self, path: str, how: str, wait: bool = False) -> str:
        """Lock a file of the guest, `posix` or `flock`, and keep it locked; return '' or why not."""
        return self._asked(f"lock {path} {how}" + " wait" * wait)

    def set_attribute(self, path: str, name: str, value: bytes) -> str:
        """Give a file of the guest an extended attribute; return '' or why not."""
        return self._asked(f"xattr {path} {name} {value.hex()}")

    def attribute(self, path: str, name: str) -> str:
        """Read an extended attribute of a file of the guest; return '' or why not."""
        return self._asked(f"xattr {path} {name}")

    def unlock(self) -> None:
        """Let go of all locks."""
        self.command("unlock")

    def device(self, path: str, data: bytes) -> bytes:
        """Write to a device and return its answer."""
        return bytes.fromhex(self.command(f"device {path} {data.hex()}"))

    def sync(self) -> None:
        """Flush everything."""
        self.command("sync")

    def poweroff(self) -> None:
        """Shut the guest down from inside."""
        self.command("poweroff")
        self.close()
