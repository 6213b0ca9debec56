# SPDX-License-Identifier: Apache-2.0
"""The end of a process: of this one, at once, with what it returns; and of one that is waited for."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class Program(Protocol):
        """A child, as subprocess has it."""

        pid: int

        def poll(self) -> int | None:
            """Return its exit code, None while it runs."""


LOOK_S = 0.02
NOT_SAID = 120
"""What python itself says where not all that was printed could be written."""


def ended(code: int) -> int:
    """End this process with `code`, at once: what python and exit(3) tidy up at their end the kernel frees
    anyway.

    That is a third of what a short action takes. And librados has threads that run on while exit(3) destroys
    what they use: now and then that was SIGSEGV, after all was said and done.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or NOT_SAID
    os._exit(code)


def ended_within(program: Program, limit_s: float) -> int | None:
    """Return the exit code of a program, None if it does not end within `limit_s`.

    Popen.wait looks again and again, at last every 50 ms: a short program would be waited for twice as long
    as it takes.
    """
    try:
        fd = os.pidfd_open(program.pid)
    except (OSError, AttributeError):
        # It is gone, or this kernel (before 5.3) cannot say, nor could the one that this Python was built
        # for.
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
