# SPDX-License-Identifier: Apache-2.0
"""Which locks the open files of a process have, as the kernel tells it (proc(5), fdinfo): no file is looked
at for that.

Of what lies on a store that hangs even a stat does not come back: who asks about one file must not have to
ask about all.
"""

from __future__ import annotations

import os
from typing import Iterator

from ..named import NamedTuple


class Lock(NamedTuple):
    """One lock of an open file."""

    fd: str
    kind: str
    """FLOCK, POSIX, OFDLCK."""
    device: str
    """MAJOR:MINOR of the file system, in hexadecimal: on btrfs stat(2) shows another one."""
    inode: int
    first: int
    last: str
    """The last byte, or EOF."""

    def is_on(self, pid: int, found: os.stat_result) -> bool:
        """Tell whether it is on that file."""
        if self.inode != found.st_ino:
            return False
        if self.device == f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}":
            return True
        try:
            return os.path.samestat(os.stat(f"/proc/{pid}/fd/{self.fd}"), found)
        except OSError:
            return False


def locks(pid: int) -> Iterator[Lock]:
    """Yield the locks of a process; raise OSError where we may not look into it."""
    for fd in os.listdir(f"/proc/{pid}/fdinfo"):
        try:
            with open(f"/proc/{pid}/fdinfo/{fd}", encoding="utf-8", errors="replace") as file:
                rows = [line.split() for line in file if line.startswith("lock:")]
        except OSError:
            continue
        for row in rows:
            # lock: N: OFDLCK ADVISORY WRITE PID MAJOR:MINOR:INODE FIRST LAST
            if len(row) == 9 and row[7].isdigit():
                device, _, inode = row[6].rpartition(":")
                yield Lock(fd, row[2], device, int(inode), int(row[7]), row[8])
