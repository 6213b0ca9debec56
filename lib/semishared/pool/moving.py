# SPDX-License-Identifier: Apache-2.0
"""Disks and bases go from one device of this host's pool to another: what both share, and the bases.

    device A   bases/NAME        <- link        bases/NAME                        -
    device B   staging/NAME (a copy)            bases/NAME, with all leases       bases/NAME  <- link

The mover reads each copy again, past the page cache, before a link leads to it. One rename of the link
switches from the old to the new copy; both have the same content. A killed move leaves a directory without a
link: the next move of the same disk or base removes it, and so does gc (host/leftovers.py) while none runs.

A guest that runs over the old copy of a base keeps it open, though its name is gone, until it opens its disk
again: names in headers and in libvirt's XML lead to the new copy.

And how a device that holds nothing any more leaves the pool.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import IO, Callable, Iterable

from ..base import cache, room
from ..device import devices, folders, label, memory, offline
from ..device.systems import directories
from ..errors import CannotMove, NoSpace, PoolBusy, ToolTimeout
from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.device.names import BASES, STAGING, Link
from ..model.device.steps import HeldItem, ListHeld, MoveBase, MovedBase
from ..model.disk import names as disk_names
from ..stage import scrub
from ..tools import effects, extents, files, locks, mounts, progress
from ..tools.effects import Undo, point
from ..tools.rate_limit import Pace, stand_back
from ..units import human

TELL_S = 1.0
GIVE_WAY_S, LOOK_S = 15.0, 0.2
"""Seconds that a mover gives way to the watcher of memory (host/watch.py), which retries every 10 seconds;
and seconds between two looks at whether it is done.
"""
OTHERS_S = 3600.0
"""Seconds that a mover waits for the watcher's move of one disk."""
Tell = Callable[..., None]
"""Send an event to the front-end: event="progress", done=, of= in bytes."""
_mine: dict[str, IO[str]] = {}


def begin(root: str, *, is_urgent: bool = False) -> None:
    """Take the host's lock for moves between devices until this process ends; raise PoolBusy if it is held.

    Unless the move `is_urgent`, give way, between two moves, to the watcher that moves a disk out of full
    memory.
    """
    path = device_names.moving_lock(root)
    if path in _mine and (is_urgent or not memory.is_urgent(root)):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    is_first = path not in _mine
    file = locks.unless_busy(path) if is_first else _taken_after_others(path)
    if not file:
        raise PoolBusy(f"something is being moved between the devices of {os.uname().nodename} already")
    _mine[path] = file
    if is_first:
        stand_back(10)


def _taken_after_others(path: str) -> IO[str] | None:
    """Free the lock for other movers and take it again after them; return None if they do not end in time."""
    _mine.pop(path).close()
    began = time.monotonic()
    while time.monotonic() - began < GIVE_WAY_S + OTHERS_S:
        time.sleep(LOOK_S)
        progress.touch()
        file = locks.attempt(path) if time.monotonic() - began > GIVE_WAY_S else None
        if file:
            return file
    return None


def require(root: str, uuid: str, needed: int) -> None:
    """Raise CannotMove unless a device is there and takes new data, NoSpace unless it has `needed` bytes."""
    found = next((device for device in devices.present(root) if device.uuid == uuid), None)
    if found is None or found.share <= 0:
        raise CannotMove(f"the device {uuid} of {os.uname().nodename} takes nothing")
    if found.free < needed:
        raise NoSpace(f"no space for {human(needed)} on {devices.mount(root, uuid)} of {os.uname().nodename}")


class Copying:
    """Copies files at a limited rate and reports progress; `size`: bytes of all, `rate`: bytes per second."""

    def __init__(self, size: int, rate: int, tell: Tell) -> None:
        self._of, self._pace, self._tell = size, Pace(rate), tell
        self._done, self._last = 0, time.monotonic()
        progress.expect(size)

    def copy(self, source: str, target: str) -> extents.Manifest:
        """Copy a file without writers, with its holes, mode and times; verify it; return its manifest."""
        status = os.stat(source)
        with open(source, "rb", buffering=0) as old, extents.Copy(target, status.st_size) as made:
            for index, content in extents.data(old.fileno(), status.st_size):
                self._pace.wait(len(content))
                progress.count("moved", len(content))
                made.add(index, content)
                self._told(len(content))
            found = made.manifest("")
        os.chmod(target, status.st_mode & 0o7777)
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        files.fsync(target)
        point("file copied")
        self._check(target, found)
        return found

    def _check(self, path: str, wanted: extents.Manifest) -> None:
        """Raise CannotMove unless the device returns what was written to it."""
        left = dict(wanted.extents)
        for index, content in scrub.from_disk(path, wanted.size):
            self._pace.wait(len(content or b""))
            progress.touch()
            digest = (
                "" if content is None or extents.is_zero(content) else hashlib.sha256(content).hexdigest()
            )
            if content is None or left.pop(index, "") != digest:
                raise CannotMove(f"{path} on {os.uname().nodename} does not read as it was written")
        if left:
            raise CannotMove(f"{path} on {os.uname().nodename} does not read as it was written")

    def _told(self, size: int) -> None:
        self._done += size
        progress.reached(min(self._done, self._of), self._of)
        if time.monotonic() - self._last > TELL_S:
            self._last = time.monotonic()
            self._tell(event="progress", done=min(self._done, self._of), of=self._of)


def discard(root: str, links: Iterable[Link]) -> None:
    """Remove directories on devices; the caller knows that no link leads to them."""
    for link in links:
        if devices.is_there(root, link.uuid):
            files.remove_folder(device_names.directory(root, link), ignore_errors=True)


# -- bases ------------------------------------------------------------------------------------------


def move_base(step: MoveBase, tell: Tell) -> MovedBase:
    """Move a base; an error is not raised, but reported."""
    with effects.told(bytes=0, leases=()) as answer:
        begin(step.root)
        answer["bytes"], answer["leases"] = _moved(step, tell)
    return MovedBase(**answer)


def _moved(step: MoveBase, tell: Tell) -> tuple[int, tuple[str, ...]]:
    """Return the bytes, and the leases."""
    base = cache.at(step.root, step.name)
    here = os.uname().nodename
    why = f"base {step.name} is not on a device of {here}, or not in use: semishared base list, verify"
    was, new = folders.at(base.directory).to_move(why), Link(step.target, BASES, step.name)
    if was == new:
        return 0, ()
    if not cache.is_published(base) or os.path.lexists(base.damaged):
        raise CannotMove(why)
    image, size = os.stat(base.image), files.allocated(base.image)
    require(step.root, step.target, size)
    staged = Link(step.target, STAGING, step.name)
    discard(step.root, [staged])
    with Undo() as undo, files.enough_space(device_names.directory(step.root, staged)):
        undo.add(lambda: discard(step.root, [staged]))
        _copy(base, device_names.directory(step.root, staged), Copying(size, step.rate, tell))
        with locks.exclusive(cache.lock_path(step.root, base)):
            if devices.link_of(base.directory) != was or not files.is_at(base.image, image):
                raise CannotMove(f"base {step.name} of {here} was evicted, or made anew, while it was copied")
            discard(step.root, [new])
            directory = device_names.directory(step.root, new)
            label.make_directory(os.path.dirname(directory), exist_ok=True)
            os.rename(device_names.directory(step.root, staged), directory)
            files.fsync(os.path.dirname(directory))
            point("base renamed on its new device")
            leases = _switch(step.root, base, new)
            undo.keep()
    discard(step.root, [was])
    point("base gone from its old device")
    return size, tuple(leases)


def _copy(base: cache.Base, staged: str, copying: Copying) -> None:
    label.make_directory(base_names.leases(staged))
    point("base being copied")
    with open(base.manifest, "rb") as file:
        recorded = extents.parse(file.read())
    found = copying.copy(base.image, base_names.image(staged))
    if (found.size, found.extents) != (recorded.size, recorded.extents):
        raise CannotMove(
            f"{base.image} on {os.uname().nodename} is not what its manifest says: semishared base verify"
        )
    for path in (base.manifest, base_names.source(base.directory), base_names.mended(base.directory)):
        if os.path.exists(path):
            copying.copy(path, f"{staged}/{os.path.basename(path)}")
    files.fsync(staged)
    point("base copied to its new device")


def _switch(root: str, base: cache.Base, new: Link) -> list[str]:
    """Hard-link every lease on the new device, then switch the base's link to it; return the leases."""
    directory = device_names.directory(root, new)
    with folders.staying(root):
        used, leases = os.stat(base.leases), room.leases(base)
        for name in leases:
            os.link(base_names.image(directory), f"{base_names.leases(directory)}/{name}")
        # The time of the directory tells when the base was last used.
        os.utime(base_names.leases(directory), ns=(used.st_atime_ns, used.st_mtime_ns))
        files.fsync(base_names.leases(directory))
        point("leases taken along")
        folders.OnDevice(base.directory, new).link_it()
    point("base switched")
    return leases


def held(step: ListHeld) -> list[HeldItem]:
    """Return the bases that are on devices."""
    found = []
    for name, folder in folders.on_devices(base_names.bases(step.root)).items():
        described = room.describe(cache.at(step.root, name)) if base_names.named(name) else None
        if described:
            found.append(HeldItem(BASES, name, folder.uuid, described.bytes, described.leases))
    return found


# Devices that the administrator has taken off the pool: what one still holds, and how an empty one leaves.
#
# What lies on a mounted device counts. A missing device may have died; only the links to it are left. Layers
# exist nowhere else, so while a VM has such a disk, the device may come back. A base is a copy: if a disk
# lies over it, the next boot finds its link and fetches the base again (disk/create.py); otherwise it is not
# missed.
#
# A crash leaves fewer links of bases, or a device that is not registered any more, or has no owner; the next
# run does the rest.


def let_go(root: str, uuid: str) -> bool:
    """Remove a device from this host's pool; return False if it holds, or may hold, layers or bases."""
    wrong = offline.state(root, uuid)
    if _is_gone(root, uuid, wrong):
        if _is_missed(root, uuid) or not _forget_bases(root, uuid):
            return False
    elif wrong or any(room.names(f"{device_names.device(root, uuid)}/{part}") for part in device_names.PARTS):
        return False
    _release(root, uuid)
    link = device_names.device(root, uuid)
    for path in (link, device_names.note(root, uuid), device_names.asked_beside(link)):
        files.unlink(path)
    point("device gone")
    return True


def _is_gone(root: str, uuid: str, wrong: str) -> bool:
    """Return True if a device is away, or nothing is mounted in its place."""
    if wrong.startswith(offline.NOT_THERE):
        return True
    path = os.path.realpath(devices.mount(root, uuid))
    return wrong.startswith(offline.BROKEN) and mounts.of(path).point != path


def _leading(directory: str, uuid: str) -> list[str]:
    found = folders.on_devices(directory)
    return [name for name in found if not disk_names.is_staged(name) and found[name].uuid == uuid]


def _is_missed(root: str, uuid: str) -> bool:
    """Return True if a disk lies on the missing device, or over a base there (leases are there, too)."""
    location, bases = os.path.dirname(root), set(_leading(base_names.bases(root), uuid))
    try:
        if any(link.uuid == uuid for link in folders.layers_links(location)):
            return True
        return bool(bases) and any(
            name in {*bases, ""}
            for directory in directories(location)
            for _, name in cache.lying_over(directory)
        )
    except ToolTimeout:
        return True  # a store hangs, so its VMs' links are unknown


def _forget_bases(root: str, uuid: str) -> bool:
    """Remove the links of bases, also of those in progress, to a missing device.

    Return False if another action holds the lock of one.
    """
    parts = (base_names.bases(root), base_names.all_staging(root))
    return all([_forget(root, f"{part}/{name}", uuid) for part in parts for name in _leading(part, uuid)])


def _forget(root: str, path: str, uuid: str) -> bool:
    """Remove one such link under its lock, if it still leads to the device; return False if locked."""
    name = os.path.basename(path)
    file = locks.attempt(
        base_names.image_lock(root, base_names.prefix_of(name) if base_names.named(name) else name)
    )
    if not file:
        return False
    with file:
        if folders.at(path).uuid == uuid:
            files.unlink(path)
            point("link of a lost base removed")
    return True


def _release(root: str, uuid: str) -> None:
    """Remove the owner from a device's label, if the label can be written."""
    said = label.own(root, uuid)
    if "owner" in said:
        try:
            side = device_names.side_of(os.readlink(device_names.device(root, uuid)))
            label.write(side, {key: said[key] for key in ("version", "uuid", "class", "weight")})
        except OSError:
            return
        point("device released")
