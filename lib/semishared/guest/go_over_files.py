# SPDX-License-Identifier: Apache-2.0
"""The files of both sides of a disk that goes over (go_over.py): `after` gets the names, `before` others.

    over a base         K, a copy of the layer over the lease      K.kept, the layer
    to another device   disk.N.snap -> the copies of the layers    disk.N.left.snap -> the layers

No libvirt is asked here: a guest that runs has been followed (active_layer.py).
"""

from __future__ import annotations

import os
from typing import Iterator, List, Mapping, Sequence, Tuple

from ..model.base import names as base_names
from ..model.device import names as device_names
from ..model.device.names import Link
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..tools import files, layers, qemu_img
from ..tools.effects import point
from . import active_layer
from .active_layer import Switch, names_delta, with_delta


def lease_of(vm_dir: str, record: Record) -> str:
    """Return the path of a disk's lease on the base of its record; it need not exist."""
    base = base_names.base(disk_names.base_store_of(vm_dir), record.of_image.base_name)
    return base_names.lease(base, int(os.path.basename(vm_dir)), record.disk)


def outermost(record: Record) -> Iterator[Tuple[str, str]]:
    """Yield path and backing name of each layer of a disk that lies over no other layer."""
    folder = disk_names.layers(disk_names.plain(record.path))
    for number in layers.numbered(folder):
        name, _ = layers.backing_of(f"{folder}/{number}")
        if not disk_names.is_number(name):
            yield f"{folder}/{number}", name


def offer_base(vm_dir: str, switches: Sequence[Switch], copies: Mapping[str, str]) -> None:
    """Give the staged `copies` the names of their layers; the records become those `after`, with deltas."""
    active_layer.note(vm_dir, switches)
    point("switch noted")
    for path, staged in copies.items():
        _replace(path, staged)
    for switch in switches:
        active_layer.write(vm_dir, with_delta(switch.after))
    point("layers lie over bases")


def _replace(path: str, staged: str) -> None:
    """Give a staged file all names of a layer; the layer keeps a second name for each."""
    folder = os.path.dirname(path)
    numbers = [name for name in sorted(os.listdir(folder)) if disk_names.is_number(name)]
    names = [name for name in numbers if os.path.samefile(f"{folder}/{name}", path)]
    for name in names:
        files.unlink(disk_names.with_second_name(f"{folder}/{name}"))
        os.link(f"{folder}/{name}", disk_names.with_second_name(f"{folder}/{name}"))
        point("layer kept")
    for name in names[1:]:
        again = files.staged_name(f"{folder}/{name}")
        os.link(staged, again)
        os.rename(again, f"{folder}/{name}")
    os.rename(staged, f"{folder}/{names[0]}")
    files.fsync(folder)
    point("layer replaced")


def take_back(vm_dir: str, before: Record) -> None:
    """Give a disk's layers over its store their names back; its record names the delta over them."""
    for path, layer in _kept(before):
        os.rename(path, layer)
        # rename() does nothing if both names are of one file.
        files.unlink(path)
        files.fsync(os.path.dirname(path))
        point("layer taken back")
    active_layer.write(vm_dir, with_delta(before))


def let_go(vm_dir: str, after: Record) -> None:
    """Have a disk lie over its base alone: what does not yet is laid over it, the former layers go."""
    lease = lease_of(vm_dir, after)
    for path, name in outermost(after):
        if name != lease:
            qemu_img.lay_over(path, lease, after.of_image.format)
            files.fsync(path)
            point("layer laid over its base")
    active_layer.write(vm_dir, with_delta(after) if names_delta(vm_dir, after) else after)
    for path, _ in _kept(after):
        files.unlink(path)
        point("layer let go")


def _kept(record: Record) -> Sequence[Tuple[str, str]]:
    """Return the second names of a disk's layers, each with the first one."""
    folder = disk_names.layers(disk_names.plain(record.path))
    paths = [f"{folder}/{name}" for name in sorted(os.listdir(folder))]
    return [(path, disk_names.of_second_name(path)) for path in paths if disk_names.of_second_name(path)]


# -- to another device ------------------------------------------------------------------------------


def offer_device(vm_dir: str, disk: int, new: Link) -> None:
    """Give the disk's names to the copies of its layers, in another place, `new`.

    QEMU opens the copy by the disk's own names, as libvirt keeps the names for later. It has the original
    open already, and no process opens that by name meanwhile.
    """
    folder = disk_names.layers(disk_names.disk(vm_dir, disk))
    files.remove_staged(*os.path.split(device_names.left(folder)))
    files.symlink(os.readlink(folder), device_names.left(folder))
    point("old device noted")
    files.remove_staged(*os.path.split(folder))
    files.symlink(device_names.target_of(new), folder)
    point("layers have their names on the new device")


def moving(vm_dir: str) -> List[int]:
    """Return the disks with links to the devices that they are about to leave."""
    entries = os.listdir(vm_dir) if os.path.isdir(vm_dir) else ()
    found = {device_names.left_named(entry): entry for entry in entries}
    return sorted(
        disk for disk, entry in found.items() if disk is not None and os.path.islink(f"{vm_dir}/{entry}")
    )


def put_all_back(vm_dir: str) -> None:
    """Settle the moves to other devices in a VM directory whose guest does not run."""
    for disk in moving(vm_dir):
        put_back(vm_dir, disk)


def put_back(vm_dir: str, disk: int) -> None:
    """Settle the move of one disk, on which there is no job; without its record both sides stay."""
    folder = disk_names.layers(disk_names.disk(vm_dir, disk))
    link, record = device_names.left(folder), files.read_json(disk_names.record(vm_dir, disk))
    if not record:
        return
    was, now = os.readlink(link), os.readlink(folder)
    if was != now and disk_names.is_delta(str(record.get("path", ""))):
        files.remove_staged(*os.path.split(folder))
        files.symlink(was, folder)
        point("layers have their names on the old device again")
        was, now = now, was
    os.unlink(link)
    files.fsync(vm_dir)
    point("device switch ended")
    if was != now:
        # Layers without a link; where their device is not there, gc finds them.
        other = device_names.linked(was)
        directory = device_names.directory(disk_names.base_store_of(vm_dir), other) if other else ""
        if directory and os.path.isdir(directory):
            files.remove_folder(directory, ignore_errors=True)
        point("layers gone from the other device")
