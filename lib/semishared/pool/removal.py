# SPDX-License-Identifier: Apache-2.0
"""Devices that are declared no more: what one still holds, and how an empty one is let go of.

Of one that is there, what lies on it counts. One that is gone may have died for good: all that is left of
that are the links which lead to it. Layers of a disk are nowhere else, so as long as some VM has that disk
its device may yet come back. What is lost of a base is a copy: where a disk lies over it, the next boot looks
for its link to make it anew elsewhere (disk/create.py); else nobody misses it.

What each crash leaves: links of fewer bases, or a device that is registered no more, or has no owner; the
next run does the rest.
"""

from __future__ import annotations

import os
from typing import Iterator

from ..base import cache, room
from ..device import devices, label, offline
from ..device.systems import directories
from ..errors import ToolTimeout
from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..tools import files, locks, mounts
from ..tools.effects import point


def let_go(root: str, uuid: str) -> bool:
    """Let a device be one of this host's no more; return False of one that holds, or may hold, something that
    is known by it.
    """
    wrong = offline.state(root, uuid)
    if _is_gone(root, uuid, wrong):
        if _is_missed(root, uuid) or not _forget_bases(root, uuid):
            return False
    elif wrong or any(room.names(f"{device_names.device(root, uuid)}/{part}") for part in device_names.PARTS):
        return False
    _release(root, uuid)
    link = device_names.device(root, uuid)
    for path in (link, device_names.note(root, uuid), device_names.asked_beside(link)):
        files.unlink(path)
    point("device gone")
    return True


def _is_gone(root: str, uuid: str, wrong: str) -> bool:
    """Tell whether a device is away, or nothing is mounted in its place: then an error says nothing of it."""
    if wrong.startswith(offline.NOT_THERE):
        return True
    path = os.path.realpath(devices.mount(root, uuid))
    return wrong.startswith(offline.BROKEN) and mounts.of(path).point != path


def _leading(directory: str, uuid: str) -> Iterator[str]:
    return (
        name
        for name in room.names(directory)
        if not disk_names.is_staged(name) and devices.device_of(f"{directory}/{name}") == uuid
    )


def _is_missed(root: str, uuid: str) -> bool:
    """Tell whether a disk lies on a device that is gone, or over a base there: leases of it would be on the
    device itself.
    """
    location, bases = os.path.dirname(root), set(_leading(base_names.bases(root), uuid))
    try:
        if any(link.uuid == uuid for link in devices.layers_links(location)):
            return True
        return bool(bases) and any(
            name in {*bases, ""}
            for directory in directories(location)
            for _, name in cache.lying_over(directory)
        )
    except ToolTimeout:
        return True  # a store hangs: nobody knows what leads where


def _forget_bases(root: str, uuid: str) -> bool:
    """Remove the links of bases, made and being made, to a device that is gone; return False where somebody
    is about to change one.
    """
    parts = (base_names.bases(root), base_names.all_staging(root))
    return all([_forget(root, f"{part}/{name}", uuid) for part in parts for name in _leading(part, uuid)])


def _forget(root: str, path: str, uuid: str) -> bool:
    """Remove one of them, which may lead elsewhere by the time that its lock is had."""
    name = os.path.basename(path)
    file = locks.attempt(
        base_names.image_lock(root, base_names.prefix_of(name) if base_names.named(name) else name)
    )
    if not file:
        return False
    with file:
        if devices.device_of(path) == uuid:
            files.unlink(path)
            point("link of a lost base removed")
    return True


def _release(root: str, uuid: str) -> None:
    """Let a device be of no host's pool, as far as it can be written to."""
    said = label.own(root, uuid)
    if "owner" in said:
        try:
            side = device_names.side_of(os.readlink(device_names.device(root, uuid)))
            label.write(side, {key: said[key] for key in ("version", "uuid", "class", "weight")})
        except OSError:
            return
        point("device released")
