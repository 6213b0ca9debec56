# SPDX-License-Identifier: Apache-2.0
"""The folders of layers in a VM directory, <VMDIR>/disk.N.snap, wherever they lie (device/folders.py).

No two VM directories have links to one place: a directory is removed with all places that its links lead to.
It is sent and copied by content; the receiving host gives it places of its own.
"""

from __future__ import annotations

import os
from typing import Any, Collection, Iterator, Mapping

from ..base import cache
from ..device import folders, ledger, offline
from ..errors import CannotMove, UnexpectedFile, UnexpectedLink
from ..model.device import names as device_names
from ..model.device.classes import NOTHING, Want
from ..model.device.names import LAYERS
from ..model.disk import names as disk_names
from ..tools import files, qemu_img
from ..tools.run import work
from . import records

NO_WANTS: Mapping[int, Want] = {}
NO_BYTES: Mapping[Any, int] = {}

links = folders.layers_on_devices


def of_disk(directory: str, disk: int) -> folders.Folder:
    """Return the folder of a disk's layers."""
    return folders.at(disk_names.layers(disk_names.disk(directory, disk)))


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


def check_written(directory: str, disk: int) -> None:
    """Raise DeviceMissing if the device with the layers that a disk's record names is missing.

    While a guest moves a disk to another device (guest/go_over.py), and the record still names the
    delta, these are the layers on the old device: the new device holds none that would be lost.
    """
    folder = disk_names.layers(disk_names.disk(directory, disk))
    left, named = (
        device_names.left(folder),
        str((files.read_json(disk_names.record(directory, disk)) or {}).get("path", "")),
    )
    own = left if disk_names.is_delta(named) and os.path.lexists(left) else folder
    folders.at(own).require(f"the layers of {disk_names.disk_name(disk)}")


def listed(folder: str) -> list[str]:
    """List a directory of layers at one moment; raise DeviceMissing if its device is missing then."""
    files.refresh(os.path.dirname(folder))
    return folders.at(folder).listed(f"the layers of {os.path.basename(disk_names.disk_of(folder))}")


def is_away(path: str) -> bool:
    """Return True if the layers of a disk (its path, or theirs) are on a missing device."""
    return folders.at(path if disk_names.are_layers(path) else disk_names.layers(path)).is_away()


def check_disk(directory: str, disk: int) -> None:
    """Raise DeviceMissing if a device with layers of this disk, or with its base, is offline."""
    root, name, own = cache.root_of(directory), disk_names.disk_name(disk), of_disk(directory, disk)
    offline.look(root, (own.uuid,))
    own.require(f"the layers of {name}", is_written=True)
    record = records.as_found(directory, disk)
    if record and record.place.leases and record.image:
        base = folders.at(cache.named(root, record.image, record.image.generation).directory)
        if base.is_away():
            offline.look(root, (base.uuid,))
            base.require(f"the base of {name}")


def place(
    vm_dir: str, vm: int, disk: int, expected: int, near: str = "", want: Want = NOTHING
) -> folders.Folder:
    """Return the folder for the layers of a new disk, on a device or in the VM directory.

    The caller holds the VM. An existing place is kept, unless its device is missing.
    """
    placed = _placed(vm_dir, vm, disk, expected, near, want, NO_BYTES)
    ledger.note(placed.root, placed.path, expected)
    return placed


def _placed(
    vm_dir: str, vm: int, disk: int, expected: int, near: str, want: Want, coming: Mapping[str, int]
) -> folders.Folder:
    """Place a disk as `place` does; `coming`: bytes to expect on devices, by UUID, that are not noted yet."""
    found = of_disk(vm_dir, disk)
    if os.path.isdir(found.path):
        return found
    name = device_names.layers_name(vm, disk, os.urandom(6).hex())
    return folders.place(found.path, LAYERS, name, f"{vm}-{disk}", expected, near, want, coming)


def walk(directory: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield as os.walk does, also for the layers on devices."""
    own = links(directory)
    yield from os.walk(directory)
    for name in own:
        yield from os.walk(f"{directory}/{name}")


def fsync_tree(directory: str) -> None:
    """Flush a VM directory, with its layers on devices, to disk."""
    for folder in links(directory).values():
        files.fsync_tree(folder.directory)
    files.fsync_tree(directory)


def remove_tree(directory: str) -> None:
    """Remove a former VM directory, first its layers on devices; those on a missing device stay."""
    for folder in links(directory).values():
        folder.remove()
    files.remove_tree(directory)


def _own(directory: str) -> dict[str, folders.OnDevice]:
    """Return the links to devices of a directory that is to be read as it is.

    Raise DeviceMissing, or CannotMove if a disk is about to leave its device.
    """
    own = links(directory)
    leaving = [name for name in own if device_names.left_named(name) is not None]
    if leaving:
        here = f"{leaving[0]} of {directory} on {os.uname().nodename}"
        raise CannotMove(f"{here}: those layers are about to leave their device")
    for name, folder in own.items():
        folder.require(f"the layers of {disk_names.disk_of(name)}")
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
        uuid = _placed(directory, vm, disk, size, "", wants.get(disk, NOTHING), coming).uuid
        coming[uuid] = coming.get(uuid, 0) + size
    for disk in disks:
        placed = of_disk(directory, disk)
        ledger.note(placed.root, placed.path, sizes.get(disk, 0))
    return {name: folder.target for name, folder in links(directory).items()}


def arrived(directory: str, made: dict[str, str]) -> None:
    """Raise UnexpectedLink if a received link does not lead to its place; remove places without files."""
    for name in filter(disk_names.are_layers, os.listdir(directory)):
        path = f"{directory}/{name}"
        target = os.readlink(path) if os.path.islink(path) else ""
        if target and target != made.get(name):
            os.unlink(path)
            if name in made:
                # So that the removal of the directory finds the place.
                os.symlink(made[name], path)
            here = f"{name} of VM directory {directory} on {os.uname().nodename}"
            raise UnexpectedLink(f"{here} came as a symbolic link to {target}")
        folders.at(path).give_up()


def copy(source: str, directory: str, vm: int) -> None:
    """Copy a VM directory into another, layers on devices to new places."""
    argv = ["cp", "-a", "--sparse=always", "--reflink=auto", "--"]
    own = _own(source)
    names = sorted(os.listdir(source)) if own else ["."]
    work([*argv, *(f"{source}/{name}" for name in names if name not in own), directory])
    for name in own:
        disk = disk_names.disk_named(disk_names.disk_of(name))
        if disk is not None:
            place(directory, vm, disk, allocated(f"{source}/{name}"), want=_as_before(source, disk))
            os.makedirs(f"{directory}/{name}", exist_ok=True)
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
