# SPDX-License-Identifier: Apache-2.0
"""The classes of the devices of a pool: the words of SEMISHARED_CLASS, and what a disk wants by them.

ram any     memory while there is room, else where disks go of which nothing is said
"""

from __future__ import annotations

from typing import Iterable

from ...named import NamedTuple

MEMORY = "ram"
"""A device that is empty after a restart of its host. Only what is told to goes there, and only what fits at
its largest.
"""
USUAL = ("fast", "slow")
"""The better first: where disks go of which nothing is said."""
KNOWN = (*USUAL, MEMORY)
ANY = "any"
WORDS = (*KNOWN, ANY)
LOG = 64 << 20


class Want(NamedTuple):
    """On which devices something may be put, and how large it can become."""

    classes: tuple[str, ...] = ()
    """Of WORDS, the one to be tried first in front; none: as ANY."""
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
        """Tell whether it is put nowhere rather than where no class is known."""
        return bool(self.classes) and ANY not in self.classes


def are_words(found: Iterable[object]) -> bool:
    """Tell whether these can be wanted: each is known, and none is there twice."""
    listed = list(found)
    return bool(listed) and all(word in WORDS for word in listed) and len(set(listed)) == len(listed)


def needed_memory(capacity: int) -> int:
    """Return how many bytes of its host's memory a device with room for `capacity` can come to take.

    Beside that there is the log of its file system, and what zram loses to its tables and between what it has
    compressed.
    """
    return capacity + capacity // 16 + LOG


NOTHING = Want()
