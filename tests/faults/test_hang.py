# SPDX-License-Identifier: Apache-2.0
"""No action waits for ever: a black-holed host frees the driver in 30 s, and nothing that is said blocks
it.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

import pytest

from semishared.disk import transfer
from semishared.errors import ToolFailed, ToolTimeout
from semishared.tools.run import run, stream

from . import conftest
from .cloud import STORE, SYSTEM, Cloud, one_line
from .rig import image_bytes

LIMIT_S = 30
CONTENT = image_bytes("hang")
SHARED = """Host h1 h2
    ControlMaster auto
    ControlPath /tmp/ssh-%r@%h:%p
    ControlPersist 120
"""
SILENT = "    ServerAliveInterval 0\n"


@pytest.fixture(scope="module")
def cloud(forking_cloud: Cloud) -> Cloud:
    """The black holes are the network's: how a driver starts is no matter."""
    forking_cloud.image(1)
    forking_cloud.vm(7, {0: 1})
    return forking_cloud


@pytest.fixture(scope="module")
def source(cloud: Cloud) -> str:
    return cloud.upload(CONTENT)


@contextmanager
def ssh_config(cloud: Cloud, text: str) -> Iterator[None]:
    """Let ssh on the front-end be configured as OpenNebula's wrapper may do; end the masters afterwards."""
    path = cloud.fe.path("/var/lib/one/.ssh/config")
    before = path.read_bytes() if path.exists() else None
    path.write_text(text + (before or b"").decode())
    os.chown(path, cloud.lab.uid, cloud.lab.gid)
    path.chmod(0o600)
    try:
        yield
    finally:
        for host in ("h1", "h2"):
            cloud.fe.run(["ssh", "-O", "exit", host], check=False)
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def freed(cloud: Cloud, name: str, action: str, words: Sequence[str], within: float = LIMIT_S) -> None:
    """The action fails within the limit, and its line names the host."""
    started = time.monotonic()
    done = cloud.tm(action, *words, timeout=120)
    took = time.monotonic() - started
    conftest.figures.setdefault("freed", {})[name] = round(took, 1)
    one_line(done, "h1")
    assert took < within, f"{took:.1f} s"


@pytest.mark.parametrize(
    "kind", ["own connection", pytest.param("shared connection", marks=pytest.mark.long)]
)
def test_host_cut_off_before_the_connection(cloud: Cloud, source: str, kind: str) -> None:
    with ssh_config(cloud, SHARED + SILENT if kind.startswith("shared") else "Host *\n"):
        if kind.startswith("shared"):
            # The master is up and believes in its host: its own keep-alive would never tell.
            cloud.fe.run(["ssh", "-fN", "h1"])
        cloud.h1.cut()
        try:
            freed(cloud, f"before, {kind}", "clone", cloud.clone_words(source))
        finally:
            cloud.h1.join()
    cloud.delete(7)


@pytest.mark.parametrize("kind", ["own connection", "shared connection"])
def test_host_cut_off_while_it_works(cloud: Cloud, source: str, kind: str) -> None:
    with ssh_config(cloud, SHARED + SILENT if kind.startswith("shared") else "Host *\n"):
        if kind.startswith("shared"):
            cloud.fe.run(["ssh", "-fN", "h1"])
        with cloud.held(cloud.h1, "vm-7"):
            driver = cloud.start("clone", *cloud.clone_words(source))
            cloud.wait_for_hostside(cloud.h1)
            cloud.h1.cut()
            try:
                started = time.monotonic()
                out, err = driver.communicate(timeout=120)
                took = time.monotonic() - started
            finally:
                cloud.h1.join()
        conftest.figures.setdefault("freed", {})[f"at work, {kind}"] = round(took, 1)
        one_line(subprocess.CompletedProcess([], driver.returncode, out, err), "h1")
        assert took < LIMIT_S, f"{took:.1f} s"
    cloud.wait_for_no_hostside(cloud.h1, 90)
    cloud.delete(7)


def test_host_cut_off_while_it_receives(cloud: Cloud) -> None:
    """The front-end writes and nobody reads any more, through a connection that has no keep-alive."""
    big = cloud.fe.path("/var/tmp/big")
    with big.open("wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 20))
    script = cloud.fe.path("/var/tmp/context.sh")
    script.write_text("SEMI=hang\n")
    for path in (big, script):
        path.chmod(0o644)
    with ssh_config(cloud, SHARED + SILENT):
        cloud.fe.run(["ssh", "-fN", "h1"])
        with cloud.held(cloud.h1, "vm-7"):
            driver = cloud.start(
                "context", "/var/tmp/context.sh", "/var/tmp/big", f"h1:{SYSTEM}/7/disk.4", "7", "101"
            )
            cloud.wait_for_hostside(cloud.h1)
            cloud.h1.cut()
            try:
                started = time.monotonic()
                out, err = driver.communicate(timeout=120)
                took = time.monotonic() - started
            finally:
                cloud.h1.join()
        conftest.figures.setdefault("freed", {})["receiving, shared connection"] = round(took, 1)
        one_line(subprocess.CompletedProcess([], driver.returncode, out, err), "h1")
        assert took < LIMIT_S, f"{took:.1f} s"
    big.unlink()
    cloud.wait_for_no_hostside(cloud.h1, 90)
    cloud.delete(7)


def test_action_through_a_shared_connection_works_and_ends(cloud: Cloud, source: str) -> None:
    """The master that ssh leaves behind holds no pipe of ours open."""
    with ssh_config(cloud, SHARED):
        started = time.monotonic()
        done = cloud.clone(source)
        assert done.returncode == 0, done.stderr.decode()
        assert time.monotonic() - started < LIMIT_S
        cloud.delete(7)


def test_host_that_says_much_on_stderr(cloud: Cloud, source: str) -> None:
    """sshd runs ~/.ssh/rc of the host first: 300 KiB on stderr before our side starts."""
    rc = cloud.h1.path("/var/lib/one/.ssh/rc")
    rc.write_text("head -c 300000 /dev/zero | tr '\\0' x >&2\n")
    os.chown(rc, cloud.lab.uid, cloud.lab.gid)
    try:
        done = cloud.clone(source)
        assert done.returncode == 0, done.stderr.decode()
        one_line(cloud.clone(f"{STORE}/nothing"), f"{STORE}/nothing")
    finally:
        rc.unlink()
        cloud.delete(7)


# -- programs ------------------------------------------------------------------------------------------------


def test_program_that_says_much_on_stderr() -> None:
    with pytest.raises(ToolFailed, match=r"exit code 3: x{500} \.\.\. x+$"):
        run(["sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x >&2; exit 3"], timeout_s=20)
    with pytest.raises(ToolFailed, match="exit code 3"):
        list(
            stream(
                ["sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x >&2; echo data; exit 3"], silence_s=20
            )
        )


def test_tar_that_says_much_on_stderr(tmp_path: Path) -> None:
    """One line for each socket that it leaves out: more than a pipe holds."""
    for number in range(1500):
        with socket.socket(socket.AF_UNIX) as one:
            here = os.getcwd()
            os.chdir(tmp_path)
            try:
                one.bind(f"{number:080}")
            finally:
                os.chdir(here)
    sent: list[bytes] = []
    answer = transfer.send(str(tmp_path), sent.append)
    assert answer.sha256 == hashlib.sha256(b"".join(sent)).hexdigest()
    assert sent


def test_program_that_leaves_a_child_with_its_output(tmp_path: Path) -> None:
    """virsh leaves its ssh: who waits for the end of a pipe waits for that too."""
    started = time.monotonic()
    with pytest.raises(ToolTimeout):
        run(["sh", "-c", "sleep 60 & sleep 60"], timeout_s=1)
    assert time.monotonic() - started < 30


def test_stream_that_falls_silent() -> None:
    started = time.monotonic()
    with pytest.raises(ToolTimeout):
        list(stream(["sh", "-c", "echo data; sleep 60"], silence_s=1))
    assert time.monotonic() - started < 30
