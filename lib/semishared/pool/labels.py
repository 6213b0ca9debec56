# SPDX-License-Identifier: Apache-2.0
"""Labels of devices: which mounted trees are this host's pool, as `semishared pool` declares them.

    <mount>/.semishared/device.json     <root>/devices/<uuid>.json      (device/label.py)

A killed run leaves some devices labelled or linked; the next run keeps those labels and does the rest.
"""

from __future__ import annotations

import os
import re
import uuid as uuids
from contextlib import suppress
from typing import Any, Sequence

from ..base import room
from ..device import devices, folders, hot, label, ledger, memory, offline
from ..errors import BadPool, NoSpace, ToolTimeout
from ..model.device import names as device_names
from ..model.device.classes import MEMORY
from ..model.device.steps import (
    ChangedPool,
    CloseDevice,
    ListDevices,
    PoolDevice,
    PoolDevices,
    SetDevices,
)
from ..model.disk import names as disk_names
from ..plan.device import choose
from ..tools import files, locks, mounts
from ..tools.effects import point
from . import moving

SYSFS = "/sys"
TYPES = ("tmpfs", "ramfs")


def is_volatile(mounted: mounts.Mount) -> bool:
    """Return True if a restart empties the file system: tmpfs, ramfs, or one on zram or brd, also in part.

    It follows the block devices below the file system:

        /sys/dev/block/<major>:<minor>  -> .../block/dm-0     the file system's device
                          .../block/dm-0/slaves/*             its lower devices: dm-crypt, LVM, MD, nested
    """
    return mounted.type in TYPES or _is_memory(os.path.realpath(f"{SYSFS}/dev/block/{_number(mounted)}"))


def _number(mounted: mounts.Mount) -> str:
    """Return the block device's number; the source's for file systems numbered 0:N, such as btrfs."""
    if mounted.device.startswith("0:") and mounted.source.startswith("/dev/"):
        with suppress(OSError):
            number = os.stat(mounted.source).st_rdev
            return f"{os.major(number)}:{os.minor(number)}"
    return mounted.device


def _is_memory(device: str) -> bool:
    if os.path.exists(f"{device}/partition"):
        device = os.path.dirname(device)
    if re.match(r"(?:zram|ram)[0-9]+\Z", os.path.basename(device)):
        return True
    try:
        below = os.listdir(f"{device}/slaves")
    except OSError:
        return False
    return any(_is_memory(os.path.realpath(f"{device}/slaves/{name}")) for name in below)


def describe(step: ListDevices) -> PoolDevices:
    """Return the devices of this host's pool."""
    return PoolDevices(described(step.root))


def described(root: str) -> list[PoolDevice]:
    """Return what can be seen of each device of this host's pool."""
    return [_described(root, uuid) for uuid in devices.registered(root)]


def _described(root: str, uuid: str) -> PoolDevice:
    directory = device_names.device(root, uuid)
    found = PoolDevice(
        uuid,
        devices.mount(root, uuid),
        class_="",
        weight=0.0,
        total=0,
        free=0,
        disks=0,
        bases=0,
        promised=0,
        lost=[],
        is_old=False,
        state=offline.state(root, uuid),
    )
    if found.state not in ("", offline.READ_ONLY):
        return found
    said: dict[str, Any] = label.read(directory)
    is_memory = said["class"] == MEMORY
    try:
        total, free = files.space(directory)
        disks = room.names(f"{directory}/{device_names.LAYERS}")
        bases = room.names(f"{directory}/{device_names.HOT if is_memory else device_names.BASES}")
        # The mounting service writes the label of memory at each boot, and such a file system keeps no small
        # files in its metadata.
        is_old = not is_memory and not label.is_padded(directory)
    except OSError as e:
        return found._replace(state=f"{offline.BROKEN}: {e.strerror}")
    found = found._replace(
        class_=said["class"],
        weight=said["weight"],
        total=total,
        free=free,
        disks=len(disks),
        bases=len(bases),
        is_old=is_old,
        mixes_memory=memory.mixes_memory(directory),
    )
    if not is_memory:
        return found
    return found._replace(
        promised=ledger.all_promised(directory),
        lost=_lost(root, uuid),
        watched=memory.is_watched(root),
        limit=memory.zram_limit(directory),
    )


def _lost(root: str, uuid: str) -> list[str]:
    """Return the disks, as VM-DISK, whose layers lay in memory that a restart has emptied."""
    try:
        found = [link for link in folders.layers_links(os.path.dirname(root)) if link.uuid == uuid]
    except ToolTimeout:
        return []  # a store hangs; other checks report that
    gone = [link.name for link in found if not os.path.isdir(device_names.directory(root, link))]
    return sorted("-".join(name.split("-")[:2]) for name in gone)


def declare(step: SetDevices) -> ChangedPool:
    """Make the pool consist of the devices in `step`.

    Raise BadPool, before any change, if one of them cannot be a device.
    """
    wanted = choose.declared(" ".join(step.devices))
    with locks.exclusive(disk_names.lock(step.root, "devices"), 30):
        found = _checked(step, wanted)
        os.makedirs(device_names.devices(step.root), exist_ok=True)
        before = devices.registered(step.root)
        labelled = {_label(step, device, found): device.path for device in wanted}
        new = [path for uuid, path in labelled.items() if uuid not in before]
        closed, gone = [], []
        for uuid in set(before) - set(labelled):
            path = devices.mount(step.root, uuid)
            if moving.let_go(step.root, uuid):
                gone.append(path)
            else:
                _close(step.root, uuid)
                closed.append(path)
    return ChangedPool(new, sorted(closed), sorted(gone))


def _checked(step: SetDevices, wanted: Sequence[choose.Declared]) -> dict[str, str]:
    """Return the UUIDs that are on labels already, by path; raise BadPool unless all can form one pool."""
    systems: dict[str, str] = {}
    found: dict[str, str] = {}
    here, listed = os.uname().nodename, mounts.listed()
    silent = offline.unanswered(step.root, [device_names.side(device.path) for device in wanted])
    for device in wanted:
        path = device.path
        if device_names.side(path) in silent:
            raise BadPool(f"{path} on {here} is {offline.HUNG}: it does not answer")
        mounted = mounts.under(os.path.realpath(path), listed)
        if not os.path.isdir(path) or os.path.islink(path) or mounted.point != os.path.realpath(path):
            raise _not_mounted(path)
        system = mounted.device
        if system in systems:
            raise BadPool(
                f"{systems[system]} and {path} on {here} are one file system: of one device there "
                f"is one label"
            )
        systems[system] = path
        if not os.access(path, os.W_OK | os.X_OK):
            raise BadPool(f"{path} on {here} cannot be written to by the drivers' user: let that own it")
        side = device_names.side(path)
        uuid = str(label.read(side).get("uuid", ""))
        if not uuid and os.path.lexists(device_names.label(side)):
            raise BadPool(f"the label of {path} on {here} cannot be understood: {device_names.label(side)}")
        if uuid and uuid in found.values():
            raise BadPool(
                f"{path} on {here} has the label of another device, of which it may be a copy: {uuid}"
            )
        if uuid:
            _check_own(step, device.path, uuid, system)
        elif any(room.names(f"{side}/{part}") for part in device_names.PARTS):
            raise BadPool(
                f"{path} on {here} has disks or bases of a pool, and no label: remove {side} if "
                f"nobody misses them"
            )
        found[path] = uuid
        _check_class(side, device, mounted)
    return found


def _not_mounted(path: str) -> BadPool:
    return BadPool(f"{path} on {os.uname().nodename} is not mounted: an unmounted directory is no device")


def _check_own(step: SetDevices, path: str, uuid: str, system: str) -> None:
    """Raise BadPool for a device in another host's pool, or with the label of one mounted elsewhere."""
    root, here = step.root, os.uname().nodename
    side, link = device_names.side(path), device_names.device(root, uuid)
    if os.path.isdir(link) and not os.path.islink(link):
        # An older version wrote to a device that was unmounted at that moment.
        raise BadPool(
            f"{link} on {here} is a directory, where the link to {path} is to be: move it away, "
            f"it may have layers of disks"
        )
    said = label.read(side)
    host = label.whose(link, said)
    if host and not label.was_of(said, root, step.host_id):
        host += f" (host {said['host_id']} in OpenNebula)" if "host_id" in said else ""
        what = (
            "take it out there (semishared pool drain), or, if that host is no more, copy what is "
            "worth it from"
        )
        raise BadPool(f"{path} on {here} is in the pool of {host}: {what} {side}, and remove that")
    was = devices.mount(root, uuid)
    mounted = mounts.under(was, mounts.listed())
    is_another = mounted.point == was and mounted.device != system
    # A hanging device is not asked again; it may be the other one with this label.
    if is_another and (
        device_names.is_aside(os.readlink(link)) or label.read(device_names.side(was)).get("uuid") == uuid
    ):
        raise BadPool(
            f"{path} on {here} has the label of {was}, which is mounted too, and of which it may "
            f"be a copy: {uuid}"
        )


def _check_class(side: str, wanted: choose.Declared, mounted: mounts.Mount) -> None:
    """Raise BadPool for memory that the administrator declares as a persistent class.

    Without `=ram` persistent data would lie in memory. Raise it also for a device with layers that changes
    between memory and another class: no memory is promised to those layers.
    """
    said, here = label.read(side), os.uname().nodename
    was = said.get("class", wanted.device_class)
    if wanted.device_class != MEMORY and is_volatile(mounted):
        what = (
            f"is memory, which a restart empties, and declared as {wanted.device_class}: "
            f"{wanted.path}={MEMORY} is what it can be"
        )
        raise BadPool(f"{wanted.path} on {here} {what}")
    if wanted.device_class != MEMORY == was and "owner" not in said:
        what = (
            f"has the label of memory, and is declared as {wanted.device_class}: "
            f"{wanted.path}={MEMORY}; or, if it is none, remove"
        )
        raise BadPool(f"{wanted.path} on {here} {what} {device_names.label(side)}")
    if (was == MEMORY) != (wanted.device_class == MEMORY) and room.names(f"{side}/{device_names.LAYERS}"):
        what = f"is of class {was} and has disks: without them it can be {wanted.device_class}"
        raise BadPool(f"{wanted.path} on {here} {what}")


def _label(step: SetDevices, wanted: choose.Declared, found: dict[str, str]) -> str:
    """Write a device's label, note and link on this host; return its UUID."""
    root = step.root
    side, uuid = device_names.side(wanted.path), found[wanted.path] or str(uuids.uuid4())
    link, note = device_names.device(root, uuid), device_names.note(root, uuid)
    said = {
        "version": 1,
        "uuid": uuid,
        "class": wanted.device_class,
        "weight": wanted.weight,
        **_owner(step, side, link, wanted),
    }
    is_new = not os.path.lexists(link)
    files.remove_staged(device_names.devices(root))
    if is_new:
        _write(side, said)
    if files.hint(note) != said:
        files.write_json(note, said)
        point("device noted")
    # For a device in use the note gets the owner first: until then its label has none, or the same.
    _write(side, said)
    files.symlink(side, link)
    point("device known")
    return uuid


def _owner(step: SetDevices, side: str, link: str, wanted: choose.Declared) -> dict[str, object]:
    """Return the owner of a device for its label: kept once it is set. Memory gets its label at each boot."""
    if wanted.device_class == MEMORY:
        return {}
    was = label.read(side)
    is_own = "owner" in was and not label.whose(link, was)
    return {
        "owner": was["owner"] if is_own else uuids.uuid4().hex,
        **label.of_host(step.root, step.host_id),
    }


def _write(side: str, said: dict[str, object]) -> None:
    """Write a label, unless it is up to date.

    An unpadded label of an older version stays if the device is full and the content is the same.
    """
    if label.is_written(side, said):
        files.remove_staged(side)
        return
    was = label.read(side)
    try:
        with files.enough_space(side):
            label.write(side, said)
    except FileNotFoundError:
        raise _not_mounted(os.path.dirname(side)) from None
    except NoSpace:
        if not was or {**said, **label.without_padding(was)} != said:
            raise
        return
    point("device labelled")


def close(step: CloseDevice) -> None:
    """Set a device's weight to 0.

    Raise BadPool if it is offline, or the last device that takes what is not for memory.
    """
    with locks.exclusive(disk_names.lock(step.root, "devices"), 30):
        found = {device.uuid: device for device in devices.present(step.root)}
        if step.device not in found:
            raise BadPool(
                f"the device {step.device} of {os.uname().nodename} is not there, or cannot be written to"
            )
        takers = {
            uuid for uuid, device in found.items() if device.share > 0 and device.device_class != MEMORY
        }
        # Memory replaces no other device: it takes only what is declared for it.
        if found[step.device].device_class != MEMORY and not takers - {step.device}:
            path = devices.mount(step.root, step.device)
            raise BadPool(
                f"{path} on {os.uname().nodename} cannot be drained: no other device of its pool "
                f"takes what is not for memory"
            )
        _close(step.root, step.device)
        with ledger.promised(step.root):
            hot.drop_idle(step.root, step.device)


def _close(root: str, uuid: str) -> None:
    """Set a device's weight to 0 in this host's note; the device itself may be full or away."""
    device, note = device_names.device(root, uuid), device_names.note(root, uuid)
    known = files.hint(note) or label.without_padding(label.read(device)) or {"version": 1, "uuid": uuid}
    said = {**known, "weight": 0}
    if known != said or not os.path.exists(note):
        files.remove_staged(*os.path.split(note))
        files.write_json(note, said)
        point("device closed")
