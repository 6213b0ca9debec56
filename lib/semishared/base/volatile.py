# SPDX-License-Identifier: Apache-2.0
"""Whether a file system is in memory: empty after a restart of its host, whatever anybody says of it.

/sys/dev/block/<major>:<minor>  -> .../block/dm-0            what it is on
                                   .../block/dm-0/slaves/*   what that is on: dm-crypt, LVM, MD, one over
                                   another
"""

from __future__ import annotations

import os
import re

from ..tools import mounts

SYSFS = "/sys"
TYPES = ("tmpfs", "ramfs")


def is_volatile(mounted: mounts.Mount) -> bool:
    """Tell whether a restart empties it: tmpfs, ramfs, and what is on zram or brd, in whole or in part."""
    return mounted.type in TYPES or _is_memory(os.path.realpath(f"{SYSFS}/dev/block/{_number(mounted)}"))


def _number(mounted: mounts.Mount) -> str:
    """Return the number of the block device; btrfs, and whatever may be on several, has one of its own, and
    is asked for its source.
    """
    if not mounted.device.startswith("0:"):
        return mounted.device
    try:
        number = os.stat(mounted.source).st_rdev if mounted.source.startswith("/dev/") else 0
    except OSError:
        number = 0
    return f"{os.major(number)}:{os.minor(number)}" if number else mounted.device


def _is_memory(device: str) -> bool:
    if os.path.exists(f"{device}/partition"):
        device = os.path.dirname(device)
    if re.match(r"(?:zram|ram)[0-9]+\Z", os.path.basename(device)):
        return True
    try:
        below = os.listdir(f"{device}/slaves")
    except OSError:
        return False
    return any(_is_memory(os.path.realpath(f"{device}/slaves/{name}")) for name in below)
