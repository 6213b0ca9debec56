# SPDX-License-Identifier: Apache-2.0
"""The labels of devices: what makes a mounted tree one of this host's pool, and what `semishared pool` is told of it.

    <mount>/.semishared/device.json     {"version": 1, "uuid": ..., "class": ..., "weight": ...}

Killed anywhere, some devices are labelled or linked, and the next run goes on: a label that is there is taken as it is.
"""

from __future__ import annotations

import os
import uuid as uuids
from typing import Sequence

from ..errors import BadPool, ToolTimeout
from ..model import layout, layout_devices
from ..model.device_class import MEMORY
from ..model.steps_device import CloseDevice, ListDevices, SetDevices
from ..plan import pool
from ..tools import files, locks
from ..tools.crash_points import point
from . import device_state, devices, hot, hung, overcommitted, promises, room


def describe(step: ListDevices) -> dict[str, object]:
    """Return the devices of this host's pool; `state` is '' for one that is as it is to be."""
    return {"devices": described(step.root)}


def described(root: str) -> list[dict[str, object]]:
    """Return the devices of this host's pool, each with its path and state, and what it holds."""
    return [_described(root, uuid) for uuid in devices.registered(root)]


def _described(root: str, uuid: str) -> dict[str, object]:
    directory = layout_devices.device(root, uuid)
    row: dict[str, object] = {"uuid": uuid, "path": devices.mount(root, uuid), "class": "", "weight": 0.0, "total": 0, "free": 0,
                              "disks": 0, "bases": 0, "promised": 0, "lost": []}  # fmt: skip
    wrong = device_state.state(root, uuid)
    if wrong and wrong != device_state.READ_ONLY:
        return {**row, "state": wrong}
    said = devices.label(directory)
    try:
        stat = os.statvfs(directory)
        held = {part: len(room.names(f"{directory}/{part}")) for part in (layout_devices.LAYERS, layout_devices.BASES)}
    except OSError as e:
        return {**row, "state": f"{device_state.BROKEN}: {e.strerror}"}
    row.update({"class": said["class"], "weight": said["weight"]})
    row.update({"total": stat.f_blocks * stat.f_frsize, "free": stat.f_bavail * stat.f_frsize})
    row.update({"disks": held[layout_devices.LAYERS], "bases": held[layout_devices.BASES]})
    if said["class"] == MEMORY:
        row.update({"bases": len(room.names(layout_devices.hot(directory)))})
        row.update({"promised": promises.total(directory), "lost": _lost(root, uuid), "watched": overcommitted.is_watched(root)})
        row.update({"limit": overcommitted.limit(directory)})
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
    """Make the pool what is wanted; return {"labelled", "closed", "gone"}: paths that are new, take nothing more, or are none any more.

    Raise BadPool, before anything is changed, if one of them cannot be a device.
    """
    wanted = pool.declared(" ".join(step.devices))
    with locks.exclusive(layout.lock(step.root, "devices"), 30):
        found = _checked(step.root, wanted)
        os.makedirs(layout_devices.devices(step.root), exist_ok=True)
        new = [path for path in (_label(step.root, device, found) for device in wanted) if path]
        labelled = {str(devices.label(layout_devices.side(device.path))["uuid"]) for device in wanted}
        closed, gone = [], []
        for uuid in set(devices.registered(step.root)) - labelled:
            path = devices.mount(step.root, uuid)
            if _holds(step.root, uuid):
                closed.append(path)
                continue
            files.unlink(layout_devices.device(step.root, uuid))
            files.unlink(layout_devices.note(step.root, uuid))
            files.unlink(layout_devices.asked_beside(layout_devices.device(step.root, uuid)))
            point("device gone")
            gone.append(path)
    return {"labelled": new, "closed": sorted(closed), "gone": sorted(gone)}


def _checked(root: str, wanted: Sequence[pool.Declared]) -> dict[str, str]:
    """Return the labels there are, by path; raise BadPool unless all can be devices of one pool."""
    systems: dict[int, str] = {}
    found: dict[str, str] = {}
    here = os.uname().nodename
    silent = hung.unanswered(root, [layout_devices.side(device.path) for device in wanted])
    for device in wanted:
        path = device.path
        if layout_devices.side(path) in silent:
            raise BadPool(f"{path} on {here} is {device_state.HUNG}: it does not answer")
        if not os.path.isdir(path) or os.path.islink(path) or not os.path.ismount(path):
            raise BadPool(f"{path} on {here} is not mounted: an unmounted directory is no device")
        system = os.stat(path).st_dev
        if system in systems:
            raise BadPool(f"{systems[system]} and {path} on {here} are one file system: of one device there is one label")
        systems[system] = path
        if not os.access(path, os.W_OK | os.X_OK):
            raise BadPool(f"{path} on {here} cannot be written to by the drivers' user: let that own it")
        side = layout_devices.side(path)
        uuid = str(devices.label(side).get("uuid", ""))
        if not uuid and os.path.lexists(layout_devices.label(side)):
            raise BadPool(f"the label of {path} on {here} cannot be understood: {layout_devices.label(side)}")
        if uuid and uuid in found.values():
            raise BadPool(f"{path} on {here} has the label of another device, of which it may be a copy: {uuid}")
        found[path] = uuid
        _check_class(side, device)
    return found


def _check_class(side: str, wanted: pool.Declared) -> None:
    """Raise BadPool for a device with layers that was no memory and is declared so, or the other way round: of them nothing is promised."""
    was = devices.label(side).get("class", wanted.device_class)
    if (was == MEMORY) != (wanted.device_class == MEMORY) and room.names(f"{side}/{layout_devices.LAYERS}"):
        what = f"is of class {was} and has disks: without them it can be {wanted.device_class}"
        raise BadPool(f"{wanted.path} on {os.uname().nodename} {what}")


def _label(root: str, wanted: pool.Declared, found: dict[str, str]) -> str:
    """Label a device and let it be known here; return its path if it was not before."""
    side, uuid = layout_devices.side(wanted.path), found[wanted.path] or str(uuids.uuid4())
    said = {"version": 1, "uuid": uuid, "class": wanted.device_class, "weight": wanted.weight}
    if files.read_json(layout_devices.label(side)) != said:
        os.makedirs(side, exist_ok=True)
        files.remove_staged(side)
        files.write_json(layout_devices.label(side), said)
        point("device labelled")
    files.remove_staged(layout_devices.devices(root))
    if wanted.device_class != MEMORY:
        files.unlink(layout_devices.note(root, uuid))
    elif files.read_json(layout_devices.note(root, uuid)) != said:
        files.write_json(layout_devices.note(root, uuid), said)
        point("memory known")
    link = layout_devices.device(root, uuid)
    is_new = not os.path.lexists(link)
    files.symlink(side, link)
    point("device known")
    return wanted.path if is_new else ""


def _holds(root: str, uuid: str) -> bool:
    """Tell whether a device holds, or may hold, something that is known by it; if so it takes nothing more from now on."""
    directory, wrong = layout_devices.device(root, uuid), device_state.state(root, uuid)
    if wrong == device_state.OTHER and uuid not in devices.usual(root):
        # Memory that was given back, and another one is in its place: all that is left of it are links of disks.
        return any(link.uuid == uuid for link in devices.layers_links(os.path.dirname(root)))
    if wrong:
        return True
    held = any(room.names(f"{directory}/{part}") for part in layout_devices.PARTS)
    if held:
        _close(directory)
    return held


def close(step: CloseDevice) -> dict[str, object]:
    """Let a device take nothing more; raise BadPool if it is not there, or the only one that takes anything."""
    with locks.exclusive(layout.lock(step.root, "devices"), 30):
        found = {device.uuid: device for device in devices.present(step.root)}
        if step.device not in found:
            raise BadPool(f"the device {step.device} of {os.uname().nodename} is not there, or cannot be written to")
        if not any(device.share > 0 for uuid, device in found.items() if uuid != step.device):
            path = devices.mount(step.root, step.device)
            raise BadPool(f"{path} on {os.uname().nodename} cannot be drained: no other device of its pool takes anything")
        _close(layout_devices.device(step.root, step.device))
        with promises.held(step.root):
            hot.drop_idle(step.root, step.device)
    return {}


def _close(directory: str) -> None:
    said = {**devices.label(directory), "weight": 0}
    if files.read_json(layout_devices.label(directory)) != said:
        files.remove_staged(*os.path.split(layout_devices.label(directory)))
        files.write_json(layout_devices.label(directory), said)
        point("device closed")
    note = layout_devices.note_beside(directory)
    if said["class"] == MEMORY and files.read_json(note) != said:
        # Its own label is made anew, with the weight of its settings, when the host is started again.
        files.write_json(note, said)
        point("memory closed")
