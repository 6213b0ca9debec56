# SPDX-License-Identifier: Apache-2.0
"""Sums of a disk's blocks, by which a later look at it knows what has changed since.

A file of sums has 16 bytes for each block of 64 KiB, zeros for a block of zeros, and at its end a sum of all
of these: one that was cut off, or is damaged, says so.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from contextlib import ExitStack
from typing import IO, Any, Iterator, List, Mapping, Sequence, Tuple

from . import files, progress, qemu_img
from .effects import point
from .extents import is_zero
from .rate_limit import Pace

BLOCK = 64 << 10
SUM = 16
"""Bytes of a block's sum."""
WINDOW = 4 << 20
"""Bytes of a disk that are looked at together."""
ZERO = bytes(SUM)
Part = Tuple[int, int]
"""Offset and length."""


def is_whole(path: str) -> bool:
    """Tell whether a file of sums is there as it was written."""
    total = hashlib.blake2b(digest_size=SUM)
    try:
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size - SUM
            while left > 0:
                data = file.read(min(left, WINDOW))
                total.update(data)
                left -= len(data)
                progress.touch()
            return left == 0 and file.read() == total.digest()
    except OSError:
        return False


def take(image: str, format: str, path: str, since: str = "", rate: int = 0) -> List[Part]:
    """Write the sums of an image, raw or a qcow2 file that lies over nothing, to `path`.

    Return the parts of whole blocks that differ from those of which the sums are in `since`; all of them
    without that. `rate`: bytes per second that are read, 0 for no limit.
    """
    size = qemu_img.virtual_size(image, format)
    found: List[Part] = []
    total = hashlib.blake2b(digest_size=SUM)
    with ExitStack() as stack:
        source = stack.enter_context(open(image, "rb"))
        made = stack.enter_context(open(stack.enter_context(files.published(path)), "wb"))
        before = stack.enter_context(open(since, "rb") if since else io.BytesIO(ZERO))
        known = before.seek(-SUM, os.SEEK_END)
        before.seek(0)
        for at, sums in _windows(source, _data(image, format), size, Pace(rate)):
            made.write(sums)
            total.update(sums)
            found += _changed(at, sums, before.read(max(0, min(len(sums), known - before.tell()))))
            progress.touch()
        made.write(total.digest())
    point("sums written")
    return found


def _changed(at: int, sums: bytes, before: bytes) -> Iterator[Part]:
    """Yield the blocks, from `at` on, whose sums are not what they were, or were not there."""
    if sums == before:
        return
    for number in range(0, len(sums), SUM):
        if sums[number : number + SUM] != before[number : number + SUM]:
            yield at + number // SUM * BLOCK, BLOCK


def _data(image: str, format: str) -> Sequence[Mapping[str, Any]]:
    """Return where in the file which parts of the image lie, those that are no zeros."""
    file = {"driver": "file", "filename": image}
    entries = qemu_img.mapped("json:" + json.dumps({"driver": format, "file": file}))
    return [entry for entry in entries if entry["data"] and not entry["zero"]]


def _windows(
    source: IO[bytes], data: Sequence[Mapping[str, Any]], size: int, pace: Pace
) -> Iterator[Tuple[int, bytes]]:
    """Yield the sums of all blocks, those of one window after the other, with its offset."""
    next_one = 0
    for at in range(0, size, WINDOW):
        end = min(at + WINDOW, size)
        sums = bytearray(-(-(end - at) // BLOCK) * SUM)
        reached = at
        while next_one < len(data) and data[next_one]["start"] < end:
            entry = data[next_one]
            begin = max(reached, entry["start"] // BLOCK * BLOCK)
            stop = min(end, -(-(entry["start"] + entry["length"]) // BLOCK) * BLOCK)
            for block in range(begin, stop, BLOCK):
                # A block with holes in it is one of a raw file, which has it all in one place.
                content = os.pread(
                    source.fileno(),
                    min(BLOCK, size - block),
                    entry["offset"] + block - entry["start"],
                )
                pace.wait(len(content))
                number = (block - at) // BLOCK * SUM
                if not is_zero(content):
                    padded = content.ljust(BLOCK, b"\0")  # what grows later is zero there
                    sums[number : number + SUM] = hashlib.blake2b(padded, digest_size=SUM).digest()
            reached = max(reached, stop)
            if entry["start"] + entry["length"] > end:
                break
            next_one += 1
        yield at, bytes(sums)
