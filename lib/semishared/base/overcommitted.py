# SPDX-License-Identifier: Apache-2.0
"""Memory of this host that is promised more than once: how full it is, what is to leave it, and for where
(plan/spill.py decides).
"""

from __future__ import annotations

import os
import time
from typing import IO, Iterable, Mapping, Sequence

from ..model import layout_devices
from ..plan import pool, pool_moves, pool_rows, spill
from ..tools import locks
from . import devices, hot, promises, zram

STUCK_S = 300.0
"""Who looks after memory is at least every so many seconds at the end of a round, or seen to work at a longer
one.
"""


def memory(root: str) -> list[pool.Device]:
    """Return the devices that are memory; what zram has left counts, if that is less. No other is touched.

    A guest can wait for room in one that was promised more than once until a moment ago.
    """
    uuids = sorted(set(devices.registered(root)) - set(devices.usual(root)))
    return [_seen(root, device) for device in devices.present(root, uuids)]


def present(root: str) -> list[pool.Device]:
    """Return those of them that are promised more than once."""
    return [device for device in memory(root) if device.is_overcommitted]


def note_watch(file: IO[str]) -> None:
    """Note in the lock of who looks after them that all is well."""
    locks.note(file, {"version": 1, "at": time.monotonic()})


def is_watched(root: str) -> bool:
    """Tell whether somebody looks after them, and does not wait for something that hangs, or fails each
    time.
    """
    path = layout_devices.watch_lock(root)
    try:
        with open(path, encoding="utf-8") as file:
            at = locks.noted(file).get("at")
    except OSError:
        return False
    return locks.is_held(path) and isinstance(at, float) and time.monotonic() - at < STUCK_S


def is_urgent(root: str) -> bool:
    """Tell whether something is to leave memory, and somebody is there who sees to it."""
    return any(map(is_due, memory(root))) and is_watched(root)


def _seen(root: str, device: pool.Device) -> pool.Device:
    left = zram.left(layout_devices.device(root, device.uuid))
    return device if left is None else device._replace(free=min(device.free, left))


def is_due(device: pool.Device) -> bool:
    """Tell whether something is to leave a device."""
    return spill.is_due(device)


def leaving(
    root: str, uuid: str, rows: Iterable[Mapping[str, object]], growth: Mapping[str, float]
) -> list[pool_moves.Move]:
    """Return what of `rows`, as ListHeld answers, may leave a device, what is to go first in front, and where
    it would go.

    Copies of bases that nobody reads are gone then.
    """
    with promises.held(root):
        hot.drop_idle(root, uuid)
    return spill.order(devices.present(root), list(map(pool_rows.item, rows)), uuid, growth)


def wait(root: str, path: str, classes: Sequence[str], is_full: bool) -> spill.Wait:
    """Return what a guest waits for whose write to the file `path` has failed."""
    stat = os.statvfs(path)
    capacity, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    for device in memory(root):
        if os.stat(layout_devices.device(root, device.uuid)).st_dev == os.stat(path).st_dev:
            return spill.Wait(is_full, classes, True, device.capacity, device.free)
    return spill.Wait(is_full, classes, False, capacity, free)


def may_go_on(waits: Sequence[spill.Wait]) -> bool:
    """Tell whether a guest that waits so goes on."""
    return spill.may_go_on(waits)
