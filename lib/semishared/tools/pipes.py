# SPDX-License-Identifier: Apache-2.0
"""Larger pipes for disk data."""

from __future__ import annotations

import fcntl

HOLDS = 1 << 20
"""Bytes: the most that an unprivileged user may request (pipe(7))."""
_SET_SIZE, _GET_SIZE = 1031, 1032
"""F_SETPIPE_SZ and F_GETPIPE_SZ of fcntl(2), which Python has from 3.10 on."""


def widen(fd: int) -> None:
    """Enlarge a pipe to HOLDS bytes, if it is one and the user's quota allows it."""
    _let_hold(fd, HOLDS)


def as_wide(fd: int, other: int) -> None:
    """Make a pipe as large as the `other`."""
    _let_hold(fd, fcntl.fcntl(other, _GET_SIZE))


def _let_hold(fd: int, size: int) -> None:
    try:
        fcntl.fcntl(fd, _SET_SIZE, size)
    except OSError:
        pass  # it stays small
