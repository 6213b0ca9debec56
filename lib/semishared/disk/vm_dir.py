# SPDX-License-Identifier: Apache-2.0
"""The directory of a VM on a machine: its disks, their records, and what a step may publish there.

`.semishared/vm.json` holds oned's SEQ of the VM's history at which the directory was made, or published by a
move: of two directories of one VM the lower SEQ is the older. Directories of 0.1.0 have none. epochs.py
counts deletions.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Callable, Iterator

from .. import store
from ..base import cache, room
from ..device import folders
from ..errors import BadRecord, DataInTheWay, LateAction, NoSpace, SemisharedError, VmGone
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.steps import DiskRef, EndedSession, NoteClients, NoteIoClasses, OnStore, RemovedDisk, RemovedVm
from ..model.store import dir_names
from ..named import NamedTuple
from ..store.dir import clones as dir_clones
from ..tools import files, layers, locks, qemu_img
from ..tools.effects import point
from . import backup_marks, epochs, history, on_devices, records, recovery, retained_diffs, vm_dir_siblings
from .epochs import Planned
from .records import read_record as read_record

if TYPE_CHECKING:
    from ..model.device.steps import NoteClasses, NoteHot, PlaceLayers

VERSION = 1
"""Version of vm.json."""


@contextmanager
def _lock(vm: int, vm_dir: str) -> Iterator[IO[str]]:
    with locks.exclusive(epochs.lock_path(vm, vm_dir), locks.VM_LIMIT_S) as file:
        yield file


@contextmanager
def publishing(vm: int, vm_dir: str, planned: Planned, disk: int | None = None) -> Iterator[IO[str]]:
    """Hold the VM's lock while a step publishes into its directory; yield the lock file.

    Raise VmGone or LateAction if the VM, or the disk, was deleted since the step was planned.
    """
    keys = (epochs.ALL,) if disk is None else (epochs.ALL, str(disk))
    with _lock(vm, vm_dir) as file:
        epochs.check(file, epochs.lock_path(vm, vm_dir), vm, keys, planned)
        history.refuse_late(vm, vm_dir, planned.seq)
        yield file


def check_wanted(disk: DiskRef, planned: Planned) -> None:
    """Raise VmGone or LateAction if a disk was deleted since a step was planned: its number may be reused."""
    with publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        pass


def release(disk: DiskRef, planned: Planned, but: str = "") -> None:
    """Free a disk's leases as retained_diffs.release does, unless a newer disk of its number has them."""
    with _lock(disk.vm, disk.vm_dir) as file:
        try:
            epochs.check(
                file, epochs.lock_path(disk.vm, disk.vm_dir), disk.vm, (epochs.ALL, str(disk.disk)), planned
            )
            history.refuse_late(disk.vm, disk.vm_dir, planned.seq)
        except (LateAction, VmGone):
            # A newer disk that is still being made leases its base again (create.py).
            if not (
                files.is_absent(disk.path) and files.is_absent(disk_names.record(disk.vm_dir, disk.disk))
            ):
                return
        retained_diffs.release(disk, but)


def note_seq(vm_dir: str, seq: int) -> None:
    """Note the SEQ in a VM directory, if it is higher than the present one."""
    if seq > history.seq_of(vm_dir):
        files.remove_staged(*os.path.split(disk_names.history_note(vm_dir)))
        files.write_json(disk_names.history_note(vm_dir), {"version": VERSION, "seq": seq})


def prepare(vm: int, vm_dir: str, planned: Planned, ask: room.Ask | None) -> None:
    """Make the VM directory, evicting idle bases if it needs room; sweep what is left of an older one."""
    try:
        _prepare(vm, vm_dir, planned)
    except NoSpace:
        room.for_disk(vm_dir, room.LITTLE, ask)
        _prepare(vm, vm_dir, planned)


def _prepare(vm: int, vm_dir: str, planned: Planned) -> None:
    from ..device import systems

    with publishing(vm, vm_dir, planned), files.enough_space(vm_dir):
        systems.mark(vm_dir)
        os.makedirs(disk_names.records(vm_dir), exist_ok=True)
        point("vm directory made")
        note_seq(vm_dir, planned.seq)
    if vm_dir_siblings.listed(vm_dir, "removed"):
        vm_dir_siblings.tidy(vm_dir, cache.root_of(vm_dir), vm)


class Layered(NamedTuple):
    """What a disk with layers takes."""

    expected: int
    """About how many bytes."""
    near: str
    """The base beside which it should lie; '' for none."""


@contextmanager
def published(
    vm: int,
    vm_dir: str,
    name: str,
    planned: Planned,
    record: Callable[[], object] | None = None,
    layered: Layered | None = None,
) -> Iterator[str]:
    """Yield a staged name for a file or link of the VM; publish it under the VM's lock.

    `record` runs under that lock, just before the rename. A `layered` disk is published as its first layer
    (tools/layers.py), in the folder that it has or gets.
    """
    path = f"{vm_dir}/{name}"
    staged, folder = files.staged_name(path), None
    disk = disk_names.disk_named(name)
    try:
        if layered and disk is not None:
            with publishing(vm, vm_dir, planned, disk):
                folder = on_devices.place(vm_dir, vm, disk, *layered)
            staged = folder.staged(name)
        with files.enough_space(os.path.dirname(staged)):
            yield staged
            point(f"{name} staged")
            if not os.path.islink(staged):
                files.fsync(staged)
            with publishing(vm, vm_dir, planned, disk) as file:
                if disk is not None:
                    epochs.note_made(file, str(disk))
                if record:
                    record()
                files.refuse()
                if layered:
                    layers.publish_first(path, staged)
                else:
                    os.rename(staged, path)
                point(f"{name} renamed")
                files.fsync(vm_dir)
                files.remove_staged(vm_dir, name)
                if disk is not None:
                    files.remove_staged(disk_names.records(vm_dir), disk_names.record_name(disk))
        point(f"{name} published")
    except BaseException as e:
        files.unlink(staged)
        if folder and isinstance(e, NoSpace):
            folder.give_up()
        if isinstance(e, (OSError, SemisharedError)) and not os.path.isdir(vm_dir):
            raise VmGone(f"VM {vm} was deleted on {os.uname().nodename} while {name} was being made") from e
        raise


def note_io_classes(step: NoteIoClasses, planned: Planned) -> None:
    """Write the I/O class of each disk into its record."""
    with publishing(step.vm, step.vm_dir, planned), files.enough_space(step.vm_dir):
        for disk, io_class in zip(step.disks, step.classes):
            _note_in_record(step.vm_dir, disk, io_class=io_class)


def note_classes(step: NoteClasses, planned: Planned) -> None:
    """Write into a disk's record on which classes of devices it is to lie."""
    disk = step.disk
    with publishing(disk.vm, disk.vm_dir, planned, disk.disk), files.enough_space(disk.vm_dir):
        _note_in_record(disk.vm_dir, disk.disk, classes=tuple(step.classes))
    from ..device import memory

    folder, record = disk_names.layers(disk.path), read_record(disk.vm_dir, disk.disk)
    if record and memory.is_promised(folder):
        # It may have been made larger than promised.
        memory.more(folder, size=qemu_img.virtual_size(record.active(disk.path), record.format), layers=0)


def note_hot(step: NoteHot, planned: Planned) -> None:
    """Write into a disk's record that its guest is to read its base from memory."""
    disk = step.disk
    with publishing(disk.vm, disk.vm_dir, planned, disk.disk), files.enough_space(disk.vm_dir):
        _note_in_record(disk.vm_dir, disk.disk, hot=True)


def place_layers(step: PlaceLayers, planned: Planned) -> None:
    """Give the layers of a new disk their place on a device of the pool."""
    from ..model.device.classes import Want

    disk = step.disk
    with publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        on_devices.place(disk.vm_dir, disk.vm, disk.disk, step.expected, want=Want(step.classes, step.size))


def _note_in_record(vm_dir: str, disk: int, **what: Any) -> None:
    files.remove_staged(disk_names.records(vm_dir), disk_names.record_name(disk))
    record = records.read_record(vm_dir, disk)
    if record and record._replace(**what) != record:
        records.write_record(vm_dir, record._replace(**what))
        point("class noted")


def remove_disk(
    disk: DiskRef, planned: Planned, store_dir: str = "", *, forget: bool = False, done: bool = False
) -> OnStore | RemovedDisk:
    """Remove a disk's file or link, its clone on `store_dir`, its record and its lease; follow no link.

    Without `forget` the record of a clone on the network stays, and is returned: the clone goes first.
    `done`: the image has all of the disk's content.
    """
    recovery.end_others(disk.vm, disk.vm_dir)
    with _lock(disk.vm, disk.vm_dir) as file:
        history.refuse_late(disk.vm, disk.vm_dir, planned.seq)
        epochs.check_removal(file, epochs.lock_path(disk.vm, disk.vm_dir), disk.vm, str(disk.disk), planned)
        noted = _note(file, disk.vm, disk.vm_dir, str(disk.disk), planned)
        recovery.put_back(disk)
        record = _to_remove(disk)
        if record and not forget and record.place.is_clone:
            on_store = records.on_store(record)
            if on_store:
                return on_store
            # An unreachable clone would look removed, and stay.
            image = record.of_image
            store.of(image.access).reach(image.root)
        clones = _clones(disk, record)
        place = (
            "" if done else retained_diffs.keep(disk, record) if record else retained_diffs.keep_unknown(disk)
        )
        if record:
            backup_marks.leave(disk.vm, disk.vm_dir, record)
        _unlink_disk(disk)
        if not noted:
            _note(file, disk.vm, disk.vm_dir, str(disk.disk), planned, must=True)
        for clone in clones:
            dir_clones.remove(clone, planned.seq)
        if store_dir and not record and not clones:
            dir_clones.remove_unnamed(store_dir, disk.vm, disk.disk)
        files.remove_staged(*os.path.split(intended(disk)))
        files.unlink(intended(disk))
        if not _is_elsewhere(disk.vm, disk.vm_dir):
            retained_diffs.release(disk)
    return RemovedDisk(retained_diffs.said(place))


def _to_remove(disk: DiskRef) -> Record | None:
    """Return the record of a disk; a damaged record, or a missing device, does not stop a removal."""
    try:
        return records.as_found(disk.vm_dir, disk.disk)
    except BadRecord:
        return None


def intended(disk: DiskRef) -> str:
    """Return the note that names a disk's clone on the store before the clone exists."""
    return disk_names.clone_note(disk.vm_dir, disk.disk)


def _layered_clone(record: Record | None) -> str:
    """Return the clone on a store that a record names, '' for other disks."""
    return disk_names.plain(record.path) if record and record.place.is_clone else ""


def _clones(disk: DiskRef, record: Record | None) -> list[str]:
    """Return the store clones of a disk, by its record and its note; never another disk's."""
    noted = files.read_json(intended(disk)) or {}
    found = {_layered_clone(record), str(noted.get("clone", ""))}
    return sorted(
        path
        for path in found
        if dir_names.is_clone_of(path, disk.vm, disk.disk) and ".." not in path.split("/")
    )


def _unlink_disk(disk: DiskRef) -> None:
    files.refuse()
    files.unlink(
        disk.path
    )  # first: layers that are missed then are none that were lost (disk/retained_diffs.py)
    folders.at(disk_names.layers(disk.path)).take_off()
    layers.remove(disk.path)
    point("disk removed")
    recovery.forget(disk)
    files.remove_staged(disk.vm_dir, disk_names.disk_name(disk.disk))
    record = disk_names.record(disk.vm_dir, disk.disk)
    if os.path.isdir(record):
        files.remove_folder(record)  # another program's directory in the record's place
    files.unlink(record)
    point("record removed")


def end_session(disk: DiskRef, planned: Planned) -> EndedSession:
    """Remove an in-place disk; leave a diff.

    Raise DataInTheWay if the disk is a file, perhaps the only copy of its data.
    """
    record = records.as_found(disk.vm_dir, disk.disk)
    if record and record.place.commits:
        return EndedSession(commits=True)
    if not files.is_absent(disk.path) and not os.path.islink(disk.path):
        raise DataInTheWay(
            f"{disk.path} on {os.uname().nodename} is to be saved but is no link to a shared image"
        )
    removed = remove_disk(disk, planned, forget=True)
    return EndedSession(kept=removed.kept if isinstance(removed, RemovedDisk) else "")


def forget_disk(disk: DiskRef, planned: Planned) -> None:
    """Remove a disk whose clone on the network is gone."""
    remove_disk(disk, planned, forget=True)


def confirm_disk(disk: DiskRef, planned: Planned) -> None:
    """Raise VmGone or LateAction if a disk was deleted since this was planned."""
    with publishing(disk.vm, disk.vm_dir, planned, disk.disk):
        if records.read_record(disk.vm_dir, disk.disk) is None:
            raise VmGone(f"disk {disk.disk} of VM {disk.vm} was deleted while it was being made")


def _is_elsewhere(vm: int, vm_dir: str) -> bool:
    """Return True if this machine has the VM in another system datastore, whose overlays share its leases."""
    location, own = os.path.split(os.path.dirname(vm_dir))
    others = (name for name in os.listdir(location) if name.isdigit() and name != own)
    return any(not files.is_absent(disk_names.records(f"{location}/{name}/{vm}")) for name in others)


def _note(file: IO[str], vm: int, vm_dir: str, key: str, planned: Planned, *, must: bool = False) -> bool:
    """Note a deletion before it begins; return False without room: what is deleted may fill the device."""
    try:
        with files.enough_space(vm_dir):
            epochs.note_deletion(file, epochs.lock_path(vm, vm_dir), key, planned)
    except NoSpace:
        if must:
            raise
        return False
    point("deletion noted")
    return True


def remove_vm(vm: int, vm_dir: str, planned: Planned) -> RemovedVm:
    """Remove a VM directory and the VM's leases; return where its diffs were `kept`."""
    found: list[str] = []

    def keep() -> str:
        found.extend(retained_diffs.keep_all(vm, vm_dir))
        return ""

    remove(vm, vm_dir, planned, keep)
    return RemovedVm(found)


def remove(vm: int, vm_dir: str, planned: Planned, why_not: Callable[[], str] = str) -> str:
    """Remove a VM directory, not across mounts, with leftovers of killed moves and the VM's leases.

    One rename takes the directory away first, so a killed removal never leaves a directory that looks like
    the VM. `why_not` is asked under the VM's lock: if it returns a reason, that is returned, and nothing is
    removed.
    """
    recovery.end_others(vm, vm_dir)
    root = cache.root_of(vm_dir)
    with _lock(vm, vm_dir) as file:
        history.refuse_late(vm, vm_dir, planned.seq)
        why = why_not()
        if why:
            return why
        noted = _note(file, vm, vm_dir, epochs.ALL, planned)
        for directory in (vm_dir, *vm_dir_siblings.listed(vm_dir, "outgoing")):
            if not files.is_absent(directory):
                vm_dir_siblings.bury(directory, vm)
        if not noted:
            vm_dir_siblings.sweep(vm_dir, root, vm)
            _note(file, vm, vm_dir, epochs.ALL, planned, must=True)
        if not _is_elsewhere(vm, vm_dir):
            cache.release(root, vm, spare=retained_diffs.others(vm, vm_dir))
        forget_old_locks(disk_names.locks(root), time.time())
    vm_dir_siblings.sweep(vm_dir, root, vm)
    return ""


def forget_old_locks(directory: str, now: float, keep_s: float = 2 * 86400) -> None:
    """Remove VMs' lock files that are unchanged for two days (`keep_s`) and that no action holds.

    A lock file with a recent count stays even if the clock was set ahead: it is needed to refuse late
    actions.
    """
    for entry in os.scandir(directory):
        if not disk_names.is_vm_lock(entry.name):
            continue
        try:
            is_old = entry.stat().st_mtime < now - keep_s
        except FileNotFoundError:
            continue
        if is_old and not epochs.is_recent(entry.path, keep_s):
            locks.forget(entry.path)


CLIENTS_VERSION = 1


def note_clients(step: NoteClients, planned: Planned) -> None:
    """Write the disks and the roots of shares; remove the note if there are none."""
    from ..model.share import names as share_names

    path = share_names.clients(step.vm_dir)
    with publishing(step.vm, step.vm_dir, planned), files.enough_space(step.vm_dir):
        files.remove_staged(*os.path.split(path))
        if step.disks or step.roots:
            files.write_json(
                path, {"version": CLIENTS_VERSION, "disks": list(step.disks), "roots": step.roots}
            )
        else:
            files.unlink(path)
        point("clients noted")
