# SPDX-License-Identifier: Apache-2.0
"""Which files bring all devices of a pool below a bound where those that come to mind first do not
(plan/pool_moves.py).

With few files for each device it is a matter of which ones. So it is tried: many orders of the same files,
always the same orders, in each what fits is moved, and one file goes there and a smaller one back where only
that helps. The least of what succeeds is taken.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping, Sequence, Tuple

from ..named import NamedTuple
from .pool import drawn

ATTEMPTS = 100
LOOKS = 400_000
"""At items and devices in all attempts: of a pool with very many items only as many are made as take part of
a second.
"""


class File(NamedTuple):
    """Something that can be moved."""

    name: str
    device: str
    size: int


class Level(NamedTuple):
    """Bytes that a device holds, may come to hold (as a target), and is to hold at most in the end."""

    used: int
    most: int
    goal: int


Found = List[Tuple[File, str]]
"""Files, and the device that each is to go to."""


def search(levels: Mapping[str, Level], files: Sequence[File], most: int) -> Found:
    """Return moves of at most `most` bytes after which every device has reached its goal; none if no attempt
    finds any.
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
