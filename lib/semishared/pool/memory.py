# SPDX-License-Identifier: Apache-2.0
"""Memory of this host that is promised more than once: how full it is, what leaves it, and for where.

plan/device/balance.py decides. The kernel says how full zram is
(Documentation/admin-guide/blockdev/zram.rst).
"""

from __future__ import annotations

import glob
import os
import time
from typing import IO, Iterable, Mapping, Sequence

from ..base import hot
from ..device import devices, ledger
from ..model.device import names as device_names
from ..plan.device import balance, choose, pool_rows
from ..tools import locks

PAGE = 4096


def zram_taken(directory: str) -> tuple[int, int] | None:
    """Return the bytes that the zram below a directory, or below a device mapped to it, has taken, and
    those beyond which it refuses a page, 0 for none; None of what is no zram.
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


def zram_limit(directory: str) -> int:
    """Return the bytes beyond which it refuses a page, 0 of a device that refuses none: there XFS shuts down,
    and all on it is lost.
    """
    found = zram_taken(directory)
    return found[1] if found else 0


def zram_left(directory: str) -> int | None:
    """Return the compressed bytes that it may still take, None of a device without such a limit."""
    found = zram_taken(directory)
    return max(found[1] - found[0], 0) if found and found[1] else None


def mixes_memory(directory: str) -> bool:
    """Tell whether direct I/O from and to memory that begins within a page is let through to zram, which
    takes it for the whole page.

    Linux lets that through since 6.0, down to `dma_alignment`, and QEMU 7.2 does it
    (tests/nfs/test_memory.py): it writes, and reads over, what lies beside its data.
    """
    if zram_taken(directory) is None:
        return False
    try:
        with open(f"{_device(directory)}/queue/dma_alignment", encoding="ascii") as file:
            return int(file.read()) < PAGE - 1
    except (OSError, ValueError):
        return False


def _device(directory: str) -> str:
    number = os.stat(directory).st_dev
    return f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"


STUCK_S = 300.0
"""Who looks after memory is at least every so many seconds at the end of a round, or seen to work at a longer
one.
"""


def memory(root: str) -> list[choose.Device]:
    """Return the devices that are memory; what zram has left counts, if that is less. No other is touched.

    A guest can wait for room in one that was promised more than once until a moment ago.
    """
    uuids = sorted(set(devices.registered(root)) - set(devices.usual(root)))
    return [_seen(root, device) for device in devices.present(root, uuids)]


def present(root: str) -> list[choose.Device]:
    """Return those of them that are promised more than once."""
    return [device for device in memory(root) if device.is_overcommitted]


def note_watch(file: IO[str]) -> None:
    """Note in the lock of who looks after them that all is well."""
    locks.note(file, {"version": 1, "at": time.monotonic()})


def is_watched(root: str) -> bool:
    """Tell whether a watcher looks after them, and neither waits for a hung device nor fails each time."""
    path = device_names.watch_lock(root)
    try:
        with open(path, encoding="utf-8") as file:
            at = locks.noted(file).get("at")
    except OSError:
        return False
    return locks.is_held(path) and isinstance(at, float) and time.monotonic() - at < STUCK_S


def is_urgent(root: str) -> bool:
    """Tell whether something is to leave memory, and somebody is there who sees to it."""
    return any(map(is_due, memory(root))) and is_watched(root)


def _seen(root: str, device: choose.Device) -> choose.Device:
    left = zram_left(device_names.device(root, device.uuid))
    return device if left is None else device._replace(free=min(device.free, left))


def is_due(device: choose.Device) -> bool:
    """Tell whether something is to leave a device."""
    return balance.is_due(device)


def leaving(
    root: str, uuid: str, rows: Iterable[Mapping[str, object]], growth: Mapping[str, float]
) -> list[balance.Move]:
    """Return what of `rows`, as ListHeld answers, may leave a device, what is to go first in front, and where
    it would go.

    Copies of bases that nobody reads are gone then.
    """
    with ledger.promised(root):
        hot.drop_idle(root, uuid)
    return balance.order(devices.present(root), list(map(pool_rows.item, rows)), uuid, growth)


def wait(root: str, path: str, classes: Sequence[str], is_full: bool) -> balance.Wait:
    """Return what a guest waits for whose write to the file `path` has failed."""
    stat = os.statvfs(path)
    capacity, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    for device in memory(root):
        if os.stat(device_names.device(root, device.uuid)).st_dev == os.stat(path).st_dev:
            return balance.Wait(is_full, classes, True, device.capacity, device.free)
    return balance.Wait(is_full, classes, False, capacity, free)


def may_go_on(waits: Sequence[balance.Wait]) -> bool:
    """Tell whether a guest that waits so goes on."""
    return balance.may_go_on(waits)
