# SPDX-License-Identifier: Apache-2.0
"""The classes of a pool's devices: the words of SEMISHARED_CLASS, and what a disk wants by them.

ram any     memory while there is room, else the place of a disk that asks for nothing
"""

from __future__ import annotations

from typing import Iterable

from ...named import NamedTuple

MEMORY = "ram"
"""A device that is empty after a restart of its host.

It takes only disks that ask for it, and only what fits at its largest.
"""
USUAL = ("fast", "slow")
"""The classes for disks that ask for none, the better first."""
KNOWN = (*USUAL, MEMORY)
ANY = "any"
WORDS = (*KNOWN, ANY)
LOG = 64 << 20


class Want(NamedTuple):
    """The devices that a file may lie on, and how large it can become."""

    classes: tuple[str, ...] = ()
    """Of WORDS, the first to try in front; none: as ANY."""
    size: int = 0
    """Bytes of one of its layers at its largest."""
    layers: int = 1

    @property
    def most(self) -> int:
        """Return the bytes that it can come to hold."""
        return self.size * self.layers

    @property
    def tried(self) -> tuple[str, ...]:
        """Return the classes in the order in which they are tried."""
        found = [known for word in self.classes or (ANY,) for known in (USUAL if word == ANY else (word,))]
        return tuple(dict.fromkeys(found))

    @property
    def is_strict(self) -> bool:
        """Tell whether it is refused rather than placed where no class is known."""
        return bool(self.classes) and ANY not in self.classes


def are_words(found: Iterable[object]) -> bool:
    """Tell whether these words can be wanted: all known, none twice."""
    listed = list(found)
    return bool(listed) and all(word in WORDS for word in listed) and len(set(listed)) == len(listed)


def needed_memory(capacity: int) -> int:
    """Return the bytes of its host's memory that a device with room for `capacity` can come to take.

    Besides its files there are the log of its file system, and zram's tables and fragmentation.
    """
    return capacity + capacity // 16 + LOG


NOTHING = Want()
