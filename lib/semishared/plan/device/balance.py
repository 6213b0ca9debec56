# SPDX-License-Identifier: Apache-2.0
"""Which disks and bases go to another device of their host's pool: to drain a device, or to rebalance.

    drain      all that lies on one device, each where it would be placed if it were new, the largest first
    rebalance  from each device that is too full as much as brings it down, to those that stay below the bound

A device is too full above BOUND times the fill of its class. It is brought to AIM: what file systems take for
themselves would otherwise make the next rebalance begin again. At most LIMIT times what devices have above
the mean is moved: with few, large files a device may stay too full.

And which disks leave memory when it fills.
"""

from __future__ import annotations

import math
from typing import Collection, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ...model.device.classes import MEMORY, Want
from ...named import NamedTuple
from ...units import MiB
from . import choose
from .choose import BOUND, RESERVE, Device, drawn

ATTEMPTS = 100
LOOKS = 400_000
"""Looks at items and devices, all attempts together: a pool with very many items gets fewer attempts, so that
the search takes part of a second.
"""


class File(NamedTuple):
    """Something that can be moved."""

    name: str
    device: str
    size: int


class Level(NamedTuple):
    """Bytes that a device holds, may hold (as a target), and is to hold at most in the end."""

    used: int
    most: int
    goal: int


Found = List[Tuple[File, str]]
"""Files, and the device that each is to go to."""


def search(levels: Mapping[str, Level], files: Sequence[File], most: int) -> Found:
    """Return moves of at most `most` bytes that bring every device to its goal; none if none are found.

    With few files for each device it matters which ones move. So many orders of the files are tried, always
    the same: in each what fits is moved, and one file goes there and a smaller one back where only that
    helps. The cheapest success wins.
    """
    best: Found = []
    fewest = most
    for number in range(min(ATTEMPTS, LOOKS // (len(files) * len(levels) + 1))):
        order = sorted(files, key=lambda file: (drawn("attempt", number, file.name), file.name))
        attempt = _Attempt(levels, fewest)
        attempt.single(order)
        attempt.exchanges(order)
        if not any(attempt.above()) and (not best or attempt.moved < fewest):
            best, fewest = list(attempt.moves.items()), attempt.moved
    return best


class _Attempt:
    def __init__(self, levels: Mapping[str, Level], most: int) -> None:
        self._levels = levels
        self._used = {uuid: level.used for uuid, level in levels.items()}
        self._most = most
        self.moved = 0
        self.moves: Dict[File, str] = {}

    def above(self) -> Iterator[str]:
        """Yield the devices that have not reached their goals."""
        return (uuid for uuid, level in self._levels.items() if self._used[uuid] > level.goal)

    def _gap(self, uuid: str) -> int:
        return self._levels[uuid].most - self._used[uuid]

    def _is_above(self, uuid: str) -> bool:
        return self._used[uuid] > self._levels[uuid].goal

    def _move(self, file: File, target: str) -> None:
        self.moves[file] = target
        self.moved += file.size
        self._used[file.device] -= file.size
        self._used[target] += file.size

    def single(self, order: Sequence[File]) -> None:
        """Move what fits, from devices that are above."""
        widest = sorted(self._levels)
        for file in order:
            if self._is_above(file.device) and self.moved + file.size <= self._most:
                target = max(widest, key=self._gap)
                if self._gap(target) >= file.size:
                    self._move(file, target)

    def exchanges(self, order: Sequence[File]) -> None:
        """Move files for which smaller ones come back."""
        for uuid in sorted(self.above()):
            stay = [file for file in order if file not in self.moves]
            for file in (file for file in stay if file.device == uuid):
                if not self._is_above(uuid):
                    break
                back = next((other for other in stay if self._fits(file, other)), None)
                if back:
                    self._move(file, back.device)
                    self._move(back, uuid)

    def _fits(self, file: File, back: File) -> bool:
        if (
            back.device == file.device
            or back in self.moves
            or self.moved + file.size + back.size > self._most
        ):
            return False
        return 0 < file.size - back.size <= self._gap(back.device)


AIM = 1.09
LIMIT = 1.1
CLASSES = ("fast", "slow")
"""Classes of devices between which files are spread by their fill."""


class Item(NamedTuple):
    """What moves to another device as one: all layers of a disk, or a base with its leases."""

    part: str
    """Directory of the device: layers, or bases."""
    name: str
    """Name of its directory there."""
    device: str
    size: int
    """Bytes."""
    key: str
    """Key that places it."""
    classes: Tuple[str, ...] = ()
    """Classes of devices that its disk wants (SEMISHARED_CLASS); none: any."""

    @property
    def tried(self) -> Tuple[str, ...]:
        """Return the classes to which it can move, in their order.

        Not memory: that takes only what is made there, or arrives, with a promise.
        """
        return tuple(word for word in Want(self.classes).tried if word != MEMORY)


class Move(NamedTuple):
    """An item, and the device that it is to go to, '' if none has room."""

    item: Item
    target: str


def drain(devices: Sequence[Device], items: Sequence[Item], uuid: str) -> List[Move]:
    """Return where all items of a device go; other devices keep their reserve, which their guests fill."""
    left = {device.uuid: device for device in devices if device.uuid != uuid}
    moves = []
    for item in sorted((item for item in items if item.device == uuid), key=_largest_first):
        target = choose.choose(list(left.values()), item.key, item.size, classes=item.tried)
        if target and left[target].room < item.size:
            target = ""
        if target:
            left[target] = left[target]._replace(free=left[target].free - item.size)
        moves.append(Move(item, target))
    return moves


def rebalance(devices: Sequence[Device], items: Sequence[Item]) -> List[Move]:
    """Return moves, few by bytes, that bring each device down to the bound; each stays within its class."""
    moves: List[Move] = []
    for device_class in CLASSES:
        of_class = [device for device in devices if device.device_class == device_class and device.share > 0]
        if len(of_class) > 1:
            moves += _within(of_class, items)
    return moves


def _within(devices: Sequence[Device], items: Sequence[Item]) -> List[Move]:
    moves = _one_by_one(devices, items)
    left, there = _after(devices, items, moves)
    if all(device.used <= int(BOUND * _mean(devices) * device.share) for device in left):
        return moves
    found = _searched(devices, items)
    if found or not moves:
        return found
    # This state may be found as it is, and the next rebalance must find nothing to do.
    more = dict(zip(((move.item.part, move.item.name) for move in moves), moves))
    for move in _within(left, there):
        was = more.get((move.item.part, move.item.name), move).item
        more[was.part, was.name] = Move(was, move.target)
    both = [move for move in more.values() if move.target != move.item.device]
    # The next rebalance would go on with half of it: so all or nothing.
    return both if sum(move.item.size for move in both) <= _most(devices) else []


def _most(devices: Sequence[Device]) -> int:
    """Return how many bytes are moved at most."""
    mean = _mean(devices)
    return int(LIMIT * sum(max(device.used - mean * device.share, 0) for device in devices))


def _mean(devices: Sequence[Device]) -> float:
    return sum(device.used for device in devices) / sum(device.share for device in devices)


def _after(
    devices: Sequence[Device], items: Sequence[Item], moves: Sequence[Move]
) -> Tuple[List[Device], List[Item]]:
    """Return devices and items as they will be."""
    free = {device.uuid: device.free for device in devices}
    for move in moves:
        free[move.item.device] += move.item.size
        free[move.target] -= move.item.size
    targets = {move.item: move.target for move in moves}
    there = [item._replace(device=targets.get(item, item.device)) for item in items]
    return [device._replace(free=free[device.uuid]) for device in devices], there


def _searched(devices: Sequence[Device], items: Sequence[Item]) -> List[Move]:
    """Return moves, found by trying, that bring all devices down to the bound; none if there are none."""
    mean, levels = _mean(devices), {}
    for device in devices:
        aim, is_above = int(AIM * mean * device.share), device.used > int(BOUND * mean * device.share)
        levels[device.uuid] = Level(
            device.used, min(aim, device.used + device.room), aim if is_above else device.capacity
        )
    own = {f"{item.part}/{item.name}": item for item in items if item.device in levels and item.size > 0}
    found = search(levels, [File(name, item.device, item.size) for name, item in own.items()], _most(devices))
    return [Move(own[file.name], target) for file, target in found]


def _one_by_one(devices: Sequence[Device], items: Sequence[Item]) -> List[Move]:
    """Return moves that bring down each device by itself, the fullest first, as far as possible."""
    mean = _mean(devices)
    gaps = {device.uuid: min(int(AIM * mean * device.share) - device.used, device.room) for device in devices}
    moves: List[Move] = []
    for device in sorted(devices, key=lambda device: (-device.fill, device.uuid)):
        if device.used <= int(BOUND * mean * device.share):
            continue
        need = device.used - int(AIM * mean * device.share)
        most = int(LIMIT * (device.used - mean * device.share))
        own = sorted(
            (item for item in items if item.device == device.uuid and item.size > 0), key=_largest_first
        )
        found = _enough(own, need, most, gaps)
        moves += found
        for move in found:
            gaps[move.target] -= move.item.size
    return moves


def _largest_first(item: Item) -> Tuple[int, str, str]:
    return -item.size, item.part, item.name


def _enough(own: Sequence[Item], need: int, most: int, gaps: Mapping[str, int]) -> List[Move]:
    """Return few moves of `need` to `most` bytes together; of fewer bytes if there are none."""
    begun: List[Move] = []
    left, gaps_left = need, dict(gaps)
    for item in own:
        target = _widest(item, gaps_left) if item.size <= left else ""
        if target:
            begun.append(Move(item, target))
            gaps_left[target] -= item.size
            left -= item.size
    if left <= 0:
        return begun
    moved, taken = need - left, {move.item for move in begun}
    rest = [item for item in own if item not in taken]
    for _, more, fewer in sorted(_completions(rest, begun, left, most - moved), key=lambda found: found[0]):
        done = _completed(more, fewer, begun, gaps, gaps_left)
        if done:
            return done
    return begun


def _completions(
    rest: Sequence[Item], begun: Sequence[Move], left: int, most: int
) -> Iterator[Tuple[Tuple[int, bool, str], Item, Optional[Move]]]:
    """Yield what completes begun moves: added bytes, one more item, and the move that it replaces."""
    for item in rest:
        if left <= item.size <= most:
            yield (item.size, False, item.name), item, None
        for move in begun:
            if left <= item.size - move.item.size <= most:
                yield (item.size - move.item.size, True, item.name), item, move


def _completed(
    more: Item,
    fewer: Optional[Move],
    begun: Sequence[Move],
    gaps: Mapping[str, int],
    gaps_left: Mapping[str, int],
) -> List[Move]:
    """Return the moves so completed, none if a device is to take more than it has room for."""
    if fewer is None:
        target = _widest(more, gaps_left)
        return [*begun, Move(more, target)] if target else []
    moves: List[Move] = []
    free: Dict[str, int] = dict(gaps)
    for item in sorted([more, *(move.item for move in begun if move != fewer)], key=_largest_first):
        target = _widest(item, free)
        if not target:
            return []
        moves.append(Move(item, target))
        free[target] -= item.size
    return moves


def _widest(item: Item, gaps: Mapping[str, int]) -> str:
    """Return the device with most bytes to go, '' if the item is larger than that."""
    uuid = max(gaps, key=lambda uuid: (gaps[uuid], uuid), default="")
    return uuid if uuid and gaps[uuid] >= item.size else ""


def unevenness(devices: Sequence[Device]) -> float:
    """Return the fill of the fullest device by the mean of its class, 1 of an empty pool."""
    found = 1.0
    for device_class in CLASSES:
        of_class = [device for device in devices if device.device_class == device_class and device.share > 0]
        used, share = sum(device.used for device in of_class), sum(device.share for device in of_class)
        if used:
            found = max(found, max(device.fill for device in of_class) * share / used)
    return found if math.isfinite(found) else 1.0


# Memory that gets full: which disk leaves it for another device, and when a paused guest goes on.
#
# The fill of memory's file system decides. A threshold of libvirt for a disk (virDomainSetBlockThreshold)
# reports one guest's writing, once. libvirtd forgets it when it restarts, and with every new layer of the
# disk; and no threshold of one disk is right for memory that all share. A guest that fills memory before the
# next look is paused, and loses nothing: so it is enough to look again and again.


HIGH = 0.8
"""Memory that is fuller than this part of it gives a disk away."""
AHEAD_S = 10
"""Seconds of a guest's writing, at its present rate, that count as if they were written."""
ENOUGH = 64 * MiB
"""Free bytes with which a guest goes on, or a twentieth of the memory if that is less."""


class Wait(NamedTuple):
    """A disk of a paused guest, on which a write has failed."""

    is_full: bool
    """Whether QEMU reports ENOSPC; else it is another error."""
    classes: Collection[str]
    """Classes that the disk wants (SEMISHARED_CLASS)."""
    was_in_memory: bool
    """Whether it is in memory, or was a moment ago."""
    capacity: int
    """Bytes of the device, or the file system, where it lies now."""
    free: int


def is_due(device: Device) -> bool:
    """Tell whether memory is so full that a disk must leave it.

    Of memory promised only once, all else is refused before it is full.
    """
    return device.is_overcommitted and device.used > HIGH * device.capacity


def order(
    devices: Sequence[Device], items: Sequence[Item], memory: str, growth: Mapping[str, float]
) -> List[Move]:
    """Return the disks in memory that may leave it, with their targets; the one that fills it most first.

    `growth`: bytes per second, by item. A disk with `SEMISHARED_CLASS = ram` alone stays there.
    """
    own = [item for item in items if item.device == memory and item.size > 0]
    own.sort(key=lambda item: (-(item.size + AHEAD_S * growth.get(item.name, 0)), item.name))
    moves = [move for item in own for move in drain(devices, [item], memory)]
    return [move for move in moves if move.target]


def may_go_on(waits: Sequence[Wait]) -> bool:
    """Tell whether a guest that libvirt paused after an error goes on: only memory was full, and has room.

    People look at other disks that fail. A write to memory fails only for want of room, whatever QEMU calls
    it.
    """
    return bool(waits) and all(map(_has_room, waits))


def _has_room(wait: Wait) -> bool:
    is_ours = MEMORY in wait.classes and (wait.is_full or wait.was_in_memory)
    return is_ours and wait.free >= min(ENOUGH, wait.capacity // RESERVE)
