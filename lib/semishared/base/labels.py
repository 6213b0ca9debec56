# SPDX-License-Identifier: Apache-2.0
"""The labels of devices: what makes a mounted tree one of this host's pool, and what `semishared pool` is
told of it.

    <mount>/.semishared/device.json     <root>/devices/<uuid>.json      (device_label.py)

Killed anywhere, some devices are labelled or linked, and the next run goes on: a label that is there is taken
as it is.
"""

from __future__ import annotations

import os
import uuid as uuids
from typing import Sequence

from ..errors import BadPool, NoSpace, ToolTimeout
from ..model import layout, layout_devices
from ..model.device_class import MEMORY
from ..model.steps_device import CloseDevice, ListDevices, SetDevices
from ..plan import pool
from ..tools import files, locks, mounts
from ..tools.crash_points import point
from . import (
    device_label,
    device_state,
    devices,
    hot,
    hung,
    overcommitted,
    promises,
    room,
    undeclared,
    volatile,
    zram,
)


def describe(step: ListDevices) -> dict[str, object]:
    """Return the devices of this host's pool; `state` is '' for one that is as it is to be."""
    return {"devices": described(step.root)}


def described(root: str) -> list[dict[str, object]]:
    """Return the devices of this host's pool, each with its path and state, and what it holds."""
    return [_described(root, uuid) for uuid in devices.registered(root)]


def _described(root: str, uuid: str) -> dict[str, object]:
    directory = layout_devices.device(root, uuid)
    row: dict[str, object] = {
        "uuid": uuid,
        "path": devices.mount(root, uuid),
        "class": "",
        "weight": 0.0,
        "total": 0,
        "free": 0,
        "disks": 0,
        "bases": 0,
        "promised": 0,
        "lost": [],
        "is_old": False,
    }
    wrong = device_state.state(root, uuid)
    if wrong and wrong != device_state.READ_ONLY:
        return {**row, "state": wrong}
    said = device_label.read(directory)
    try:
        stat = os.statvfs(directory)
        held = {
            part: len(room.names(f"{directory}/{part}"))
            for part in (layout_devices.LAYERS, layout_devices.BASES)
        }
        # That of memory is written by who mounts it, and no file system is made there that has small files in
        # its metadata.
        row["is_old"] = said["class"] != MEMORY and not device_label.is_padded(directory)
    except OSError as e:
        return {**row, "state": f"{device_state.BROKEN}: {e.strerror}"}
    row.update(
        {"class": said["class"], "weight": said["weight"], "mixes_memory": zram.mixes_memory(directory)}
    )
    row.update({"total": stat.f_blocks * stat.f_frsize, "free": stat.f_bavail * stat.f_frsize})
    row.update({"disks": held[layout_devices.LAYERS], "bases": held[layout_devices.BASES]})
    if said["class"] == MEMORY:
        row.update({"bases": len(room.names(layout_devices.hot(directory)))})
        row.update(
            {
                "promised": promises.total(directory),
                "lost": _lost(root, uuid),
                "watched": overcommitted.is_watched(root),
            }
        )
        row.update({"limit": zram.limit(directory)})
    return {**row, "state": wrong}


def _lost(root: str, uuid: str) -> list[str]:
    """Return the disks, VM-DISK, that lay in memory which was emptied since."""
    try:
        found = [link for link in devices.layers_links(os.path.dirname(root)) if link.uuid == uuid]
    except ToolTimeout:
        return []  # a store hangs, which is told of elsewhere
    gone = [link.name for link in found if not os.path.isdir(layout_devices.directory(root, link))]
    return sorted("-".join(name.split("-")[:2]) for name in gone)


def declare(step: SetDevices) -> dict[str, object]:
    """Make the pool what is wanted; return {"labelled", "closed", "gone"}: paths that are new, take nothing
    more, or are none any more.

    Raise BadPool, before anything is changed, if one of them cannot be a device.
    """
    wanted = pool.declared(" ".join(step.devices))
    with locks.exclusive(layout.lock(step.root, "devices"), 30):
        found = _checked(step, wanted)
        os.makedirs(layout_devices.devices(step.root), exist_ok=True)
        before = devices.registered(step.root)
        labelled = {_label(step, device, found): device.path for device in wanted}
        new = [path for uuid, path in labelled.items() if uuid not in before]
        closed, gone = [], []
        for uuid in set(before) - set(labelled):
            path = devices.mount(step.root, uuid)
            if undeclared.let_go(step.root, uuid):
                gone.append(path)
            else:
                _close(step.root, uuid)
                closed.append(path)
    return {"labelled": new, "closed": sorted(closed), "gone": sorted(gone)}


def _checked(step: SetDevices, wanted: Sequence[pool.Declared]) -> dict[str, str]:
    """Return the labels there are, by path; raise BadPool unless all can be devices of one pool."""
    systems: dict[str, str] = {}
    found: dict[str, str] = {}
    here, listed = os.uname().nodename, mounts.listed()
    silent = hung.unanswered(step.root, [layout_devices.side(device.path) for device in wanted])
    for device in wanted:
        path = device.path
        if layout_devices.side(path) in silent:
            raise BadPool(f"{path} on {here} is {device_state.HUNG}: it does not answer")
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
        side = layout_devices.side(path)
        uuid = str(device_label.read(side).get("uuid", ""))
        if not uuid and os.path.lexists(layout_devices.label(side)):
            raise BadPool(f"the label of {path} on {here} cannot be understood: {layout_devices.label(side)}")
        if uuid and uuid in found.values():
            raise BadPool(
                f"{path} on {here} has the label of another device, of which it may be a copy: {uuid}"
            )
        if uuid:
            _check_own(step, device.path, uuid, system)
        elif any(room.names(f"{side}/{part}") for part in layout_devices.PARTS):
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
    """Raise BadPool for a device that is in the pool of another host, or has the label of one that is mounted
    elsewhere.
    """
    root, here = step.root, os.uname().nodename
    side, link = layout_devices.side(path), layout_devices.device(root, uuid)
    if os.path.isdir(link) and not os.path.islink(link):
        # Of an older version, which wrote to a device that went at that moment.
        raise BadPool(
            f"{link} on {here} is a directory, where the link to {path} is to be: move it away, "
            f"it may have layers of disks"
        )
    said = device_label.read(side)
    host = device_label.whose(link, said)
    if host and not device_label.was_of(said, root, step.host_id):
        host += f" (host {said['host_id']} in OpenNebula)" if "host_id" in said else ""
        what = (
            "take it out there (semishared pool drain), or, if that host is no more, copy what is "
            "worth it from"
        )
        raise BadPool(f"{path} on {here} is in the pool of {host}: {what} {side}, and remove that")
    was = devices.mount(root, uuid)
    mounted = mounts.under(was, mounts.listed())
    is_another = mounted.point == was and mounted.device != system
    # One that hangs is not asked again, and may be that.
    if is_another and (
        layout_devices.is_aside(os.readlink(link))
        or device_label.read(layout_devices.side(was)).get("uuid") == uuid
    ):
        raise BadPool(
            f"{path} on {here} has the label of {was}, which is mounted too, and of which it may "
            f"be a copy: {uuid}"
        )


def _check_class(side: str, wanted: pool.Declared, mounted: mounts.Mount) -> None:
    """Raise BadPool for memory that is declared as what outlives a restart: by one word too few persistent
    data would lie there.

    And for a device with layers that was no memory and is declared so, or the other way round: of them
    nothing is promised.
    """
    said, here = device_label.read(side), os.uname().nodename
    was = said.get("class", wanted.device_class)
    if wanted.device_class != MEMORY and volatile.is_volatile(mounted):
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
        raise BadPool(f"{wanted.path} on {here} {what} {layout_devices.label(side)}")
    if (was == MEMORY) != (wanted.device_class == MEMORY) and room.names(f"{side}/{layout_devices.LAYERS}"):
        what = f"is of class {was} and has disks: without them it can be {wanted.device_class}"
        raise BadPool(f"{wanted.path} on {here} {what}")


def _label(step: SetDevices, wanted: pool.Declared, found: dict[str, str]) -> str:
    """Label a device and let it be known here; return its UUID."""
    root = step.root
    side, uuid = layout_devices.side(wanted.path), found[wanted.path] or str(uuids.uuid4())
    link, note = layout_devices.device(root, uuid), layout_devices.note(root, uuid)
    said = {
        "version": 1,
        "uuid": uuid,
        "class": wanted.device_class,
        "weight": wanted.weight,
        **_owner(step, side, link, wanted),
    }
    is_new = not os.path.lexists(link)
    files.remove_staged(layout_devices.devices(root))
    if is_new:
        _write(side, said)
    if files.hint(note) != said:
        files.write_json(note, said)
        point("device noted")
    # Of one that is in use the note has the owner first: in between its label has none, or the same.
    _write(side, said)
    files.symlink(side, link)
    point("device known")
    return uuid


def _owner(step: SetDevices, side: str, link: str, wanted: pool.Declared) -> dict[str, object]:
    """Return whose a device is from now on: it stays so. Memory has its label from its host, at each boot."""
    if wanted.device_class == MEMORY:
        return {}
    was = device_label.read(side)
    is_own = "owner" in was and not device_label.whose(link, was)
    return {
        "owner": was["owner"] if is_own else uuids.uuid4().hex,
        **device_label.of_host(step.root, step.host_id),
    }


def _write(side: str, said: dict[str, object]) -> None:
    """Write a label, unless it says that; one of before, which says nothing else, may be on a device that is
    full, and stays.
    """
    if device_label.is_written(side, said):
        files.remove_staged(side)
        return
    was = device_label.read(side)
    try:
        with files.enough_space(side):
            device_label.write(side, said)
    except FileNotFoundError:
        raise _not_mounted(os.path.dirname(side)) from None
    except NoSpace:
        if not was or {**said, **device_label.without_padding(was)} != said:
            raise
        return
    point("device labelled")


def close(step: CloseDevice) -> dict[str, object]:
    """Let a device take nothing more; raise BadPool if it is not there, or the only one that takes what is
    not for memory.
    """
    with locks.exclusive(layout.lock(step.root, "devices"), 30):
        found = {device.uuid: device for device in devices.present(step.root)}
        if step.device not in found:
            raise BadPool(
                f"the device {step.device} of {os.uname().nodename} is not there, or cannot be written to"
            )
        takers = {
            uuid for uuid, device in found.items() if device.share > 0 and device.device_class != MEMORY
        }
        # Memory takes nothing in the place of a device, and none of what all others wait for.
        if found[step.device].device_class != MEMORY and not takers - {step.device}:
            path = devices.mount(step.root, step.device)
            raise BadPool(
                f"{path} on {os.uname().nodename} cannot be drained: no other device of its pool "
                f"takes what is not for memory"
            )
        _close(step.root, step.device)
        with promises.held(step.root):
            hot.drop_idle(step.root, step.device)
    return {}


def _close(root: str, uuid: str) -> None:
    """Let a device take nothing more: as this host has noted it, for it may be full, or away."""
    device, note = layout_devices.device(root, uuid), layout_devices.note(root, uuid)
    known = (
        files.hint(note)
        or device_label.without_padding(device_label.read(device))
        or {"version": 1, "uuid": uuid}
    )
    said = {**known, "weight": 0}
    if known != said or not os.path.exists(note):
        files.remove_staged(*os.path.split(note))
        files.write_json(note, said)
        point("device closed")
