# SPDX-License-Identifier: Apache-2.0
"""The devices of this host's pool, and the links to disks and bases on them (model/device/names.py).

A device is known by its label, found through its link in the base store. An empty mount point has no label
and no files of semishared, and nothing is made there. A host without such links has no pool: all disks and
bases are in the base store and the directories of VMs.

A crash leaves a link whose directory does not exist yet, which the next run reuses. If a device was away when
its disk was removed, a directory without a link stays (host/leftovers.py).
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Iterable, Iterator, Mapping

from ..errors import BadRecord, NoDevice, NoDeviceOfClass
from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.device.classes import MEMORY, NOTHING, Want
from ..model.device.names import Link
from ..model.disk import names as disk_names
from ..tools import beneath, files, locks
from ..tools.effects import point
from . import label, ledger

if TYPE_CHECKING:
    from ..plan.device import choose

Coming = Mapping[str, int]
"""Bytes by the UUIDs of devices."""
NO_BYTES: Coming = {}
SWITCH_S = 60
"""Seconds that another process may hold the lock to change the links of one base."""


def registered(root: str) -> list[str]:
    """Return the UUIDs of the devices of this host's pool, offline ones too."""
    try:
        names = os.listdir(device_names.devices(root))
    except FileNotFoundError:
        return []
    return sorted(
        uuid
        for uuid in filter(device_names.is_uuid, names)
        if os.path.islink(device_names.device(root, uuid))
    )


def usual(root: str) -> list[str]:
    """Return the UUIDs of the devices that are not memory; without any, the host behaves as without a pool.

    If a device's note is unreadable its label counts. Without either it may be memory, and gets no lasting
    data.
    """
    return [uuid for uuid in registered(root) if _is_usual(root, uuid)]


def _is_usual(root: str, uuid: str) -> bool:
    try:
        return (files.read_json(device_names.note(root, uuid)) or {}).get("class") != MEMORY
    except BadRecord:
        return label.read(device_names.device(root, uuid)).get("class", MEMORY) != MEMORY


def may_hold(vm_dir: str) -> bool:
    """Return True if layers of a VM's disks may lie on devices.

    Not in a datastore that is a link: the relative path to the device differs from the link's target.
    """
    return not os.path.islink(os.path.dirname(vm_dir))


def mount(root: str, uuid: str) -> str:
    """Return a device's mount point, mounted or not; its UUID if it has just left the pool."""
    try:
        return device_names.mount(os.readlink(device_names.device(root, uuid)))
    except OSError:
        return uuid


def is_there(root: str, uuid: str) -> bool:
    """Return True if a device is mounted and has the right label."""
    return bool(label.own(root, uuid))


def present(root: str, uuids: Iterable[str] | None = None) -> list[choose.Device]:
    """Return the devices (all, or `uuids`) that are mounted and writable."""
    from ..plan.device import choose

    found: list[choose.Device] = []
    for uuid, directory in (
        (uuid, device_names.device(root, uuid)) for uuid in (registered(root) if uuids is None else uuids)
    ):
        said = label.own(root, uuid)
        try:
            stat = os.statvfs(directory)
        except OSError:
            continue
        if said and not stat.f_flag & os.ST_RDONLY:
            capacity, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
            promised = ledger.all_promised(directory) if said["class"] == MEMORY else 0
            found.append(
                choose.Device(uuid, capacity, free, float(str(said["weight"])), str(said["class"]), promised)
            )
    return found


# -- links ------------------------------------------------------------------------------------------


def link_of(path: str) -> Link | None:
    """Return the parts of the link `path`, None if it does not lead to a device."""
    try:
        return device_names.linked(os.readlink(path))
    except OSError:
        return None


def device_of(path: str) -> str:
    """Return the UUID of the device to which the link `path` leads, '' if it leads to none."""
    link = link_of(path)
    return link.uuid if link else ""


def behind(path: str) -> str:
    """Return the directory on a device to which the link `path` leads; `path` itself if it leads to none."""
    return os.path.join(os.path.dirname(path), os.readlink(path)) if link_of(path) else path


def refuse_link(path: str) -> None:
    """Raise UnexpectedLink if a base or staged base is a link to anything but its directory on a device."""
    link = link_of(path)
    directory, name = os.path.split(path)
    if link is None or (link.part, link.name) != (os.path.basename(directory), name):
        beneath.refuse_link(path)


def check(root: str, relative: str) -> None:
    """Raise UnexpectedLink if a component of `relative` is a link, other than a base on a device."""
    path = root
    for name in relative.split("/"):
        path = f"{path}/{name}"
        refuse_link(path)


@contextmanager
def staying(root: str) -> Iterator[None]:
    """Keep bases on their devices within the block, in which leases change; it must not take seconds."""
    if not registered(root):
        yield
        return
    with locks.exclusive(device_names.switch_lock(root), SWITCH_S):
        yield


# -- placing ----------------------------------------------------------------------------------------


def _wanted(
    root: str, key: str, expected: int, near: str, want: Want = NOTHING, coming: Coming = NO_BYTES
) -> Iterator[choose.Device]:
    """Yield the devices for `key` in order of preference; the caller tries the next if one fails."""
    from ..plan.device import choose

    there = present(root)
    pending = ledger.pending(root, {device.uuid for device in there})
    left = [
        device._replace(free=device.free - coming.get(device.uuid, 0), pending=pending.get(device.uuid, 0))
        for device in there
    ]
    while left:
        uuid = choose.choose(left, key, expected, near, classes=want.tried, most=want.most)
        if not uuid:
            return
        yield next(device for device in left if device.uuid == uuid)
        left = [device for device in left if device.uuid != uuid]


def make(
    root: str,
    path: str,
    part: str,
    name: str,
    key: str,
    expected: int,
    near: str = "",
    want: Want = NOTHING,
    coming: Coming = NO_BYTES,
) -> bool:
    """Make a directory `name` on the chosen device and the link `path` to it; return False without a pool.

    The caller holds the lock for `path`. `coming`: bytes that are about to be written to devices, by UUID.

    Raise NoDevice if no device can take it, as the base store is not meant for it; NoDeviceOfClass if none of
    the wanted classes can.
    """
    if not usual(root) and not want.classes:
        return False
    if MEMORY in want.classes:
        with ledger.promised(root):
            return _make(
                root, path, Link("", part, name), _wanted(root, key, expected, near, want, coming), want
            )
    return _make(root, path, Link("", part, name), _wanted(root, key, expected, near, want, coming), want)


def _make(root: str, path: str, link: Link, wanted: Iterator[choose.Device], want: Want) -> bool:
    files.remove_staged(*os.path.split(path))
    for device in wanted:
        link = link._replace(uuid=device.uuid)
        directory = device_names.directory(root, link)
        try:
            label.make_directory(os.path.dirname(directory), exist_ok=True)
            # The link first: no directory is ever without its link.
            files.symlink(device_names.target_of(link), path)
            if device.device_class == MEMORY:
                ledger.write_promises(
                    device_names.device(root, device.uuid), link.name, want.size, want.layers
                )
            label.make_directory(directory, exist_ok=True)
            # By its path, by which its users find it.
            files.fsync(os.path.dirname(directory))
        except OSError:
            if not os.path.isdir(os.path.dirname(path)):
                raise
            # the device fails, or was removed from the pool: its label is readable, and writes fail
            continue
        point("directory on a device made")
        return True
    if not usual(root) and not want.is_strict:
        return False
    if want.classes:
        from ..plan.device import choose

        raise NoDeviceOfClass(
            choose.none_takes(present(root), want, lambda uuid: mount(root, uuid), os.uname().nodename)
        )
    raise NoDevice(f"{_missing(root)} of the pool of {os.uname().nodename}")


def _missing(root: str) -> str:
    lost = [mount(root, uuid) for uuid in registered(root) if not is_there(root, uuid)]
    return f"no device takes anything ({', '.join(lost)} not there)" if lost else "no device takes anything"


def remove(path: str) -> None:
    """Remove a directory; of a link to a device, first the directory it leads to, if it is mounted."""
    files.refuse()
    if link_of(path):
        files.remove_folder(behind(path), ignore_errors=True)
        point("directory on a device removed")
        files.unlink(path)
    elif not os.path.islink(path):
        files.remove_folder(path, ignore_errors=True)


def stage(root: str, prefix: str, expected: int = 0, near: str = "") -> str:
    """Return the staging directory of an image's base, under its lock; on a device, if there is a pool.

    `near`: another base, beside which it should lie.
    """
    path = base_names.staging(root, prefix)
    if not os.path.isdir(path):
        os.makedirs(base_names.all_staging(root), exist_ok=True)
        remove(path)
        make(root, path, device_names.STAGING, prefix, prefix, expected, near)
    return path


def clear(path: str) -> None:
    """Empty the directory of a staged base; on a device it keeps its place."""
    if link_of(path) and os.path.isdir(path):
        files.remove_folder(behind(path), ignore_errors=True)
        label.make_directory(behind(path))
    else:
        remove(path)


def publish(root: str, staging: str, base: str) -> None:
    """Rename a complete staged base to its final path, which is free; on a device the link comes first."""
    link = link_of(staging)
    if link is None:
        # From before a pool was removed.
        remove(base)
        os.rename(staging, base)
        return
    final = Link(link.uuid, device_names.BASES, os.path.basename(base))
    directory = device_names.directory(root, final)
    label.make_directory(os.path.dirname(directory), exist_ok=True)
    if os.path.isdir(directory):
        # Left on a device that was away when its base was made anew elsewhere.
        files.remove_folder(directory)
    files.remove_staged(*os.path.split(base))
    files.symlink(device_names.target_of(final), base)
    point("base linked")
    os.rename(behind(staging), directory)
    files.fsync(os.path.dirname(directory))
    point("base renamed on its device")
    files.unlink(staging)


def likely(root: str, key: str, expected: int, coming: Coming = NO_BYTES) -> str:
    """Return the device where something would be placed, '' on a host without a pool."""
    device = next(_wanted(root, key, expected, "", coming=coming), None) if usual(root) else None
    return device_names.device(root, device.uuid) if device else ""


def is_linked(location: str, link: Link) -> bool:
    """Return True if a link on this host leads to a directory on a device."""
    root = disk_names.base_store(location)
    if link.part == device_names.HOT:
        return os.path.isdir(base_names.base(root, link.name))
    if link.part != device_names.LAYERS:
        return link_of(f"{root}/{link.part}/{link.name}") == link
    found = device_names.layers_named(link.name)
    return found is None or link in layers_links(location, found[1])


def layers_links(location: str, disk: int | None = None) -> set[Link]:
    """Return all links to layers (of disks of this number) in VM directories of this host.

    Raise ToolTimeout if a system datastore does not answer.
    """
    from .systems import directories

    found: set[Link] = set()
    own = disk_names.layers(disk_names.disk_name(disk)) if disk is not None else ""
    for directory in directories(location):
        names = (own, device_names.left(own)) if own else _listed(directory)
        found |= {link for name in names for link in (link_of(f"{directory}/{name}"),) if link}
    return found


def _listed(directory: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if disk_names.are_layers(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
