# SPDX-License-Identifier: Apache-2.0
"""Diffs of images, and what was done with one."""

from __future__ import annotations

from typing import Tuple

from ..named import NamedTuple


class Diff(NamedTuple):
    """What a guest has written, in files of this machine, and what it lies over."""

    layers: Tuple[str, ...]
    """All qcow2 layers up to the one that is to be committed, the lowest first; nobody writes to them.
    Headers are not asked.
    """
    base: str
    """The image of generation `Owner.generation` that the lowest lies over."""
    format: str
    """Its format, which is the image's."""
    manifest: str
    """Path of its manifest."""
    last: str = ""
    """Path of a file that the commit writes and the next one reads: what the image has. '' for none: all is
    written each time.
    """
    rate: float = 0
    """Bytes per second to the store, 0 for no limit."""


class Committed(NamedTuple):
    """What a commit has done."""

    generation: str
    """What the image is now, '' if nobody knows the name of that."""
    size: int
    """In bytes, as a guest sees it."""
    dirty: int
    """Bytes that the diff holds, zeros and discards not counted."""
    written: int
    """Bytes that were sent to the store, journal and all."""
    seconds: float
    """Until all of it was sent."""
    hashed: int
    """Bytes that were read on this machine for the name of the generation, none from the store."""
    waited: float
    """Seconds more, for that."""
    how: str
    """reflink, journal, whole, rbd; '' if the image has it all already."""

    def to_data(self) -> dict[str, object]:
        """Return it as JSON data."""
        return self._asdict()
