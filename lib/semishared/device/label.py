# SPDX-License-Identifier: Apache-2.0
"""The label of a device of this host's pool, the host's own note of it, and directories made on it.

    <mount>/.semishared/device.json
        {"version": 1, "uuid", "class", "weight", "owner", "host", "host_id", "padding"}
    <root>/devices/<uuid>.json
        the same without padding, as it was last declared, or with weight 0: closed

A device is in the pool of one host: the one whose note has the `owner` that was drawn when the device was
declared. On a device that moved to another host, or that several hosts have mounted, nothing is made and
nothing removed. For a label without an owner (of older versions, of memory) the link counts. The note closes
a device, as the device itself may be full, read-only, or away.
"""

from __future__ import annotations

import errno
import os
from typing import Mapping

from ..model.device import names as device_names
from ..tools import beneath, files

PADDING = 6144
"""Bytes of incompressible padding: btrfs and ext4 then store the label in its own block on the disk."""
BLOCK = 4096
MOST_WEIGHT = 1000
"""Weights are less: an administrator declares up to three digits (plan/device/choose.py)."""


def read(directory: str) -> dict[str, object]:
    """Return the label in a device's directory, weight 0 if the note closed it; {} if it is invalid."""
    found = files.hint(device_names.label(directory))
    if noted(directory).get("weight") == 0:
        found["weight"] = 0
    is_whole = (
        device_names.is_uuid(str(found.get("uuid")))
        and isinstance(found.get("class"), str)
        and found.get("version") == 1
    )
    return found if is_whole and _is_weight(found.get("weight")) else {}


def _is_weight(said: object) -> bool:
    """Return True for a valid weight: a number in range, so neither NaN nor infinity."""
    return isinstance(said, (int, float)) and not isinstance(said, bool) and 0 <= said < MOST_WEIGHT


def noted(device: str) -> dict[str, object]:
    """Return this host's note of a device, found beside the link to it."""
    return files.hint(device_names.note_beside(device))


def whose(device: str, said: Mapping[str, object]) -> str:
    """Return the host in whose pool a device is, by its label and our note; '' if in this host's."""
    if "owner" not in said or said["owner"] == noted(device).get("owner"):
        return ""
    return str(said.get("host") or "another host")


def own(root: str, uuid: str) -> dict[str, object]:
    """Return the label of a mounted device with the right UUID in this host's pool, else {}."""
    device = device_names.device(root, uuid)
    said = read(device)
    return said if is_own(device, said) else {}


def is_own(device: str, said: Mapping[str, object]) -> bool:
    """Return True if a label belongs to the device of this link, in the pool of this host."""
    return said.get("uuid") == os.path.basename(device) and not whose(device, said)


def of_host(root: str, host_id: int) -> dict[str, object]:
    """Return the fields by which labels name this host: for people, and for this host if its notes are lost.

    Two hosts may have one name; their ids in OpenNebula differ (`host_id`, -1 if it is unknown).
    """
    return {"host": f"{os.uname().nodename}:{root}", **({"host_id": host_id} if host_id >= 0 else {})}


def was_of(said: Mapping[str, object], root: str, host_id: int) -> bool:
    """Return True if a label without a note names this host; labels of older versions have no id."""
    host = said.get("host")
    return host == of_host(root, host_id)["host"] and said.get("host_id", host_id) == host_id


def write(side: str, said: Mapping[str, object]) -> None:
    """Write the label into a device's directory of semishared; raise FileNotFoundError if not mounted."""
    import base64

    from ..tools import mounts

    mount, name = os.path.split(side)
    with beneath.directory(mount) as opened:
        if not mounts.is_point(opened):
            raise FileNotFoundError(errno.ENOENT, "nothing is mounted there", mount)
        fd = beneath.open_directory(opened, name, make=True, for_all=False)
        try:
            files.remove_staged(beneath.path_of(fd))
            padding = base64.b64encode(os.urandom(PADDING)).decode()
            files.write_json(device_names.label(beneath.path_of(fd)), {**said, "padding": padding})
        finally:
            os.close(fd)


def is_written(side: str, said: Mapping[str, object]) -> bool:
    """Return True if the device has this label, in a block of its own."""
    found = files.hint(device_names.label(side))
    return without_padding(found) == said and is_padded(side)


def is_padded(directory: str) -> bool:
    """Return True if the label is in a block of its own; raise OSError if there is none."""
    return os.stat(device_names.label(directory)).st_size > BLOCK


def without_padding(said: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in said.items() if key != "padding"}


def make_directory(path: str, *, exist_ok: bool = False) -> None:
    """Make a directory and its parents, by a path through the link to a device.

    Raise FileNotFoundError if the device is not mounted, or not in this host's pool; else as mkdir(2).

    Every directory on a device is made here. A device can be unmounted, or dropped by `semishared pool add`,
    between the check and the mkdir; by path, the directory would then be made below the empty mount point, or
    in place of the link. So this function opens the device once, reads its label there, and makes the
    directory from there. Files need no such care: their directory exists only on the device.
    """
    device, relative = device_names.split(path)
    with beneath.directory(device) as opened:
        if not is_own(device, read(opened)):
            raise FileNotFoundError(errno.ENOENT, "no device of this host's pool", device)
        above, name = os.path.split(relative)
        fd = beneath.open_directory(opened, above, make=True, for_all=False)
        try:
            os.mkdir(name, dir_fd=fd)
        except FileExistsError:
            if not exist_ok:
                raise
        finally:
            os.close(fd)
