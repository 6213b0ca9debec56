# SPDX-License-Identifier: Apache-2.0
"""Folders of this host: where the layers of a disk, a base or a staged base lie.

    <vm_dir>/disk.N.snap    <root>/bases/NAME    <root>/staging/PREFIX

A folder is a directory on the host's own disk, or a link to one on a device (model/device/names.py). The same
functions place, find, count, move and remove both; only this module asks which of the two a folder is.

A crash leaves a link whose directory does not exist yet, which the next run reuses. If a device was away when
its disk was removed, a directory without a link stays (host/leftovers.py).
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from typing import Iterator, Mapping

from ..errors import CannotMove, DeviceMissing, LostWithMemory, NoDevice, NoDeviceOfClass, SemisharedError
from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.device.classes import MEMORY, NOTHING, Want
from ..model.device.names import LAYERS, Link
from ..model.disk import names as disk_names
from ..tools import beneath, files, locks
from ..tools.effects import point
from . import devices, label, ledger, offline

Coming = Mapping[str, int]
"""Bytes by the UUIDs of devices."""
NO_BYTES: Coming = {}
SWITCH_S = 60
"""Seconds that another process may hold the lock to change the links of one base."""


class Folder:
    """A folder on the host's own disk; one on a device overrides what differs there."""

    uuid = ""
    """Of its device."""
    target = ""
    """The text of the link that it is."""
    device = ""
    """The path through the link to its device."""
    promise = ""
    """The note of what its device promises to it, which only memory does."""

    def __init__(self, path: str) -> None:
        self.path = self.directory = path
        self.name, above = os.path.basename(path), os.path.dirname(path)
        self.root = disk_names.base_store_of(above) if disk_names.are_layers(path) else os.path.dirname(above)

    def real(self) -> str:
        """Return the directory by its path on its file system."""
        return self.path

    def mount(self) -> str:
        """Return its device's mount point, or UUID if that left the pool; '' for the host's own disk."""
        return devices.mount(self.root, self.uuid)

    def is_away(self) -> bool:
        """Return True if its device is missing, or has nothing of it any more."""
        return False

    def fails(self) -> bool:
        """Return True if its device cannot be written to."""
        return False

    def require(self, what: str, *, is_written: bool = False) -> None:
        """Raise DeviceMissing if it is away, or (to be written) fails; LostWithMemory after a restart."""
        if self.is_away() or is_written and self.fails():
            raise self._missing(what)

    def _missing(self, what: str) -> SemisharedError:
        here, where = os.uname().nodename, self.mount()
        if label.read(self.device).get("class") == MEMORY and not os.path.isdir(self.directory):
            return LostWithMemory(
                f"{what} lay in memory of {here}, {where}, which is empty since the host was started again"
            )
        wrong = offline.state(self.root, self.uuid)
        how = f"is {wrong}" if wrong else "has nothing of it any more"
        return DeviceMissing(f"{what}: on the device {where} of {here}, which {how}")

    def refuse_link(self) -> None:
        """Raise UnexpectedLink if a base or staged base is a link, but to its directory on a device."""
        beneath.refuse_link(self.path)

    def to_move(self, why: str) -> Link:
        """Return the link of a folder that is to go to another device; raise CannotMove if there is none."""
        raise CannotMove(why)

    def listed(self, what: str) -> list[str]:
        """Return the names in it at one moment; raise as `require` if its device is missing then.

        A look name by name could miss files: another process may set the device aside meanwhile
        (offline.py), or bring it back.
        """
        try:
            return os.listdir(self.path)
        except FileNotFoundError:
            if not self.uuid:
                return []
            raise self._missing(what) from None

    def staged(self, name: str) -> str:
        """Return the path of a file that is to become its first: in it, if its directory is made already."""
        return files.staged_name(f"{self.path if self.uuid else os.path.dirname(self.path)}/{name}")

    def remove(self) -> None:
        """Remove it, but no foreign link; on a device first the directory, if mounted, then the link."""
        files.refuse()
        if not os.path.islink(self.path):
            files.remove_folder(self.path, ignore_errors=True)

    def clear(self) -> None:
        """Empty it; on a device it keeps its place."""
        self.remove()

    def take_off(self) -> None:
        """Remove it from its device; on the host's own disk its files go one by one (tools/layers.py)."""

    def give_up(self) -> None:
        """Remove it if it is empty, on a device without room: a retry gets another one."""

    def publish(self, base: str) -> None:
        """Rename this complete staged base to `base`, which is free; on a device the link comes first."""
        # `base` may be a link from before a pool was removed.
        remove(base)
        os.rename(self.path, base)


class OnDevice(Folder):
    """A folder that is a link to a directory on a device."""

    def __init__(self, path: str, link: Link) -> None:
        super().__init__(path)
        self.link, self.uuid, self.name = link, link.uuid, link.name
        self.target = device_names.target_of(link)
        # Relative to the name: a removal has the directory above open, and knows it by its descriptor.
        self.directory = os.path.join(os.path.dirname(path), self.target)
        self.device = self.directory.rsplit("/", 2)[0]
        self.promise = device_names.promise(self.device, self.name)

    def real(self) -> str:
        return os.path.realpath(self.path)

    def is_away(self) -> bool:
        return not os.path.isdir(self.path)

    def fails(self) -> bool:
        return bool(offline.state(self.root, self.uuid))

    def refuse_link(self) -> None:
        directory, name = os.path.split(self.path)
        if (self.link.part, self.link.name) != (os.path.basename(directory), name):
            super().refuse_link()

    def to_move(self, why: str) -> Link:
        return self.link

    def link_it(self) -> None:
        """Make its name lead to its directory, from wherever it has led so far."""
        files.remove_staged(*os.path.split(self.path))
        files.symlink(self.target, self.path)

    def remove(self) -> None:
        files.refuse()
        files.remove_folder(self.directory, ignore_errors=True)
        point("directory on a device removed")
        files.unlink(self.path)

    def clear(self) -> None:
        if self.is_away():
            self.remove()
            return
        files.remove_folder(self.directory, ignore_errors=True)
        label.make_directory(self.directory)

    def take_off(self) -> None:
        self.remove()

    def give_up(self) -> None:
        if not os.listdir(self.path):
            self.remove()

    def publish(self, base: str) -> None:
        final = OnDevice(base, self.link._replace(part=device_names.BASES, name=os.path.basename(base)))
        label.make_directory(os.path.dirname(final.directory), exist_ok=True)
        if os.path.isdir(final.directory):
            # Left on a device that was away when its base was made anew elsewhere.
            files.remove_folder(final.directory)
        final.link_it()
        point("base linked")
        os.rename(self.directory, final.directory)
        files.fsync(os.path.dirname(final.directory))
        point("base renamed on its device")
        files.unlink(self.path)


def at(path: str) -> Folder:
    """Return the folder `path`, which need not exist, as it is now."""
    link = devices.link_of(path)
    return OnDevice(path, link) if link else Folder(path)


def remove(path: str) -> None:
    """Remove the folder `path`."""
    at(path).remove()


def remove_failed(path: str) -> None:
    """Remove the folder `path` if its device cannot be written to."""
    found = at(path)
    if found.fails():
        found.remove()


def on_devices(directory: str) -> dict[str, OnDevice]:
    """Return the folders in a directory that are on devices, by name."""
    try:
        found = {name: at(f"{directory}/{name}") for name in sorted(os.listdir(directory))}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {name: folder for name, folder in found.items() if isinstance(folder, OnDevice)}


def check(root: str, relative: str) -> None:
    """Raise UnexpectedLink if a component of `relative` is a link, other than a base on a device."""
    path = root
    for name in relative.split("/"):
        path = f"{path}/{name}"
        at(path).refuse_link()


@contextmanager
def staying(root: str) -> Iterator[None]:
    """Keep bases on their devices within the block, in which leases change; it must not take seconds."""
    if not devices.registered(root):
        yield
        return
    with locks.exclusive(device_names.switch_lock(root), SWITCH_S):
        yield


# -- placing ----------------------------------------------------------------------------------------


def takes_layers(vm_dir: str) -> bool:
    """Return True if new layers in this directory lie on devices; a disk that needs none has some, then."""
    return _may_hold(vm_dir) and bool(devices.usual(disk_names.base_store_of(vm_dir)))


def may_move(vm_dir: str) -> bool:
    """Return True if layers in this directory can lie on devices, and go from one to another."""
    return _may_hold(vm_dir) and bool(devices.registered(disk_names.base_store_of(vm_dir)))


def _may_hold(vm_dir: str) -> bool:
    """Return False in a datastore that is a link: the relative path to a device is not that of its target."""
    return not os.path.islink(os.path.dirname(vm_dir))


def _wanted(
    root: str, key: str, expected: int, near: str = "", want: Want = NOTHING, coming: Coming = NO_BYTES
) -> Iterator[tuple[str, str]]:
    """Yield UUID and class of the devices for `key` in order of preference; the caller tries the next.

    The last is the host's own disk, if it has no other lasting device, and any class will do.
    """
    there = devices.present(root)
    pending = ledger.pending(root, {device.uuid for device in there})
    left = [
        device._replace(free=device.free - coming.get(device.uuid, 0), pending=pending.get(device.uuid, 0))
        for device in there
    ]
    while left:
        from ..plan.device import choose

        uuid = choose.choose(left, key, expected, near, classes=want.tried, most=want.most)
        if not uuid:
            break
        yield uuid, next(device.device_class for device in left if device.uuid == uuid)
        left = [device for device in left if device.uuid != uuid]
    if not want.is_strict and not devices.usual(root):
        yield "", ""


def place(
    path: str,
    part: str,
    name: str,
    key: str,
    expected: int,
    near: str = "",
    want: Want = NOTHING,
    coming: Coming = NO_BYTES,
) -> Folder:
    """Give the folder `path` its place; on a device `name` is that of the directory.

    That directory is made, on the host's own disk the folder comes with its first file. The caller holds the
    lock for `path`. `near`: a base, or a device, beside which it should lie. `coming`: bytes that are about
    to be written to devices, by UUID.

    Raise NoDevice if no device can take it, as the base store is not meant for it; NoDeviceOfClass if none of
    the wanted classes can.
    """
    above, here = os.path.dirname(path), os.uname().nodename
    own = Folder(path)
    if part == LAYERS and not _may_hold(above):
        if want.is_strict:
            what = f"{os.path.dirname(above)} on {here} is a symbolic link"
            raise NoDeviceOfClass(f"{what}: disks in it lie on no device; mount it there")
        return own
    root, beside = own.root, at(near).uuid or os.path.basename(near)
    with _room_in_memory(root, want) if MEMORY in want.classes else nullcontext():
        for uuid, device_class in _wanted(root, key, expected, beside, want, coming):
            if not uuid:
                remove(path)  # a link to a device that failed, or is not registered any more
                return own
            try:
                return _made(OnDevice(path, Link(uuid, part, name)), device_class, want)
            except OSError:
                if not os.path.isdir(above):
                    raise
                # the device fails, or was removed from the pool: its label is readable, and writes fail
    if want.classes:
        from ..plan.device import choose

        raise NoDeviceOfClass(
            choose.none_takes(devices.present(root), want, lambda uuid: devices.mount(root, uuid), here)
        )
    lost = [
        devices.mount(root, uuid) for uuid in devices.registered(root) if not devices.is_there(root, uuid)
    ]
    what = f"no device takes anything ({', '.join(lost)} not there)" if lost else "no device takes anything"
    raise NoDevice(f"{what} of the pool of {here}")


@contextmanager
def _room_in_memory(root: str, want: Want) -> Iterator[None]:
    """Keep what memory has promised as it is within the block, after room for `want` was made there."""
    from . import hot

    with ledger.promised(root):
        hot.make_way(root, want.most)
        yield


def _made(folder: OnDevice, device_class: str, want: Want) -> Folder:
    files.remove_staged(*os.path.split(folder.path))
    label.make_directory(os.path.dirname(folder.directory), exist_ok=True)
    # The link first: no directory is ever without its link.
    folder.link_it()
    if device_class == MEMORY:
        ledger.write_promises(folder.device, folder.name, want.size, want.layers)
    label.make_directory(folder.directory, exist_ok=True)
    # By its path, by which its users find it.
    files.fsync(os.path.dirname(folder.directory))
    point("directory on a device made")
    return folder


def likely(root: str, key: str, expected: int, coming: Coming = NO_BYTES) -> str:
    """Return the UUID of the device where something would be placed, '' for the host's own disk, or none."""
    return next(_wanted(root, key, expected, coming=coming), ("", ""))[0]


def arriving(vm_dir: str, disks: Mapping[str, int], apart: int) -> tuple[Mapping[str, int], int]:
    """Return the disks of an arriving VM that devices of no class take, and the bytes not in its directory.

    `disks`: bytes of each disk's layers; `apart`: of all disks that want a class of devices.
    """
    found = disks if takes_layers(vm_dir) else NO_BYTES
    return found, apart + sum(found.values()) if may_move(vm_dir) else 0


# -- bases ------------------------------------------------------------------------------------------


def stage(root: str, prefix: str, expected: int = 0, near: str = "") -> None:
    """Give an image's staged base a place, under its lock, unless it has one; `near` as `place` takes it."""
    path = base_names.staging(root, prefix)
    remove_failed(path)
    if not os.path.isdir(path):
        os.makedirs(base_names.all_staging(root), exist_ok=True)
        remove(path)
        place(path, device_names.STAGING, prefix, prefix, expected, near)


# -- links ------------------------------------------------------------------------------------------


def layers_links(location: str, disk: int | None = None) -> set[Link]:
    """Return all links to layers (of disks of this number) in VM directories of this host.

    Raise ToolTimeout if a system datastore does not answer.
    """
    from .systems import directories

    own = disk_names.layers(disk_names.disk_name(disk)) if disk is not None else ""
    return {
        folder.link
        for directory in directories(location)
        for name, folder in layers_on_devices(directory).items()
        if own in ("", name) or name == device_names.left(own)
    }


def layers_on_devices(vm_dir: str) -> dict[str, OnDevice]:
    """Return the folders of layers in a VM directory that are on devices, by name."""
    return {name: folder for name, folder in on_devices(vm_dir).items() if disk_names.are_layers(name)}


def is_linked(location: str, link: Link) -> bool:
    """Return True if a link on this host leads to a directory on a device, or it is none of this host's."""
    root = disk_names.base_store(location)
    if link.uuid not in devices.registered(root):
        return True
    if link.part == device_names.HOT:
        return os.path.isdir(base_names.base(root, link.name))
    if link.part != LAYERS:
        return devices.link_of(f"{root}/{link.part}/{link.name}") == link
    said = device_names.layers_named(link.name)
    return said is None or link in layers_links(location, said[1])


def unlinked(location: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the directories on devices to which no link leads: real path, VM (-1 of a base), replaced.

    They are of disks and bases that were removed while their device was away, or of killed moves between
    devices. `replaced`: the layers of that disk lie elsewhere here, complete. Raise ToolTimeout as
    `layers_links`.
    """
    from ..tools import inventory

    root, linked = disk_names.base_store(location), layers_links(location)
    whole = {
        device_names.layers_named(link.name)
        for link in linked
        if os.path.isdir(device_names.directory(root, link))
    }
    for uuid in filter(lambda uuid: devices.is_there(root, uuid), devices.registered(root)):
        place = os.readlink(device_names.device(root, uuid))
        for part in (*device_names.PARTS, device_names.HOT):
            for name in inventory.names(f"{place}/{part}"):
                link = Link(uuid, part, name)
                disk = device_names.layers_named(name) if part == LAYERS else (-1, -1)
                if disk and link not in linked and (part == LAYERS or not is_linked(location, link)):
                    yield f"{place}/{part}/{name}", disk[0], part == LAYERS and disk in whole
