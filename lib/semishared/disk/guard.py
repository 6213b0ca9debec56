# SPDX-License-Identifier: Apache-2.0
"""What may lie in a VM directory, and which symbolic links there are (docs/reference/names.md).

    disk.N                                  -> disk.N.snap/K               the active layer of an own disk
    disk.N.snap                             -> its place on a device       (model/device/names.py)
    disk.N                                  -> <store>/.semishared/NAME/image | clones/VM-N-CLOUD
    <store>/.semishared/NAME/image          -> ../../NAME
    <store>/.semishared/NAME/clones/VM-N-CLOUD   -> VM-N-CLOUD.snap/K

A VM directory is written by one machine alone, but comes from another when the VM moves. So it is looked at
whole before an action works in it: a handful of names. Everything else that is a link is refused, whoever
made it.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Any, Callable, Tuple

from .. import store
from ..device import devices
from ..errors import BadRecord, UnexpectedFile, UnexpectedLink
from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.steps import DiskRef, ImageRef, is_look
from ..model.store import dir_names
from ..tools import beneath, layers
from . import history, on_devices, records, retained_diffs

DEEPEST = 4
STOCK = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z"
MANY = 10_000
"""Names in one VM directory beyond which somebody plays games."""


def _here() -> str:
    return os.uname().nodename


def check_vm_dir(path: str, vm: int, is_followed: Callable[[int], bool] = lambda disk: True) -> None:
    """Raise UnexpectedLink or UnexpectedFile if a VM directory has anything that the layout has not.

    It need not be there. Disks without a record of ours are another driver's: their links may lead to any
    datastore, and where nobody here follows the link of a disk, anywhere (to a device, as the drivers of LVM
    have it).
    """
    beneath.refuse_link(path)
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise UnexpectedFile(f"{beneath.readable(path)} on {_here()} is no directory")
    except FileNotFoundError:
        return
    links: list[tuple[str, str]] = []
    _look(path, "", links)
    for name, target in links:
        _check_link(path, vm, name, target, is_followed)


def check_place(path: str) -> None:
    """Raise UnexpectedLink if a VM directory or its records' is a link: a removal follows none inside."""
    beneath.refuse_link(path)
    beneath.refuse_link(disk_names.records(path))


REMOVALS = (
    "RemoveVm",
    "RemoveDisk",
    "EndSession",
    "EndBackup",
    "ForgetDisk",
    "ReleaseVm",
    "ClearVm",
    "UnmarkVm",
    "LookForVm",
)
"""Steps that clean up whatever lies there; they follow nothing."""


OF_DISKS = ("BeginChange", "ForgetSnapshot", "GrowImage", "KeepSnapshot", "RemoveImage", "RevertImage")
"""Steps on images to which an action on a VM's disk comes: the image may be its clone, and of a VM that was
made anew.
"""


TAKES_ALONG = ("SendVm", "RenameVm", "SaveDisk", "FillImage", "BackUp", "RestoreDisk")
"""Steps by which what a directory holds becomes the VM's elsewhere, or somebody's image, or leads to one that
is replaced.
"""


def guard(step: Tuple[Any, ...], warn: Callable[[str], None], seq: int = history.UNKNOWN) -> None:
    """Look at the VM directories and the base store that a step works in, before it does; raise as
    `check_vm_dir`.

    Raise LateAction for a step that changes something and was planned at a SEQ before that of a directory, or
    of a clone that a bridge has made.
    `warn` is told what cannot be told of them.
    """
    name, disk, sent = type(step).__name__, getattr(step, "disk", None), None
    places: list[tuple[str, int]] = []
    if isinstance(disk, DiskRef):
        places.append((disk.vm_dir, disk.vm))
    vm = getattr(step, "vm", -1)
    for field in ("vm_dir", "source" if name == "RenameVm" else "vm_dir"):
        if isinstance(getattr(step, field, None), str):
            places.append((getattr(step, field), vm))
    if name in ("CopyFile", "ReceiveFile"):
        path, file = os.path.split(step.path)  # type: ignore[attr-defined]
        sent = disk_names.disk_named(file)
        places.append(
            (path, int(os.path.basename(path)) if disk_names.is_number(os.path.basename(path)) else vm)
        )
    for path, owner in places:
        if not is_look(step):
            history.refuse_late(owner, path, seq)
        if name not in REMOVALS:
            numbers = (
                [int(number) for number in getattr(step, "disks", ())]
                if name == "BackUp"
                else [disk.disk]
                if disk
                else []
            )
            numbers += [sent] if sent is not None else []
            check_vm_dir(path, owner, numbers.__contains__)
            for number in numbers:
                check_below(path, owner, number)
                if not is_look(step):
                    refuse_late_clone(path, number, seq)
            # What was kept is nobody's but who asks for it by name.
            if name in TAKES_ALONG and os.path.isdir(path) and not retained_diffs.is_kept(path):
                from . import epoch_check

                unknown = epoch_check.check(owner, path, records.given.get(owner))
                if unknown:
                    warn(unknown)
        elif name != "RemoveVm":
            check_place(path)
    location = [getattr(step, "root", ""), *(disk_names.base_store_of(path) for path, _ in places)]
    for root in {root for root in location if root}:
        for part in base_names.PARTS:
            beneath.refuse_link(f"{root}/{part}")
    if seq >= 0 and name in OF_DISKS and step.image.access.can.has_bridge:  # type: ignore[attr-defined]
        image: ImageRef = step.image  # type: ignore[attr-defined]
        store.bridged(image.access).refuse_late(image.source, seq)


def check_below(path: str, vm: int, disk: int) -> None:
    """Raise UnexpectedLink if a disk, its lease, its image or its clone there is a link."""
    record = records.as_found(path, disk)
    if record is None or record.network:
        return
    records.check_place(record, vm)
    if record.place.leases and record.image:
        root = disk_names.base_store_of(path)
        devices.check(root, _lease(root, record.image, vm, disk)[len(root) + 1 :])
    if record.is_local:
        return
    datastore, name = os.path.split(record.of_image.source)
    side = dir_names.side(name)
    beneath.check(datastore, name)
    beneath.check(datastore, disk_names.layers(name))
    beneath.check(datastore, side)
    image = dir_names.link(f"{datastore}/{side}")
    if os.path.islink(image) and os.readlink(image) != dir_names.link_target(name):
        beneath.refuse_link(image)
    if record.place.is_clone:
        clone = f"{dir_names.clones(side)}/{os.path.basename(disk_names.plain(record.path))}"
        folder, link = disk_names.layers(f"{datastore}/{clone}"), f"{datastore}/{clone}"
        beneath.check(datastore, disk_names.layers(clone))
        for entry in os.scandir(folder) if os.path.isdir(folder) else ():
            beneath.refuse_link(entry.path)
        if os.path.islink(link) and not _is_own_layer(os.path.basename(clone), os.readlink(link)):
            beneath.refuse_link(link)


def refuse_late_clone(path: str, disk: int, seq: int) -> None:
    """Raise LateAction if a disk's clone on a mounted store is of a later SEQ than this one, of a plan:
    another host has that VM.
    """
    record = records.as_found(path, disk) if seq >= 0 else None
    if record and record.place.is_clone and not record.network:
        from ..store.dir import clones

        clones.refuse_late(disk_names.plain(record.path), seq)


def _lease(root: str, image: ImageRef, vm: int, disk: int) -> str:
    """Return the path of a disk's lease in the base store `root`."""
    return base_names.lease(
        base_names.base(root, base_names.name(image.store, image.id, image.generation)), vm, disk
    )


def _look(top: str, below: str, links: list[tuple[str, str]], names: int = 0) -> int:
    """Find the links below a directory; raise UnexpectedFile for any other special file."""
    try:
        found = list(os.scandir(f"{top}/{below}" if below else top))
    except PermissionError:
        return names  # whatever is in there, nothing of ours goes there
    for entry in found:
        name = f"{below}/{entry.name}" if below else entry.name
        names += 1
        if names > MANY or name.count("/") >= DEEPEST:
            raise UnexpectedFile(f"{beneath.readable(top)} on {_here()} holds more than a VM has: {name}")
        if entry.is_symlink():
            links.append((name, os.readlink(entry.path)))
        elif entry.is_dir(follow_symlinks=False):
            names = _look(top, name, links, names)
        elif not entry.is_file(follow_symlinks=False) and not _is_foreign_socket(name, entry):
            raise UnexpectedFile(f"{beneath.readable(top)}/{name} on {_here()} is no plain file")
    return names


def _is_foreign_socket(name: str, entry: os.DirEntry[str]) -> bool:
    """Tell whether an entry is a socket that somebody else listens on in the VM directory."""
    return not (name.startswith(".") or disk_names.is_of_disks(name)) and stat.S_ISSOCK(
        entry.stat(follow_symlinks=False).st_mode
    )


def _check_link(path: str, vm: int, name: str, target: str, is_followed: Callable[[int], bool]) -> None:
    folder, _, last = name.rpartition("/")
    if disk_names.is_staged(last):
        # left by somebody who was killed; nobody follows what is not published, and the next to publish
        # unlinks it
        return
    disk = disk_names.disk_named(last) if not folder else None
    if (
        disk is not None
        and _is_own_layer(last, target)
        or not folder
        and on_devices.is_own(path, last, target, vm)
    ):
        return
    # What the stock drivers have: a directory of layers that contains itself, and the second name of a disk.
    if target == "." and folder == last and disk_names.are_layers(folder):
        return
    if (
        not folder
        and not last.startswith(".")
        and re.match(r"disk\.[0-9]+[A-Za-z0-9._-]*\Z", target)
        and disk is None
    ):
        return
    if disk is not None and _leads_to_its_place(path, vm, disk, target, is_followed):
        return
    raise UnexpectedLink(
        f"{beneath.readable(path)}/{name} on {_here()} is a symbolic link to {target}, where no "
        f"disk of VM {vm} is"
    )


def _is_own_layer(disk: str, target: str) -> bool:
    layer = disk_names.layer_of(target)
    return bool(layer) and target == disk_names.layer(disk, layer)


def _leads_to_its_place(
    path: str, vm: int, disk: int, target: str, is_followed: Callable[[int], bool]
) -> bool:
    """Tell whether a link out of the VM directory leads where the disk's record says; without a record, as
    `check_vm_dir` has it.
    """
    if os.path.islink(disk_names.records(path)) or os.path.islink(disk_names.record(path, disk)):
        return False
    record = records.as_found(path, disk)
    if record is None and not is_followed(disk):
        return True
    if record is None:
        location = disk_names.location_of(path)
        below = target[len(location) + 1 :].split("/") if target.startswith(f"{location}/") else []
        if len(below) == 3 and disk_names.are_layers(below[1]) and disk_names.is_number(below[2]):
            del below[2]  # a snapshot of the stock drivers
        # Two names: what is deeper is another VM's.
        return len(below) == 2 and disk_names.is_number(below[0]) and bool(re.match(STOCK, below[1]))
    if record.network or record.is_local:
        return False
    records.check_place(record, vm)
    return target == (record.path if record.place.is_image else disk_names.plain(record.path))


def check_received(staging: str, vm: int, vm_dir: str, foreign: Tuple[int, ...]) -> None:
    """Raise unless what was unpacked in `staging`, to become `vm_dir`, is a VM directory and nothing else.

    What another host sends is a tar stream of its making: links, devices, set-user-id programs, second names
    of files outside. Permissions are made plain; layers must lie over one another, or over the lease that
    they will have here. Where the disks lead that oned says are another driver's (`foreign`) is that driver's
    affair.
    """
    check_vm_dir(staging, vm, lambda disk: disk not in foreign)
    names: dict[tuple[int, int], int] = {}
    counts: dict[tuple[int, int], tuple[int, str]] = {}
    for folder, folders, entries in on_devices.walk(staging):
        for name in (*folders, *entries):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                continue
            if status.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | stat.S_IWOTH):
                os.chmod(path, stat.S_IMODE(status.st_mode) & 0o775)
            if stat.S_ISREG(status.st_mode):
                key = status.st_dev, status.st_ino
                names[key] = names.get(key, 0) + 1
                counts[key] = status.st_nlink, path
    for key, (count, path) in counts.items():
        if names[key] != count:
            raise UnexpectedFile(f"{path} on {_here()} has a name outside of what was received")
    side = disk_names.records(staging)
    for number in records.given.get(vm, ()):
        own = disk_names.disk(staging, number)
        # What did not arrive at all nobody opens: whoever starts the VM misses it.
        there = os.path.lexists(own) or os.path.lexists(disk_names.layers(own))
        if there and not os.path.lexists(disk_names.record(staging, number)):
            raise BadRecord(f"disk {number} of VM {vm} came to {_here()} without its record")
    for disk in map(disk_names.recorded, os.listdir(side) if os.path.isdir(side) else []):
        if disk is not None:
            _check_layers(staging, disk, vm, vm_dir)


def _check_layers(staging: str, disk: int, vm: int, vm_dir: str) -> None:
    """Raise UnexpectedFile if a received layer of ours lies over any other file than a layer beside it or its
    own lease.
    """
    record = records.as_found(staging, disk)
    if record is None or record.network:
        return
    records.check_place(record, vm)
    if not record.is_local:
        return

    if os.path.lexists(disk_names.delta_note(staging)):
        from ..guest import active_layer

        # A delta that stayed where its guest is: what it lies over counts, and gets a new one here.
        record = active_layer.arrived(staging, record)
        records.check_place(record, vm)
    plain = disk_names.disk(staging, disk)
    folder = disk_names.layers(plain)
    format, layer = record.format, disk_names.layer_of(record.path)
    found = {plain: format} if os.path.isfile(plain) and not os.path.islink(plain) else {}
    if layer and os.path.lexists(f"{folder}/{layer}"):
        tree = layers.tree(folder, int(layer), format, record.raw_layer)
        found.update({f"{folder}/{number}": str(described["format"]) for number, described in tree.items()})
    for path, kind in found.items():
        # A raw one's first bytes are its guest's, to be believed in nothing.
        trouble = layers.reaches_out(path) if kind != "raw" else ""
        if (
            trouble
            and not _lay_over_lease(path, record, trouble, vm, vm_dir)
            and not _lies_over_store(path, record, trouble)
        ):
            raise UnexpectedFile(
                f"{os.path.basename(path)} of disk {disk} of VM {vm}, as it came to {_here()}, has {trouble}"
            )


def _lies_over_store(path: str, record: Record, trouble: str) -> bool:
    if not record.place.is_remote:
        return False
    from . import remote_first

    return remote_first.lies_over_it(record, path, trouble)


def _lay_over_lease(path: str, record: Record, trouble: str, vm: int, vm_dir: str) -> bool:
    """Let an overlay lie over the lease that it has here, if its only `trouble` is its lease where it was;
    tell whether it does.
    """
    if not record.place.leases or record.image is None:
        return False
    if not base_names.named(record.image.base_name):
        return False
    root = disk_names.base_store_of(vm_dir)
    here = _lease(root, record.image, vm, record.disk)
    name, format = layers.backing_of(path)
    if trouble != layers.outside(name):
        return False
    if name == here:
        return True
    if not name.endswith(here[len(disk_names.location_of(vm_dir)) :]) or format not in ("raw", "qcow2"):
        return False
    from ..tools import qemu_img

    qemu_img.lay_over(path, here, format)
    return True
