# SPDX-License-Identifier: Apache-2.0
"""Room that is kept free in memory which is promised more than once: where nothing can be made any more, no
disk could be moved away.

    <device>/spare/<number>      PIECE bytes of zeros (in zram they take no memory), or none of one that was
    given away

A disk that leaves memory under its guest gets a delta there first. What is freed for that another guest may
be faster to take: so there are several, and that guest has something less to write.
"""

from __future__ import annotations

import os

from ..model import layout_devices
from ..tools.crash_points import point
from . import device_dirs

PIECE = 2 << 20
"""What XFS wants to have free for a new file, and an empty delta takes, several times over."""
PIECES = 4


def keep(device: str) -> None:
    """Have all of it, of a device with room; what cannot be made is made the next time."""
    directory = layout_devices.spare(device)
    try:
        device_dirs.make(directory, exist_ok=True)
        for number in range(PIECES):
            path = f"{directory}/{number}"
            if not os.path.exists(path) or os.stat(path).st_blocks * 512 < PIECE:
                with open(path, "wb") as file:
                    file.write(bytes(PIECE))
                    os.fsync(file.fileno())
                point("memory spared")
    except OSError:
        pass  # it has become full meanwhile, or is gone


def give(device: str) -> bool:
    """Let one piece be free; tell whether there was one."""
    directory = layout_devices.spare(device)
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        if os.stat(f"{directory}/{name}").st_blocks:
            # Not removed: XFS would free that only later.
            os.truncate(f"{directory}/{name}", 0)
            point("spare memory given")
            return True
    return False
