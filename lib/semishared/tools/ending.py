# SPDX-License-Identifier: Apache-2.0
"""The end of a process: what it returns is its exit code, whatever librados does meanwhile."""

from __future__ import annotations

import os
import sys


def ended(code: int) -> int:
    """Return `code`; end this process with it at once if it is connected to Ceph.

    Threads of librados run on while exit(3) destroys what they use: now and then that is SIGSEGV, after all is said and done.
    """
    ceph = sys.modules.get("semishared.store.ceph")
    if ceph and ceph.is_connected():
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads
        os._exit(code)
    return code
