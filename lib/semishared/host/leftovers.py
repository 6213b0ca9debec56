# SPDX-License-Identifier: Apache-2.0
"""What lies on a machine, for plan/gc.py to judge, and the removal of what it judged to be left over.

Looking changes nothing and follows no link. A removal happens under the lock of what is removed, and only if
the thing is still as it was when it was looked at: its newest time is part of what the plan names (`seen`).
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import Iterator

from ..base import devices, systems
from ..disk import beside, history, kept, on_devices, unreadable
from ..errors import SemisharedError, StoreUnavailable, ToolFailed, ToolTimeout
from ..guest import listing
from ..model import layout, layout_base, layout_store
from ..model.steps import Discard, LookAround
from ..store import dir_leftovers, marker
from ..tools import beneath, files, inventory, locks, owner
from ..tools.crash_points import point
from ..tools.hung_store import LIMIT_S, unless_it_hangs
from . import unlinked


def _open_files() -> list[str]:
    """Return the unpublished files that processes of ours have open on this machine."""
    found = set()
    for process in inventory.names("/proc"):
        if not process.isdigit():
            continue
        try:
            names = os.listdir(f"/proc/{process}/fd")
        except OSError:
            continue  # another user's, or gone
        for name in names:
            try:
                path = os.readlink(f"/proc/{process}/fd/{name}")
            except OSError:
                continue
            if any(map(_is_unpublished, path.split("/"))):
                found.add(path.replace(" (deleted)", ""))
    return sorted(found)


def _is_unpublished(name: str) -> bool:
    return layout.is_staged(name) or layout.beside_named(name) is not None or name == layout_store.UPLOADS


def look_around(step: LookAround) -> dict[str, object]:
    """Return what lies on this machine in our directories below `step.location` and in the stores
    `step.stores`.
    """
    # Leases before directories: whoever takes a lease has made his VM's directory before.
    root = layout.base_store(step.location)
    found: dict[str, object] = {"open": _open_files(), "root": _root(root)}
    directories = {number: f"{step.location}/{number}" for number in step.systems}
    found["unlinked"] = unlinked.look(step.location)
    vms = [vm for number, path in directories.items() for vm in _system(number, path)]
    found["vms"] = vms
    found["unreadable"] = [
        text for vm in vms if vm["kind"] in ("dir", "kept") for text in unreadable.listed(str(vm["path"]))
    ]
    ours = (layout_base.bases(root), layout_base.all_staging(root))
    found["staged"] = [
        item for path in (root, *ours, *directories.values()) for item in inventory.staged(path)
    ]
    try:
        found["domains"] = listing.names_and_files() if step.libvirt else {"names": [], "files": []}
    except SemisharedError as e:
        found["domains"] = {"error": e.detail}
    stores, refused = [], _away(step.location)
    found["is_away"] = bool(refused)
    for number, path in enumerate(step.stores):
        try:
            _check_store(path, step.markers[number] if step.markers else "")
        except SemisharedError as e:
            refused.append({"id": e.id, "detail": e.detail})
        else:
            stores.append(dir_leftovers.look(path))
    return {**found, "stores": stores, "refused": refused}


def _check_store(path: str, wanted: str) -> None:
    """Raise StoreUnavailable if a store hangs, else as its marker says: a server that is away holds its
    callers for ever.
    """

    def answers() -> bool:
        marker.check(path, wanted)
        # Without an id nothing was asked yet.
        return bool(wanted) or inventory.names(path, root=True) is not None

    if not unless_it_hangs(answers, False):
        raise StoreUnavailable(f"{path} on {os.uname().nodename} hangs: no answer within {LIMIT_S:.0f} s")


def _away(location: str) -> list[dict[str, object]]:
    """Return which system datastore is not mounted that was: what is here may be of VMs in it, which nobody
    sees.
    """
    try:
        systems.check_mounted(location)
    except ToolTimeout as e:
        return [{"id": e.id, "detail": e.detail}]
    return []


def _root(root: str) -> dict[str, object]:
    held = []
    for name in inventory.names(layout_base.bases(root)):
        base = layout_base.base(root, name)
        if layout.is_staged(name) or (beneath.is_link(base) and not devices.link_of(base)):
            continue
        leases = []
        folder = layout_base.leases(base)
        for lease in inventory.names(folder) if os.path.isdir(base) else ():
            holder = layout_base.leased_to(lease)
            if holder:
                # A hard link has the times of the image: only the change time tells when it was made.
                path, (vm, disk) = f"{folder}/{lease}", holder
                leases.append(
                    {
                        "path": path,
                        "age": int(time.time() - os.lstat(path).st_ctime_ns / 1e9),
                        "vm": vm,
                        "disk": disk,
                    }
                )
        staged = inventory.staged(folder) if os.path.isdir(base) else []
        held.append(inventory.seen(base, devices.link_of, name=name, leases=leases, staged=staged))
    staging = [
        inventory.seen(
            layout_base.staging(root, name),
            devices.link_of,
            held=locks.is_held(layout_base.image_lock(root, name)),
        )
        for name in inventory.names(layout_base.all_staging(root))
        if not layout.is_staged(name)
    ]
    vm_locks = [
        inventory.seen(layout.lock(root, name), vm=vm)
        for name in inventory.names(layout.locks(root))
        for vm in (layout.locked_vm(name),)
        if vm is not None
    ]
    return {"bases": held, "staging": staging, "locks": vm_locks}


def _system(number: int, directory: str) -> Iterator[dict[str, object]]:
    for name in inventory.names(directory, root=True):
        own, path = layout.beside_named(name), f"{directory}/{name}"
        if (own or layout.is_number(name)) and os.path.isdir(path) and not os.path.islink(path):
            kind, vm = own or ("dir", int(name))
            entries = inventory.names(path)
            own_layers = [f"{path}/{entry}" for entry in entries if layout.are_layers(entry)]
            places = [
                path,
                layout.records(path),
                *(os.path.realpath(place) if devices.link_of(place) else place for place in own_layers),
            ]
            staged = [item for place in places if os.path.isdir(place) for item in inventory.staged(place)]
            seq = history.seq_of(path)
            noted = any(map(layout.is_unsettled, inventory.names(layout.records(path))))
            more = {
                "system": number,
                "vm": vm,
                "kind": kind,
                "entries": entries,
                "staged": staged,
                "seq": seq,
                "noted": noted,
            }
            yield inventory.seen(path, devices.link_of, **more)


def discard(step: Discard) -> dict[str, object]:
    """Remove one thing, if it is still as it was seen; return {"removed": bool}. Raise UnexpectedLink."""
    try:
        with _opened(step) as path:
            return _discard_locked(step._replace(path=path))
    except (FileNotFoundError, NotADirectoryError):
        return {"removed": True}


@contextmanager
def _opened(step: Discard) -> Iterator[str]:
    """Yield the path of what is to be removed in its directory, opened beneath its root; in a base on a
    device, beneath what that has.
    """
    directory, name = os.path.split(step.path)
    bases = layout_base.bases(layout.base_store(step.location))
    if directory.startswith(f"{bases}/"):
        root = f"{bases}/{directory[len(bases) + 1 :].split('/')[0]}"
        devices.refuse_link(root)
        with beneath.directory(devices.behind(root), directory[len(root) + 1 :]) as where:
            yield f"{where}/{name}"
        return
    if step.path.startswith(f"{step.location}/"):
        root = f"{step.location}/{step.path[len(step.location) + 1 :].split('/')[0]}"
    else:
        root = layout_store.store_of(step.path) or (
            os.path.dirname(directory) if layout.are_layers(directory) else directory
        )
    with beneath.directory(root, directory[len(root) + 1 :]) as where:
        yield f"{where}/{name}"


def _discard_locked(step: Discard) -> dict[str, object]:
    if step.kind == "unlinked":
        with unlinked.nobody_moving(step) as is_free:
            return {"removed": is_free and _discard_of(step)}
    return {"removed": _discard_of(step)}


def _discard_of(step: Discard) -> bool:
    root, name = layout.base_store(step.location), os.path.basename(step.path)
    if step.kind == "staging":
        lock = layout_base.image_lock(root, name)
    elif step.kind == "base":
        lock = layout_base.image_lock(root, layout_base.prefix_of(name))
    elif step.vm >= 0:
        lock = layout.vm_lock(root, step.vm)
    else:
        return _discard(step)
    with locks.exclusive(lock, 30):
        return _discard(step)


def _discard(step: Discard) -> bool:
    if files.is_absent(step.path):
        return True
    if step.kind == "lease":
        # Its times are those of the image; what counts is that the VM's disk is not there.
        with devices.staying(layout.base_store(step.location)):
            return not uses_lease(step) and files.unlink(step.path)
    if str(inventory.newest(step.path, devices.link_of)[0]) != step.seen:
        return False
    if step.kind == "staged" and owner.lives(os.path.basename(step.path)):
        return False
    if step.kind == "unlinked" and unlinked.is_linked(step):
        return False
    if step.kind == "base":
        return _remove_base(step.path)
    if step.kind == "staging":
        devices.remove(step.path)
    if step.kind == "upload" and os.path.isdir(step.path):
        lock = locks.attempt(layout_store.upload_lock(step.path))
        if not lock:
            return False
        with lock:
            return _removed(step)
    return _removed(step)


def _removed(step: Discard) -> bool:
    own, root = layout.beside_named(os.path.basename(step.path)), layout.base_store(step.location)
    if own and own.kind == "incoming" and locks.is_held(layout.incoming_lock(root, step.path)):
        return False
    if own and own.kind == "outgoing":
        kept.keep_set_aside(own.vm, beneath.readable(step.path))
    # What might be taken for a VM's directory is so no more, however far its removal comes.
    on_devices.remove_tree(beside.bury(step.path, own.vm) if own and own.kind != "removed" else step.path)
    if os.path.lexists(step.path):
        raise ToolFailed(f"{beneath.readable(step.path)} is still there")
    point(f"{step.kind} removed")
    return True


def _remove_base(path: str) -> bool:
    """Remove a base of a deleted image; its leases directory must be empty, and rmdir says so without a
    race.
    """
    try:
        os.rmdir(layout_base.leases(path))
    except FileNotFoundError:
        pass
    except OSError:
        return False
    devices.remove(path)
    return True


def uses_lease(step: Discard) -> bool:
    """Tell whether a disk that the lease is for is, or is being made, in any system datastore of this
    machine.
    """
    holder = layout_base.leased_to(os.path.basename(step.path))
    if not holder or _away(step.location):
        return True
    vm, disk = holder
    for system in inventory.names(step.location, root=True):
        if not system.isdigit():
            continue
        own = f"{step.location}/{system}/{vm}"
        for directory in (own, *beside.listed(own, "incoming", "outgoing", "kept")):
            if any(layout.is_of_disk(name, disk) for name in inventory.names(directory)):
                return True
    return False
