# SPDX-License-Identifier: Apache-2.0
"""Parts of a disk, copied into a qcow2 file of nothing else, which hides these in what it is laid over later.

qemu-io opens the empty file over the disk and reads the parts; QEMU keeps in the file what it reads through
it, zeros as a note. The file itself names no backing file.
"""

from __future__ import annotations

import json
import os
from itertools import islice
from typing import Any, Iterable, Iterator, Mapping, Sequence, Tuple

from ..errors import NoSpace, ToolFailed
from . import qemu_img, run

CLUSTER = 65536
"""Bytes: that of a qcow2 file which qemu-img makes."""
AT_ONCE = 128
"""Reads in flight, each of one cluster: QEMU tells zeros from data by what one read has."""
MOST = 1 << 18
"""Reads of one qemu-io, of 16 GiB: what it is to do is in memory."""
PROMPT = "qemu-io> "


def clusters(parts: Iterable[Tuple[int, int]], size: int) -> Iterator[Tuple[int, int]]:
    """Yield (offset, length) of the clusters that `parts` lie in, none twice, in order.

    At the end of a disk of `size` bytes the last cluster is shorter; what lies behind it is left out.
    """
    reached = 0
    for offset, length in sorted(parts):
        begin = max(reached, offset // CLUSTER * CLUSTER)
        end = min(-(-(offset + length) // CLUSTER) * CLUSTER, size)
        for at in range(begin, end, CLUSTER):
            yield at, min(CLUSTER, end - at)
        reached = max(reached, end)


def copy(
    source: Mapping[str, Any],
    target: str,
    parts: Iterable[Tuple[int, int]],
    within: Sequence[str] = (),
    *,
    rate: int = 0,
) -> None:
    """Copy `parts` (offset, length) of a disk to the empty qcow2 `target` of its size.

    `source`: the disk as a node of QEMU's. `within`: words of programs that start qemu-io; `rate`: bytes per
    second, 0 for no limit. Raise NoSpace or ToolFailed.
    """
    file = {"driver": "file", "filename": target}
    below, limits = dict(source), []
    if rate:
        below = {"driver": "throttle", "throttle-group": "rate", "file": below}
        limits = ["--object", f"throttle-group,id=rate,x-bps-read={rate}"]
    name = "json:" + json.dumps({"driver": "qcow2", "file": file, "backing": below})
    argv = [*within, "qemu-io", *limits, "-C", *qemu_img.past_the_cache(target), name]
    wanted = clusters(parts, qemu_img.virtual_size(target, "qcow2"))
    while some := list(islice(wanted, MOST)):
        _read(argv, some, target, at_once=1 if rate else AT_ONCE)


def _read(argv: list[str], wanted: Sequence[Tuple[int, int]], target: str, at_once: int) -> None:
    with run.memory() as script:
        with open(script, "w", encoding="ascii", closefd=False) as given:
            for number, (offset, length) in enumerate(wanted, 1):
                # At a flush QEMU lets go at once of what a limit holds back.
                given.write(f"{'read' if at_once == 1 else 'aio_read'} -q {offset} {length}\n")
                if at_once > 1 and (number % at_once == 0 or number == len(wanted)):
                    given.write("aio_flush\n")
        os.lseek(script, 0, os.SEEK_SET)
        # A read that fails in flight is in what it says, not in its exit code.
        said = run.work(argv, stdin=script).replace(PROMPT, "").strip()
    if said:
        text = f"qemu-io {target} on {os.uname().nodename}: {said[:500]}"
        raise NoSpace(text) if "No space left" in text else ToolFailed(text)
