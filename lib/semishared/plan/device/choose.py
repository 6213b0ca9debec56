# SPDX-License-Identifier: Apache-2.0
"""Choose the device of a host's pool for a disk or a base, and the device class that a disk asks for.

Whole files are placed, and their final size is unknown: spreading them by a hash alone fills one device while
others are half empty. So the order that the hash gives is only where the search begins: the first device with
room that is not much fuller than the pool is taken. A link records it; it is never computed again.

    share         Brinkmann, Salzwedel, Scheideler: Compact, adaptive placement schemes for non-uniform
                  requirements (SPAA 2002): each device covers an interval of a ring, as long as its share of
                  the pool; those that cover a key's point compete
    rendezvous    weighted rendezvous: all devices compete, by their weights (Thaler, Ravishankar: IEEE/ACM
                  ToN 6(1), 1998)
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from ...errors import BadPool
from ...model import steps as s
from ...model.device.classes import KNOWN, MEMORY, USUAL, Want, needed_memory
from ...model.disk.place import Place
from ...model.exchange import On, Plan, warn
from ...named import NamedTuple
from ...opennebula.xml import Datastore, Disk, Image, Vm
from ...units import KiB, human
from ..image import placement

if TYPE_CHECKING:
    from ...model.device.steps import PoolDevice

BOUND = 1.1
"""A device takes more as long as its fill is at most this many times that of the pool."""
NEAR = 0.05
"""The device of a disk's base may be fuller by this: a device that dies then costs few VMs beside its own."""
RESERVE = 20
"""One in this many bytes of a device is left to disks that grow, where another device has room."""
STRETCH = 10
"""Times ln N, how often share covers the ring: with less, few devices cover some of it, and are fuller."""


CLASSES = KNOWN
MOST = 16
"""Most devices of a host."""
OVERCOMMIT = 8
"""Most times that memory may be promised, by its weight; guests wait where it is full
(plan/libvirt/domain.py).
"""


class Declared(NamedTuple):
    """A device as SEMISHARED_POOL declares it: PATH, PATH=CLASS or PATH=CLASS:WEIGHT."""

    path: str
    device_class: str = CLASSES[0]
    weight: float = 1.0

    @property
    def word(self) -> str:
        return f"{self.path}={self.device_class}:{self.weight:g}"


class Device(NamedTuple):
    """A device of a host's pool."""

    uuid: str
    capacity: int
    """Bytes."""
    free: int
    weight: float = 1.0
    """The part of its capacity that counts; of memory, how many times it is promised; 0: it takes nothing
    more.
    """
    device_class: str = CLASSES[0]
    promised: int = 0
    """Bytes that the files in memory can come to hold."""
    pending: int = 0
    """Bytes that files placed there lately are still expected to take."""

    @property
    def is_memory(self) -> bool:
        return self.device_class == MEMORY

    @property
    def share(self) -> float:
        """Return the bytes that count."""
        return self.capacity * self.weight

    @property
    def used(self) -> int:
        return self.capacity - self.free + self.pending

    @property
    def fill(self) -> float:
        return self.used / self.share

    @property
    def room(self) -> int:
        """Return the bytes that it takes until only its reserve, and what is pending, are left."""
        return self.free - self.capacity // RESERVE - self.pending

    @property
    def is_overcommitted(self) -> bool:
        return is_overcommitted(self.device_class, self.weight, self.capacity, self.promised)

    @property
    def unpromised(self) -> int:
        """Return the bytes of memory that no file there can come to hold, less the tables of both."""
        return int((self.capacity - self.capacity // RESERVE) * self.weight) - self.promised

    def takes(self, expected: int, most: int) -> bool:
        """Tell whether it has room for about `expected` bytes.

        Memory needs room for the `most`: its guests fail when it is full.
        """
        return self.unpromised >= most > 0 if self.is_memory else self.room >= expected


def is_overcommitted(device_class: str, weight: float, capacity: int, promised: int) -> bool:
    """Tell whether memory can fill before its files are as large as promised.

    Also memory that takes nothing more (weight 0): what it has promised counts.
    """
    return device_class == MEMORY and (weight > 1 or promised > capacity - capacity // RESERVE)


def declared(text: str) -> tuple[Declared, ...]:
    """Return the devices that SEMISHARED_POOL of a host (or [pool] devices) declares; raise BadPool."""
    found = tuple(map(_declared, text.split()))
    paths = [device.path for device in found]
    if not 1 <= len(found) <= MOST:
        raise BadPool(f"a pool has 1 to {MOST} devices, and {len(found)} are declared")
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise BadPool(f"{', '.join(twice)} is declared twice")
    return found


def _declared(word: str) -> Declared:
    match = re.match(
        r"(/[A-Za-z0-9._/\-]+)(?:=([a-z]+)(?::([0-9]{1,3}(?:\.[0-9]{1,3})?))?)?\Z", word, re.ASCII
    )
    path = match.group(1) if match else ""
    if match is None or path != posixpath.normpath(path) or ".." in path.split("/"):
        raise BadPool(
            f"{word!r} is no device: /PATH, /PATH=CLASS and /PATH=CLASS:WEIGHT are (/mnt/nvme0=fast:1)"
        )
    device_class, weight = match.group(2) or CLASSES[0], float(match.group(3) or 1)
    if device_class not in CLASSES:
        raise BadPool(f"class {device_class!r} of {path} is not one of {', '.join(CLASSES)}")
    if not weight:
        raise BadPool(f"weight 0 of {path}: a device that is to take nothing is not declared")
    if device_class == MEMORY and not 1 <= weight <= OVERCOMMIT:
        raise BadPool(
            f"weight {weight:g} of {path}: memory is promised to the last byte, or up to "
            f"{OVERCOMMIT} times over"
        )
    return Declared(path, device_class, weight)


KINDS = ("absent", "changed", "lost", "unreserved", "unwatched", "limited", "old", "unsafe")
ABSENT, CHANGED, LOST, UNRESERVED, UNWATCHED, LIMITED, OLD, UNSAFE = KINDS


class Wrong(NamedTuple):
    """A difference between a pool and what it is to be."""

    kind: str
    """ABSENT: disks cannot start; CHANGED: a declaration is not done, or undone, yet; LOST: disks, with what
    memory held; UNRESERVED: oned also gives this memory of the host to VMs; UNWATCHED: memory is promised
    more than once, and no service moves disks away; LIMITED: memory can be lost with all its disks before it
    is full; OLD: by its label one cannot see whether the device answers; UNSAFE: what guests write there is
    lost, or they read something else.
    """
    text: str


def differences(declared: Sequence[Declared], reported: Sequence[PoolDevice]) -> list[Wrong]:
    """Return how the devices that a host reports differ from those declared; nothing if they do not."""
    # Another device may be mounted in the place of one that died.
    found = {device.path: device for device in sorted(reported, key=lambda device: not device.state)}
    wrong = []
    for device in declared:
        there = found.get(device.path)
        if there is None:
            wrong.append(
                Wrong(
                    CHANGED, f"{device.path} is declared and no device of the pool yet: semishared pool add"
                )
            )
        elif there.state:
            wrong.append(
                Wrong(
                    ABSENT,
                    f"{device.path} is {there.state}: disks on it cannot start, and it takes no new ones",
                )
            )
        elif (there.class_, there.weight) != (device.device_class, device.weight):
            wrong.append(Wrong(CHANGED, _changed(device, there)))
        if there and there.is_old and not there.state and there.weight:
            what = (
                "has a label of before, which its file system may answer without asking the disk: "
                "that it hangs would not be noticed"
            )
            wrong.append(
                Wrong(OLD, f"{device.path} {what}: semishared pool add writes it anew, where there is room")
            )
        if there and there.lost:
            vms = sorted({int(disk.split("-")[0]) for disk in there.lost})
            whose = f"disks of VM {', '.join(map(str, vms))}"
            wrong.append(
                Wrong(LOST, f"{device.path} was emptied by a restart of the host, {whose} are lost with it")
            )
    paths = {device.path for device in declared}
    for there in sorted(reported, key=lambda device: device.path):
        path = there.path
        is_declared = path in paths and there is found[path]
        if not is_declared and there.state:
            wrong.append(
                Wrong(
                    ABSENT,
                    f"{path}, which is not declared any more, is {there.state}: disks on it cannot start",
                )
            )
        elif not is_declared and there.weight:
            wrong.append(Wrong(CHANGED, f"{path} takes disks and is not declared: semishared pool add"))
        if _is_overcommitted(there) and not there.watched:
            what = "is promised more than once, and nothing moves disks away when it is full"
            wrong.append(Wrong(UNWATCHED, f"{path} {what}: it is not watched"))
        if there.limit:
            what = (
                f"a zram that refuses a page beyond {human(there.limit)}: its file system can "
                f"shut down there, with all disks"
            )
            wrong.append(Wrong(LIMITED, f"{path} is on {what}"))
        if there.mixes_memory:
            what = (
                "a zram that guests' disks must not be on with this kernel: QEMU's direct I/O writes "
                "and reads something else there"
            )
            wrong.append(Wrong(UNSAFE, f"{path} is on {what}"))
    return wrong


def _changed(device: Declared, there: PoolDevice) -> str:
    """Return how a device that is there differs from its declaration."""
    if not there.weight:
        return (
            f"{device.path} is being drained, or was, and takes nothing more: semishared pool add "
            f"takes it back"
        )
    said, wanted = f"{there.class_}:{there.weight:g}", f"{device.device_class}:{device.weight:g}"
    return f"{device.path} is {said}, and declared as {wanted}: semishared pool add"


def _is_overcommitted(device: PoolDevice) -> bool:
    return is_overcommitted(device.class_, device.weight, device.total, device.promised)


def unreserved(reported: Sequence[PoolDevice], reserved: int) -> list[Wrong]:
    """Return what is wrong with the `reserved` bytes of a host that oned gives to no VM.

    -1 if unknown; devices in memory take some.
    """
    needed = sum(
        needed_memory(device.total) for device in reported if device.class_ == MEMORY and not device.state
    )
    if not needed or not 0 <= reserved < needed:
        return []
    said = f"oned keeps {human(reserved)} of its memory from VMs"
    least = f"RESERVED_MEM = {-(-needed // KiB)} at least"
    return [Wrong(UNRESERVED, f"{said}, and class {MEMORY} can come to take {human(needed)}: {least}")]


def drawn(*words: object) -> float:
    """Return a number between 0 and 1, both excluded, that is always the same for these words."""
    digest = hashlib.blake2b("\0".join(map(str, words)).encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 12) + 0.5) / (1 << 52)


def rendezvous(key: str, shares: Mapping[str, float]) -> list[str]:
    """Return devices in the order in which they are asked to take `key`; `shares`: the bytes of each."""
    return sorted(shares, key=lambda uuid: (-math.log(drawn("rendezvous", key, uuid)) / shares[uuid], uuid))


def share(key: str, shares: Mapping[str, float]) -> list[str]:
    """Return the same by Share as it was published.

    A device has one draw for the key for each time its interval covers the key's point.
    """
    stretch = STRETCH * math.log(max(len(shares), 2)) / sum(shares.values())
    point = drawn("point", key)
    best: dict[str, float] = {}
    for uuid, bytes_that_count in shares.items():
        length = bytes_that_count * stretch
        inside = (point - drawn("start", uuid)) % 1.0 < length % 1.0
        draws = [drawn("draw", key, uuid, copy) for copy in range(int(length) + inside)]
        best[uuid] = max(draws, default=0.0)
    # Devices that do not cover it come last, in an order that does not always load the same one.
    rest = {uuid: at for at, uuid in enumerate(rendezvous(key, shares))}
    return sorted(shares, key=lambda uuid: (-best[uuid], rest[uuid]))


ORDERS: Mapping[str, Callable[[str, Mapping[str, float]], list[str]]] = {
    "share": share,
    "rendezvous": rendezvous,
}
DEFAULT = "rendezvous"


def choose(
    devices: Sequence[Device],
    key: str,
    expected: int,
    near: str = "",
    order: str = DEFAULT,
    *,
    classes: Sequence[str] = USUAL,
    most: int = 0,
) -> str:
    """Return the device that takes `key`, of about `expected` bytes; '' if none does.

    It is the first in the order with room and a fill within the bound, `near` (the device of its base) before
    all; else the least filled with room. While a device of the first class has room, no other of `classes` is
    looked at. If nothing fits beside what is pending, which is a guess, it is the least filled of the first
    class with room now; if nothing fits now, the one with most bytes left: bases there may go. Never so of
    memory, where `most` bytes have to fit.
    """
    takers = [device for device in devices if device.share > 0 and device.device_class in classes]
    for device_class in classes:
        found = _first(
            [device for device in takers if device.device_class == device_class],
            key,
            expected,
            near,
            order,
            most,
        )
        if found:
            return found
    disks = [device for device in takers if not device.is_memory]
    with_room = [device for device in disks if device.room + device.pending >= expected]
    if with_room:
        return min(
            with_room, key=lambda device: (classes.index(device.device_class), device.fill, device.uuid)
        ).uuid
    return max(disks, key=lambda device: (device.free, device.uuid)).uuid if disks else ""


def none_takes(devices: Sequence[Device], want: Want, mount: Callable[[str], str], host: str) -> str:
    """Return why no device of a host takes what wants these classes; `mount`: the mount point of a UUID."""
    left = [
        f"{mount(device.uuid)} has {human(max(device.unpromised, 0))} that are not promised"
        for device in devices
        if device.is_memory and MEMORY in want.tried
    ]
    what = f"no device of class {' or '.join(want.tried)} on {host} for a disk of up to {human(want.most)}"
    return f"{what}: {'; '.join(left) or 'it has none'}"


def _first(devices: Sequence[Device], key: str, expected: int, near: str, order: str, most: int) -> str:
    """Return which of the devices of one class takes `key`, '' if none has room."""
    with_room = {device.uuid: device.fill for device in devices if device.takes(expected, most)}
    if not with_room:
        return ""
    mean = sum(device.used for device in devices) / sum(device.share for device in devices)
    if with_room.get(near, math.inf) <= BOUND * mean + NEAR:
        return near
    for uuid in ORDERS[order](key, {device.uuid: device.share for device in devices}):
        if with_room.get(uuid, math.inf) <= BOUND * mean:
            return uuid
    return min(with_room, key=lambda uuid: (with_room[uuid], uuid))


# The class of device for a local disk: SEMISHARED_CLASS names it, its record keeps it for moves.
#
# A diff that must be committed is never in memory, which is empty after a restart of the host.


GROWTH = 10
"""One in this many bytes of its size is what an overlay is expected to hold (disk/create.py)."""


def wanted(image: Image, datastore: Datastore, place: Place) -> tuple[str, ...]:
    """Return the classes for a disk, () for any, or for one on no device; raise BadAttribute."""
    found = placement.device_classes(image, datastore)
    if not place.is_local or not place.is_layered:
        return ()
    return tuple(word for word in found if word != MEMORY) if place.commits else found


def warned(disk: Disk, image: Image, datastore: Datastore, place: Place) -> Plan:
    """Warn of a disk that asks for memory and must not be there."""
    if place.commits and MEMORY in placement.device_classes(image, datastore):
        yield warn(
            f"disk {disk.id} is of a persistent image: SEMISHARED_CLASS = {MEMORY} is not for it, "
            f"what is in memory can be lost"
        )


def placed(host: str, ref: s.DiskRef, disk: Disk, classes: tuple[str, ...], place: Place) -> Plan:
    """Find a place for a disk before it and its base are made: the host may refuse."""
    if classes:
        from ...model.device.steps import PlaceLayers

        size = max(disk.size, disk.original_size)
        expected = size if place.name == "copy" else size // GROWTH
        yield On(host, (s.PrepareVm(ref.vm, ref.vm_dir), PlaceLayers(ref, classes, size, expected)))


def noted(host: str, ref: s.DiskRef, classes: tuple[str, ...]) -> Plan:
    """Note the classes of a disk that was just made."""
    if classes:
        from ...model.device.steps import NoteClasses

        yield On(host, (NoteClasses(ref, classes),))


def travelling(vm: Vm, classes: Mapping[Any, Sequence[str]], more: int = 0) -> dict[str, Any]:
    """Return what disks want where they go (ReceiveVm): `classes` by number, as their records have them.

    `more`: layers that they get on their way.
    """
    numbered = {int(number): list(words) for number, words in classes.items()}
    return {
        str(disk.id): {
            "classes": numbered[disk.id],
            "size": max(disk.size, disk.original_size),
            "layers": len(vm.snapshots_of(disk.id)) + 1 + more,
        }
        for disk in vm.disks
        if disk.id in numbered
    }
