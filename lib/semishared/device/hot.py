# SPDX-License-Identifier: Apache-2.0
"""Hot bases: copies of bases in memory, from which guests read instead of from disk.

    <memory>/.semishared/hot/<store>-<image>-<generation>/image     mode 0440

An overlay always names the base on disk, by its header and its lease. Only libvirt's domain names the copy,
at each boot (plan/vm/hypervisor.py). So a copy is never the only one of any data, and needs no repair when
memory is lost or a VM moves to another host.

A copy reserves its room as layers do (device/ledger.py). It is removed when that room is needed and no guest
reads from it: QEMU locks the files that it has open, and the process that boots a guest holds a lock until
QEMU does.

A crash leaves a directory without `image`, whose room stays reserved. The next boot makes it again, or it
goes when its room is needed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Iterator

from ..errors import SemisharedError
from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.device.classes import MEMORY
from ..named import NamedTuple
from ..tools import extents, files, lock_holders, locks
from ..tools.effects import point
from ..tools.rate_limit import standing_back
from ..units import human
from . import devices, label, ledger

if TYPE_CHECKING:
    from ..plan.device import choose

COPY_S = 600
"""Seconds that a guest's start waits at most for another one's copy of the same base."""


class Copy(NamedTuple):
    """A directory of a copy, by its device."""

    uuid: str
    directory: str

    @property
    def name(self) -> str:
        return os.path.basename(self.directory)

    @property
    def image(self) -> str:
        return base_names.image(self.directory)


def _copies(root: str) -> Iterator[Copy]:
    """Yield the copies, also unfinished ones."""
    for uuid in devices.in_memory(root):
        if devices.is_there(root, uuid):
            # Its own path, not the link to the device, as libvirt opens it.
            place = os.readlink(device_names.device(root, uuid))
            for name in filter(base_names.named, _listed(device_names.hot(place))):
                yield Copy(uuid, device_names.hot(place, name))


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def found(root: str, name: str) -> str:
    """Return the copy of a base, '' if there is no complete one."""
    return next(
        (copy.image for copy in _copies(root) if copy.name == name and os.path.isfile(copy.image)), ""
    )


def why_not(root: str, size: int) -> str:
    """Return why memory cannot take the copy of a base of `size` bytes, '' if it can."""
    memory = [device for device in devices.memory(root) if device.share > 0]
    if not memory:
        return f"no device of class {MEMORY} takes it"
    most = max(_takes(device) + _idle_bytes(root, device.uuid) for device in memory)
    return (
        ""
        if size <= most
        else f"it has {human(size)}, and memory {human(max(most, 0))} that are not promised"
    )


def _takes(device: choose.Device) -> int:
    """Return the bytes that memory can take at once: neither promised to others, nor beyond its free room."""
    return min(device.unpromised, device.room)


def provide(root: str, name: str, source: str, format: str) -> str:
    """Copy the base `name` into memory, from the lease `source`; return why there is no copy, or ''."""
    if found(root, name):
        return ""
    size = os.stat(source).st_size
    if why_not(root, size):
        return why_not(root, size)
    os.makedirs(os.path.dirname(base_names.hot_lock(root, name)), exist_ok=True)
    with locks.exclusive(base_names.hot_lock(root, name), COPY_S):
        if found(root, name):
            return ""
        copy = _begin(root, name, size)
        if copy is None:
            return why_not(root, size) or "others were faster"
        return _made(copy, source, format)


def _begin(root: str, name: str, size: int) -> Copy | None:
    """Return a copy's new directory, with its room promised; None if no device has that much."""
    with ledger.promised(root):
        for copy in [copy for copy in _copies(root) if copy.name == name]:
            _remove(copy)  # left by a killed run
        make_way(root, size)
        for device in devices.memory(root):
            if _takes(device) >= size > 0:  # weight 0: none is unpromised
                link = device_names.device(root, device.uuid)
                try:
                    copy = Copy(device.uuid, device_names.hot(os.readlink(link), name))
                    label.make_directory(device_names.hot(link, name))
                    point("hot base begun")
                    ledger.write_promises(link, name, size, 1)
                except FileNotFoundError:
                    continue  # just removed from the pool, or unmounted
                return copy
    return None


def _made(copy: Copy, source: str, format: str) -> str:
    try:
        with files.published(copy.image) as staged:
            with standing_back():
                made = extents.copy(source, staged, format, "base_read")
            said = base_names.named(copy.name)
            if said is None or made.generation != said.generation:
                raise ValueError(f"{source} is not what it was: semishared base verify")
            os.chmod(staged, 0o440)
    except (OSError, ValueError, SemisharedError) as e:
        _remove(copy)
        return e.detail if isinstance(e, SemisharedError) else str(e)
    return ""


def hold(root: str, name: str) -> str:
    """Return the copy of a base, locked for this process and the program it becomes by exec; '' for none."""
    if not found(root, name):
        return ""
    with ledger.promised(root):
        path = found(root, name)
        if path:
            lock_holders.hold_image(path)
            # Its mtime is that of the last use.
            os.utime(os.path.dirname(path))
        return path


def make_way(root: str, needed: int) -> None:
    """Remove idle copies where memory lacks room for `needed` bytes, if that is enough.

    The caller holds the lock `ledger.promised`.
    """
    for device in devices.memory(root):
        left = needed - device.unpromised
        if left <= 0 or left > _idle_bytes(root, device.uuid):
            continue
        for copy in _idle(root, device.uuid):
            if left > 0:
                left -= _promised(copy)
                _remove(copy)


def _idle_bytes(root: str, uuid: str) -> int:
    return sum(map(_promised, _idle(root, uuid)))


def _promised(copy: Copy) -> int:
    size, count = ledger.read_promises(os.path.dirname(os.path.dirname(copy.directory)), copy.name)
    return size * count


def _idle(root: str, uuid: str) -> list[Copy]:
    """Return the copies that no process makes and no guest reads, the least recently used first."""
    idle = [copy for copy in _copies(root) if copy.uuid == uuid and not _is_used(root, copy)]
    return sorted(idle, key=_last_used)


def _last_used(copy: Copy) -> float:
    try:
        return os.stat(copy.directory).st_mtime
    except FileNotFoundError:  # removed meanwhile, with its base
        return 0.0


def _is_used(root: str, copy: Copy) -> bool:
    try:
        return lock_holders.is_image_open(copy.image)
    except FileNotFoundError:
        return locks.is_held(base_names.hot_lock(root, copy.name))


def drop(root: str, name: str) -> None:
    """Remove the copy of a base that is gone, or a damaged copy; guests that have it open keep it."""
    for copy in [copy for copy in _copies(root) if copy.name == name]:
        _remove(copy)


def drop_idle(root: str, uuid: str) -> None:
    """Remove all copies on a device that no guest reads."""
    for copy in _idle(root, uuid):
        _remove(copy)


def _remove(copy: Copy) -> None:
    files.remove_folder(copy.directory, ignore_errors=True)
    point("hot base removed")
    files.unlink(device_names.promise(os.path.dirname(os.path.dirname(copy.directory)), copy.name))
