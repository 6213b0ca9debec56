# SPDX-License-Identifier: Apache-2.0
"""What lies on a machine, for plan/care/gc.py to judge, and the removal of what gc judges to be left over.

A look changes nothing and follows no link. A removal takes the lock of its object and removes it only if it
is as it was seen: the plan names its newest time (`seen`).
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, nullcontext
from typing import Callable, ContextManager, Iterator

from ..base import cache
from ..device import devices, folders, label, systems
from ..disk import history, on_devices, report, retained_diffs, vm_dir_siblings
from ..errors import SemisharedError, StoreUnavailable, ToolFailed, ToolTimeout, here
from ..guest import virsh
from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.device.names import Link
from ..model.disk import names as disk_names
from ..model.leftover_steps import (
    BaseStore,
    Discard,
    Discarded,
    Domains,
    LookAround,
    SeenBase,
    SeenLease,
    SeenLock,
    SeenMachine,
    SeenStaging,
    SeenVm,
    Staged,
    Unlinked,
)
from ..model.refs import Refusal
from ..model.store import dir_names
from ..named import NamedTuple
from ..store.dir import leftovers, marker
from ..tools import beneath, files, inventory, locks, owner
from ..tools.effects import point
from ..tools.hung_store import LIMIT_S, unless_it_hangs


def find_unlinked(location: str) -> list[Unlinked]:
    """Return the directories on devices without a link."""
    if locks.is_held(device_names.moving_lock(disk_names.base_store(location))):
        return []  # the copy of a running move has no link yet
    try:
        # By its real path: the removal opens the object below that.
        return [
            inventory.seen(Unlinked, path, vm=vm, replaced=replaced)
            for path, vm, replaced in folders.unlinked(location)
        ]
    except ToolTimeout:
        return []  # a store hangs or is not mounted, so the links in it are unknown


@contextmanager
def nobody_moving(step: Discard) -> Iterator[bool]:
    """Yield True if no move between devices runs during the block."""
    file = locks.attempt(device_names.moving_lock(disk_names.base_store(step.location)))
    if file is None:
        yield False
        return
    with file:
        yield True


def is_linked(step: Discard) -> bool:
    """Return True if a link leads there after all; the caller holds the lock of the VM that would have it."""
    directory, name = os.path.split(os.path.realpath(step.path))
    uuid = str(label.read(os.path.dirname(directory)).get("uuid"))
    link = Link(uuid, os.path.basename(directory), name)
    try:
        return folders.is_linked(step.location, link)
    except ToolTimeout:
        return True


def _open_files() -> list[str]:
    """Return the unpublished files that our processes have open on this machine."""
    found = set()
    for process in inventory.names("/proc"):
        if not process.isdigit():
            continue
        try:
            names = os.listdir(f"/proc/{process}/fd")
        except OSError:
            continue  # another user's process, or one that has ended
        for name in names:
            try:
                path = os.readlink(f"/proc/{process}/fd/{name}")
            except OSError:
                continue
            if any(map(_is_unpublished, path.split("/"))):
                found.add(path.replace(" (deleted)", ""))
    return sorted(found)


def _is_unpublished(name: str) -> bool:
    return (
        disk_names.is_staged(name) or disk_names.beside_named(name) is not None or name == dir_names.UPLOADS
    )


def look_around(step: LookAround) -> SeenMachine:
    """Return what lies in our directories below `step.location` and in the stores `step.stores`."""
    # Leases before directories: a VM's directory is made before its first lease.
    root = disk_names.base_store(step.location)
    is_open, base_store = _open_files(), _root(root)
    directories = {number: f"{step.location}/{number}" for number in step.systems}
    unlinked = find_unlinked(step.location)
    vms = [vm for number, path in directories.items() for vm in _system(number, path)]
    unreadable = [text for vm in vms if vm.kind in ("dir", "kept") for text in report.listed(vm.path)]
    ours = (base_names.bases(root), base_names.all_staging(root))
    staged = [
        item for path in (root, *ours, *directories.values()) for item in inventory.staged(Staged, path)
    ]
    try:
        domains = Domains(*virsh.names_and_files()) if step.libvirt else Domains()
    except SemisharedError as e:
        domains = Domains(error=e.detail or e.id)  # never empty: that would be no domains
    stores, refused = [], _away(step.location)
    is_away = bool(refused)
    for number, path in enumerate(step.stores):
        try:
            _check_store(path, step.markers[number] if step.markers else "")
        except SemisharedError as e:
            refused.append(Refusal(e.id, e.detail))
        else:
            stores.append(leftovers.look(path))
    return SeenMachine(
        is_open, is_away, base_store, unlinked, vms, unreadable, staged, domains, stores, refused
    )


def _check_store(path: str, wanted: str) -> None:
    """Raise StoreUnavailable if a store hangs (its server holds callers for ever), or as marker.check."""

    def answers() -> bool:
        marker.check(path, wanted)
        # Without a marker id `marker.check` has read nothing.
        return bool(wanted) or inventory.names(path, root=True) is not None

    if not unless_it_hangs(answers, False):
        raise StoreUnavailable(f"{here(path)} hangs: no answer within {LIMIT_S:.0f} s")


def _away(location: str) -> list[Refusal]:
    """Return why a system datastore is not mounted: bases and leases here may be of the VMs in it."""
    try:
        systems.check_mounted(location)
    except ToolTimeout as e:
        return [Refusal(e.id, e.detail)]
    return []


def _root(root: str) -> BaseStore:
    held = []
    for name in inventory.names(base_names.bases(root)):
        base = base_names.base(root, name)
        if disk_names.is_staged(name) or beneath.is_link(folders.at(base).directory):
            continue
        leases = []
        folder = base_names.leases(base)
        for lease in inventory.names(folder) if os.path.isdir(base) else ():
            holder = base_names.leased_to(lease)
            if holder:
                # A hard link shares the image's times; only the change time tells when it was made.
                path = f"{folder}/{lease}"
                age = int(time.time() - os.lstat(path).st_ctime_ns / 1e9)
                leases.append(SeenLease(path, age, *holder))
        staged = inventory.staged(Staged, folder) if os.path.isdir(base) else []
        held.append(inventory.seen(SeenBase, base, devices.link_of, name=name, staged=staged, leases=leases))
    staging = [
        inventory.seen(
            SeenStaging,
            base_names.staging(root, name),
            devices.link_of,
            held=locks.is_held(base_names.image_lock(root, name)),
        )
        for name in inventory.names(base_names.all_staging(root))
        if not disk_names.is_staged(name)
    ]
    vm_locks = [
        inventory.seen(SeenLock, disk_names.lock(root, name), vm=vm)
        for name in inventory.names(disk_names.locks(root))
        for vm in (disk_names.locked_vm(name),)
        if vm is not None
    ]
    return BaseStore(held, staging, vm_locks)


def _system(number: int, directory: str) -> Iterator[SeenVm]:
    for name in inventory.names(directory, root=True):
        own, path = disk_names.beside_named(name), f"{directory}/{name}"
        if (own or disk_names.is_number(name)) and os.path.isdir(path) and not os.path.islink(path):
            kind, vm = own or ("dir", int(name))
            entries = inventory.names(path)
            own_layers = [f"{path}/{entry}" for entry in entries if disk_names.are_layers(entry)]
            places = [
                path,
                disk_names.records(path),
                *(folders.at(place).real() for place in own_layers),
            ]
            there = filter(os.path.isdir, places)
            staged = [item for place in there for item in inventory.staged(Staged, place)]
            yield inventory.seen(
                SeenVm,
                path,
                devices.link_of,
                system=number,
                vm=vm,
                kind=kind,
                entries=entries,
                staged=staged,
                seq=history.seq_of(path),
                noted=any(map(disk_names.is_unsettled, inventory.names(disk_names.records(path)))),
            )


def discard(step: Discard) -> Discarded:
    """Remove one object, if it is as it was seen. Raise UnexpectedLink."""
    how = REMOVALS.get(step.kind, Removal())
    try:
        with _opened(step) as path, how.alone(step) as is_alone:
            return Discarded(is_alone and _discard(step._replace(path=path), how))
    except (FileNotFoundError, NotADirectoryError):
        return Discarded(True)


@contextmanager
def _opened(step: Discard) -> Iterator[str]:
    """Yield the path of an object in its directory, opened beneath its root, or beneath a base's device."""
    directory, name = os.path.split(step.path)
    bases = base_names.bases(disk_names.base_store(step.location))
    if directory.startswith(f"{bases}/"):
        root = f"{bases}/{directory[len(bases) + 1 :].split('/')[0]}"
        folders.at(root).refuse_link()
        with beneath.directory(folders.at(root).directory, directory[len(root) + 1 :]) as where:
            yield f"{where}/{name}"
        return
    if step.path.startswith(f"{step.location}/"):
        root = f"{step.location}/{step.path[len(step.location) + 1 :].split('/')[0]}"
    else:
        root = dir_names.store_of(step.path) or (
            os.path.dirname(directory) if disk_names.are_layers(directory) else directory
        )
    with beneath.directory(root, directory[len(root) + 1 :]) as where:
        yield f"{where}/{name}"


def _discard(step: Discard, how: Removal) -> bool:
    lock = how.lock(disk_names.base_store(step.location), step)
    with locks.exclusive(lock, 30) if lock else nullcontext():
        if files.is_absent(step.path):
            return True
        if how.is_dated and str(inventory.newest(step.path, devices.link_of)[0]) != step.seen:
            return False
        return not how.is_wanted(step) and how.remove(step)


def _removed(step: Discard) -> bool:
    own, root = disk_names.beside_named(os.path.basename(step.path)), disk_names.base_store(step.location)
    if own and own.kind == "incoming" and locks.is_held(disk_names.incoming_lock(root, step.path)):
        return False
    if own and own.kind == "outgoing":
        retained_diffs.keep_set_aside(own.vm, beneath.readable(step.path))
    # After one rename nothing takes the directory for a VM's, however far its removal gets.
    on_devices.remove_tree(
        vm_dir_siblings.bury(step.path, own.vm) if own and own.kind != "removed" else step.path
    )
    if os.path.lexists(step.path):
        raise ToolFailed(f"{beneath.readable(step.path)} is still there")
    point(f"{step.kind} removed")
    return True


def _remove_kept(step: Discard) -> bool:
    """Remove a kept disk with its lease, where no other directory has that disk; the caller holds the VM."""
    entries = inventory.names(step.path)
    if not _removed(step):
        return False
    root = disk_names.base_store(step.location)
    numbers = {disk_names.disk_named(disk_names.disk_of(name)) for name in entries}
    for number in sorted(number for number in numbers if number is not None):
        if not uses_lease(step._replace(path=base_names.lease_name(step.vm, number))):
            cache.release(root, step.vm, number)
    return True


def _remove_base(step: Discard) -> bool:
    """Remove a base of a deleted image; return False if it has leases: rmdir finds that without a race."""
    try:
        os.rmdir(base_names.leases(step.path))
    except FileNotFoundError:
        pass
    except OSError:
        return False
    folders.remove(step.path)
    return True


def _remove_staging(step: Discard) -> bool:
    folders.remove(step.path)
    return _removed(step)


def _remove_upload(step: Discard) -> bool:
    if not os.path.isdir(step.path):
        return _removed(step)
    lock = locks.attempt(dir_names.upload_lock(step.path))
    if not lock:
        return False
    with lock:
        return _removed(step)


def _remove_lease(step: Discard) -> bool:
    with folders.staying(disk_names.base_store(step.location)):
        return not uses_lease(step) and files.unlink(step.path)


def uses_lease(step: Discard) -> bool:
    """Return True if any system datastore of this machine has, or is getting, the disk of the lease."""
    holder = base_names.leased_to(os.path.basename(step.path))
    if not holder or _away(step.location):
        return True
    vm, disk = holder
    for system in inventory.names(step.location, root=True):
        if not system.isdigit():
            continue
        own = f"{step.location}/{system}/{vm}"
        for directory in (own, *vm_dir_siblings.listed(own, "incoming", "outgoing", "kept")):
            if any(disk_names.is_of_disk(name, disk) for name in inventory.names(directory)):
                return True
    return False


def _lock_of_vm(root: str, step: Discard) -> str:
    return disk_names.vm_lock(root, step.vm) if step.vm >= 0 else ""


class Removal(NamedTuple):
    """How leftovers of one kind are removed."""

    lock: Callable[[str, Discard], str] = _lock_of_vm
    """Returns the lock to hold, below the base store; '' for none."""
    is_wanted: Callable[[Discard], bool] = lambda _: False
    """Returns True if the object is in use by now."""
    remove: Callable[[Discard], bool] = _removed
    is_dated: bool = True
    """Its newest time shows whether it has changed since it was seen."""
    alone: Callable[[Discard], ContextManager[bool]] = lambda _: nullcontext(True)


def _lock_of_image(root: str, step: Discard) -> str:
    name = os.path.basename(step.path)
    return base_names.image_lock(root, base_names.prefix_of(name) if step.kind == "base" else name)


REMOVALS = {
    "base": Removal(lock=_lock_of_image, remove=_remove_base),
    "kept": Removal(remove=_remove_kept),
    # Its times are the image's; it goes if the VM's disk is not there.
    "lease": Removal(remove=_remove_lease, is_dated=False),
    "staged": Removal(is_wanted=lambda step: owner.lives(os.path.basename(step.path))),
    "staging": Removal(lock=_lock_of_image, remove=_remove_staging),
    "unlinked": Removal(is_wanted=is_linked, alone=nobody_moving),
    "upload": Removal(remove=_remove_upload),
}
"""Kind (plan/care/gc.py) -> how it is removed, if not as files and directories of VMs are."""
