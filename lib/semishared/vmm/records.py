# SPDX-License-Identifier: Apache-2.0
"""Records of a VM's disks for hypervisor actions, and a check of what they name before QEMU opens it."""

from __future__ import annotations

import os
from typing import Iterable, Optional

from ..errors import BadRecord, MissingImage, SemisharedError, UnexpectedLink, UnsafeImage, here
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.store import dir_names
from ..model.vm.hypervisor_steps import Recorded
from ..named import NamedTuple


class Noted(NamedTuple):
    """What a note, made before each boot, says of a share that the host serves."""

    marker: str = ""
    born: int = -1
    readonly: Optional[bool] = None
    """oned's READONLY of the image; None: unknown."""


def read_records(vm_dir: str, numbers: Iterable[int]) -> list[Record]:
    """Return the existing records of the disks `numbers`; raise BadRecord for a damaged one."""
    records = []
    for number in numbers:
        path = disk_names.record(vm_dir, number)
        try:
            with open(path, "rb") as file:
                records.append(Record.parse(number, file.read(disk_names.JSON_BYTES)))
        except FileNotFoundError:
            pass
        except OSError as e:
            raise BadRecord(f"the record of disk {number}: {e.strerror}: {path}") from None
        except BadRecord as e:
            raise BadRecord(f"{here(path)}: {e.detail}") from None
    return records


def as_data(vm_dir: str, disks: Optional[tuple[int, ...]]) -> Recorded:
    """Return the `records` of these disks; None stands for all that have one."""
    found = read_records(vm_dir, numbers_recorded(vm_dir) if disks is None else disks)
    return Recorded([record.to_data() for record in found], os.path.lexists(disk_names.marks(vm_dir)))


def numbers_recorded(vm_dir: str) -> list[int]:
    """Return the numbers of the disks that have a record."""
    found = map(disk_names.recorded, os.listdir(disk_names.records(vm_dir)))
    return sorted(number for number in found if number is not None)


def notes(vm_dir: str) -> list[str]:
    """Return the notes that disk/recovery.py would handle, and the lock's name if an action has the turn.

    It does not load that module, as there are mostly no notes.
    """
    try:
        found = list(filter(disk_names.is_unsettled, os.listdir(disk_names.records(vm_dir))))
    except (FileNotFoundError, NotADirectoryError):
        return []
    vm = os.path.basename(vm_dir)
    if not disk_names.is_number(vm):
        return found
    lock = disk_names.disks_lock(disk_names.base_store_of(vm_dir), int(vm))
    if os.path.exists(lock):
        from ..tools import locks

        if locks.is_held(lock):
            found.append(os.path.basename(lock))
    return found


def clients(vm_dir: str) -> list[int]:
    """Return the disks that are shares which the guest itself mounts; raise BadRecord as share_note."""
    return share_note(vm_dir)[0]


def share_note(vm_dir: str) -> tuple[list[int], dict[int, Noted]]:
    """Return these disks, and by image what is noted of shares that the host serves.

    Raise BadRecord for an unintelligible note. Without a CONTEXT, or if the VM last booted under a version
    without the note, there is none.
    """
    import json

    from ..model.share import names as share_names

    path = share_names.clients(vm_dir)
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read(disk_names.JSON_BYTES))
    except FileNotFoundError:
        return [], {}
    except (OSError, ValueError, RecursionError) as e:
        raise BadRecord(f"{path}: {e}") from None
    known = data if isinstance(data, dict) and data.get("version") == 1 else {}
    disks, roots = known.get("disks"), known.get("roots", {})
    try:
        if isinstance(disks, list) and all(type(disk) is int for disk in disks) and isinstance(roots, dict):
            return disks, {int(image): _noted(*noted) for image, noted in roots.items()}
    except (TypeError, ValueError):
        pass
    raise BadRecord(f"{path} is no note that this version understands")


def _noted(marker: str, born: int, readonly: bool = False) -> Noted:
    return Noted(str(marker), int(born), bool(readonly))


def read_chain(path: str, record: Record) -> list[tuple[str, str]]:
    """Return the backing files of a disk's qcow2 file `path`, by the headers; raise if one is not allowed."""
    from ..tools import layers

    try:
        in_place = record.place.is_image
        top = os.path.realpath(path) if in_place else path
        found = layers.below(top, "qcow2", over_network=bool(record.over))
        if in_place and found:
            raise UnsafeImage(f"image {path} has a backing file")
        if record.place.is_clone:
            _check_chain(path, found, dir_names.link(dir_names.side_of(path)))
        elif record.place.is_remote:
            from ..disk import remote_first

            _check_chain(path, found, remote_first.link_of(record))
            if not record.over and (not found or found[-1][0] != remote_first.link_of(record)):
                raise UnsafeImage(f"{path} does not lie over {record.of_image.source}")
    except SemisharedError as e:
        if isinstance(e, MissingImage) and record.is_local:
            _check_device(os.path.dirname(disk_names.plain(path)), record)
        raise type(e)(f"disk {record.disk}: {e.detail}") from None
    return found


def _check_chain(path: str, chain: list[tuple[str, str]], image: str) -> None:
    """Raise UnsafeImage unless `path` lies over layers beside it and, last, over the link to its `image`.

    Every host can write the headers of a clone on a store, and QEMU gets access to all files of the chain.
    """
    folder, above = os.path.dirname(path), path
    for below, _ in chain:
        name = below[len(folder) + 1 :] if below.startswith(f"{folder}/") else ""
        is_layer = disk_names.is_number(name)
        above, earlier = below, above
        if earlier == image or not (is_layer or below == image):
            raise UnsafeImage(f"{path} lies over {below}, which is neither a layer of its disk nor its image")


def check_disk(vm_dir: str, record: Record) -> None:
    """Raise unless a disk exists and is what its record says; QEMU does not run yet."""
    if record.network:
        return  # it has no file on this host; QEMU opens it over the network
    path = disk_names.disk(vm_dir, record.disk)
    link = os.path.normpath(os.path.join(vm_dir, os.readlink(path))) if os.path.islink(path) else ""
    link, inside = "/" + link.lstrip("/") if link else "", os.path.normpath("/" + vm_dir.strip("/"))
    if record.is_local and link and not link.startswith(f"{inside}/"):
        raise BadRecord(f"disk {record.disk} is recorded as {record.how} but is a link to {link}")
    # A killed action may have left the link at an older layer; only the record says which one is active.
    leads = link == record.path
    if record.place.is_clone:
        leads = os.path.dirname(record.path) == disk_names.layers(link)
    if not record.is_local and not leads:
        raise BadRecord(f"disk {record.disk} is recorded as {record.path} but {link or 'no link'} is there")
    if not record.is_local:
        _check_on_store(record)
    elif record.place.is_remote:
        from ..disk import remote_first

        remote_first.check(record)
    is_on_device = record.is_local and os.path.islink(disk_names.layers(path))
    if is_on_device:
        # First: a look for a file on a hung device would wait for ever.
        _check_device(vm_dir, record)
    for name in (path, record.active(path) if record.is_local else record.path):
        if not os.path.exists(name):
            _check_device(vm_dir, record)
            shown = name if record.is_local else record.path
            raise MissingImage(f"disk {record.disk}: {shown} is not there on {os.uname().nodename}")
    if record.is_local and not is_on_device and os.statvfs(record.active(path)).f_flag & os.ST_RDONLY:
        _check_device(vm_dir, record)


def _check_device(vm_dir: str, record: Record) -> None:
    """Raise DeviceMissing if a disk is missing because its device is."""
    from ..disk import on_devices

    on_devices.check_disk(vm_dir, record.disk)


def _check_on_store(record: Record) -> None:
    """Raise UnexpectedLink for a link on the store outside the layout: libvirt would follow any.

    A host that can write to the store could add one a moment later: only QEMU's confinement restricts what it
    opens.
    """
    side = dir_names.side_of(record.path) if record.place.backing == "store" else os.path.dirname(record.path)
    name, own = os.path.basename(side), os.path.dirname(side)
    suspects = [own, side, f"{os.path.dirname(own)}/{name}"]
    if record.place.backing == "store":
        suspects += [dir_names.clones(side), os.path.dirname(record.path), record.path]
    link = dir_names.link(side)
    if os.path.islink(link) and os.readlink(link) != dir_names.link_target(name):
        suspects.append(link)
    for path in suspects:
        if os.path.islink(path):
            raise UnexpectedLink(f"{here(path)} is a symbolic link to {os.readlink(path)}")
