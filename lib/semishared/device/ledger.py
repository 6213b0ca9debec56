# SPDX-License-Identifier: Apache-2.0
"""Reserved bytes of devices: expected of new layers, promised in memory, kept free.

    <root>/locks/placed         a line each: when, device, directory of layers, bytes expected there
    <device>/promised/<name>    {"version": 1, "size": bytes of one layer, "layers": how many}
    <device>/promised/<base>    the same for a copy of a base (device/hot.py): its size, and one
    <device>/spare/<number>     PIECE bytes of zeros (none in zram), or no bytes once it was given away

plan/device/choose.py and plan/device/balance.py decide by them.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Collection, Dict, Iterator, Tuple

from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.device.names import LAYERS, Link
from ..model.disk import names as disk_names
from ..tools import files, locks
from ..tools.effects import point
from . import label

YOUNG_S = 3600
MOST = 200
"""Most lines that are evaluated, the last ones: each takes some 10 us."""
LONG = 200 * MOST
"""Bytes of the file beyond which only the last lines are kept."""


def note(root: str, folder: str, expected: int) -> None:
    """Record the bytes that the layers behind the link `folder` are expected to hold.

    A new overlay is empty, so without this more disks would be placed beside it. `pending` subtracts what the
    layers hold by now. After an hour the record expires: the device's fill then counts alone. A lost line
    only makes a choice less even; so this takes no lock and does not wait for the disk.
    """
    try:
        link = device_names.linked(os.readlink(folder))
        if link is None or expected <= 0:
            return
        fd = os.open(
            device_names.placed(root),
            os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o644,
        )
        with open(fd, "r+b") as file:
            if os.fstat(fd).st_size > LONG:
                last = file.read().splitlines(keepends=True)[-MOST:]
                os.truncate(fd, 0)
                file.writelines(last)
            file.write(f"{int(time.time())} {link.uuid} {link.name} {expected}\n".encode())
    except OSError:
        pass


def pending(root: str, uuids: Collection[str]) -> Dict[str, int]:
    """Return the bytes that are still expected on each of these devices, if any."""
    found: Dict[str, int] = {}
    for (uuid, name), expected in _noted(root).items():
        if uuid in uuids:
            try:
                held = sum(
                    entry.stat().st_blocks * 512
                    for entry in os.scandir(device_names.directory(root, Link(uuid, LAYERS, name)))
                )
            except OSError:
                continue  # removed, or moved to another device
            found[uuid] = found.get(uuid, 0) + max(expected - held, 0)
    return found


def _noted(root: str) -> Dict[Tuple[str, str], int]:
    try:
        lines = files.read(device_names.placed(root), 2 * LONG).splitlines()[-MOST:]
    except OSError:
        return {}
    now, found = time.time(), {}
    for words in (line.decode("ascii", "replace").split() for line in lines):
        if (
            len(words) == 4
            and words[0].isdigit()
            and words[3].isdigit()
            and abs(now - int(words[0])) < YOUNG_S
        ):
            found[words[1], words[2]] = int(words[3])
    return found


VERSION = 1


@contextmanager
def promised(root: str) -> Iterator[None]:
    """Hold the lock on this host's promises of memory within the block."""
    os.makedirs(disk_names.locks(root), exist_ok=True)
    with locks.exclusive(disk_names.lock(root, "promised"), 30):
        yield


def all_promised(device: str) -> int:
    """Return the bytes that the layers on a device can grow to, with copies of bases."""
    return sum(_bytes(device, name) for name in _names(device))


def _bytes(device: str, name: str) -> int:
    size, layers = read_promises(device, name) if os.path.isdir(_home(device, name)) else (0, 0)
    return size * layers


def _home(device: str, name: str) -> str:
    return (
        device_names.hot(device, name) if base_names.named(name) else f"{device}/{device_names.LAYERS}/{name}"
    )


def _names(device: str) -> list[str]:
    try:
        names = os.listdir(device_names.promises(device))
        return sorted(name for name in names if device_names.layers_named(name) or base_names.named(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_promises(device: str, name: str) -> Tuple[int, int]:
    """Return the promise for the layers of a name: bytes of one, and how many; (0, 0) for none."""
    found = files.hint(device_names.promise(device, name))
    size, layers = found.get("size"), found.get("layers")
    return (size, layers) if type(size) is int and type(layers) is int else (0, 0)


def write_promises(device: str, name: str, size: int, layers: int) -> None:
    """Record a promise of `layers` times `size` bytes; the caller holds `promised` and has checked the room.

    A device of class ram takes layers, and copies of bases, only as long as all of them fit at their largest.
    A guest fills half a GiB in two seconds and fails when memory runs out, before any disk could be moved
    away. So an action that adds or grows a layer records it here first, or is refused while that is harmless.
    A record whose directory is gone does not count; the next call removes it.
    """
    directory = device_names.promises(device)
    label.make_directory(directory, exist_ok=True)
    for other in os.listdir(directory):
        if other != name and not os.path.isdir(_home(device, other)):
            files.unlink(f"{directory}/{other}")
    files.write_json(device_names.promise(device, name), {"version": VERSION, "size": size, "layers": layers})
    point("memory promised")


PIECE = 2 << 20
"""Several times the free space that XFS needs for a new file, or an empty delta takes."""
PIECES = 4


def keep_spare(device: str) -> None:
    """Make all spare pieces of a device with room; the next call makes those that fail.

    They are for memory that is promised more than once: on a full device no delta could be made, so no disk
    could be moved away from under its guest. Another guest may take freed room first; so there are several
    pieces.
    """
    directory = device_names.spare(device)
    try:
        label.make_directory(directory, exist_ok=True)
        for number in range(PIECES):
            path = f"{directory}/{number}"
            if not os.path.exists(path) or os.stat(path).st_blocks * 512 < PIECE:
                with open(path, "wb") as file:
                    file.write(bytes(PIECE))
                    os.fsync(file.fileno())
                point("memory spared")
    except OSError:
        pass  # the device became full, or is gone


def give_spare(device: str) -> bool:
    """Free one spare piece; return False if there is none."""
    directory = device_names.spare(device)
    for name in sorted(os.listdir(directory)) if os.path.isdir(directory) else ():
        if os.stat(f"{directory}/{name}").st_blocks:
            # Truncated, not removed: XFS would free a removed file only later.
            os.truncate(f"{directory}/{name}", 0)
            point("spare memory given")
            return True
    return False
