# SPDX-License-Identifier: Apache-2.0
"""The layers of a disk go to another device of their host's pool (base/moving.py): all of them, by one rename
of disk.N.snap. Those of a disk that a running guest has open go as in moved_live.py.

    disk.N.snap -> A/layers/V-N-x        B/layers/V-N-y, a copy, is made        disk.N.snap -> B/layers/V-N-y

oned knows nothing of this, and may begin anything with the VM meanwhile: as in detach.py nobody is ended for
it who is at work on the disks, oned is asked when they are ours, and whatever it begins after that ends us.
What does not come here first (a restore) is seen: layers that are not as they were before they were copied
are not switched.
"""

from __future__ import annotations

import os

from ..base import cache, devices, moving, systems
from ..base.moving import Copying, Tell
from ..base.room import Ask
from ..errors import CannotMove, ToolTimeout
from ..guest import active_layer, deltas, domain, job_lock, rest, waiting
from ..model import layout, layout_devices
from ..model.layout_devices import LAYERS, Link
from ..model.steps import DiskRef
from ..model.steps_device import ListHeld, MoveLayers
from ..tools import files, image_locks, outcome
from ..tools.crash_points import point
from ..tools.undo import Undo
from . import epochs, layer_copies, moved_live, on_devices, recovery, uncommitted, vm_dir, whereabouts
from .epochs import Planned
from .history import UNKNOWN


def held(step: ListHeld) -> list[dict[str, object]]:
    """Return the layers of disks that are on devices: {"part", "name", "device", "bytes", "vm", "disk",
    "vm_dir", "classes"}.

    Not of VMs in what does not answer.
    """
    location, found = os.path.dirname(step.root), []
    for system in systems.systems(location):
        for name in sorted(os.listdir(f"{location}/{system}")):
            directory = f"{location}/{system}/{name}"
            links = on_devices.links(directory)
            wanted = whereabouts.classes(directory) if links else {}
            for own, link in links.items():
                said = layout_devices.layers_named(link.name)
                if said and (layout.is_number(name) or layout.beside_named(name)):
                    size = (
                        on_devices.allocated(f"{directory}/{own}")
                        if os.path.isdir(f"{directory}/{own}")
                        else 0
                    )
                    row: dict[str, object] = {
                        "part": LAYERS,
                        "name": link.name,
                        "device": link.uuid,
                        "bytes": size,
                    }
                    classes = wanted.get(str(said[1]), [])
                    found.append(
                        {**row, "vm": said[0], "disk": said[1], "vm_dir": directory, "classes": classes}
                    )
    return found


def move(
    step: MoveLayers, planned: Planned, ask: Ask | None, tell: Tell, *, is_urgent: bool = False
) -> dict[str, object]:
    """Move the layers of a disk; report {"bytes", "seconds", "error", "id"}: of what is wrong its line,
    nothing is raised.
    """
    with outcome.told(bytes=0) as answer:
        disk = step.disk
        moving.begin(cache.root_of(disk.vm_dir), is_urgent=is_urgent)
        if not job_lock.take_if_free(disk.vm, disk.vm_dir):
            raise CannotMove(f"VM {disk.vm} on {os.uname().nodename} is being acted upon")
        try:
            answer["bytes"] = _moved(step, planned, ask, tell)
        finally:
            job_lock.leave(disk.vm, disk.vm_dir)
    return answer


def spill(step: MoveLayers, tell: Tell) -> dict[str, object]:
    """Move the layers of a disk that its guest has open, as `move`, where nobody can ask oned.

    Only of a VM in which nothing is under way that anybody has noted, but for a move like this that was
    killed.
    """
    vm_dir = step.disk.vm_dir

    def ask(**_: object) -> dict[str, object]:
        is_busy = recovery.left(vm_dir) and not active_layer.moves(vm_dir)
        return {"why": "something is under way in it"} if is_busy else {}

    return move(step, epochs.arrived(UNKNOWN, [step], {}), ask, tell, is_urgent=True)


def _moved(step: MoveLayers, planned: Planned, ask: Ask | None, tell: Tell) -> int:
    disk, root = step.disk, cache.root_of(step.disk.vm_dir)
    folder, state = layout.layers(disk.path), "off"
    left = devices.link_of(layout_devices.left(folder))
    if not uncommitted.is_kept(disk.vm_dir):
        said = ask(question="vm", vm=disk.vm) if ask else {}
        if said.get("why"):
            raise CannotMove(f"VM {disk.vm}: {said['why']}")
        if not _goes_on(step):
            recovery.recover(disk.vm_dir, step.domain)
        state = domain.state(step.domain) if step.domain else "off"
        if state == "paused" and waiting.is_waiting(step.domain):
            state = "running"
        # Where libvirt does not say it, what QEMU has open does.
        wanted = ("off", "absent", "unknown") if said.get("is_off") else ("running", "off", "absent")
        if state not in wanted:
            raise CannotMove(f"domain {step.domain} of VM {disk.vm} is {state} on {os.uname().nodename}")
    was = devices.link_of(folder)
    if was and left and was.name != step.name == left.name:
        return 0  # A move that was killed had come so far that it has been ended there.
    if was is None or was.name != step.name:
        raise CannotMove(
            f"the layers of disk {disk.disk} of VM {disk.vm} are not on the device any more where they were"
        )
    if on_devices.is_away(folder):
        on_devices.check_disk(disk.vm_dir, disk.disk)
    size = on_devices.allocated(folder)
    moving.require(root, step.target, size)
    _discard_unlinked(root, disk)
    new = Link(step.target, LAYERS, layout_devices.layers_name(disk.vm, disk.disk, os.urandom(6).hex()))
    if state == "running":
        moved_live.move(step, planned, tell, was, new)
        return size
    _refuse_opened(disk, folder)
    with Undo() as undo, files.enough_space(layout_devices.directory(root, new)):
        # A switch that fails behind its rename has been made.
        undo.add(lambda: moving.discard(root, [new] if devices.link_of(folder) != new else []))
        before = layer_copies.seen(folder)
        layer_copies.copy(folder, layout_devices.directory(root, new), Copying(size, step.rate, tell))
        with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
            if devices.link_of(folder) != was or layer_copies.seen(folder) != before:
                raise CannotMove(f"disk {disk.disk} of VM {disk.vm} was changed while it was copied")
            _refuse_opened(disk, folder)
            switch(folder, new)
        undo.keep()
    moving.discard(root, [was])
    point("layers gone from their old device")
    return size


def _refuse_opened(disk: DiskRef, folder: str) -> None:
    """Raise CannotMove if a guest has layers open after all: a guest that is idle changes none of them, and
    would write to what is gone.
    """
    for name in sorted(os.listdir(folder)):
        if image_locks.is_open(f"{folder}/{name}"):
            what = f"disk {disk.disk} of VM {disk.vm} open, which is to be off"
            raise CannotMove(f"a guest on {os.uname().nodename} has {what}: {folder}/{name}")


def _goes_on(step: MoveLayers) -> bool:
    """Tell whether a move of this disk under its guest that was killed can be gone on with: all is undone of
    it but its delta.
    """
    vm_dir = step.disk.vm_dir
    if (
        not step.domain
        or not active_layer.moves(vm_dir)
        or [record.disk for record in active_layer.noted(vm_dir)] != [step.disk.disk]
    ):
        return False
    rest.wake(vm_dir, step.domain)
    return domain.state(step.domain) in ("running", "paused") and deltas.keep(vm_dir, step.domain)


def switch(folder: str, new: Link) -> None:
    """Let the layers of a disk be in another place from now on; the caller holds the VM."""
    files.remove_staged(*os.path.split(folder))
    files.symlink(layout_devices.target_of(new), folder)
    point("layers switched")


def _discard_unlinked(root: str, disk: DiskRef) -> None:
    """Remove what killed moves of this disk have left: the turn is ours, and whoever makes a place makes its
    link first.
    """
    try:
        linked = devices.layers_links(os.path.dirname(root), disk.disk)
    except ToolTimeout:
        return  # a store hangs, or is not mounted: gc does it when that answers
    own = devices.link_of(layout.layers(disk.path))
    if own not in linked:
        return  # it was taken elsewhere meanwhile, or not everything was seen
    for uuid in filter(lambda uuid: devices.is_there(root, uuid), devices.registered(root)):
        parent = os.path.dirname(layout_devices.directory(root, Link(uuid, LAYERS, "-")))
        for name in os.listdir(parent) if os.path.isdir(parent) else ():
            link = Link(uuid, LAYERS, name)
            if layout_devices.layers_named(name) == (disk.vm, disk.disk) and link not in linked:
                moving.discard(root, [link])
                point("left-over layers removed")
