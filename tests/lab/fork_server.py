# SPDX-License-Identifier: Apache-2.0
"""A process that starts host sides by forking itself, in milliseconds, where the point of a test is not that one starts.

    fork_server.py LIB [DISKS DATASTORES STORE]      with a socket as stdin; says "ready"; with mounts, if they are named

Each request on the socket is an environment (JSON) with four descriptors: stdin, stdout, stderr, and a socket that is
told the pid and then the exit code. What runs is the host side as ssh starts it, but for python's own start: everything
it imports is here before, and nothing of it has run yet. Suites with real starts: system, faults, shell, staging and more.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
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

    def Popen(self, argv: Sequence[str], *, env: Dict[str, str], stderr: int, **more: Any) -> "HostSide | subprocess.Popen[bytes]":  # noqa: N802
        """Start what `argv` says."""
        if self._only and self._only not in argv:
            return subprocess.Popen(argv, env=env, stderr=stderr, **more)
        return HostSide(self._server, {**env, **self._extra}, stderr)


@contextmanager
def serving(lib: Path) -> Iterator[socket.socket]:
    """Have a server on this machine; yield its socket. It ends with the block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(["/usr/bin/python3", "-I", __file__, str(lib)], stdin=theirs.fileno())
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
    running: Dict[int, "tuple[int, socket.socket]"] = {}
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
        importlib.reload(sys.modules["semishared.tools.crash_points"])
        code = sys.modules["semishared.hostside"].main()
    except BaseException:  # noqa: BLE001 - as the interpreter would tell it
        traceback.print_exc()
    finally:
        os._exit(code)


HOST = ("tools", "wire", "store", "intake", "base", "guest", "disk", "host")
"""The parts of the package that a host side may load."""
RUN_BY_PATH = ("watch.py", "host_probe.py")


def _host_modules(lib: str) -> List[Path]:
    return [path for part in HOST for path in Path(lib, "semishared", part).glob("*.py") if path.name not in RUN_BY_PATH]


def main() -> None:
    lib, *mounts = sys.argv[1:]
    server = socket.socket(fileno=os.dup(0))
    if mounts:
        disks, datastores, store = mounts
        subprocess.run(["mount", "--bind", disks, datastores], check=True)
        subprocess.run(["mount", "--bind", store, f"{datastores}/100"], check=True)
    sys.path.insert(0, lib)
    for path in sorted([Path(lib, "semishared/hostside.py"), *_host_modules(lib)]):
        importlib.import_module(".".join(path.relative_to(lib).with_suffix("").parts))
    server.send(b"ready")
    os.chdir("/")
    _serve(server)


if __name__ == "__main__":
    main()
