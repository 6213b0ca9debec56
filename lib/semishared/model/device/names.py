# SPDX-License-Identifier: Apache-2.0
"""Names on the devices of a host's pool, and of the links that lead there; see model/disk/names.py.

    <mount>/.semishared/                     what is ours on a device
        device.json                          its label
        layers/<vm>-<disk>-<random>/<layer>  the layers of a disk
        promised/<vm>-<disk>-<random>        of memory: how large those layers can become
        hot/<base>/image  promised/<base>    of memory: a copy of a base, and how large that is
        spare/<number>                       of memory that is promised more than once: what is kept free
        bases/  staging/                     as in the base store: model/base/names.py
    <root>/devices/<uuid>                    -> <mount>/.semishared, of each device of the pool
                                             -> hung:<mount>/.semishared, of one that does not answer
                                             (device/offline.py)
                   <uuid>.json               its label, as it was last declared, or closed
                   <uuid>.asked              of one that does not answer: the processes that hang in it
    <vm_dir>/disk.<N>.snap                   -> ../../.semishared/devices/<uuid>/layers/<vm>-<disk>-<random>
             disk.<N>.left.snap          -> the same, where those layers have been until now: their running
             guest is about to leave
    <root>/bases/<name>  staging/<prefix>    -> ../devices/<uuid>/bases/<name>  staging/<prefix>

A link is the record of where something lies. Directories of VMs have other names on their way, all in one
place: a link in one leads to the same then.
"""

from __future__ import annotations

import posixpath
import re
from typing import Optional

from ...named import NamedTuple
from ..disk.names import SIDE, are_layers, disk_named, disk_of, layers, lock, records

LAYERS, BASES, STAGING = "layers", "bases", "staging"
PARTS = (LAYERS, BASES, STAGING)
HOT = "hot"
"""To what is in there no links lead: it belongs to the base of its name, wherever that is."""


class Link(NamedTuple):
    """What a link to a device says."""

    uuid: str
    part: str
    name: str


def devices(root: str) -> str:
    """Return the directory of the links to a host's devices."""
    return f"{root}/devices"


def device(root: str, uuid: str) -> str:
    """Return the path to what is ours on a device: by its label, wherever it is mounted."""
    return f"{devices(root)}/{uuid}"


def note(root: str, uuid: str) -> str:
    """Return what is known here of the label of a device, also while it is not there."""
    return note_beside(device(root, uuid))


def note_beside(device: str) -> str:
    """Return the same by the link to the device."""
    return f"{device}.json"


def asked_beside(device: str) -> str:
    """Return the note, beside the link to a device, of processes that hang in it."""
    return f"{device}.asked"


def is_uuid(name: str) -> bool:
    return re.match(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z", name) is not None


def side(mount: str) -> str:
    """Return what is ours on the device that is mounted there."""
    return f"{mount}/{SIDE}"


HUNG = "hung:"
"""Before the target of the link to a device that hangs: a relative path, below which there is nothing."""


def aside(side: str) -> str:
    """Return what the link to a device that hangs says."""
    return f"{HUNG}{side}"


def is_aside(target: str) -> bool:
    return target.startswith(HUNG)


def side_of(target: str) -> str:
    """Return what is ours on the device to which a link leads, or led before it hung."""
    return target[len(HUNG) :] if is_aside(target) else target


def mount(target: str) -> str:
    """Return where the device is, or was, mounted to which a link leads."""
    return posixpath.dirname(side_of(target))


def label(device: str) -> str:
    return f"{device}/device.json"


def promises(device: str) -> str:
    """Return the directory of what is promised to layers on a device of memory."""
    return f"{device}/promised"


def promise(device: str, name: str) -> str:
    return f"{promises(device)}/{name}"


def spare(device: str) -> str:
    """Return the directory of what is kept free on a device of memory."""
    return f"{device}/spare"


def watch_lock(root: str) -> str:
    """Return the lock of the process that relieves memory which is promised more than once."""
    return lock(root, "watch")


def hot(device: str, name: str = "") -> str:
    """Return the directory of the copy of a base on a device of memory; without a name, that of all of
    them.
    """
    return f"{device}/{HOT}/{name}" if name else f"{device}/{HOT}"


def directory(root: str, link: Link) -> str:
    """Return the directory that a link says."""
    return f"{device(root, link.uuid)}/{link.part}/{link.name}"


def split(path: str) -> tuple[str, str]:
    """Return the link to a device, and the rest of a path through it."""
    root, _, below = path.rpartition("/devices/")
    uuid, _, rest = below.partition("/")
    return device(root, uuid), rest


def moving_lock(root: str) -> str:
    """Return the lock for moves between a host's devices, and for removing what a move has left."""
    return lock(root, "moving")


def switch_lock(root: str) -> str:
    """Return the lock for switching a base to another device, and for changing its leases."""
    return lock(root, "switch")


def placed(root: str) -> str:
    """Return the file of recent placements on a host's devices; it is no lock and is not kept for good."""
    return lock(root, "placed")


def layers_name(vm: int, disk: int, random: str) -> str:
    return f"{vm}-{disk}-{random}"


def layers_named(name: str) -> Optional[tuple[int, int]]:
    """Return VM and disk of a directory of layers on a device, None if the name is none."""
    match = re.match(r"([0-9]{1,10})-([0-9]{1,9})-[0-9a-f]{12}\Z", name)
    return (int(match.group(1)), int(match.group(2))) if match else None


def left(folder: str) -> str:
    """Return the link to the device that the layers in `folder` are about to leave under their guest."""
    return layers(f"{disk_of(folder)}.left")


def left_note(vm_dir: str, disk: int) -> str:
    """Return the note that a disk has left memory under its guest, perhaps paused by a failed write."""
    return f"{records(vm_dir)}/left.{disk}.json"


def left_named(name: str) -> Optional[int]:
    """Return the disk to which the name of such a link belongs, None if it is none."""
    own, _, last = disk_of(name).rpartition(".")
    return disk_named(own) if are_layers(name) and last == "left" else None


def target_of(link: Link) -> str:
    """Return the text of a link."""
    root = f"../../{SIDE}" if link.part == LAYERS else ".."
    return f"{root}/devices/{link.uuid}/{link.part}/{link.name}"


def linked(target: str) -> Optional[Link]:
    """Return what the text of a link says, None if it is none of these."""
    match = re.match(r"\.\./(?:\.\./\.semishared/)?devices/([0-9a-f-]{36})/([a-z]+)/([0-9a-f-]+)\Z", target)
    found = Link(*match.groups()) if match else None
    return (
        found
        if found and found.part in PARTS and is_uuid(found.uuid) and target_of(found) == target
        else None
    )
