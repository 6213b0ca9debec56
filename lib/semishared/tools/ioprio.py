# SPDX-License-Identifier: Apache-2.0
"""The I/O priority of threads: ioprio_set(2), for which neither python nor the C library has a function."""

from __future__ import annotations

import os

NUMBERS = {"aarch64": 30, "ppc64le": 273, "s390x": 282, "x86_64": 251}
"""Of the system call, by machine."""
BY_THREAD = 1
ANY, LOWEST, IDLE = 0, 2 << 13 | 7, 3 << 13
"""A class and what is within it: that of whoever asked for none, the last of the usual one, and the one that
gets what all others leave.
"""


def put(threads: "list[int]", priority: int) -> bool:
    """Give threads an I/O priority; tell whether this machine let us, also if some of them have ended
    meanwhile.
    """
    import ctypes  # as long to load as one program takes to start

    number = NUMBERS.get(os.uname().machine)
    if number is None:
        return False
    libc = ctypes.CDLL(None)
    return any([libc.syscall(number, BY_THREAD, thread, priority) == 0 for thread in threads])
