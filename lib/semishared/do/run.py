# SPDX-License-Identifier: Apache-2.0
"""The one way to run a program: argv lists, closed stdin, a constructed environment, a limit, stderr in the error.

Programs die with us (PR_SET_PDEATHSIG through setpriv), so that a killed driver leaves nobody at work (DESIGN §3).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from typing import IO, Iterator

from ..errors import NoSpace, SemisharedError, ToolFailed, ToolMissing, ToolTimeout
from . import progress

PATH = "/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL", "--"]
KEPT = ("HOME", "USER", "SSH_AUTH_SOCK", "TMPDIR", "http_proxy", "https_proxy", "HTTPS_PROXY", "no_proxy", "NO_PROXY")
"""The proxies are for downloads: DATASTORE_MAD's --proxy arrives as http_proxy."""
QUICK_S = 120
"""Limit of what reads or writes metadata only."""
LONG_S = 6 * 3600
"""Limit of what copies data."""


def environment() -> dict[str, str]:
    """Return the environment of every program we run: ours, plus system directories, in the C locale."""
    env = {key: os.environ[key] for key in KEPT if key in os.environ}
    env["PATH"] = f"{os.environ['PATH']}:{PATH}" if os.environ.get("PATH") else PATH
    env["LC_ALL"] = "C.UTF-8"
    return env


def run(argv: list[str], *, timeout_s: float = QUICK_S, ok: tuple[int, ...] = (0,), cwd: str | None = None) -> str:
    """Run `argv` and return its stdout.

    Raise ToolMissing, ToolTimeout (after `timeout_s` seconds), NoSpace, or ToolFailed for an exit code not in `ok`.
    """
    env = environment()
    if shutil.which(argv[0], path=env["PATH"]) is None:
        raise ToolMissing(f"{argv[0]} is not installed on {os.uname().nodename}")
    try:
        with progress.waiting():
            done = subprocess.run(
                [*DIES_WITH_US, *argv], stdin=subprocess.DEVNULL, capture_output=True,
                env=env, cwd=cwd, timeout=timeout_s, check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ToolTimeout(f"{argv[0]} did not end within {timeout_s:.0f} s: {shlex.join(argv)}") from None
    if done.returncode not in ok:
        raise _failure(argv, done.returncode, done.stderr[-1000:])
    return done.stdout.decode("utf-8", "replace")


@contextmanager
def piped(argv: list[str], *, feed: bool) -> Iterator[IO[bytes]]:
    """Run `argv` and yield its stdin (if `feed`, else its stdout); when the block ends, wait for its end.

    Raise as `run`. A program that stops reading early is judged by its exit code.
    """
    env = environment()
    # Its stderr goes to memory: nobody would read a pipe while the data flows.
    with os.fdopen(os.memfd_create("stderr"), "w+b") as said:
        process = subprocess.Popen(
            [*DIES_WITH_US, *argv], stdin=subprocess.PIPE if feed else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if feed else subprocess.PIPE, stderr=said, env=env,
        )  # fmt: skip
        stream = process.stdin if feed else process.stdout
        assert stream
        with process:
            try:
                yield stream
                stream.close()
            except BrokenPipeError:
                pass
            except BaseException:
                process.kill()
                raise
            with progress.waiting():
                process.wait(LONG_S)
        if process.returncode:
            said.seek(max(said.seek(0, os.SEEK_END) - 1000, 0))
            raise _failure(argv, process.returncode, said.read())


def _failure(argv: list[str], code: int, stderr: bytes) -> SemisharedError:
    said = " ".join(stderr.decode("utf-8", "replace").split()) or "said nothing"
    if "No space left on device" in said or "Disk quota exceeded" in said:
        return NoSpace(f"{argv[0]} on {os.uname().nodename}: {said}")
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return ToolFailed(f"{shlex.join(argv)}: {how}: {said}")
