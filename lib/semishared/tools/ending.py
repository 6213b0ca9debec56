# SPDX-License-Identifier: Apache-2.0
"""The end of a process: of this one, at once or after another program, and of a child within a time limit."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class Program(Protocol):
        """A child process, as subprocess has it."""

        pid: int

        def poll(self) -> int | None:
            """Return its exit code, None while it runs."""


LOOK_S = 0.02
NOT_SAID = 120
"""Exit code of Python if it cannot write all of its output."""


def ended(code: int) -> int:
    """End this process with `code` at once, without the cleanup of Python and exit(3).

    That cleanup takes a third of a short action. Also, librados has threads that run on while exit(3)
    destroys their data, which now and then ended in SIGSEGV after all work was done.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or NOT_SAID
    os._exit(code)


def written_after(text: bytes) -> None:
    """Return in a child, which is to become another program; write `text` to stderr when that has ended.

    This process waits for it, and ends as it does: the one that has started it sees no difference.
    """
    child = os.fork()
    if not child:
        return
    code = NOT_SAID
    try:
        # The locks that this process has are the program's no more, as if this process had become it.
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                _closed(int(name))
        status = os.waitpid(child, 0)[1]
        code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        os.write(2, text)
    finally:
        os._exit(code)


def _closed(fd: int) -> None:
    """Close a file descriptor, unless it is closed."""
    try:
        os.close(fd)
    except OSError:
        pass


def ended_within(program: Program, limit_s: float) -> int | None:
    """Return the exit code of a program, None if it does not end within `limit_s` seconds.

    Popen.wait polls, at last every 50 ms: twice as long as a short program takes.
    """
    try:
        fd = os.pidfd_open(program.pid)
    except (OSError, AttributeError):
        # The program is gone, or the kernel (before 5.3) or this Python lacks pidfd_open.
        deadline = time.monotonic() + limit_s
        while program.poll() is None and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        return program.poll()
    from select import POLLIN, poll

    try:
        waiting = poll()
        waiting.register(fd, POLLIN)
        waiting.poll(max(0.0, limit_s) * 1000)
    finally:
        os.close(fd)
    return program.poll()
