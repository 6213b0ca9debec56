# SPDX-License-Identifier: Apache-2.0
"""Records of a VM's disks for hypervisor actions, and a check of what they name before QEMU opens it."""

from __future__ import annotations

import os
from typing import Iterable, Optional

from ..errors import BadRecord, MissingImage, SemisharedError, UnexpectedLink, UnsafeImage
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.store import dir_names
from ..named import NamedTuple


class Noted(NamedTuple):
    """What is noted of a share that the host gives, before each boot."""

    marker: str = ""
    born: int = -1
    readonly: Optional[bool] = None
    """Whether oned's image is; None: nobody has asked it."""


def read_records(vm_dir: str, numbers: Iterable[int]) -> list[Record]:
    """Return the records there are of the disks `numbers`; raise BadRecord for one that cannot be
    believed.
    """
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
            raise BadRecord(f"{path} on {os.uname().nodename}: {e.detail}") from None
    return records


def as_data(vm_dir: str, disks: Optional[tuple[int, ...]]) -> dict[str, object]:
    """Return the `records` of these disks, None: of all that have one."""
    found = read_records(vm_dir, numbers_recorded(vm_dir) if disks is None else disks)
    return {"records": [record.to_data() for record in found]}


def numbers_recorded(vm_dir: str) -> list[int]:
    """Return the numbers of the disks that have a record."""
    return sorted(
        number
        for number in map(disk_names.recorded, os.listdir(disk_names.records(vm_dir)))
        if number is not None
    )


def notes(vm_dir: str) -> list[str]:
    """Return the names of the notes that disk/recovery.py would see to, and of the lock if somebody is at
    work on the disks.

    Without loading that, for mostly there are none.
    """
    try:
        found = list(filter(disk_names.is_unsettled, os.listdir(disk_names.records(vm_dir))))
    except (FileNotFoundError, NotADirectoryError):
        return []
    vm = os.path.basename(vm_dir)
    lock = (
        disk_names.disks_lock(disk_names.base_store_of(vm_dir), int(vm)) if disk_names.is_number(vm) else ""
    )
    if lock and os.path.exists(lock):
        from ..tools import locks

        if locks.is_held(lock):
            found.append(os.path.basename(lock))
    return found


def clients(vm_dir: str) -> list[int]:
    """Return which of the VM's disks are shares whose client the guest itself is; raise BadRecord for a note
    that nobody understands.
    """
    return share_note(vm_dir)[0]


def share_note(vm_dir: str) -> tuple[list[int], dict[int, Noted]]:
    """Return these disks, and by image what is noted of shares that the host gives.

    Raise BadRecord. Of VMs that have booted before there was such a note, and of those without a CONTEXT,
    nothing is noted.
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
    if (
        not isinstance(disks, list)
        or not all(type(disk) is int for disk in disks)
        or not isinstance(roots, dict)
    ):
        raise BadRecord(f"{path} is no note that this version understands")
    try:
        return disks, {int(image): _noted(*noted) for image, noted in roots.items()}
    except (TypeError, ValueError):
        raise BadRecord(f"{path} is no note that this version understands") from None


def _noted(marker: str, born: int, readonly: bool = False) -> Noted:
    return Noted(str(marker), int(born), bool(readonly))


def read_chain(path: str, record: Record) -> list[tuple[str, str]]:
    """Return what the qcow2 file `path` of a disk lies over, as its headers say it now; raise if that is not
    plain.
    """
    from ..tools import layers

    try:
        in_place = record.place.is_image
        found = layers.below(
            os.path.realpath(path) if in_place else path, "qcow2", over_network=bool(record.over)
        )
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
    """Raise UnsafeImage if the layer `path` lies over anything but layers beside it and, last, its `image`,
    by the link to it.

    Every host can write the headers of a clone on a store, and what is in the chain QEMU is let open.
    """
    folder, above = os.path.dirname(path), path
    for below, _ in chain:
        name = below[len(folder) + 1 :] if below.startswith(f"{folder}/") else ""
        is_layer = disk_names.is_number(name)
        above, earlier = below, above
        if earlier == image or not (is_layer or below == image):
            raise UnsafeImage(f"{path} lies over {below}, which is neither a layer of its disk nor its image")


def check_disk(vm_dir: str, record: Record) -> None:
    """Raise unless the disk is what its record says and there: nothing has been started yet."""
    if record.network:
        return  # no file of it is on this host; who opens it will see
    path = disk_names.disk(vm_dir, record.disk)
    link = os.path.normpath(os.path.join(vm_dir, os.readlink(path))) if os.path.islink(path) else ""
    link, inside = "/" + link.lstrip("/") if link else "", os.path.normpath("/" + vm_dir.strip("/"))
    if record.is_local and link and not link.startswith(f"{inside}/"):
        raise BadRecord(f"disk {record.disk} is recorded as {record.how} but is a link to {link}")
    # An action that was killed may have left the link at an older layer; which one is active, the record
    # alone says.
    leads = (
        os.path.dirname(record.path) == disk_names.layers(link)
        if record.place.is_clone
        else link == record.path
    )
    if not record.is_local and not leads:
        raise BadRecord(f"disk {record.disk} is recorded as {record.path} but {link or 'no link'} is there")
    if not record.is_local:
        _check_on_store(record)
    elif record.place.is_remote:
        from ..disk import remote_first

        remote_first.check(record)
    is_on_device = record.is_local and os.path.islink(disk_names.layers(path))
    if is_on_device:
        # First: whoever looks for a file on one that hangs waits for ever.
        _check_device(vm_dir, record)
    for name in (path, record.active(path) if record.is_local else record.path):
        if not os.path.exists(name):
            _check_device(vm_dir, record)
            shown = name if record.is_local else record.path
            raise MissingImage(f"disk {record.disk}: {shown} is not there on {os.uname().nodename}")
    if record.is_local and not is_on_device and os.statvfs(record.active(path)).f_flag & os.ST_RDONLY:
        _check_device(vm_dir, record)


def _check_device(vm_dir: str, record: Record) -> None:
    """Raise DeviceMissing if that is why a disk is not there."""
    from ..disk import on_devices

    on_devices.check_disk(vm_dir, record.disk)


def _check_on_store(record: Record) -> None:
    """Raise UnexpectedLink if a link on the store is none of the layout's: libvirt, which follows all, is to
    open it next.

    Whoever can write the store can do that a moment later still: what QEMU may open is for its confinement to
    say.
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
            raise UnexpectedLink(f"{path} on {os.uname().nodename} is a symbolic link to {os.readlink(path)}")
