# SPDX-License-Identifier: Apache-2.0
"""Hosts with a kernel of their own: Debian's, in an emulated machine, with this machine's programs and files.

What this machine's kernel cannot do (NFS, CephFS, AppArmor ...) a kernel host can. Its root is this machine's
root, read-only, under a tmpfs: nothing is installed, nothing is written here; the checkout is at its own
path. It is up after 7 to 20 s on an idle machine and takes 40 MB of its memory to be there.

    with Wire() as wire, KernelHost("h1", wire) as h1, KernelHost("h2", wire) as h2:    # both boot at once
        h1.run(["mount", "-t", "nfs4", ...])
        print(h1.run(["id", "-un"], user=ONEADMIN).out)
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Optional, TypeVar

from lab import caches, initramfs, layout

HERE = Path(__file__).resolve().parent
MODULES = ["virtio_pci", "virtio_net", "virtio_blk", "virtio_console", "virtiofs", "overlay"]
VIRTIOFSD = "/usr/lib/qemu/virtiofsd"
BOOT_S = 240
"""Boot takes 20 s where a processor is free; this is for a machine on which everything is slow."""
# What costs an emulated processor most is to start programs: half of it goes with `max`, whose wide registers
# and deep page tables are emulated too, and with addresses that differ each time, since what was translated
# for one serves no other.
CPU = "qemu64,+rdrand"
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
ROOT = None
ONEADMIN = layout.owner_ids()


class KernelHostError(Exception):
    """A kernel host that does not come up, does not answer, or a program on it that failed."""


class Done(NamedTuple):
    """What a program said."""

    code: int
    out: str
    err: str


class Wire:
    """An Ethernet segment for kernel hosts: a multicast group on the loopback of this machine. To reach a
    lab: lab/switch.py.
    """

    def __init__(self) -> None:
        self.enter: list[str] = []
        """The words to run QEMU by, in another network namespace."""
        # Groups of other tests on the same machine are others with near certainty; a MAC address says whose a
        # packet is.
        self._tag = secrets.token_bytes(3)
        self._group = f"239.{self._tag[0]}.{self._tag[1]}.{self._tag[2]}:{20000 + secrets.randbelow(20000)}"
        self._names: list[str] = []

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def join(self, name: str) -> tuple[str, list[str]]:
        """Return the address of a new host on it, and what QEMU needs to be told."""
        self._names.append(name)
        number = len(self._names)
        mac = "52:54:" + ":".join(f"{byte:02x}" for byte in (*self._tag, number))
        device = f"virtio-net-pci,netdev=wire,mac={mac},id=nic,romfile="
        return f"10.99.7.{number}", [
            "-netdev",
            f"socket,id=wire,mcast={self._group},localaddr=127.0.0.1",
            "-device",
            device,
        ]


class Program:
    """A program that runs on a kernel host."""

    def __init__(self, host: KernelHost, argv: Sequence[str]) -> None:
        self._host = host
        self.argv = list(argv)
        self.number = host._number()
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._said = {"out": b"", "err": b""}
        self._code: Optional[int] = None

    def write(self, data: bytes) -> None:
        """Write to its standard input."""
        for at in range(0, len(data), 1 << 16):
            self._host._send(id=self.number, input=base64.b64encode(data[at : at + (1 << 16)]).decode())

    def close(self) -> None:
        """Close its standard input."""
        self._host._send(id=self.number, close=True)

    def signal(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to it and to what it started."""
        self._host._send(id=self.number, signal=int(number))

    def _take(self, left: float) -> bool:
        try:
            event = self.events.get(timeout=max(0.0, left))
        except queue.Empty:
            return False
        for key in self._said:
            if key in event:
                self._said[key] += base64.b64decode(event[key])
        self._code = event.get("end", self._code)
        return True

    @property
    def ended(self) -> bool:
        """Tell whether it has ended."""
        while self._code is None and self._take(0):
            pass
        return self._code is not None

    @property
    def out(self) -> str:
        """Return what it has said so far."""
        while self._take(0):
            pass
        return self._said["out"].decode("utf-8", "replace")

    def wait_for(self, text: str, timeout: float = 60) -> str:
        """Wait until it has said `text`; return all it has said."""
        deadline = time.monotonic() + timeout
        while text not in self.out:
            if self._code is not None or not self._take(deadline - time.monotonic()):
                raise KernelHostError(
                    f"{self._host.name}: {self.argv} did not say {text!r}: "
                    f"{self._result()}{self._host.says()}"
                )
        return self.out

    def _result(self) -> Done:
        code = -1 if self._code is None else self._code
        return Done(code, *(self._said[key].decode("utf-8", "replace") for key in ("out", "err")))

    def wait(self, timeout: float = 180) -> Done:
        """Wait for its end; a KernelHostError if that does not come."""
        deadline = time.monotonic() + timeout
        while self._code is None:
            if not self._take(deadline - time.monotonic()):
                raise KernelHostError(
                    f"{self._host.name}: {self.argv} has not ended in {timeout} s: "
                    f"{self._result()}{self._host.says()}"
                )
        return self._result()


_Self = TypeVar("_Self", bound="KernelHost")


class KernelHost:
    """One emulated machine; `with` starts it, the first use waits until it is up."""

    def __init__(
        self,
        name: str,
        wire: Optional[Wire] = None,
        *,
        memory_mib: int = 512,
        disks: Mapping[str, int] | None = None,
        kernel_arguments: str = "",
        qemu_arguments: Sequence[str] = (),
        processors: int = 1,
    ) -> None:
        """Describe it. `disks`: name -> MiB, each an empty XFS that `mount_disk` mounts, sparse on this
        machine.
        """
        self.name = name
        self.memory_mib = memory_mib
        self.address = ""
        self._wire = wire
        self._disks = dict(disks or {})
        self._kernel_arguments = kernel_arguments
        self._qemu_arguments = list(qemu_arguments)
        self._processors = processors
        self._folder = Path()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._line: Optional[socket.socket] = None
        self._sending = threading.Lock()
        self._programs: dict[int, Program] = {}
        self._count = 0
        self._up = threading.Event()
        self._asking = threading.Lock()
        self._started = 0.0
        self.boot_s = 0.0
        """How long it took to come up."""

    # -- up and down
    # ----------------------------------------------------------------------------------------------

    def __enter__(self: _Self) -> _Self:
        self.start()
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], tb: Optional[TracebackType]
    ) -> None:
        self.end()

    def start(self) -> None:
        """Let it boot. From the thread that owns it: when that ends, so does the host, however it ends.

        It remembers the machine's files as it first sees them: programs start three times as fast.
        """
        kernel, packed = _boot_files()
        self._folder = Path(tempfile.mkdtemp(prefix="kernel-host-", dir="/var/tmp"))
        self._started = time.monotonic()
        words = [
            "qemu-system-x86_64",
            "-name",
            self.name,
            "-machine",
            "q35,accel=tcg",
            "-cpu",
            CPU,
            "-smp",
            str(self._processors),
        ]
        words += ["-display", "none", "-nodefaults", "-no-reboot", "-no-user-config"]
        words += [
            "-object",
            f"memory-backend-memfd,id=memory,size={self.memory_mib}M,share=on",
            "-m",
            f"{self.memory_mib}M",
        ]
        words += ["-numa", "node,memdev=memory", "-serial", f"file:{self._folder}/console"]
        words += [
            "-chardev",
            f"socket,id=files,path={self._folder}/files",
            "-device",
            "vhost-user-fs-pci,chardev=files,tag=machine",
        ]
        words += [
            "-device",
            "virtio-serial-pci",
            "-chardev",
            f"socket,id=agent,path={self._folder}/agent,server=on,wait=off",
        ]
        words += ["-device", "virtserialport,chardev=agent,name=kernel-host"]
        words += [
            "-chardev",
            f"socket,id=qmp,path={self._folder}/qmp,server=on,wait=off",
            "-mon",
            "chardev=qmp,mode=control",
        ]
        if self._wire:
            self.address, more = self._wire.join(self.name)
            words += more
        for name, mib in self._disks.items():
            path = self._folder / f"{name}.raw"
            with open(path, "wb") as file:
                file.truncate(mib << 20)
            subprocess.run(["mkfs.xfs", "-q", "-L", name[:12], str(path)], check=True)
            words += ["-drive", f"file={path},format=raw,if=none,id=d-{name},cache=unsafe,discard=unmap"]
            words += ["-device", f"virtio-blk-pci,drive=d-{name},serial={name}"]
        uid, gid = ONEADMIN
        says = (
            f"kh_checkout={caches.CHECKOUT} kh_address={self.address} kh_uid={uid} kh_gid={gid} "
            f"kh_name={self.name}"
        )
        append = f"console=ttyS0 quiet loglevel=4 panic=-1 norandmaps {initramfs.QUICK} {says}"
        words += [
            "-kernel",
            str(kernel),
            "-initrd",
            str(packed),
            "-append",
            f"{append} {self._kernel_arguments}".strip(),
        ]
        try:
            self._spawn(
                [
                    VIRTIOFSD,
                    f"--socket-path={self._folder}/files",
                    "-o",
                    "source=/,cache=always,sandbox=chroot,xattr",
                ],
                "virtiofsd",
            )
            self._wait_for("files", "virtiofsd", _is_listened_to)
            self._spawn([*(self._wire.enter if self._wire else ()), *words, *self._qemu_arguments], "qemu")
            self._line = socket.socket(socket.AF_UNIX)
            self._wait_for("agent", "qemu", self._connect)
            threading.Thread(target=self._listen, args=(self._line,), daemon=True).start()
        except BaseException:
            self.end()
            raise

    def _spawn(self, words: Sequence[str], name: str) -> None:
        with open(self._folder / f"{name}.log", "wb") as log:
            self._processes.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "KILL", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _connect(self, path: Path) -> bool:
        """Return whether the connection is made: a socket has its name before somebody listens."""
        assert self._line
        try:
            self._line.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True

    def _wait_for(self, name: str, program: str, is_there: Callable[[Path], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_there(self._folder / name):
            if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                raise KernelHostError(
                    f"{self.name}: {program} does not start: "
                    f"{(self._folder / f'{program}.log').read_text()[-2000:]}"
                )
            time.sleep(0.02)

    def wait_up(self, timeout: float = BOOT_S) -> KernelHost:
        """Wait until it answers; a KernelHostError with the end of its console if it does not."""
        deadline = self._started + timeout
        while not self._up.wait(0.2):
            if self._processes[-1].poll() is not None or time.monotonic() > deadline:
                how = "ended" if self._processes[-1].poll() is not None else f"is not up after {timeout} s"
                raise KernelHostError(f"{self.name} {how}{self.says()}")
        return self

    def says(self) -> str:
        """Return the end of its console and of what its emulator says, for messages."""
        parts = []
        for name in ("console", "qemu.log", "virtiofsd.log"):
            path = self._folder / name
            text = path.read_text(errors="replace")[-1500:].strip() if path.exists() else ""
            if text:
                parts.append(f"\n-- {self.name}, {name}:\n{text}")
        return "".join(parts)

    def end(self) -> None:
        """Cut the power and remove what was its."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
        if self._line:
            self._line.close()
            self._line = None
        self._up.clear()
        if self._folder != Path():
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- programs and files
    # ---------------------------------------------------------------------------------------

    def _number(self) -> int:
        with self._sending:
            self._count += 1
            return self._count

    def _send(self, **message: Any) -> None:
        self.wait_up()
        assert self._line
        with self._sending:
            self._line.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self, line: socket.socket) -> None:
        pending = b""
        while True:
            try:
                data = line.recv(1 << 20)
            except OSError:
                return
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for text in lines:
                event = json.loads(text)
                if "hello" in event:
                    self.boot_s = round(time.monotonic() - self._started, 1)
                    self._up.set()
                else:
                    self._programs[event["id"]].events.put(event)

    def start_program(
        self,
        argv: Sequence[str],
        *,
        user: Optional[tuple[int, int]] = ROOT,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
    ) -> Program:
        """Start a program there; its standard input stays open until `close`."""
        program = Program(self, argv)
        self._programs[program.number] = program
        environment = {**ENVIRONMENT, **(env or {})}
        self._send(
            id=program.number, start=list(argv), env=environment, user=list(user) if user else None, cwd=cwd
        )
        return program

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        user: Optional[tuple[int, int]] = ROOT,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        timeout: float = 180,
        check: bool = True,
    ) -> Done:
        """Run a program there to its end; with `check`, another exit code than 0 is a KernelHostError."""
        program = self.start_program(argv, user=user, env=env, cwd=cwd)
        program.write(stdin)
        program.close()
        done = program.wait(timeout)
        if check and done.code:
            raise KernelHostError(
                f"{self.name}: {list(argv)} ended with {done.code}: {done.out[-1500:]}{done.err[-1500:]}"
            )
        return done

    def script(self, text: str, **options: Any) -> Done:
        """Run a shell script there; it ends at the first command that fails. Options as of `run`."""
        return self.run(["bash", "-euc", text], **options)

    def python(self, text: str, *words: str, **options: Any) -> Done:
        """Run Python there, with the package of this checkout. Options as of `run`."""
        env = {"PYTHONPATH": f"{caches.CHECKOUT}/lib:{caches.CHECKOUT}/tests", "PYTHONDONTWRITEBYTECODE": "1"}
        env.update(options.pop("env", None) or {})
        return self.run(["/usr/bin/python3", "-c", text, *words], env=env, **options)

    def put(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Write a file there, as root, with the directories above it."""
        program = Program(self, ["put", path])
        self._programs[program.number] = program
        self._send(id=program.number, put=path, content=base64.b64encode(content).decode(), mode=mode)
        done = program.wait()
        if done.code:
            raise KernelHostError(f"{self.name}: {path}: {done.err}")

    def mount_disk(self, name: str, path: str) -> None:
        """Mount one of its disks; it belongs to oneadmin."""
        number = list(self._disks).index(name)
        device, (uid, gid) = f"/dev/vd{chr(ord('a') + number)}", ONEADMIN
        self.script(f"modprobe xfs; mkdir -p {path}; mount -t xfs {device} {path}; chown {uid}:{gid} {path}")

    # -- faults
    # ---------------------------------------------------------------------------------------------------

    def _command(self, command: str, **arguments: object) -> Any:
        with self._asking, socket.socket(socket.AF_UNIX) as line:
            line.settimeout(30)
            line.connect(f"{self._folder}/qmp")
            file = line.makefile("rwb")
            file.readline()
            for words in ({"execute": "qmp_capabilities"}, {"execute": command, "arguments": arguments}):
                file.write(json.dumps(words).encode() + b"\n")
                file.flush()
                while True:
                    answer = json.loads(file.readline())
                    if "return" in answer:
                        break
                    if "error" in answer:
                        raise KernelHostError(f"{self.name}: {command}: {answer['error']['desc']}")
            return answer["return"]

    def cut(self) -> None:
        """Pull its network cable."""
        self._command("set_link", name="nic", up=False)

    def mend(self) -> None:
        """Plug it in again."""
        self._command("set_link", name="nic", up=True)

    def freeze(self) -> None:
        """Stop its processor: it is there and does not answer anything."""
        self._command("stop")

    def thaw(self) -> None:
        """Let it go on."""
        self._command("cont")


def _is_listened_to(path: Path) -> bool:
    """Return whether somebody of this network namespace listens there, without the one connection it takes
    (proc(5), net/unix).
    """
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(words[-1] == str(path) and words[3] == "00010000" for words in sockets)


def _boot_files() -> tuple[Path, Path]:
    """Return the kernel and an initramfs that leads to the agent, kept by content."""
    kernel = caches.newest_kernel()
    files = initramfs.modules(kernel.name[len("vmlinuz-") :], MODULES)
    key = hashlib.sha256()
    for path in (Path(initramfs.__file__), HERE / "kernel/init.sh", initramfs.BUSYBOX, *files):
        key.update(path.read_bytes())
    kept = caches.CACHE / f"kernel-host-{key.hexdigest()[:16]}.initrd"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as name:
            tree = Path(name) / "tree"
            (tree / "bin").mkdir(parents=True)
            (tree / "modules").mkdir()
            shutil.copy(initramfs.BUSYBOX, tree / "bin/busybox")
            shutil.copy(HERE / "kernel/init.sh", tree / "init")
            os.chmod(tree / "init", 0o755)
            initramfs.put(files, tree / "modules")
            caches.put(kept, initramfs.pack(tree))
    return caches.unpacked_kernel(), kept
