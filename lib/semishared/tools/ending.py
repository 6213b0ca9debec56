# SPDX-License-Identifier: Apache-2.0
"""The end of a process: what it returns is its exit code, whatever libraries do that it has loaded."""

from __future__ import annotations

import os
import sys

NOT_SAID = 120
"""What python itself says where not all that was printed could be written."""


def ended(code: int) -> int:
    """End this process with `code`, at once: what python and exit(3) tidy up at their end the kernel frees anyway.

    That is a third of what a short action takes. And librados has threads that run on while exit(3) destroys what they use: now
    and then that was SIGSEGV, after all was said and done.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        code = code or NOT_SAID
    os._exit(code)
