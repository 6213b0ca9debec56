# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of the zram that a directory is on, or a device mapped to it
(Documentation/admin-guide/blockdev/zram.rst).
"""

from __future__ import annotations

import glob
import os

PAGE = 4096


def taken(directory: str) -> tuple[int, int] | None:
    """Return the bytes that it has taken and those beyond which it refuses a page, 0 for none; None of what
    is no zram.
    """
    device = _device(directory)
    for path in (f"{device}/mm_stat", *glob.glob(f"{device}/slaves/*/mm_stat")):
        try:
            with open(path, encoding="ascii") as file:
                used, most = map(int, file.read().split()[2:4])
            return used, most
        except (OSError, ValueError):
            pass
    return None


def limit(directory: str) -> int:
    """Return the bytes beyond which it refuses a page, 0 of a device that refuses none: there XFS shuts down,
    and all on it is lost.
    """
    found = taken(directory)
    return found[1] if found else 0


def left(directory: str) -> int | None:
    """Return the bytes that it may still take for what it has compressed, None of a device without such a
    limit.
    """
    found = taken(directory)
    return max(found[1] - found[0], 0) if found and found[1] else None


def mixes_memory(directory: str) -> bool:
    """Tell whether direct I/O from and to memory that begins within a page is let through to zram, which
    takes it for the whole page.

    Linux lets that through since 6.0, down to `dma_alignment`, and QEMU 7.2 does it
    (tests/nfs/test_memory.py): it writes, and reads over, what lies beside its data.
    """
    if taken(directory) is None:
        return False
    try:
        with open(f"{_device(directory)}/queue/dma_alignment", encoding="ascii") as file:
            return int(file.read()) < PAGE - 1
    except (OSError, ValueError):
        return False


def _device(directory: str) -> str:
    number = os.stat(directory).st_dev
    return f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"
