# SPDX-License-Identifier: Apache-2.0
"""Room on this host's disk: the bases there, and the eviction of some for a new base or disk.

plan/base/eviction.py decides which go: on the front-end, which knows the host's own limits, if it answers;
else here, by the limits of the site. A leased base always stays.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Callable, Collection, Dict, Iterable, Mapping

from ..device import devices, folders
from ..errors import NoSpace, here
from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.disk import names as disk_names
from ..model.refs import ImageRef
from ..named import NamedTuple, to_data
from ..tools import files, locks, progress
from ..units import human
from . import cache

if TYPE_CHECKING:
    from ..model.base.steps import EvictedBase, HeldBase, Listed
    from ..plan.base import eviction

Ask = Callable[..., Dict[str, object]]
"""Asks the front-end: question=WHAT, and the facts for the answer.

    base    {"name" ('' if it is unknown), "needed", "must", "stays", "mends", and the report of ListBases}
            -> {"evict": names, "sources": hosts, "from_store": "last" or "quicker", "codec", "rate"}
    room    {"needed", "last": names, and the report of ListBases} -> {"evict": names}
    has     {"name"}: this host has a base now whose name was unknown before -> {}
"""


def list_bases(root: str, where: str = "") -> Listed:
    """Return all bases of this host and the capacity of their file systems.

    With `where` it is the capacity of that path's file system, and `here` marks the bases on it. `whole` is
    the capacity of all devices, of which a limit may be a share.
    """
    from ..model.base.steps import Listed

    found = []
    system = os.stat(files.made_part(where)).st_dev if where else -1
    for name in filter(base_names.named, sorted(names(base_names.bases(root)))):
        base, is_here = base_names.base(root, name), True
        try:
            is_here = system in (-1, os.stat(files.made_part(base)).st_dev)
            described = describe(cache.at(root, name))
        except OSError:
            # An error of another device does not concern the room on this one.
            if is_here and not folders.at(base).fails():
                raise
            continue
        if described:
            found.append(described._replace(here=is_here))
    whole, free = space(root)
    total, free = files.space(where) if where else (whole, free)
    return Listed(found, total, free, whole)


def names(directory: str) -> list[str]:
    """Return the names in a directory, [] if it is absent."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def leases(base: cache.Base) -> list[str]:
    """Return the leases on a base, as VM-DISK."""
    return sorted(name for name in names(base.leases) if not disk_names.is_staged(name))


def describe(base: cache.Base) -> HeldBase | None:
    """Return the report of ListBases on a base, None if none of its files is here."""
    from ..model.base.steps import HeldBase

    held, damaged = leases(base), os.path.lexists(base.damaged)
    for path in (base.image, base.damaged, *(f"{base.leases}/{name}" for name in held)):
        try:
            stat = os.stat(path)
            used = os.stat(base.leases).st_mtime
        except FileNotFoundError:
            continue
        noted = mended(base)
        return HeldBase(
            os.path.basename(base.directory),
            stat.st_blocks * 512,
            stat.st_mtime,
            max(used, stat.st_mtime),
            tuple(held),
            stat.st_size,
            damaged,
            folders.at(base.directory).mount(),
            verified=_verified(base),
            mended=noted.at,
            reread=noted.leases,
        )
    return None


class Mended(NamedTuple):
    """When a base was made anew in place of a damaged one, and for which leases; 0 and none: never."""

    at: float
    leases: tuple[str, ...]


def mended(base: cache.Base) -> Mended:
    """Return the note of a mending (stage/scrub.py); one that cannot be read says nothing."""
    said = files.hint(base_names.mended(base.directory))
    at, found = said.get("at"), said.get("leases")
    names = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
    # No number, and none that is no time, goes to the front-end.
    seconds = float(at) if isinstance(at, (int, float)) and 0 <= at < 1 << 40 else 0.0
    return Mended(seconds, tuple(name for name in names if base_names.leased_to(name)))


def _verified(base: cache.Base) -> float:
    try:
        return os.stat(base_names.verified(base.directory)).st_mtime
    except OSError:
        return 0.0


def evict(root: str, name: str, held: tuple[str, ...] = ()) -> EvictedBase:
    """Remove a base unless a disk has a lease on it; `held` are the locks that the caller holds."""
    from ..model.base.steps import EvictedBase

    base = cache.at(root, name)
    lock = cache.lock_path(root, base)
    if lock in held:
        return EvictedBase(*_evicted(base))
    os.makedirs(os.path.dirname(lock), exist_ok=True)
    # Without waiting: the holder is about to use the image, and may be evicting for room itself.
    file = locks.attempt(lock)
    if not file:
        return EvictedBase(False, 0)
    with file:
        return EvictedBase(*_evicted(base))


def _evicted(base: cache.Base) -> tuple[bool, int]:
    described = describe(base)
    gone = cache.forget(base)
    return gone, described.bytes if described and gone else 0


def evict_all(root: str, bases: Iterable[object], held: tuple[str, ...] = ()) -> None:
    """Remove those of these bases that no disk has a lease on."""
    for name in bases:
        evict(root, str(name), held)


def _evict_by_itself(root: str, bases: Iterable[str], held: tuple[str, ...] = ()) -> None:
    """Remove bases that no front-end has named, and so has noted: this host notes each, and says it."""
    for name in bases:
        if evict(root, name, held).evicted:
            from ..tools import trail_lines

            trail_lines.by_host("evict", f"base {name}")
            progress.evicted.append(name)


def chosen(answer: dict[str, object]) -> tuple[str, ...]:
    """Return the bases to evict in an answer."""
    found = answer.get("evict")
    return tuple(map(str, found)) if isinstance(found, list) else ()


PLENTY = 4
"""With a quarter of the file system free, a disk is made without a check of bases and limits."""
LITTLE = 1 << 20
"""Bytes of the small files of every disk: headers, records, directories."""


class Want(NamedTuple):
    """How much a base is wanted."""

    must: bool = False
    """A VM needs it on this host: limits do not refuse it if it fits."""
    stays: bool = True
    """It stays for other VMs when the action is over."""
    mends: bool = False
    """It replaces one that is counted already: evict others only if it does not fit."""


FOR_ALL, FOR_THIS, BORROWED, MENDED = (
    Want(),
    Want(must=True),
    Want(must=True, stays=False),
    Want(must=True, mends=True),
)


def ask_for_base(root: str, image: ImageRef, needed: int, ask: Ask | None, want: Want) -> dict[str, object]:
    """Return how to get a base of `needed` bytes (see Ask); raise NoSpace if no eviction can make room.

    The caller has the lock of the image. Without a front-end this host makes room itself.
    """
    listed = list_bases(root, base_names.staging(root, image.base_prefix))
    if ask:
        return ask(
            question="base",
            name=image.base_name,
            needed=needed,
            must=want.must,
            stays=want.stays,
            mends=want.mends,
            **to_data(listed),
        )
    from ..plan.base import eviction

    host, limits = os.uname().nodename, _limits(listed)
    gone = eviction.room(listed, limits, host, needed, image.base_name, must=want.must, mends=want.mends)
    _evict_by_itself(root, gone, (base_names.image_lock(root, image.base_prefix),))
    return {}


def for_base(root: str, image: ImageRef, needed: int, ask: Ask | None, want: Want) -> None:
    """Make room for `needed` bytes of an unnamed base, under its image's lock; raise NoSpace."""
    answer = ask_for_base(root, image, needed, ask, want)
    evict_all(root, chosen(answer), (base_names.image_lock(root, image.base_prefix),))


def _limits(listed: Listed) -> eviction.Limits:
    from ..config import load
    from ..plan.base import eviction

    config = load()
    return eviction.limits_of(None, config.bases_size_limit, config.bases_free_floor, listed)


def for_disk(
    vm_dir: str,
    needed: int,
    ask: Ask | None,
    last: tuple[str, ...] = (),
    where: str = "",
    stay: Collection[str] = (),
) -> None:
    """Evict idle bases for `needed` bytes of a VM's disk, and for the free floor beside bases.

    If that is not enough the disk may still fit. `last`: bases that the disk is made from, useful but not
    needed. `stay`: those that it will lie over, leased or not. `where`: the directory of the bytes, if it is
    not the VM's.
    """
    root = cache.root_of(vm_dir)
    total, free = files.space(where or vm_dir)
    if free - needed > total // PLENTY:
        return
    listed = list_bases(root, where or vm_dir)
    bases = [base for base in listed.bases if base.here and base.name not in stay]
    if not any(not base.leases for base in bases):
        return
    listed, floor = listed._replace(bases=bases), _limits(listed).floor
    if listed.free - needed >= floor:
        return
    if ask:
        evict_all(root, chosen(ask(question="room", needed=needed, last=list(last), **to_data(listed))))
    else:
        from ..plan.base import eviction

        _evict_by_itself(root, eviction.room_for_disk(listed, floor, needed, last))


def space(root: str) -> tuple[int, int]:
    """Return total and free bytes of the devices that take bases and disks."""
    found = devices.lasting(root)
    return sum(device.capacity for device in found), sum(device.free for device in found)


def require(
    vm_dir: str, needed: int, ask: Ask | None, where: str = "", stay: Collection[str] = (), said: str = ""
) -> None:
    """As for_disk, for a known size; raise NoSpace, which begins as `said`, before the first write."""
    for_disk(vm_dir, needed, ask, where=where, stay=stay)
    left = needed - files.space(where or vm_dir)[1]
    if left > 0:
        what = f"no space for {human(needed)} in {here(where or vm_dir)}:"
        raise NoSpace(f"{said or what} {human(left)} are missing")


def require_for_vm(
    vm_dir: str,
    needed: int,
    ask: Ask | None,
    stay: Collection[str],
    disks: Mapping[str, int] = folders.NO_BYTES,
    apart: int = 0,
) -> None:
    """As require, for a VM's directory and the layers of its disks, each on one device of the pool.

    `disks`: bytes of each disk's layers, by its key (disk/on_devices.py), placed as they will be. `apart`:
    bytes of disks that want a class of devices, and are checked separately. Everything else (checkpoints,
    disks without layers) goes to the directory.
    """
    root, coming = cache.root_of(vm_dir), dict[str, int]()
    placed, elsewhere = folders.arriving(vm_dir, disks, apart)
    for key, size in sorted(placed.items(), key=lambda disk: (-disk[1], disk[0])):
        uuid = folders.likely(root, key, size, coming)
        if not uuid:
            break  # no device takes anything: the action that places it names those not mounted
        coming[uuid] = coming.get(uuid, 0) + size
        what = f"no space for {human(size)} of disk {key} in the pool of {os.uname().nodename}"
        said = f"{what}: on {devices.mount(root, uuid)}"
        require(vm_dir, coming[uuid], ask, device_names.device(root, uuid), stay, said)
    require(vm_dir, max(needed - elsewhere, 0), ask, stay=stay)
