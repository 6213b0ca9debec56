# SPDX-License-Identifier: Apache-2.0
"""A process that starts programs of ours by forking itself, in milliseconds, where the point of a test is not
that one starts.

    fork_server.py [--ceph] LIB [DISKS DATASTORES STORE]      with a socket as stdin; says "ready"; with
    mounts, if they are named
    fork_server.py --listen SOCKET LIB [PYTHON]      says "ready" on stdout

What runs is the program but for python's own start: everything it imports is here before, and nothing of it
has run yet.

With a socket as stdin it starts host sides: each request is an environment (JSON) with four descriptors,
stdin, stdout, stderr, and a socket that is told the pid and then the exit code. With --ceph they have what
talks to Ceph, which takes as long to import as all else that a short step does, and makes each fork that does
without a little dearer.

With --listen it serves a node of a lab, where fork_client.c is in the place of python3: driver actions, host
sides, hypervisor actions. It takes what lies beside LIB, as long as LIB is as it was; the client runs all
else itself. One that is killed takes its program along. Real starts stay in the suites system, faults, shell,
staging and docs. So it serves tests of this machine, too; their programs start host sides by PYTHON, which is
the client as well.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Dict, Iterator, List, Optional, Sequence


class HostSide:
    """A host side on a machine, with those parts of subprocess.Popen that wire.session uses."""

    def __init__(self, server: socket.socket, env: Dict[str, str], stderr: int) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self._told, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(server, [json.dumps(env).encode()], [theirs_in, theirs_out, stderr, told.fileno()])
        for fd in (theirs_in, theirs_out):
            os.close(fd)
        told.close()
        self.stdin: Optional[IO[bytes]] = os.fdopen(ours_in, "wb", buffering=0)
        self.stdout: Optional[IO[bytes]] = os.fdopen(ours_out, "rb", buffering=0)
        self.returncode: Optional[int] = None
        pid, fds, _, _ = socket.recv_fds(self._told, 100, 1)
        self.pid, self._pidfd = int(pid), fds[0]

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.returncode is not None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def wait(self, timeout: Optional[float] = None) -> int:
        """Return its exit code; raise TimeoutExpired."""
        if self.returncode is None:
            waiting = select.poll()
            waiting.register(self._told, select.POLLIN)
            if not waiting.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("hostside", timeout or 0)
            self.returncode = int(self._told.recv(100))
            self._told.close()
            os.close(self._pidfd)
        return self.returncode

    def poll(self) -> Optional[int]:
        """Return its exit code, None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None


class Starter:
    """In place of the module subprocess in wire.session: starts host sides on the machine of that server."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, server: socket.socket, extra: Optional[Dict[str, str]] = None, only: str = "") -> None:
        """`only`: what starts anything but this script is started as usual."""
        self._server, self._extra, self._only = server, extra or {}, only

    def Popen(
        self, argv: Sequence[str], *, env: Dict[str, str], stderr: int, **more: Any
    ) -> HostSide | subprocess.Popen[bytes]:  # noqa: N802
        """Start what `argv` says."""
        if self._only and self._only not in argv:
            return subprocess.Popen(argv, env=env, stderr=stderr, **more)
        return HostSide(self._server, {**env, **self._extra}, stderr)


@contextmanager
def serving(lib: Path, *, ceph: bool = False) -> Iterator[socket.socket]:
    """Have a server on this machine, of host sides of images on Ceph or of others; yield its socket. It ends
    with the block.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            ["/usr/bin/python3", "-I", __file__, *["--ceph"] * ceph, str(lib)], stdin=theirs.fileno()
        )
    try:
        if ours.recv(100) != b"ready":
            raise RuntimeError(f"{__file__} did not start")
        yield ours
    finally:
        ours.close()
        process.wait()


# -- the process itself -----------------------------------------------------------------------------


def _serve(server: socket.socket) -> None:
    """Start what is asked for, tell who ended; end with the other end of the socket."""
    poll = select.poll()
    poll.register(server, select.POLLIN)
    running: Dict[int, tuple[int, socket.socket]] = {}
    while True:
        for fd, _ in poll.poll():
            if fd in running:
                pid, told = running.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                try:
                    told.send(str(code).encode())
                except BrokenPipeError:
                    pass
                told.close()
                continue
            request, fds, _, _ = socket.recv_fds(server, 1 << 20, 4)
            if not request:
                return
            told = socket.socket(fileno=fds[3])
            pid = os.fork()
            if not pid:
                _become(json.loads(request), fds)
            for other in fds[:3]:
                os.close(other)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(told, [str(pid).encode()], [pidfd])
            running[pidfd] = pid, told
            poll.register(pidfd, select.POLLIN)


def _become(env: Dict[str, str], fds: List[int]) -> None:
    """Be a host side in this (forked) process."""
    code = 1
    try:
        os.setsid()
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        os.closerange(3, 1000)
        os.environ.clear()
        os.environ.update(env)
        importlib.reload(sys.modules["semishared.tools.effects"])
        code = sys.modules["semishared.hostside"].main()
    except BaseException:  # noqa: BLE001 - as the interpreter would tell it
        traceback.print_exc()
    finally:
        os._exit(code)


HOST = ("tools", "wire", "store", "intake", "device", "base", "stage", "pool", "guest", "disk", "host")
"""The parts of the package that a host side may load."""
RUN_BY_PATH = ("freeze_watch.py", "host_probe.py", "probe.py", "watch.py")


def _host_modules(lib: str) -> List[Path]:
    return [
        path
        for part in HOST
        for path in Path(lib, "semishared", part).rglob("*.py")
        if path.name not in RUN_BY_PATH
    ]


# -- a node's ---------------------------------------------------------------------------------------


class Client:
    """Who has asked for a program, and that program."""

    def __init__(self, line: socket.socket) -> None:
        self.line, self.pid, self.pidfd = line, 0, -1

    def took(self) -> bool:
        """Tell it that its program begins; return False when it is gone, and nothing is to begin."""
        try:
            self.line.send(b"T")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def end(self) -> None:
        """Tell it how the program ended."""
        _, status = os.waitpid(self.pid, 0)
        try:
            self.line.send(status.to_bytes(4, sys.byteorder))
        except (BrokenPipeError, ConnectionResetError):
            pass  # it was killed
        os.close(self.pidfd)
        self.line.close()

    def heard(self) -> bool:
        """Pass on a signal; return False when it is gone, and its program too."""
        try:
            told = self.line.recv(4)
        except ConnectionResetError:
            told = b""
        signal.pidfd_send_signal(self.pidfd, int.from_bytes(told, sys.byteorder) if told else signal.SIGKILL)
        return bool(told)


class NodeServer:
    """Starts what clients ask for."""

    def __init__(self, listening: socket.socket, lib: str) -> None:
        self._listening, self._poll = listening, select.poll()
        self._package = f"{lib}/semishared"
        self._top, self._known = os.path.dirname(lib) + "/", self._version()
        self._clients: Dict[int, Client] = {}
        self._programs: Dict[int, Client] = {}
        self._poll.register(listening, select.POLLIN)

    def _version(self) -> tuple[int, ...]:
        """Return what another version, or one of which a file was replaced, has otherwise."""
        with os.scandir(self._package) as entries:
            folders = [
                self._package,
                *sorted(entry.path for entry in entries if entry.is_dir() and entry.name != "__pycache__"),
            ]
        return (os.stat(self._package).st_ino, *(os.stat(folder).st_mtime_ns for folder in folders))

    def serve(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._listening.fileno():
                    line, _ = self._listening.accept()
                    self._clients[line.fileno()] = Client(line)
                    self._poll.register(line, select.POLLIN)
                elif fd in self._programs:
                    client = self._programs.pop(fd)
                    self._forget(client)
                    self._poll.unregister(fd)
                    client.end()
                elif fd in self._clients:
                    client = self._clients[fd]
                    if not client.pid:
                        self._begin(client)
                    elif not client.heard():
                        self._forget(client)

    def _forget(self, client: Client) -> None:
        if self._clients.pop(client.line.fileno(), None):
            self._poll.unregister(client.line)

    def _begin(self, client: Client) -> None:
        request, fds, _, _ = socket.recv_fds(client.line, 1 << 18, 4)
        mask, nice, count, *words = (
            request.decode(errors="surrogateescape").split("\0")[:-1] if request else ("0", "0", "0")
        )
        argv, environment = words[: int(count)], words[int(count) :]
        is_ours = len(fds) == 4 and argv and argv[0].startswith(self._top) and self._version() == self._known
        if is_ours and client.took():
            client.pid = os.fork()
            if not client.pid:
                _become_script(argv, environment, int(mask), int(nice), fds)
            client.pidfd = os.pidfd_open(client.pid)
            self._programs[client.pidfd] = client
            self._poll.register(client.pidfd, select.POLLIN)
        else:
            self._forget(client)
            client.line.close()
        for fd in fds:
            os.close(fd)


def _become_script(argv: List[str], environment: List[str], mask: int, nice: int, fds: List[int]) -> None:
    """Be, in this (forked) process, what the interpreter makes of a script."""
    status = 1
    try:
        os.setsid()
        os.fchdir(fds[3])
        for number, fd in enumerate(fds[:3]):
            os.dup2(fd, number)
        os.closerange(3, 1000)
        os.umask(mask)
        os.setpriority(os.PRIO_PROCESS, 0, nice)
        os.environ.clear()
        os.environ.update((name, value) for name, _, value in (word.partition("=") for word in environment))
        for points in EFFECTS:
            if points in sys.modules:
                importlib.reload(sys.modules[points])
        sys.argv = argv
        Path("/proc/self/comm").write_text(os.path.basename(argv[0]))  # by which pgrep finds it
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = argv[0]
        with open(argv[0], encoding="utf-8") as file:
            code = compile(file.read(), argv[0], "exec")
        exec(code, main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if not isinstance(end.code, (int, type(None))):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as the interpreter would tell it
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined] # what the interpreter itself does first at its end
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status & 0xFF)


ACTIONS = (*HOST, "model", "opennebula", "plan", "front", "vmm", "share", "cli", "install", "do")
"""The last one is the oldest version's (tests/upgrade)."""
BINDINGS = ("libvirt", "rados", "rbd")
EFFECTS = ("semishared.tools.effects", "semishared.tools.crash_points")
"""Where the points are at which a test kills, by an older version's name too; the oldest has none."""
REACH = "semishared.tools.this_machine"
"""Another module that the oldest version has not got."""


def _bind(names: Sequence[str]) -> None:
    """Import bindings, which do nothing until they are called; nothing that is there by then is looked
    through for garbage again.
    """
    sys.modules[REACH].reach_bindings() if REACH in sys.modules else site.main()
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    gc.collect()
    gc.freeze()


def _listen(path: str, lib: str, python: str = "") -> None:
    sys.path.insert(0, lib)
    package = Path(lib, "semishared")
    modules = [
        path for part in ACTIONS for path in (package / part).rglob("*.py") if path.name not in RUN_BY_PATH
    ]
    for module in sorted([*package.glob("*.py"), *modules]):
        importlib.import_module(".".join(module.relative_to(lib).with_suffix("").parts))
    if python:
        sys.path.insert(0, os.path.join(os.path.dirname(lib), "tests"))
        sys.modules["semishared.wire.session"].PYTHON = python  # type: ignore[attr-defined]
    _bind(BINDINGS)
    # One that was here before, with another version, ends what it has begun, and is asked for nothing more.
    Path(path).unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(64)
    print("ready", flush=True)
    NodeServer(listening, lib).serve()


def main() -> None:
    if sys.argv[1] == "--listen":
        _listen(*sys.argv[2:])
    ceph = sys.argv[1] == "--ceph"
    lib, *mounts = sys.argv[1 + ceph :]
    server = socket.socket(fileno=os.dup(0))
    if mounts:
        disks, datastores, store = mounts
        subprocess.run(["mount", "--bind", disks, datastores], check=True)
        subprocess.run(["mount", "--bind", store, f"{datastores}/100"], check=True)
    sys.path.insert(0, lib)
    for path in sorted([Path(lib, "semishared/hostside.py"), *_host_modules(lib)]):
        importlib.import_module(".".join(path.relative_to(lib).with_suffix("").parts))
    _bind(BINDINGS if ceph else BINDINGS[:1])
    server.send(b"ready")
    os.chdir("/")
    _serve(server)


if __name__ == "__main__":
    main()
