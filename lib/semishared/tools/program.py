# SPDX-License-Identifier: Apache-2.0
"""A watched program with a pipe, fed or read piece by piece; it may stall, and is killed at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from typing import Callable, Iterator

from . import run
from .run import failure, memory, read_back, read_ends, start_piped


class Program:
    """A running program; its stderr can be read at any time."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int, err: int) -> None:
        self._process, self.fd, self._err = process, fd, err
        self.last = ""
        """The end of its stderr, once its block has ended."""

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    def said(self, last: int = 2000) -> str:
        """Return the end of its stderr so far."""
        return read_back(self._err, last).decode("utf-8", "replace")

    def write(self, data: bytes | memoryview, stalled: Callable[[float], None]) -> None:
        """Write to its stdin; call `stalled` with the seconds while it reads nothing. Raise ToolFailed."""
        view, since = memoryview(data), time.monotonic()
        while view:
            if not run.wait_to_write(self.fd, 0.5):
                stalled(time.monotonic() - since)
                continue
            try:
                view = view[os.write(self.fd, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                self.wait(5)
                raise failure(["program"], self.code or 0, read_ends(self._err)) from None
            since = time.monotonic()

    def end_of_input(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit code, None if it has not ended within `timeout_s` seconds."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def interrupt(self, within_s: float) -> None:
        """Send SIGINT, and SIGKILL if it has not ended within `within_s` seconds."""
        self._process.send_signal(signal.SIGINT)
        if self.wait(within_s) is None:
            self._process.kill()


@contextmanager
def started(argv: list[str], *, feed: bool) -> Iterator[Program]:
    """Run `argv` with a pipe (stdin if `feed`, else stdout) as `fd`; kill it at the end of the block."""
    with memory() as err:
        process, pipe = start_piped(argv, err, feed=feed)
        os.set_blocking(pipe.fileno(), not feed)
        program = Program(process, pipe.fileno(), err)
        try:
            yield program
        finally:
            process.kill()
            process.wait()
            program.last = program.said()
            try:
                pipe.close()
            except OSError:
                pass
