# SPDX-License-Identifier: Apache-2.0
"""The watch over unit tests itself: what it must stop, it stops."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest


@pytest.fixture()
def forgiven(watch: object) -> object:
    """Yield the watch, and forget what this test did on purpose."""
    yield watch
    watch.crimes.clear()  # type: ignore[attr-defined]


CRIMES: dict[str, Callable[[], object]] = {
    "popen": lambda: subprocess.run(["true"], check=False),
    "system": lambda: os.system("true"),
    "exec": lambda: os.execv("/bin/true", ["true"]),
    "fork": os.fork,
    "spawn": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "python": lambda: subprocess.run([sys.executable, "-c", "pass"], check=False),
    "connect": lambda: socket.socket().connect(("127.0.0.1", 9)),
    "unix socket": lambda: socket.socket(socket.AF_UNIX).connect("/run/x"),
    "name lookup": lambda: socket.getaddrinfo("localhost", 80),
    "read": lambda: open("/etc/passwd", "rb"),
    "write": lambda: open("/var/lib/semishared-test", "wb"),
    "os.open": lambda: os.open("/var/lib/semishared-test", os.O_CREAT | os.O_WRONLY),
    "mkdir": lambda: os.mkdir("/var/lib/semishared-test"),
    "remove": lambda: os.remove("/var/lib/semishared-test"),
    "rename": lambda: os.rename("/var/lib/semishared-test", "/tmp/x"),
    "write to the checkout": lambda: open(Path(__file__).with_name("new"), "w"),
}


@pytest.mark.parametrize("crime", CRIMES.values(), ids=CRIMES)
def test_what_a_unit_test_may_not_do_is_stopped_and_remembered(
    crime: Callable[[], object], forgiven: object
) -> None:
    with pytest.raises(RuntimeError, match="a unit test may not"):
        crime()
    assert len(forgiven.crimes) == 1  # type: ignore[attr-defined]


def test_temporary_files_and_socket_pairs_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    os.rename(tmp_path / "file", tmp_path / "other")
    left, right = socket.socketpair()
    left.close()
    right.close()
