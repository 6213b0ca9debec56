# SPDX-License-Identifier: Apache-2.0
"""Memory of this host: a device like others, but empty after a restart, and perhaps overcommitted.

What it promises to layers, so that one is added or grown only if all fit at their full size; how full it is,
which disks leave it, and for which device (plan/device/balance.py decides). The kernel reports how full zram
is (Documentation/admin-guide/blockdev/zram.rst).
"""

from __future__ import annotations

import glob
import os
import time
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING, Iterable, Iterator, Mapping, Sequence

from ..errors import MemoryPromised
from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..tools import files, locks
from ..units import human
from . import devices, folders, ledger

if TYPE_CHECKING:
    from ..model.device.steps import HeldItem
    from ..plan.device import balance, choose

# What memory promises to layers. Folders elsewhere need no promise.


def is_promised(folder: str) -> bool:
    """Return True if the folder `folder` of layers is in memory, as large as they can become."""
    return os.path.isfile(folders.at(folder).promise)


def more(folder: str, *, size: int = 0, layers: int = 1) -> None:
    """Promise memory for `layers` more than a disk has in `folder`, each of at least `size` bytes.

    Raise MemoryPromised, with nothing changed, if they would not fit at full size.
    """
    if not is_promised(folder):
        return
    from . import hot  # here: few disks are in memory

    found = folders.at(folder)
    with ledger.promised(found.root):
        was, had = ledger.read_promises(found.device, found.name)
        size, layers = max(size, was), _count(folder) + layers
        hot.make_way(found.root, size * layers - was * had)
        # A device of weight 0 still has room for its own disks: they may leave it only by a live move.
        left = was * had + sum(
            device._replace(weight=device.weight or 1).unpromised
            for device in devices.present(found.root, [found.uuid])
        )
        if size * layers > max(left, was * had):
            raise MemoryPromised(
                f"{disk_names.disk_of(os.path.basename(folder))}: {layers} layers of up to "
                f"{human(size)} each are more than the {human(max(left, 0))} that {found.mount()} on "
                f"{os.uname().nodename} has for them"
            )
        if (size, layers) != (was, had):  # where memory is full there may be no room for a note
            ledger.write_promises(found.device, found.name, size, layers)


def more_each(paths: Sequence[str]) -> None:
    """Promise memory for one more layer of each disk; raise as `more`, with nothing changed."""
    with ExitStack() as promised:
        for path in paths:
            more(path)
            promised.callback(settle, path)
        promised.pop_all()


def settle(folder: str) -> None:
    """Take back the promises for layers that a disk does not have any more."""
    if os.path.isdir(folder):
        more(folder, layers=0)


@contextmanager
def another_layer(folder: str, size: int = 0) -> Iterator[None]:
    """Promise memory for one more layer of a disk, of at least `size` bytes, within the block."""
    more(folder, size=size)
    try:
        yield
    finally:
        settle(folder)


def _count(folder: str) -> int:
    """Count the layers; hard links count once."""
    return len({entry.inode() for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)})


# How full memory is.


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
    found = devices.memory(root)
    zram = [zram_taken(device_names.device(root, device.uuid)) or (0, 0) for device in found]
    return [
        device._replace(free=min(device.free, max(most - used, 0))) if most else device
        for device, (used, most) in zip(found, zram)
    ]


def overcommitted(root: str) -> list[choose.Device]:
    """Return the devices in memory that are promised more than once."""
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


def is_due(device: choose.Device) -> bool:
    """Return True if something is to leave the device."""
    from ..plan.device import balance

    return balance.is_due(device)


def leaving(
    root: str, uuid: str, held: Iterable[HeldItem], growth: Mapping[str, float]
) -> list[balance.Move]:
    """Return the moves that empty a device, of all that is `held` there, the most urgent first.

    It first drops the device's copies of bases that no guest reads.
    """
    from ..plan.device import balance, pool_rows
    from . import hot

    with ledger.promised(root):
        hot.drop_idle(root, uuid)
    return balance.order(devices.present(root), list(map(pool_rows.item, held)), uuid, growth)


def wait(root: str, path: str, classes: Sequence[str], is_full: bool) -> balance.Wait:
    """Return what a guest waits for after its write to the file `path` has failed."""
    from ..plan.device import balance

    capacity, free = files.space(path)
    for device in memory(root):
        if os.stat(device_names.device(root, device.uuid)).st_dev == os.stat(path).st_dev:
            return balance.Wait(is_full, classes, True, device.capacity, device.free)
    return balance.Wait(is_full, classes, False, capacity, free)


def may_go_on(waits: Sequence[balance.Wait]) -> bool:
    """Return True if a guest with these waits can be resumed."""
    from ..plan.device import balance

    return balance.may_go_on(waits)
