# SPDX-License-Identifier: Apache-2.0
"""The devices of this host: those that the administrator declared, else its own disk alone.

A device is known by its label, found through its link in the base store. An empty mount point has no label
and no files of semishared, and nothing is made there. The host's own disk is a device without a label: its
UUID is ''. What lies where: folders.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Iterable

from ..errors import BadRecord
from ..model.device import names as device_names
from ..model.device.classes import MEMORY
from ..model.device.names import Link
from ..tools import files
from . import label, ledger

if TYPE_CHECKING:
    from ..plan.device import choose


def registered(root: str) -> list[str]:
    """Return the UUIDs of the devices of this host's pool, offline ones too."""
    try:
        names = os.listdir(device_names.devices(root))
    except FileNotFoundError:
        return []
    return sorted(
        uuid
        for uuid in filter(device_names.is_uuid, names)
        if os.path.islink(device_names.device(root, uuid))
    )


def usual(root: str) -> list[str]:
    """Return the UUIDs of the devices that are not memory; without any, the host's own disk takes files.

    If a device's note is unreadable its label counts. Without either it may be memory, and gets no lasting
    data.
    """
    return [uuid for uuid in registered(root) if _is_usual(root, uuid)]


def _is_usual(root: str, uuid: str) -> bool:
    try:
        return (files.read_json(device_names.note(root, uuid)) or {}).get("class") != MEMORY
    except BadRecord:
        return label.read(device_names.device(root, uuid)).get("class", MEMORY) != MEMORY


def mount(root: str, uuid: str) -> str:
    """Return a device's mount point, mounted or not; its UUID if it has just left the pool."""
    try:
        return device_names.mount(os.readlink(device_names.device(root, uuid)))
    except OSError:
        return uuid


def is_there(root: str, uuid: str) -> bool:
    """Return True if a device is mounted and has the right label."""
    return bool(label.own(root, uuid))


def link_of(path: str) -> Link | None:
    """Return the parts of the link `path`, None if it does not lead to a device."""
    try:
        return device_names.linked(os.readlink(path))
    except OSError:
        return None


def present(root: str, uuids: Iterable[str] | None = None) -> list[choose.Device]:
    """Return the devices (all, or `uuids`) that are mounted and writable."""
    found: list[choose.Device] = []
    for uuid in registered(root) if uuids is None else uuids:
        from ..plan.device import choose  # here: hosts without such devices do without

        directory = device_names.device(root, uuid)
        said = label.own(root, uuid)
        try:
            stat = os.statvfs(directory)
        except OSError:
            continue
        if said and not stat.f_flag & os.ST_RDONLY:
            capacity, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
            promised = ledger.all_promised(directory) if said["class"] == MEMORY else 0
            found.append(
                choose.Device(uuid, capacity, free, float(str(said["weight"])), str(said["class"]), promised)
            )
    return found


def in_memory(root: str) -> list[str]:
    """Return the UUIDs of the devices in memory."""
    return sorted(set(registered(root)) - set(usual(root)))


def memory(root: str) -> list[choose.Device]:
    """Return the present devices in memory; other devices are not touched."""
    return [device for device in present(root, in_memory(root)) if device.is_memory]


def lasting(root: str) -> list[choose.Device]:
    """Return the present devices that take disks and bases, but for memory; else the host's own disk."""
    found = [device for device in present(root) if device.share > 0 and not device.is_memory]
    return found or [own(root)]


def own(root: str) -> choose.Device:
    """Return the host's own disk."""
    from ..plan.device import choose

    return choose.Device("", *files.space(root))
