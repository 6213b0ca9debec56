# SPDX-License-Identifier: Apache-2.0
"""A disk's layers move to another device of their host's pool (pool/moving.py): all of them, by one rename.

    disk.N.snap -> A/layers/V-N-x        B/layers/V-N-y, a copy, is made        disk.N.snap -> B/layers/V-N-y

oned does not know of a move and may start any action meanwhile. As in detach.py the move takes the turn, asks
oned, and is ended by an action that oned starts later. It also notices an action that takes no turn (a
restore): layers that changed since they were copied are not switched.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator

from ..base import cache
from ..base.room import Ask
from ..device import devices, folders, label, ledger, memory, systems
from ..errors import CannotMove, NoSpace, ToolTimeout
from ..guest import active_layer, block_jobs, domain, freeze, go_over, go_over_files, job_lock
from ..model.device import names as device_names
from ..model.device.classes import MEMORY
from ..model.device.names import LAYERS, Link
from ..model.device.steps import HeldItem, HeldItems, ListHeld, Moved, MoveLayers
from ..model.disk import names as disk_names
from ..model.steps import DiskRef
from ..pool import labels, moving
from ..pool.moving import Copying, Tell
from ..tools import effects, files, lock_holders
from ..tools.effects import Undo, point
from ..units import MiB, human
from . import epochs, on_devices, records, recovery, retained_diffs, vm_dir, vm_dir_inventory
from .epochs import Planned
from .history import UNKNOWN


def copy_layer(source: str, target: str, copying: Copying, empty: str = "") -> None:
    """Copy layers without writers into a new directory, with hard links, without a delta.

    The layer `empty` is only created there, at its size.
    """
    label.make_directory(target)
    point("layers being copied")
    names: dict[int, str] = {}
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        if disk_names.is_staged(entry.name) or entry.name == str(disk_names.DELTA_NUMBER):
            continue
        inode = entry.inode()
        if inode in names:
            os.link(f"{target}/{names[inode]}", f"{target}/{entry.name}")
        elif entry.name == empty:
            _make(entry, f"{target}/{entry.name}")
        else:
            copying.copy(entry.path, f"{target}/{entry.name}")
            names[inode] = entry.name
    files.fsync(target)
    files.fsync(os.path.dirname(target))
    point("layers copied")


def _make(entry: os.DirEntry[str], path: str) -> None:
    status = entry.stat()
    with open(path, "xb") as file:
        file.truncate(status.st_size)
    os.chmod(path, status.st_mode & 0o7777)
    files.fsync(path)


def layers_seen(folder: str) -> list[tuple[str, int, int, int, int]]:
    """Return what changes with any change in a directory of layers, except to its delta."""
    own = (entry for entry in os.scandir(folder) if entry.name != str(disk_names.DELTA_NUMBER))
    found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in own]
    return sorted(
        (name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found
    )


FLOOR = 64 * MiB
"""Bytes that stay free on the old device, where guests go on writing: QEMU pauses them on a full one."""


def move_live(step: MoveLayers, planned: Planned, tell: Tell, was: Link, new: Link) -> None:
    """Move a disk's layers to a device that is no memory; its guest runs, or waits for room in memory.

    The caller has the turn. A delta that is there is a killed move's.

    The guest writes to a delta while the layers below are copied, as in a migration, and goes over to the
    copy (guest/go_over.py). QEMU opens the base anew there, on that base's present device.

    A disk may leave memory when that is full and its guest stands still. The delta then takes space reserved
    for it (device/ledger.py), and the next run resumes a killed move instead of undoing it, for which there
    might be no room.

    A failure ends the move on one device or the other; after a kill the next action on the VM's disks does
    (recovery.py).
    """
    disk, root = step.disk, cache.root_of(step.disk.vm_dir)
    folder = disk_names.layers(disk.path)
    _check(step, root, was, new)
    with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        record = records.record_of(disk)
    is_memory = _label(root, was).get("class") == MEMORY
    floor = 0 if is_memory else min(FLOOR, _free(folder) // 2)
    with recovery.ended_on_failure(disk.vm_dir, step.domain):
        if not active_layer.noted(disk.vm_dir):
            if is_memory and _free(folder) < ledger.PIECE:
                ledger.give_spare(device_names.device(root, was.uuid))
            go_over.begin(disk.vm_dir, step.domain, [record], active_layer.DEVICE)
        ((_, record, _),) = active_layer.noted(disk.vm_dir)
        copying = Copying(on_devices.allocated(folder), step.rate, _watched(folder, floor, tell))
        # QEMU writes a raw layer as a whole.
        empty = record.layer if record.format == "raw" else ""
        with _copied(step, planned, was, new, copying, empty):
            if is_memory:
                note_leaving(disk.vm_dir, disk.disk, new)
            go_over_files.offer_device(disk.vm_dir, disk.disk, new)
        go_over.finish(disk.vm_dir, step.domain, step.rate, lambda: _see(device_names.left(folder), floor))
    if not _is_at(folder, new):
        raise CannotMove(f"disk {disk.disk} of VM {disk.vm}: its guest has not gone over")


def note_leaving(vm_dir: str, disk: int, new: Link) -> None:
    """Note that a disk is leaving memory; while the note stands, the guest may wait for full memory."""
    path = device_names.left_note(vm_dir, disk)
    files.remove_staged(*os.path.split(path))
    files.write_json(path, {"version": 1, "to": device_names.target_of(new)})
    point("leaving of memory noted")


def has_left(vm_dir: str, disk: int) -> bool:
    """Return True if a disk has left memory and its guest was not seen running since."""
    target = on_devices.of_disk(vm_dir, disk).target
    said = files.hint(device_names.left_note(vm_dir, disk))
    return bool(target) and said == {"version": 1, "to": target}


def forget_left(vm_dir: str, disk: int) -> None:
    """Remove that note: later write errors are not due to full memory."""
    files.unlink(device_names.left_note(vm_dir, disk))
    point("leaving of memory over")


def _check(step: MoveLayers, root: str, was: Link, new: Link) -> None:
    """Raise CannotMove for a disk that moves only while its VM is off."""
    which, record = f"disk {step.disk.disk} of VM {step.disk.vm}", records.record_of(step.disk)
    if _label(root, new).get("class") == MEMORY:
        raise CannotMove(f"{which}: what is to go to memory moves while its VM is off")
    if _label(root, was).get("class") == MEMORY and was.uuid not in {
        device.uuid for device in memory.overcommitted(root)
    }:
        raise CannotMove(
            f"{which}: what is in memory that is promised once, and not for a delta, moves while "
            f"its VM is off"
        )
    if record.over:
        raise CannotMove(f"{which} lies over {record.over.name} on the network: it moves while its VM is off")
    count = len(domain.snapshots(step.domain))
    if count:
        raise CannotMove(
            f"{which}: the VM has {count} system snapshots, which libvirt keeps in its layers: it "
            f"moves while it is off"
        )
    if block_jobs.find(step.domain, record.path)[0] in domain.encrypted(step.domain):
        raise CannotMove(
            f"{which} is encrypted (LUKS_SECRET), and QEMU would write it decrypted: it moves "
            f"while its VM is off"
        )


def _label(root: str, link: Link) -> dict[str, object]:
    return label.read(device_names.device(root, link.uuid))


@contextmanager
def _copied(
    step: MoveLayers, planned: Planned, was: Link, new: Link, copying: Copying, empty: str = ""
) -> Iterator[None]:
    """Copy a disk's layers, and hold its VM within the block; without a link to the copy, remove that.

    Raise CannotMove if the layers were changed meanwhile.
    """
    disk, root = step.disk, cache.root_of(step.disk.vm_dir)
    folder, directory = disk_names.layers(disk.path), device_names.directory(root, new)
    with Undo() as undo, files.enough_space(directory):
        # A switch that fails after its rename has taken place.
        undo.add(lambda: moving.discard(root, [] if _is_at(folder, new) else [new]))
        before = layers_seen(folder)
        copy_layer(folder, directory, copying, empty)
        with vm_dir.publishing(disk.vm, disk.vm_dir, planned, disk.disk):
            if not _is_at(folder, was) or layers_seen(folder) != before:
                raise CannotMove(f"disk {disk.disk} of VM {disk.vm} was changed while it was copied")
            yield
        undo.keep()


def _watched(folder: str, floor: int, tell: Tell) -> Tell:
    """Return a `tell` that raises NoSpace when the old device has less than `floor` bytes left."""

    def told(**event: object) -> None:
        _see(folder, floor)
        tell(**event)

    return told


def _see(folder: str, floor: int) -> None:
    if _free(folder) < floor:
        here = os.uname().nodename
        raise NoSpace(
            f"{human(_free(folder))} are left on the device of {folder} on {here}, where its "
            f"guest writes until it has moved"
        )


def _free(folder: str) -> int:
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def list_held(step: ListHeld) -> HeldItems:
    """Return the devices of this host, and the disks and bases on them."""
    return HeldItems(labels.described(step.root), [*moving.held(step), *held(step)])


def held(step: ListHeld) -> list[HeldItem]:
    """Return the disks with layers on devices.

    VMs in a system datastore that does not answer are left out.
    """
    location, found = os.path.dirname(step.root), []
    for system in systems.systems(location):
        for name in sorted(os.listdir(f"{location}/{system}")):
            directory = f"{location}/{system}/{name}"
            links = on_devices.links(directory)
            wanted = vm_dir_inventory.classes(directory) if links else {}
            for own, link in links.items():
                said = device_names.layers_named(link.name)
                if said and (disk_names.is_number(name) or disk_names.beside_named(name)):
                    size = (
                        on_devices.allocated(f"{directory}/{own}")
                        if os.path.isdir(f"{directory}/{own}")
                        else 0
                    )
                    classes = tuple(wanted.get(str(said[1]), ()))
                    found.append(HeldItem(LAYERS, link.name, link.uuid, size, (), *said, directory, classes))
    return found


def move(
    step: MoveLayers, planned: Planned, ask: Ask | None, tell: Tell, *, is_urgent: bool = False
) -> Moved:
    """Move a disk's layers; an error is not raised, but reported."""
    with effects.told(bytes=0) as answer:
        disk = step.disk
        moving.begin(cache.root_of(disk.vm_dir), is_urgent=is_urgent)
        if not job_lock.take_if_free(disk.vm, disk.vm_dir):
            raise CannotMove(f"VM {disk.vm} on {os.uname().nodename} is being acted upon")
        try:
            answer["bytes"] = _moved(step, planned, ask, tell)
        finally:
            job_lock.leave(disk.vm, disk.vm_dir)
    return Moved(**answer)


def spill(step: MoveLayers, tell: Tell) -> Moved:
    """Move the layers of a disk that its guest has open, as `move`, on a host that cannot ask oned.

    It moves no disk of a VM with notes of another unfinished action, except a killed move of this kind.
    """
    vm_dir = step.disk.vm_dir

    def ask(**_: object) -> dict[str, object]:
        is_busy = recovery.left(vm_dir) and not go_over.moves(vm_dir)
        return {"why": "something is under way in it"} if is_busy else {}

    return move(step, epochs.arrived(UNKNOWN, [step], {}), ask, tell, is_urgent=True)


def _moved(step: MoveLayers, planned: Planned, ask: Ask | None, tell: Tell) -> int:
    disk, root = step.disk, cache.root_of(step.disk.vm_dir)
    folder, state = disk_names.layers(disk.path), "off"
    left = folders.at(device_names.left(folder)).name
    if not retained_diffs.is_kept(disk.vm_dir):
        said = ask(question="vm", vm=disk.vm) if ask else {}
        if said.get("why"):
            raise CannotMove(f"VM {disk.vm}: {said['why']}")
        if not _goes_on(step):
            recovery.recover(disk.vm_dir, step.domain)
        state = domain.state(step.domain) if step.domain else "off"
        if state == "paused" and domain.is_paused_on_error(step.domain):
            state = "running"
        # Where libvirt does not report the state, open files decide (_refuse_opened).
        wanted = ("off", "absent", "unknown") if said.get("is_off") else ("running", "off", "absent")
        if state not in wanted:
            raise CannotMove(f"domain {step.domain} of VM {disk.vm} is {state} on {os.uname().nodename}")
    why = f"the layers of disk {disk.disk} of VM {disk.vm} are not on the device any more where they were"
    was = folders.at(folder).to_move(why)
    if was.name != step.name == left:
        return 0  # recovery has completed a killed move to another device
    if was.name != step.name:
        raise CannotMove(why)
    if on_devices.is_away(folder):
        on_devices.check_disk(disk.vm_dir, disk.disk)
    size = on_devices.allocated(folder)
    moving.require(root, step.target, size)
    _discard_unlinked(root, disk)
    new = Link(step.target, LAYERS, device_names.layers_name(disk.vm, disk.disk, os.urandom(6).hex()))
    if state == "running":
        move_live(step, planned, tell, was, new)
        return size
    _refuse_opened(disk, folder)
    with _copied(step, planned, was, new, Copying(size, step.rate, tell)):
        _refuse_opened(disk, folder)
        folders.OnDevice(folder, new).link_it()
        point("layers switched")
    moving.discard(root, [was])
    point("layers gone from their old device")
    return size


def _refuse_opened(disk: DiskRef, folder: str) -> None:
    """Raise CannotMove if a guest has layers open after all.

    An idle guest changes none of them, so `layers_seen` does not notice it; it would write to removed files.
    """
    for name in sorted(os.listdir(folder)):
        if lock_holders.is_image_open(f"{folder}/{name}"):
            what = f"disk {disk.disk} of VM {disk.vm} open, which is to be off"
            raise CannotMove(f"a guest on {os.uname().nodename} has {what}: {folder}/{name}")


def _goes_on(step: MoveLayers) -> bool:
    """Return True if a killed live move of this disk can be resumed: only its delta is left to keep."""
    vm_dir = step.disk.vm_dir
    if (
        not step.domain
        or not go_over.moves(vm_dir)
        or [switch.after.disk for switch in active_layer.noted(vm_dir)] != [step.disk.disk]
    ):
        return False
    freeze.wake(vm_dir, step.domain)
    return domain.state(step.domain) in ("running", "paused") and go_over.keep(vm_dir, step.domain)


def _is_at(folder: str, link: Link) -> bool:
    return folders.at(folder).target == device_names.target_of(link)


def _discard_unlinked(root: str, disk: DiskRef) -> None:
    """Remove what killed moves of this disk left; the caller has the turn, so no unlinked place is in use."""
    try:
        linked = folders.layers_links(os.path.dirname(root), disk.disk)
    except ToolTimeout:
        return  # a store hangs or is not mounted: gc removes them later
    if devices.link_of(disk_names.layers(disk.path)) not in linked:
        return  # the disk was moved elsewhere meanwhile, or some links were not seen
    for uuid in filter(lambda uuid: devices.is_there(root, uuid), devices.registered(root)):
        parent = os.path.dirname(device_names.directory(root, Link(uuid, LAYERS, "-")))
        for name in os.listdir(parent) if os.path.isdir(parent) else ():
            link = Link(uuid, LAYERS, name)
            if device_names.layers_named(name) == (disk.vm, disk.disk) and link not in linked:
                moving.discard(root, [link])
                point("left-over layers removed")
