# SPDX-License-Identifier: Apache-2.0
"""The layers of a disk go to another device of their host's pool (base/moving.py): all of them, by one rename of disk.N.snap.

    disk.N.snap -> A/layers/V-N-x        B/layers/V-N-y, a copy, is made        disk.N.snap -> B/layers/V-N-y

oned knows nothing of this, and may begin anything with the VM meanwhile: as in detach.py nobody is ended for it who is at work on the
disks, oned is asked when they are ours, and whatever it begins after that ends us. What does not come here first (a restore) is
seen: layers that are not as they were before they were copied are not switched.
"""

from __future__ import annotations

import os
import time

from ..base import cache, devices, moving
from ..base.moving import Copying, Tell
from ..base.room import Ask
from ..errors import CannotMove, SemisharedError
from ..guest import domain, job_lock
from ..model import layout, layout_devices
from ..model.layout_devices import LAYERS, Link
from ..model.steps import DiskRef
from ..model.steps_device import ListHeld, MoveLayers
from ..tools import files
from ..tools.crash_points import point
from ..tools.undo import Undo
from . import kept, on_devices, recovery, vm_dir
from .epochs import Planned


def held(step: ListHeld) -> list[dict[str, object]]:
    """Return the layers of disks that are on devices: {"part", "name", "device", "bytes", "vm", "disk", "vm_dir"}."""
    location, found = os.path.dirname(step.root), []
    for system in filter(layout.is_number, sorted(os.listdir(location))):
        for name in sorted(os.listdir(f"{location}/{system}")):
            directory = f"{location}/{system}/{name}"
            for own, link in on_devices.links(directory).items():
                said = layout_devices.layers_named(link.name)
                if said and (layout.is_number(name) or layout.beside_named(name)):
                    size = on_devices.allocated(f"{directory}/{own}") if os.path.isdir(f"{directory}/{own}") else 0
                    row: dict[str, object] = {"part": LAYERS, "name": link.name, "device": link.uuid, "bytes": size}
                    found.append({**row, "vm": said[0], "disk": said[1], "vm_dir": directory})
    return found


def move(step: MoveLayers, planned: Planned, ask: Ask | None, tell: Tell) -> dict[str, object]:
    """Move the layers of a disk; report {"bytes", "seconds", "error", "id"}: of what is wrong its line, nothing is raised."""
    began, answer = time.monotonic(), {"bytes": 0, "error": "", "id": ""}
    try:
        disk = step.disk
        moving.begin(cache.root_of(disk.vm_dir))
        if not job_lock.take_if_free(disk.vm, disk.vm_dir):
            raise CannotMove(f"VM {disk.vm} on {os.uname().nodename} is being acted upon")
        try:
            answer["bytes"] = _moved(step, planned, ask, tell)
        finally:
            job_lock.leave(disk.vm, disk.vm_dir)
    except SemisharedError as e:
        answer.update(error=e.line(), id=e.id)
    except OSError as e:
        answer.update(error=f"on {os.uname().nodename}: {e}", id="SS012")
    return {**answer, "seconds": round(time.monotonic() - began, 2)}


def _moved(step: MoveLayers, planned: Planned, ask: Ask | None, tell: Tell) -> int:
    disk, root = step.disk, cache.root_of(step.disk.vm_dir)
    folder = layout.layers(disk.path)
    if not kept.is_kept(disk.vm_dir):
        why = str(ask(question="vm", vm=disk.vm).get("why", "")) if ask else ""
        if why:
            raise CannotMove(f"VM {disk.vm}: {why}")
        recovery.recover(disk.vm_dir, step.domain)
        state = domain.state(step.domain) if step.domain else "off"
        if state not in ("off", "absent"):
            raise CannotMove(f"domain {step.domain} of VM {disk.vm} is {state} on {os.uname().nodename}")
    was = devices.link_of(folder)
    if was is None or was.name != step.name:
        raise CannotMove(f"the layers of disk {disk.disk} of VM {disk.vm} are not on the device any more where they were")
    if on_devices.is_away(folder):
        on_devices.check_disk(disk.vm_dir, disk.disk)
    size = on_devices.allocated(folder)
    moving.require(root, step.target, size)
    _discard_unlinked(root, disk)
    new = Link(step.target, LAYERS, layout_devices.layers_name(disk.vm, disk.disk, os.urandom(6).hex()))
    with Undo() as undo, files.enough_space(layout_devices.directory(root, new)):
        # A switch that fails behind its rename has been made.
        undo.add(lambda: moving.discard(root, [new] if devices.link_of(folder) != new else []))
        seen = _seen(folder)
        copy(folder, layout_devices.directory(root, new), Copying(size, step.rate, tell))
        with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
            if devices.link_of(folder) != was or _seen(folder) != seen:
                raise CannotMove(f"disk {disk.disk} of VM {disk.vm} was changed while it was copied")
            switch(folder, new)
        undo.keep()
    moving.discard(root, [was])
    point("layers gone from their old device")
    return size


def switch(folder: str, new: Link) -> None:
    """Let the layers of a disk be in another place from now on; the caller holds the VM."""
    files.remove_staged(*os.path.split(folder))
    files.symlink(layout_devices.target_of(new), folder)
    point("layers switched")


def copy(source: str, target: str, copying: Copying) -> None:
    """Copy layers that nobody writes to into a new directory; one with several names stays one."""
    os.makedirs(target)
    point("layers being copied")
    names: dict[int, str] = {}
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if layout.is_staged(entry.name):
            continue
        inode = entry.inode()
        if inode in names:
            os.link(f"{target}/{names[inode]}", f"{target}/{entry.name}")
        else:
            copying.copy(entry.path, f"{target}/{entry.name}")
            names[inode] = entry.name
    files.fsync(target)
    files.fsync(os.path.dirname(target))
    point("layers copied")


def _seen(folder: str) -> list[tuple[str, int, int, int, int]]:
    """Return what tells whether anything in a directory of layers was changed."""
    found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
    return sorted((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found)


def _discard_unlinked(root: str, disk: DiskRef) -> None:
    """Remove what killed moves of this disk have left: the turn is ours, and whoever makes a place makes its link first."""
    linked = devices.layers_links(os.path.dirname(root), disk.disk)
    for uuid in filter(lambda uuid: devices.is_there(root, uuid), devices.registered(root)):
        parent = os.path.dirname(layout_devices.directory(root, Link(uuid, LAYERS, "-")))
        for name in os.listdir(parent) if os.path.isdir(parent) else ():
            link = Link(uuid, LAYERS, name)
            if layout_devices.layers_named(name) == (disk.vm, disk.disk) and link not in linked:
                moving.discard(root, [link])
                point("left-over layers removed")
