# SPDX-License-Identifier: Apache-2.0
"""What was placed on devices lately and is still expected to take bytes there: a new overlay is empty, and
more would be put beside it.

    <root>/locks/placed     a line each: when, device, directory of layers, bytes that those are expected to
    come to hold

What each has taken by now is looked up. What has not within an hour is not expected to any more: the fill of
its device says all. Lines that get lost, or cannot be written, make a choice less fair, and no more: so
nobody holds a lock, or waits for the disk.
"""

from __future__ import annotations

import os
import time
from typing import Collection, Dict, Tuple

from ..model import layout_devices
from ..model.layout_devices import LAYERS, Link
from ..tools import files

YOUNG_S = 3600
MOST = 200
"""So many are looked at, the last ones: a look at one takes some 10 us."""
LONG = 200 * MOST
"""Bytes of a file of which only the last lines are kept."""


def note(root: str, folder: str, expected: int) -> None:
    """Note what the layers in the directory to which the link `folder` leads are expected to come to hold."""
    try:
        link = layout_devices.linked(os.readlink(folder))
        if link is None or expected <= 0:
            return
        fd = os.open(
            layout_devices.placed(root),
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
    """Return the bytes that are still expected on each of these devices where there are any."""
    found: Dict[str, int] = {}
    for (uuid, name), expected in _noted(root).items():
        if uuid in uuids:
            try:
                held = sum(
                    entry.stat().st_blocks * 512
                    for entry in os.scandir(layout_devices.directory(root, Link(uuid, LAYERS, name)))
                )
            except OSError:
                continue  # it is gone, or elsewhere
            found[uuid] = found.get(uuid, 0) + max(expected - held, 0)
    return found


def _noted(root: str) -> Dict[Tuple[str, str], int]:
    try:
        lines = files.read(layout_devices.placed(root), 2 * LONG).splitlines()[-MOST:]
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
