# SPDX-License-Identifier: Apache-2.0
"""The locks that QEMU has on the bytes of the images that it has open, read-only ones too (its
block/file-posix.c), of this machine.
"""

from __future__ import annotations

import fcntl
import os
import struct

FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""


def is_open(path: str) -> bool:
    """Tell whether a QEMU, or who has taken `hold`, has an image open; raise OSError as opening it does."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        # It asks, and takes nothing.
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        return bool(struct.unpack(FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)
    finally:
        os.close(fd)


def hold(path: str) -> None:
    """Let an image be seen as open as long as this process lives, and the program that it becomes."""
    fd = os.open(path, os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))
    os.set_inheritable(fd, True)
