# SPDX-License-Identifier: Apache-2.0
"""What may lie in a VM directory, and which symbolic links there are (docs/reference/names.md).

    disk.N                                  -> disk.N.snap/K               the active layer of an own disk
    disk.N.snap                             -> its place on a device       (model/device/names.py)
    disk.N                                  -> <store>/.semishared/NAME/image | clones/VM-N-CLOUD
    <store>/.semishared/NAME/image          -> ../../NAME
    <store>/.semishared/NAME/clones/VM-N-CLOUD   -> VM-N-CLOUD.snap/K

One machine alone writes to a VM directory, but another one sends it when the VM moves. So every action first
looks at all of it, a handful of names, and refuses any other link, whatever made it.
"""

from __future__ import annotations

import os
import re
import stat
from typing import Callable, Tuple

from .. import store
from ..device import folders
from ..errors import BadRecord, UnexpectedFile, UnexpectedLink
from ..model.base import names as base_names
from ..model.disk import names as disk_names
from ..model.disk.record import Record
from ..model.steps import DiskRef, ImageRef, Step, is_look
from ..model.store import dir_names
from ..tools import beneath, layers
from . import history, on_devices, records, retained_diffs

DEEPEST = 4
STOCK = r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z"
MANY = 10_000
"""Names in one VM directory beyond which its sender is not trusted."""


def _here() -> str:
    return os.uname().nodename


def check_vm_dir(path: str, vm: int, is_followed: Callable[[int], bool] = lambda disk: True) -> None:
    """Raise UnexpectedLink or UnexpectedFile if a VM directory has anything outside the layout.

    The directory may be missing. A disk without a record is another driver's: its link may lead to any
    datastore, and anywhere if no step here follows it (LVM drivers link to a device).
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
    """Raise UnexpectedLink if a VM directory, or its records', is a link; removals follow none inside."""
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
"""Steps that remove what is there and follow no link."""


OF_DISKS = ("BeginChange", "ForgetSnapshot", "GrowImage", "KeepSnapshot", "RemoveImage", "RevertImage")
"""Steps on an image that serve a VM's disk: the image may be its clone, and the VM recreated since."""


TAKES_ALONG = ("SendVm", "RenameVm", "SaveDisk", "FillImage", "BackUp", "RestoreDisk")
"""Steps that carry a directory's content to another host or an image, or replace a disk through its link."""


def guard(step: Step, warn: Callable[[str], None], seq: int = history.UNKNOWN) -> None:
    """Check the VM directories and the base store of a step before it runs; raise as `check_vm_dir`.

    Raise LateAction for a changing step whose SEQ is below that of a directory, or of a clone that a bridge
    has made. `warn` gets what cannot be determined.
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
            # A kept diff belongs to no VM: it is used only by its name.
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
    if seq >= 0 and name in OF_DISKS:
        image: ImageRef = step.image  # type: ignore[attr-defined]
        store.of(image.access).refuse_late(image, seq)


def check_below(path: str, vm: int, disk: int) -> None:
    """Raise UnexpectedLink if the file of a disk, its lease, its image or its clone is a link."""
    record = records.as_found(path, disk)
    if record is None or record.network:
        return
    records.check_place(record, vm)
    if record.place.leases and record.image:
        root = disk_names.base_store_of(path)
        folders.check(root, _lease(root, record.image, vm, disk)[len(root) + 1 :])
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
    """Raise LateAction if a disk's clone on a mounted store is of a later SEQ: another host has the VM."""
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
    """Collect the links below a directory in `links`; raise UnexpectedFile for any other special file."""
    try:
        found = list(os.scandir(f"{top}/{below}" if below else top))
    except PermissionError:
        return names  # unreadable, so not ours, and no step uses it
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
    """Return True for a socket that another program made in the VM directory."""
    return not (name.startswith(".") or disk_names.is_of_disks(name)) and stat.S_ISSOCK(
        entry.stat(follow_symlinks=False).st_mode
    )


def _check_link(path: str, vm: int, name: str, target: str, is_followed: Callable[[int], bool]) -> None:
    folder, _, last = name.rpartition("/")
    if disk_names.is_staged(last):
        # a killed step left it; no step follows an unpublished link, and the next to publish unlinks it
        return
    disk = disk_names.disk_named(last) if not folder else None
    if (
        disk is not None
        and _is_own_layer(last, target)
        or not folder
        and on_devices.is_own(path, last, target, vm)
    ):
        return
    # The stock drivers make a link from a directory of layers to itself, and a second name of a disk.
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
    """Return True if a link out of the VM directory leads where the disk's record says.

    Without a record, `check_vm_dir` says what is allowed.
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
        # Two names: a deeper path would lead into another VM's directory.
        return len(below) == 2 and disk_names.is_number(below[0]) and bool(re.match(STOCK, below[1]))
    if record.network or record.is_local:
        return False
    records.check_place(record, vm)
    return target == (record.path if record.place.is_image else disk_names.plain(record.path))


def check_received(staging: str, vm: int, vm_dir: str, foreign: Tuple[int, ...]) -> None:
    """Raise unless what was unpacked in `staging`, to become `vm_dir`, is a VM directory and nothing else.

    The sender may be hostile: its tar stream could hold links, devices, set-user-id programs, or hard links
    to files outside. Special permission bits are cleared. Layers must lie over one another, or over their
    leases on this host. Disks that oned reports as another driver's (`foreign`) may lead anywhere.
    """
    check_vm_dir(staging, vm, lambda disk: disk not in foreign)
    names: dict[tuple[int, int], int] = {}
    counts: dict[tuple[int, int], tuple[int, str]] = {}
    for folder, below, entries in on_devices.walk(staging):
        for name in (*below, *entries):
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
        # A disk that did not arrive at all opens nothing; the VM does not start without it.
        there = os.path.lexists(own) or os.path.lexists(disk_names.layers(own))
        if there and not os.path.lexists(disk_names.record(staging, number)):
            raise BadRecord(f"disk {number} of VM {vm} came to {_here()} without its record")
    for disk in map(disk_names.recorded, os.listdir(side) if os.path.isdir(side) else []):
        if disk is not None:
            _check_layers(staging, disk, vm, vm_dir)


def _check_layers(staging: str, disk: int, vm: int, vm_dir: str) -> None:
    """Raise UnexpectedFile if a received layer lies over anything but a layer beside it or its own lease."""
    record = records.as_found(staging, disk)
    if record is None or record.network:
        return
    records.check_place(record, vm)
    if not record.is_local:
        return

    if records.goes_over(staging):
        from ..guest import active_layer

        # The delta stayed with its guest and is made anew here, so the layer below it is checked.
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
        # A guest writes the first bytes of a raw layer: they are no header.
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
    """Rebase an overlay onto its lease on this host, if that is its only `trouble`; return True if it is."""
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
