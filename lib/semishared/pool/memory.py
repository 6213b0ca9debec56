# SPDX-License-Identifier: Apache-2.0
"""Overcommitted memory of this host: how full it is, which disks leave it, and for which device.

plan/device/balance.py decides. The kernel reports how full zram is
(Documentation/admin-guide/blockdev/zram.rst).
"""

from __future__ import annotations

import glob
import os
import time
from typing import IO, Iterable, Mapping, Sequence

from ..device import devices, hot, ledger
from ..model.device import names as device_names
from ..plan.device import balance, choose, pool_rows
from ..tools import locks

PAGE = 4096


def zram_taken(directory: str) -> tuple[int, int] | None:
    """Return bytes used by the zram below a directory, or below its mapped device, and its limit.

    The limit is 0 if there is none; beyond it zram refuses a page. Return None if the device is no zram.
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
    """Return the bytes at which zram refuses a page, 0 for no limit.

    At the limit XFS shuts down, and everything on it is lost.
    """
    found = zram_taken(directory)
    return found[1] if found else 0


def zram_left(directory: str) -> int | None:
    """Return the compressed bytes up to zram's limit, None for a device without one."""
    found = zram_taken(directory)
    return max(found[1] - found[0], 0) if found and found[1] else None


def mixes_memory(directory: str) -> bool:
    """Return True if zram may get direct I/O of buffers that begin within a page, and mistake them for pages.

    Linux passes it down since 6.0, as far as `dma_alignment` allows, and QEMU 7.2 issues it
    (tests/nfs/test_memory.py): zram then writes, and overwrites on reads, what lies beside the data.
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
"""Seconds after which the watcher (host/watch.py) counts as stuck: it notes each round, and long work."""


def memory(root: str) -> list[choose.Device]:
    """Return the devices in memory; `free` is at most what zram has left. Other devices are not touched.

    Also devices that are not overcommitted any more: a guest may still wait for room in one.
    """
    uuids = sorted(set(devices.registered(root)) - set(devices.usual(root)))
    return [_seen(root, device) for device in devices.present(root, uuids)]


def present(root: str) -> list[choose.Device]:
    """Return the overcommitted devices in memory."""
    return [device for device in memory(root) if device.is_overcommitted]


def note_watch(file: IO[str]) -> None:
    """Note in the watcher's lock file that the watcher works."""
    locks.note(file, {"version": 1, "at": time.monotonic()})


def is_watched(root: str) -> bool:
    """Return True if a watcher runs, neither waiting for a hung device nor failing each time."""
    path = device_names.watch_lock(root)
    try:
        with open(path, encoding="utf-8") as file:
            at = locks.noted(file).get("at")
    except OSError:
        return False
    return locks.is_held(path) and isinstance(at, float) and time.monotonic() - at < STUCK_S


def is_urgent(root: str) -> bool:
    """Return True if something is to leave memory, and a watcher is there to move it."""
    return any(map(is_due, memory(root))) and is_watched(root)


def _seen(root: str, device: choose.Device) -> choose.Device:
    left = zram_left(device_names.device(root, device.uuid))
    return device if left is None else device._replace(free=min(device.free, left))


def is_due(device: choose.Device) -> bool:
    """Return True if something is to leave the device."""
    return balance.is_due(device)


def leaving(
    root: str, uuid: str, rows: Iterable[Mapping[str, object]], growth: Mapping[str, float]
) -> list[balance.Move]:
    """Return the moves that empty a device, the most urgent first; `rows` as ListHeld answers.

    It first drops the device's copies of bases that no guest reads.
    """
    with ledger.promised(root):
        hot.drop_idle(root, uuid)
    return balance.order(devices.present(root), list(map(pool_rows.item, rows)), uuid, growth)


def wait(root: str, path: str, classes: Sequence[str], is_full: bool) -> balance.Wait:
    """Return what a guest waits for after its write to the file `path` has failed."""
    stat = os.statvfs(path)
    capacity, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    for device in memory(root):
        if os.stat(device_names.device(root, device.uuid)).st_dev == os.stat(path).st_dev:
            return balance.Wait(is_full, classes, True, device.capacity, device.free)
    return balance.Wait(is_full, classes, False, capacity, free)


def may_go_on(waits: Sequence[balance.Wait]) -> bool:
    """Return True if a guest with these waits can be resumed."""
    return balance.may_go_on(waits)
