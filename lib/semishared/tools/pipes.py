# SPDX-License-Identifier: Apache-2.0
"""Pipes that hold more than Linux gives them, where data for disks goes through."""

from __future__ import annotations

import fcntl

HOLDS = 1 << 20
"""Bytes: the most that any user may ask for (pipe(7))."""
_SET_SIZE, _GET_SIZE = 1031, 1032
"""F_SETPIPE_SZ and F_GETPIPE_SZ of fcntl(2), which Python knows from 3.10 on."""


def widen(fd: int) -> None:
    """Let the pipe hold HOLDS bytes, if it is one and its user has not too many such already."""
    _let_hold(fd, HOLDS)


def as_wide(fd: int, other: int) -> None:
    """Let a pipe hold as much as the `other`."""
    _let_hold(fd, fcntl.fcntl(other, _GET_SIZE))


def _let_hold(fd: int, size: int) -> None:
    try:
        fcntl.fcntl(fd, _SET_SIZE, size)
    except OSError:
        pass  # then it is small
