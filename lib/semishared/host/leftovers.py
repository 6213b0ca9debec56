# SPDX-License-Identifier: Apache-2.0
"""What lies on a machine, for plan/gc.py to judge, and the removal of what it judged to be left over.

Looking changes nothing and follows no link. A removal happens under the lock of what is removed, and only if the thing
is still as it was when it was looked at: its newest time is part of what the plan names (`seen`).
"""

from __future__ import annotations

import os
import re
import time
from contextlib import contextmanager
from typing import Iterator

from ..base import cache
from ..disk import beside, vm_dir
from ..errors import SemisharedError, ToolFailed
from ..guest import listing
from ..model import layout
from ..model.steps import Discard, LookAround
from ..store import dir_image, dir_leftovers, marker
from ..tools import beneath, files, inventory, locks
from ..tools.crash_points import point

OPEN = re.compile(r"/(\.staged-|\.incoming-|\.outgoing-|\.uploads/)")
LOCK = re.compile(r"(?:vm|incoming)-([0-9]+)(?:-[0-9a-f]+)?\Z")


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
            if OPEN.search(path):
                found.add(path.replace(" (deleted)", ""))
    return sorted(found)


def look_around(step: LookAround) -> dict[str, object]:
    """Return what lies on this machine in our directories below `step.location` and in the stores `step.stores`."""
    # Leases before directories: whoever takes a lease has made his VM's directory before.
    root = f"{step.location}/{cache.NAME}"
    found: dict[str, object] = {"open": _open_files(), "root": _root(root)}
    systems = {number: f"{step.location}/{number}" for number in step.systems}
    found["vms"] = [vm for number, path in systems.items() for vm in _system(number, path)]
    found["staged"] = [item for path in (root, *systems.values()) for item in inventory.staged(path)]
    try:
        found["domains"] = listing.names_and_files() if step.libvirt else {"names": [], "files": []}
    except SemisharedError as e:
        found["domains"] = {"error": e.detail}
    stores, refused = [], []
    for number, path in enumerate(step.stores):
        try:
            marker.check(path, step.markers[number] if step.markers else "")
        except SemisharedError as e:
            refused.append({"id": e.id, "detail": e.detail})
        else:
            stores.append(dir_leftovers.look(path))
    return {**found, "stores": stores, "refused": refused}


def _root(root: str) -> dict[str, object]:
    held = []
    for name in inventory.names(f"{root}/bases"):
        base = layout.base(root, name)
        if beneath.is_link(base):
            continue
        leases = []
        for pair in inventory.names(f"{base}/leases"):
            match = dir_leftovers.PAIR.match(pair)
            if match and not match.group("snap") and not match.group("cloud"):
                # A hard link has the times of the image: only the change time tells when it was made.
                ctime_ns = os.lstat(f"{base}/leases/{pair}").st_ctime_ns
                owner = {"vm": int(match.group("vm")), "disk": int(match.group("disk"))}
                leases.append({"path": f"{base}/leases/{pair}", "age": int(time.time() - ctime_ns / 1e9), **owner})
        held.append(inventory.seen(base, name=name, leases=leases, staged=inventory.staged(f"{base}/leases")))
    staging = [
        inventory.seen(f"{root}/staging/{name}", held=locks.is_held(f"{root}/locks/base-{name}"))
        for name in inventory.names(f"{root}/staging")
    ]
    vm_locks = [
        inventory.seen(layout.lock(root, name), vm=int(match.group(1)))
        for name in inventory.names(f"{root}/locks") for match in (LOCK.match(name),) if match
    ]  # fmt: skip
    return {"bases": held, "staging": staging, "locks": vm_locks}


def _system(number: int, directory: str) -> Iterator[dict[str, object]]:
    for name in inventory.names(directory, root=True):
        match, path = beside.NAME.match(name), f"{directory}/{name}"
        if (match or (name.isdigit() and name.isascii())) and os.path.isdir(path) and not os.path.islink(path):
            kind, vm = (match.group(1), int(match.group(2))) if match else ("dir", int(name))
            entries = inventory.names(path)
            layers = [name for name in entries if name.endswith(".snap")]
            staged = [item for name in ("", vm_dir.RECORDS, *layers) for item in inventory.staged(f"{path}/{name}".rstrip("/"))]
            seq = vm_dir.seq_of(path)
            yield inventory.seen(path, system=number, vm=vm, kind=kind, entries=entries, staged=staged, seq=seq)


def discard(step: Discard) -> dict[str, object]:
    """Remove one thing, if it is still as it was seen; return {"removed": bool}. Raise UnexpectedLink."""
    try:
        with _opened(step) as path:
            return _discard_locked(step._replace(path=path))
    except (FileNotFoundError, NotADirectoryError):
        return {"removed": True}


@contextmanager
def _opened(step: Discard) -> Iterator[str]:
    """Yield the path of what is to be removed in its directory, opened beneath its root."""
    directory, name = os.path.split(step.path)
    if step.path.startswith(f"{step.location}/"):
        root = f"{step.location}/{step.path[len(step.location) + 1 :].split('/')[0]}"
    elif f"/{dir_image.SIDE}/" in step.path:
        root = step.path[: step.path.index(f"/{dir_image.SIDE}/")]
    else:
        root = os.path.dirname(directory) if directory.endswith(".snap") else directory
    with beneath.directory(root, directory[len(root) + 1 :]) as where:
        yield f"{where}/{name}"


def _discard_locked(step: Discard) -> dict[str, object]:
    root = f"{step.location}/{cache.NAME}"
    name = os.path.basename(step.path)
    if step.kind == "staging":
        lock = f"{root}/locks/base-{name}"
    elif step.kind == "base":
        lock = f"{root}/locks/base-{'-'.join(name.split('-')[:2])}"
    elif step.vm >= 0:
        lock = layout.vm_lock(root, step.vm)
    else:
        return {"removed": _discard(step)}
    with locks.exclusive(lock, 30):
        return {"removed": _discard(step)}


def _discard(step: Discard) -> bool:
    if not os.path.lexists(step.path):
        return True
    if step.kind == "lease":
        # Its times are those of the image; what counts is that the VM's disk is not there.
        return not uses_lease(step) and files.unlink(step.path)
    if str(inventory.newest(step.path)[0]) != step.seen:
        return False
    if step.kind == "base":
        return _remove_base(step.path)
    if step.kind == "upload" and os.path.isdir(step.path):
        lock = locks.attempt(f"{step.path}/lock")
        if not lock:
            return False
        with lock:
            return _removed(step)
    return _removed(step)


def _removed(step: Discard) -> bool:
    match = beside.NAME.match(os.path.basename(step.path))
    if match and match.group(1) == "incoming" and locks.is_held(beside.lock_of(step.path, f"{step.location}/{cache.NAME}")):
        return False
    # What might be taken for a VM's directory is so no more, however far its removal comes.
    files.remove_tree(beside.bury(step.path, int(match.group(2))) if match and match.group(1) != "removed" else step.path)
    if os.path.lexists(step.path):
        raise ToolFailed(f"{beneath.readable(step.path)} is still there")
    point(f"{step.kind} removed")
    return True


def _remove_base(path: str) -> bool:
    """Remove a base of a deleted image; its leases directory must be empty, and rmdir says so without a race."""
    try:
        os.rmdir(f"{path}/leases")
    except FileNotFoundError:
        pass
    except OSError:
        return False
    files.remove_tree(path)
    return True


def uses_lease(step: Discard) -> bool:
    """Tell whether a disk that the lease is for is, or is being made, in any system datastore of this machine."""
    pair = dir_leftovers.PAIR.match(os.path.basename(step.path))
    if not pair:
        return True
    disk = f"disk.{pair.group('disk')}"
    for system in inventory.names(step.location, root=True):
        if not system.isdigit():
            continue
        own = f"{step.location}/{system}/{pair.group(1)}"
        for directory in (own, *beside.listed(own, "incoming", "outgoing")):
            for name in inventory.names(directory):
                if name == disk or name.startswith((f"{disk}.", f"{files.STAGED}{disk}.")):
                    return True
    return False
