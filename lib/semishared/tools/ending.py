# SPDX-License-Identifier: Apache-2.0
"""The end of a process: what it returns is its exit code, whatever libraries do that it has loaded."""

from __future__ import annotations

import os
import sys

_at_once: list[str] = []


def at_once(why: str) -> None:
    """Have this process end without exit handlers, since `why` has threads that run on while exit(3) destroys what they use."""
    _at_once.append(why)


def ended(code: int) -> int:
    """Return `code`; end this process with it at once, where that was asked for."""
    if _at_once:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads
        os._exit(code)
    return code
