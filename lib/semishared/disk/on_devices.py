# SPDX-License-Identifier: Apache-2.0
"""Layers on the devices of a host's pool: <VMDIR>/disk.N.snap is a link there (model/device/names.py).

No two VM directories have links to one place: a directory is removed with all places that its links lead to.
It is sent and copied by content; the receiving host gives it places of its own.
"""

from __future__ import annotations

import os
from typing import Any, Collection, Iterator, Mapping

from ..base import cache
from ..device import devices, label, offline
from ..errors import (
    CannotMove,
    DeviceMissing,
    LostWithMemory,
    NoDeviceOfClass,
    SemisharedError,
    UnexpectedFile,
    UnexpectedLink,
)
from ..model.device import names as device_names
from ..model.device.classes import MEMORY, NOTHING, Want
from ..model.device.names import LAYERS, Link
from ..model.disk import names as disk_names
from ..tools import files, qemu_img
from ..tools.run import work
from . import records

NO_WANTS: Mapping[int, Want] = {}
NO_BYTES: Mapping[Any, int] = {}


def links(directory: str) -> dict[str, Link]:
    """Return the links to devices in a VM directory, by name."""
    try:
        names = sorted(filter(disk_names.are_layers, os.listdir(directory)))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found = {name: devices.link_of(f"{directory}/{name}") for name in names}
    return {name: link for name, link in found.items() if link}


def is_own(directory: str, name: str, target: str, vm: int) -> bool:
    """Return True if a link in a VM directory leads to the VM's layers on a device.

    Raise UnexpectedFile if anything but plain files is there.
    """
    link, disk = device_names.linked(target), disk_names.disk_named(disk_names.disk_of(name))
    if disk is None:
        disk = device_names.left_named(name)
    if link is None or disk is None or not disk_names.are_layers(name) or link.part != LAYERS:
        return False
    if device_names.layers_named(link.name) != (vm, disk):
        return False
    place = f"{directory}/{name}"
    for entry in os.scandir(place) if os.path.isdir(place) else ():
        if not entry.is_file(follow_symlinks=False):
            raise UnexpectedFile(f"{place}/{entry.name} on {os.uname().nodename} is no plain file")
    return True


def check(directory: str) -> None:
    """Raise DeviceMissing if a device with layers of a VM is missing."""
    root = cache.root_of(directory)
    for name, link in links(directory).items():
        if not os.path.isdir(f"{directory}/{name}"):
            raise _missing(root, f"the layers of {disk_names.disk_of(name)}", link)


def check_written(directory: str, disk: int) -> None:
    """Raise DeviceMissing if the device with the layers that a disk's record names is missing.

    While a guest moves a disk to another device (guest/device_switch.py), and the record still names the
    delta, these are the layers on the old device: the new device holds none that would be lost.
    """
    folder = disk_names.layers(disk_names.disk(directory, disk))
    left, named = (
        device_names.left(folder),
        str((files.read_json(disk_names.record(directory, disk)) or {}).get("path", "")),
    )
    own = left if disk_names.is_delta(named) and os.path.lexists(left) else folder
    link = devices.link_of(own)
    if link and not os.path.isdir(own):
        raise _missing(cache.root_of(directory), f"the layers of {disk_names.disk_name(disk)}", link)


def listed(folder: str) -> list[str]:
    """List a directory of layers at one moment; raise DeviceMissing if its device is missing then.

    A look name by name could miss layers: another process may set the device aside meanwhile
    (device/offline.py), or bring it back.
    """
    files.refresh(os.path.dirname(folder))
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        link = devices.link_of(folder)
        if link is None:
            return []
        raise _missing(
            cache.root_of(os.path.dirname(folder)),
            f"the layers of {os.path.basename(disk_names.disk_of(folder))}",
            link,
        ) from None


def is_away(path: str) -> bool:
    """Return True if the layers of a disk (its path, or theirs) are on a missing device."""
    folder = path if disk_names.are_layers(path) else disk_names.layers(path)
    return devices.link_of(folder) is not None and not os.path.isdir(folder)


def check_disk(directory: str, disk: int) -> None:
    """Raise DeviceMissing if a device with layers of this disk, or with its base, is offline."""
    root, own = cache.root_of(directory), disk_names.layers(disk_names.disk_name(disk))
    link = devices.link_of(f"{directory}/{own}")
    offline.look(root, (link.uuid,) if link else ())
    if link and (offline.state(root, link.uuid) or not os.path.isdir(f"{directory}/{own}")):
        raise _missing(root, f"the layers of {disk_names.disk_name(disk)}", link)
    record = records.as_found(directory, disk)
    if record and record.place.leases and record.image:
        base = cache.named(root, record.image, record.image.generation).directory
        link = devices.link_of(base)
        if link and not os.path.isdir(base):
            offline.look(root, (link.uuid,))
        if link and not os.path.isdir(base):
            raise _missing(root, f"the base of {disk_names.disk_name(disk)}", link)


def _missing(root: str, which: str, link: Link) -> SemisharedError:
    try:
        where = devices.mount(root, link.uuid)
    except OSError:
        where = link.uuid
    if is_lost(root, link):
        here = os.uname().nodename
        return LostWithMemory(
            f"{which} lay in memory of {here}, {where}, which is empty since the host was started again"
        )
    wrong = offline.state(root, link.uuid)
    what = f"is {wrong}" if wrong else "has nothing of it any more"
    return DeviceMissing(f"{which}: on the device {where} of {os.uname().nodename}, which {what}")


def is_lost(root: str, link: Link) -> bool:
    """Return True if a link leads to memory whose device is there, but emptied by a restart."""
    device = device_names.device(root, link.uuid)
    return label.read(device).get("class") == MEMORY and not os.path.isdir(device_names.directory(root, link))


def place(vm_dir: str, vm: int, disk: int, expected: int, near: str = "", want: Want = NOTHING) -> str:
    """Return where the layers of a new disk lie on a device, '' if in the VM directory.

    The caller holds the VM. An existing place is kept, unless its device is missing.
    """
    folder = _placed(vm_dir, vm, disk, expected, near, want, NO_BYTES)
    if folder:
        _note(vm_dir, disk, expected)
    return folder


def _note(vm_dir: str, disk: int, expected: int) -> None:
    """Note the expected bytes of a disk's layers, if they lie on a device."""
    from ..device import ledger

    ledger.note(cache.root_of(vm_dir), disk_names.layers(disk_names.disk(vm_dir, disk)), expected)


def _placed(
    vm_dir: str, vm: int, disk: int, expected: int, near: str, want: Want, coming: Mapping[str, int]
) -> str:
    """Place a disk as `place` does; `coming`: bytes to expect on devices, by UUID, that are not noted yet."""
    folder = disk_names.layers(disk_names.disk(vm_dir, disk))
    link = devices.link_of(folder)
    if os.path.isdir(folder):
        return folder if link else ""
    if not devices.may_hold(vm_dir):
        if want.is_strict:
            what = f"{os.path.dirname(vm_dir)} on {os.uname().nodename} is a symbolic link"
            raise NoDeviceOfClass(f"{what}: disks in it lie on no device; mount it there")
        return ""
    if MEMORY in want.tried:
        from ..device import hot, ledger

        with ledger.promised(cache.root_of(vm_dir)):
            hot.make_way(cache.root_of(vm_dir), want.most)
    name = device_names.layers_name(vm, disk, os.urandom(6).hex())
    if devices.make(
        cache.root_of(vm_dir), folder, LAYERS, name, f"{vm}-{disk}", expected, near, want, coming
    ):
        return folder
    if link:
        files.unlink(folder)
    return ""


def give_up(folder: str) -> None:
    """Remove an empty place on a device without room: a retry gets another one."""
    if not os.listdir(folder):
        devices.remove(folder)


def device(directory: str, disk: int) -> str:
    """Return the mount point of the device with a disk's layers, '' if they are on none."""
    return offline.where(cache.root_of(directory), disk_names.layers(disk_names.disk(directory, disk)))


def walk(directory: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield as os.walk does, also for the layers on devices."""
    own = links(directory)
    yield from os.walk(directory)
    for name in own:
        yield from os.walk(f"{directory}/{name}")


def fsync_tree(directory: str) -> None:
    """Flush a VM directory, with its layers on devices, to disk."""
    for name in links(directory):
        files.fsync_tree(devices.behind(f"{directory}/{name}"))
    files.fsync_tree(directory)


def remove_tree(directory: str) -> None:
    """Remove a former VM directory, first its layers on devices; those on a missing device stay."""
    for name in links(directory):
        devices.remove(f"{directory}/{name}")
    files.remove_tree(directory)


def remove(disk_path: str) -> None:
    """Remove the layers of a disk from their device; the link goes last."""
    if devices.link_of(disk_names.layers(disk_path)):
        devices.remove(disk_names.layers(disk_path))


def _own(directory: str) -> dict[str, Link]:
    """Return the links to devices of a directory that is to be read as it is.

    Raise DeviceMissing, or CannotMove if a disk is about to leave its device.
    """
    own = links(directory)
    leaving = [name for name in own if device_names.left_named(name) is not None]
    if leaving:
        raise CannotMove(
            f"{leaving[0]} of {directory} on {os.uname().nodename}: those layers are about to "
            f"leave their device"
        )
    check(directory)
    return own


def members(directory: str) -> list[str]:
    """Return what tar archives of a VM directory, as relative paths, with the layers behind links.

    Raise DeviceMissing or CannotMove.
    """
    own = _own(directory)
    if not own:
        return ["."]
    names = [f"./{name}" for name in sorted(os.listdir(directory)) if name not in own]
    return names + [
        f"./{name}/{layer}" for name in own for layer in sorted(os.listdir(f"{directory}/{name}"))
    ]


def prepare(
    directory: str,
    vm: int,
    disks: Collection[int],
    wants: Mapping[int, Want] = NO_WANTS,
    sizes: Mapping[int, int] = NO_BYTES,
) -> dict[str, str]:
    """Give the disks of an arriving directory places on devices; return the links made, with their targets.

    `sizes`: bytes of each disk. The largest is placed first, each with regard to what those before it will
    take.
    """
    coming: dict[str, int] = {}
    for disk in sorted(disks, key=lambda disk: (-sizes.get(disk, 0), disk)):
        size = sizes.get(disk, 0)
        uuid = devices.device_of(_placed(directory, vm, disk, size, "", wants.get(disk, NOTHING), coming))
        coming[uuid] = coming.get(uuid, 0) + size
    made = links(directory)
    for disk in disks if made else ():
        _note(directory, disk, sizes.get(disk, 0))
    return {name: device_names.target_of(link) for name, link in made.items()}


def arrived(directory: str, made: dict[str, str]) -> None:
    """Raise UnexpectedLink if a received link does not lead to its place; remove places without files."""
    for name in [
        name
        for name in os.listdir(directory)
        if disk_names.are_layers(name) and os.path.islink(f"{directory}/{name}")
    ]:
        path = f"{directory}/{name}"
        if os.readlink(path) != made.get(name):
            target = os.readlink(path)
            os.unlink(path)
            if name in made:
                # So that the removal of the directory finds the place.
                os.symlink(made[name], path)
            raise UnexpectedLink(
                f"{name} of VM directory {directory} on {os.uname().nodename} came as a symbolic "
                f"link to {target}"
            )
        if not os.listdir(path):
            devices.remove(path)


def copy(source: str, directory: str, vm: int) -> None:
    """Copy a VM directory into another, layers on devices to new places."""
    argv = ["cp", "-a", "--sparse=always", "--reflink=auto", "--"]
    own = _own(source)
    if not own:
        work([*argv, f"{source}/.", directory])
        return
    work([*argv, *(f"{source}/{name}" for name in sorted(os.listdir(source)) if name not in own), directory])
    for name in own:
        disk = disk_names.disk_named(disk_names.disk_of(name))
        if disk is not None:
            if not place(directory, vm, disk, allocated(f"{source}/{name}"), want=_as_before(source, disk)):
                os.mkdir(f"{directory}/{name}")
            work([*argv, f"{source}/{name}/.", f"{directory}/{name}"])


def _as_before(source: str, disk: int) -> Want:
    """Return a disk's wishes for its new place, by its record, with one more layer for a live move."""
    record, folder = records.as_found(source, disk), disk_names.layers(disk_names.disk(source, disk))
    if record is None or not record.classes:
        return NOTHING
    size = qemu_img.virtual_size(record.active(disk_names.disk(source, disk)), record.format)
    return Want(record.classes, size, len(os.listdir(folder)))


def allocated(folder: str) -> int:
    """Return the allocated bytes of the layers in a directory."""
    return sum(files.allocated(entry.path) for entry in os.scandir(folder))
