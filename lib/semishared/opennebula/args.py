# SPDX-License-Identifier: Apache-2.0
"""Arguments and standard input of the actions, one class per shape (docs/explanation/contract.md).

Values are checked here and believed afterwards.
"""

from __future__ import annotations

import os
import re
from typing import Iterable, Mapping

from ..errors import BadArguments
from ..named import NamedTuple
from ..units import MiB

HOST = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z"
DISK = r"disk\.([0-9]{1,9})\Z"


def number(text: str, what: str) -> int:
    """Return `text` as a number that is not negative; raise BadArguments."""
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise BadArguments(f"{what} is not a number: {text!r}")
    return int(text)


def absolute(path: str, what: str) -> str:
    """Return `path` without double slashes; raise BadArguments unless it is absolute, without `..`."""
    if not path.startswith("/") or any(not c.isprintable() for c in path) or ".." in path.split("/"):
        raise BadArguments(f"{what} is not a plain absolute path: {path!r}")
    return "/" + os.path.normpath(path).lstrip("/")


STORED = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*/[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z"
"""POOL/IMAGE of a store on the network; model/store/access.py says whether a datastore is of that kind."""


def image_source(text: str, what: str) -> str:
    """Return the SOURCE of an image: a path as `absolute` returns it, or POOL/IMAGE; raise BadArguments."""
    return text if re.match(STORED, text) else absolute(text, what)


class Location(NamedTuple):
    """A `host:path` argument."""

    host: str
    path: str

    @classmethod
    def parse(cls, text: str, what: str = "location") -> Location:
        """Return the location in `text`; raise BadArguments."""
        host, colon, path = text.partition(":")
        if not colon or not re.match(HOST, host):
            raise BadArguments(f"{what} is not host:path: {text!r}")
        return cls(host, absolute(path, what))


class VmPlace(NamedTuple):
    """A VM directory on a host: <DATASTORE_LOCATION>/<system datastore>/<vm>."""

    host: str
    path: str
    vm: int

    @property
    def datastore_location(self) -> str:
        return os.path.dirname(os.path.dirname(self.path))

    @classmethod
    def at(cls, location: Location, vm: str) -> VmPlace:
        """Return the VM directory at `location`; raise BadArguments if its name is not the VM's id."""
        vm_id = number(vm, "VM id")
        parts = location.path.split("/")
        if parts[-1] != str(vm_id) or len(parts) < 4 or not (parts[-2].isascii() and parts[-2].isdigit()):
            raise BadArguments(f"{location.path} is not the directory of VM {vm_id} in a system datastore")
        return cls(location.host, location.path, vm_id)


class DiskPlace(NamedTuple):
    """A disk of a VM: its directory and `disk.N`, or the name of a kernel or initrd (CONTRACT pitfall 5)."""

    vm_place: VmPlace
    name: str
    disk: int | None

    @property
    def host(self) -> str:
        return self.vm_place.host

    @property
    def path(self) -> str:
        return f"{self.vm_place.path}/{self.name}"

    @classmethod
    def at(cls, location: Location, vm: str) -> DiskPlace:
        """Return the disk at `location`; raise BadArguments if that is no disk of VM `vm`."""
        directory, name = os.path.split(location.path)
        match = re.match(DISK, name)
        if not match and name not in ("kernel", "initrd"):
            raise BadArguments(f"{location.path} names neither a disk nor a kernel")
        place = VmPlace.at(Location(location.host, directory), vm)
        return cls(place, name, int(match.group(1)) if match else None)


def is_disk(text: str) -> bool:
    """Tell whether a `host:path` argument names a disk (and not a VM directory)."""
    name = text.rsplit("/", 1)[-1]
    return bool(re.match(DISK, name)) or name in ("kernel", "initrd")


def _disk(location: str, vm: str) -> DiskPlace:
    return DiskPlace.at(Location.parse(location), vm)


def _vm_dir(location: str, vm: str) -> VmPlace:
    return VmPlace.at(Location.parse(location), vm)


def _count(argv: list[str], wanted: int) -> None:
    if len(argv) != wanted:
        raise BadArguments(f"{len(argv)} arguments where {wanted} belong")


def _store(argv: list[str], wanted: int) -> int:
    """Return the datastore, the last of so many arguments; raise BadArguments."""
    _count(argv, wanted)
    return number(argv[-1], "datastore id")


class FromImage(NamedTuple):
    """clone, ln: `fe:SOURCE host:VMDIR/disk.N vm image_datastore`."""

    source: str
    target: DiskPlace
    store: int

    @classmethod
    def parse(cls, argv: list[str]) -> FromImage:
        store = _store(argv, 4)
        return cls(image_source(argv[0].partition(":")[2], "source"), _disk(argv[1], argv[2]), store)


class NewDisk(NamedTuple):
    """mkimage: `size_mib format host:VMDIR/disk.N vm system_datastore`; mkswap has no format."""

    size: int
    format: str
    target: DiskPlace

    @classmethod
    def parse(cls, argv: list[str]) -> NewDisk:
        _store(argv, 5)
        return cls(number(argv[0], "size") * MiB, argv[1].lower(), _disk(argv[2], argv[3]))

    @classmethod
    def parse_swap(cls, argv: list[str]) -> NewDisk:
        _store(argv, 4)
        return cls(number(argv[0], "size") * MiB, "raw", _disk(argv[1], argv[2]))


class Context(NamedTuple):
    """context: `context.sh [file[:name] ...] host:VMDIR/disk.N vm system_datastore`; parsed from the end."""

    files: tuple[str, ...]
    target: DiskPlace

    @classmethod
    def parse(cls, argv: list[str]) -> Context:
        if len(argv) < 4:
            raise BadArguments(f"{len(argv)} arguments where at least 4 belong")
        number(argv[-1], "datastore id")
        return cls(tuple(argv[:-3]), _disk(argv[-3], argv[-2]))


class Move(NamedTuple):
    """mv: `host:VMDIR host:VMDIR vm datastore`; the same with disk.N on both sides (`disk` is then true)."""

    source: VmPlace
    target: VmPlace
    disk: bool

    @classmethod
    def parse(cls, argv: list[str]) -> Move:
        _store(argv, 4)
        if is_disk(argv[0]) and is_disk(argv[1]):
            return cls(_disk(argv[0], argv[2]).vm_place, _disk(argv[1], argv[2]).vm_place, True)
        return cls(_vm_dir(argv[0], argv[2]), _vm_dir(argv[1], argv[2]), False)


class ToImage(NamedTuple):
    """mvds: `host:VMDIR/disk.N SOURCE vm image_datastore`; cpds has a snapshot id (or -1) before the VM."""

    disk: DiskPlace
    image: str
    snapshot: int
    store: int

    @classmethod
    def parse(cls, argv: list[str]) -> ToImage:
        store = _store(argv, 4)
        return cls(_disk(argv[0], argv[2]), image_source(argv[1], "image"), -1, store)

    @classmethod
    def parse_copy(cls, argv: list[str]) -> ToImage:
        store = _store(argv, 5)
        snapshot = -1 if argv[2] == "-1" else number(argv[2], "snapshot id")
        return cls(_disk(argv[0], argv[3]), image_source(argv[1], "image"), snapshot, store)


def _numbered(argv: list[str]) -> DiskPlace:
    """Return the disk in `disk what vm datastore`; raise BadArguments for a kernel or initrd."""
    _store(argv, 4)
    place = _disk(argv[0], argv[2])
    if place.disk is None:
        raise BadArguments(f"{place.path} is no disk")
    return place


class SnapshotPlace(NamedTuple):
    """snap_create, snap_create_live, snap_delete, snap_revert: `host:VMDIR/disk.N snapshot vm
    image_datastore`.
    """

    disk: DiskPlace
    snapshot: int

    @classmethod
    def parse(cls, argv: list[str]) -> SnapshotPlace:
        return cls(_numbered(argv), number(argv[1], "snapshot id"))


class Resize(NamedTuple):
    """resize: `host:VMDIR/disk.N size_mib vm datastore`."""

    disk: DiskPlace
    size: int

    @classmethod
    def parse(cls, argv: list[str]) -> Resize:
        return cls(_numbered(argv), number(argv[1], "size") * MiB)


class Delete(NamedTuple):
    """delete: `host:VMDIR[/disk.N] vm datastore`."""

    vm_place: VmPlace
    disk: DiskPlace | None
    store: int

    @classmethod
    def parse(cls, argv: list[str]) -> Delete:
        store = _store(argv, 3)
        if is_disk(argv[0]):
            disk = _disk(argv[0], argv[1])
            return cls(disk.vm_place, disk, store)
        return cls(_vm_dir(argv[0], argv[1]), None, store)

    @property
    def is_nothing(self) -> bool:
        """Tell whether there is nothing to remove: a kernel goes with its directory."""
        return self.disk is not None and self.disk.disk is None


class Migrate(NamedTuple):
    """premigrate, postmigrate, failmigrate: `source_host target_host VMDIR vm system_datastore [calling
    TM]`.
    """

    source_host: str
    target: VmPlace
    caller: str

    @classmethod
    def parse(cls, argv: list[str]) -> Migrate:
        if len(argv) not in (5, 6):
            raise BadArguments(f"{len(argv)} arguments where 5 or 6 belong")
        number(argv[4], "datastore id")
        for host in argv[:2]:
            if not re.match(HOST, host):
                raise BadArguments(f"not a host name: {host!r}")
        target = VmPlace.at(Location(argv[1], absolute(argv[2], "VM directory")), argv[3])
        return cls(argv[0], target, argv[5] if len(argv) == 6 else "")


class Backup(NamedTuple):
    """(pre|post)backup(_live): `host:VMDIR id[:id...] deploy_id backup_job|- vm system_datastore`."""

    place: VmPlace
    disks: tuple[int, ...]
    domain: str

    @classmethod
    def parse(cls, argv: list[str]) -> Backup:
        _count(argv, 6)
        disks = tuple(number(text, "disk id") for text in argv[1].split(":") if text)
        return cls(_vm_dir(argv[0], argv[4]), disks, argv[2])


class Restore(NamedTuple):
    """restore: `host:VMDIR vm image increment|-1 disk|-1`."""

    place: VmPlace
    image: int
    increment: int
    disk: int

    @classmethod
    def parse(cls, argv: list[str]) -> Restore:
        _count(argv, 5)
        increment, disk = (-1 if text == "-1" else number(text, "increment or disk") for text in argv[3:])
        return cls(_vm_dir(argv[0], argv[1]), number(argv[2], "image id"), increment, disk)


class Subject(NamedTuple):
    """What an action is about."""

    noun: str
    """`VM 12 disk 0`, `VM 12`, `image 7` or `datastore 100`."""
    vm: int = -1
    names: Mapping[str, str] = {}
    """What is at a path, or at POOL/IMAGE, in a user's words: `image 7`, `VM 12`, `datastore 100`."""


def of_words(asked: Iterable[object], image: int = -1) -> Subject:
    """Return what a transfer action with these words (opennebula/args.py) is about; `image`: the disk's."""
    words = tuple(asked)
    disk = next((word for word in words if isinstance(word, DiskPlace)), None)
    places = [word for word in words if isinstance(word, VmPlace)] + ([disk.vm_place] if disk else [])
    vm = places[0].vm
    noun = f"VM {vm}"
    names = {place.path: noun for place in places}
    source = next((word for word in words if isinstance(word, str) and "/" in word), "")
    if source:
        names[source] = f"image {image}" if image >= 0 else "its image"
        if source.startswith("/") and hasattr(asked, "store"):
            names[os.path.dirname(source)] = f"datastore {asked.store}"
    if disk:
        noun = f"{noun} {disk.name if disk.disk is None else f'disk {disk.disk}'}"
    return Subject(noun, vm, names)
