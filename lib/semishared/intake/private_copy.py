# SPDX-License-Identifier: Apache-2.0
"""An upload is first copied into a directory of its own, and judged there: what is checked is what is used.

So no later change of the original matters. The copy is sparse, hashed as it is written, and never larger than
was approved.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import Iterable, Iterator

from ..errors import SourceTooSlow, UnsafeImage, UploadTooLarge
from ..named import NamedTuple
from ..tools import extents
from ..units import MiB, human

FORMAT_SHARE = 16
"""A format's own tables are at most this fraction of the disk."""
FORMAT_LEAST = 64 * MiB
"""And never a question below this: VHDX counts in blocks of 32 MiB."""
CLUSTERS = 16
"""Clusters of a small qcow2 file that hold no data."""


class Bound(NamedTuple):
    """How large an upload may be, in bytes: what oned has approved for the disk (0 if it did not say), and
    what the site allows.
    """

    approved: int
    most: int

    @property
    def disk(self) -> int:
        """Return the largest virtual size: SIZE is in MiB, and not everybody who tells it rounds up."""
        return min(self.approved + MiB - 1, self.most) if self.approved else self.most

    @property
    def file(self) -> int:
        """Return the largest file, whatever its format."""
        return self.disk + self.disk // FORMAT_SHARE + FORMAT_LEAST

    def check_disk(self, size: int, name: str) -> None:
        """Raise UploadTooLarge if a disk of `size` bytes was not approved."""
        if size > self.disk:
            raise UploadTooLarge(
                f"{name} is a disk of {human(size)}, and {human(self.approved or self.most)} were approved"
            )

    def check_data(self, kept: Kept, format: str, name: str) -> None:
        """Raise UploadTooLarge if a file to be stored as it is holds more than its disk can need."""
        most, size = self.disk, kept.manifest.size
        if format != "raw":
            with open(kept.path, "rb") as file:
                bits = int.from_bytes(file.read(24)[20:24], "big")
            most += most // FORMAT_SHARE + CLUSTERS * (1 << min(bits, 21)) + MiB
            # Its length may be more holes than data.
            size = kept.written
        if size > most:
            raise UploadTooLarge(
                f"{name} holds {human(size)}, more than a disk of "
                f"{human(self.approved or self.most)} needs (snapshots inside a "
                "qcow2 file are lost by qemu-img convert)"
            )


class Kept(NamedTuple):
    """A private copy: where it is, what it holds, and the bytes of it that are not zero."""

    path: str
    manifest: extents.Manifest
    written: int


def keep(chunks: Iterable[bytes], target: str, bound: Bound, name: str) -> Kept:
    """Write what comes to the new sparse file `target`; raise UploadTooLarge as soon as it is too much."""
    size, index, waiting = 0, 0, bytearray()
    with extents.Copy(target, 0) as made:
        for chunk in chunks:
            size += len(chunk)
            if size > bound.file:
                raise UploadTooLarge(
                    f"{name} is longer than {human(bound.file)}, and a disk of "
                    f"{human(bound.disk)} was approved"
                )
            waiting += chunk
            while len(waiting) >= extents.EXTENT:
                made.add(index, bytes(waiting[: extents.EXTENT]))
                del waiting[: extents.EXTENT]
                index += 1
        if waiting:
            made.add(index, bytes(waiting))
        made.end_at(size)
    return Kept(target, made.manifest("raw"), made.written)


def copy(source: str, target: str, bound: Bound, name: str) -> Kept:
    """Copy the file `source` to the new sparse file `target`; raise UploadTooLarge."""
    fd = os.open(source, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        size = os.fstat(fd).st_size
        if size > bound.file:
            raise UploadTooLarge(f"{name} has {human(size)}, and a disk of {human(bound.disk)} was approved")
        with extents.Copy(target, size) as made:
            for index, content in extents.data(fd, size):
                made.add(index, content)
    finally:
        os.close(fd)
    return Kept(target, made.manifest("raw"), made.written)


def paced(chunks: Iterator[bytes], least: float, window_s: float, name: str) -> Iterator[bytes]:
    """Yield `chunks`; raise SourceTooSlow if in `window_s` seconds of waiting for them less than `least`
    bytes per second came.
    """
    waited, came = 0.0, 0
    while True:
        began = time.monotonic()
        chunk = next(chunks, None)
        # Not the time in which the store takes what came.
        waited += time.monotonic() - began
        if chunk is None:
            return
        came += len(chunk)
        if waited >= window_s:
            if came < least * waited:
                raise SourceTooSlow(
                    f"{name} came with {human(int(came / waited))} per second, for {waited:.0f} s"
                )
            waited, came = 0.0, 0
        yield chunk


@contextmanager
def within(limit_s: float, name: str) -> Iterator[None]:
    """Raise SourceTooSlow in the block if it takes longer than `limit_s` seconds, wherever it waits."""

    def late(_signal: int, _frame: object) -> None:
        raise SourceTooSlow(f"the size of {name} is not known after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check_claim(size: int, most: int, name: str) -> None:
    """Raise UnsafeImage if an image claims to be larger than the site allows."""
    if size > most:
        raise UnsafeImage(f"{name} claims a size of {human(size)}, more than the {human(most)} allowed")
