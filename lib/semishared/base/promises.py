# SPDX-License-Identifier: Apache-2.0
"""What memory is promised to: a device of class ram takes layers, and copies of bases, only as long as all of
them fit at their largest.

A guest fills half a GiB in two seconds, and what has no memory any more fails under it: nobody would be in
time to do something about that. So each directory of layers there has a note of how large one of its layers
can become, and how many there can be. Whoever adds a layer, or grows one, says so before: it is refused while
that is no harm.

    <device>/promised/<name>     {"version": 1, "size": bytes of one layer, "layers": how many}
    <device>/promised/<base>     the same of a copy of a base (hot.py): its size, and one

A note whose directory is gone counts for nothing, and goes with the next one that is made.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator, Tuple

from ..model import layout, layout_base, layout_devices
from ..tools import files, locks
from ..tools.crash_points import point
from . import device_dirs

VERSION = 1


@contextmanager
def held(root: str) -> Iterator[None]:
    """Let nobody else promise memory of this host within the block."""
    os.makedirs(layout.locks(root), exist_ok=True)
    with locks.exclusive(layout.lock(root, "promised"), 30):
        yield


def total(device: str) -> int:
    """Return the bytes that the layers on a device can come to hold, with those of copies of bases."""
    return sum(_bytes(device, name) for name in _names(device))


def _bytes(device: str, name: str) -> int:
    size, layers = read(device, name) if os.path.isdir(_home(device, name)) else (0, 0)
    return size * layers


def _home(device: str, name: str) -> str:
    return (
        layout_devices.hot(device, name)
        if layout_base.named(name)
        else f"{device}/{layout_devices.LAYERS}/{name}"
    )


def _names(device: str) -> "list[str]":
    try:
        names = os.listdir(layout_devices.promises(device))
        return sorted(name for name in names if layout_devices.layers_named(name) or layout_base.named(name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read(device: str, name: str) -> Tuple[int, int]:
    """Return what is promised to layers by their name: the bytes of one, and how many; (0, 0) for nothing."""
    found = files.hint(layout_devices.promise(device, name))
    size, layers = found.get("size"), found.get("layers")
    return (size, layers) if type(size) is int and type(layers) is int else (0, 0)


def write(device: str, name: str, size: int, layers: int) -> None:
    """Note what is promised, of `size` bytes each, by the link to the device; the caller holds the promises,
    and has seen that they fit.
    """
    directory = layout_devices.promises(device)
    device_dirs.make(directory, exist_ok=True)
    for other in os.listdir(directory):
        if other != name and not os.path.isdir(_home(device, other)):
            files.unlink(f"{directory}/{other}")
    files.write_json(
        layout_devices.promise(device, name), {"version": VERSION, "size": size, "layers": layers}
    )
    point("memory promised")
