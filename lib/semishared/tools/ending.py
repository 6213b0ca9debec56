# SPDX-License-Identifier: Apache-2.0
"""The end of a process: of this one, for another program or at once, and of a child within a time limit."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import NoReturn, Protocol

    class Program(Protocol):
        """A child process, as subprocess has it."""

        pid: int

        def poll(self) -> int | None:
            """Return its exit code, None while it runs."""


LOOK_S = 0.02
NOT_SAID = 120
"""Exit code of Python if it cannot write all of its output."""
MOST_B = 64 << 10
"""Half of what the kernel takes as one argument of a program (execve(2), MAX_ARG_STRLEN)."""
_THEN_WRITE = 'text=$1; shift; "$@"; code=$?; printf %s "$text" >&2; exit $code'


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


def become(words: list[str], text: bytes) -> NoReturn:
    """Replace this process by a program; `text` is written to stderr when that has ended.

    What waits for the program is a shell, not this process: threads of librados, still at work after
    a cluster has not answered, end with it, and so do its locks. Raise OSError.
    """
    if text:
        words = ["/bin/sh", "-c", _THEN_WRITE, "sh", text[:MOST_B].decode("ascii", "replace"), *words]
    os.execvp(words[0], words)


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
