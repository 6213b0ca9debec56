# SPDX-License-Identifier: Apache-2.0
"""Compressors for what travels between hosts: the programs zstd and lzop, or none; and which of them pays."""

from __future__ import annotations

import shutil
import time
from typing import Collection, Sequence, Union

from ..errors import BadArguments, TransferCorrupt
from ..named import NamedTuple
from .run import PATH, filtered

NONE, ZSTD, LZOP = "none", "zstd", "lzop"
PACK = {ZSTD: ["zstd", "-q", "-1", "-T0", "-c"], LZOP: ["lzop", "-q", "-1", "-c"]}
UNPACK = {ZSTD: ["zstd", "-q", "-d", "-c"], LZOP: ["lzop", "-q", "-d", "-c"]}
NUMBERS = {NONE: 0, ZSTD: 1, LZOP: 2}
NAMES = {number: name for name, number in NUMBERS.items()}
AUTO = "auto"
Bytes = Union[bytes, memoryview]
UNLIMITED = 117_000_000
"""Bytes per second that are taken for the network's where no rate is given: what 1 Gbit/s carries."""


def available() -> list[str]:
    """Return the compressors of this machine."""
    return [NONE, *(name for name, argv in PACK.items() if shutil.which(argv[0], path=PATH))]


def pack(name: str, content: Bytes) -> Bytes:
    """Return `content` compressed; raise ToolMissing, ToolFailed."""
    return content if name == NONE else filtered(PACK[name], content)


def unpack(name: str, packed: Bytes, size: int) -> Bytes:
    """Return what was packed, `size` bytes; raise TransferCorrupt if it is not that long."""
    content = packed if name == NONE else filtered(UNPACK[name], packed)
    if len(content) != size:
        raise TransferCorrupt(f"{len(content)} bytes came out of {name} instead of {size}")
    return content


class Sample(NamedTuple):
    """What a compressor did with a piece of the image."""

    name: str
    ratio: float
    """Packed by plain."""
    speed: float
    """Plain bytes per second that it takes in."""


def best(samples: Sequence[Sample], rate: float) -> str:
    """Return the compressor with which most plain bytes per second go through `rate`; of equals the least
    work.
    """
    link = rate or UNLIMITED

    def through(sample: Sample) -> float:
        return min(sample.speed, link / max(sample.ratio, 0.001))

    most = max(through(sample) for sample in samples)
    # Not for a few percent: compressing costs the guests of the sender their CPU.
    return next(
        s.name
        for s in sorted(samples, key=lambda s: s.name != NONE and 1 / s.speed)
        if through(s) >= 0.93 * most
    )


def pays(link: float) -> bool:
    """Tell whether to think of compressing for a network that has carried so many bytes per second:
    processors are the guests'.
    """
    return link < UNLIMITED * 1.25


def choose(wanted: str, unpacks: Collection[str], content: bytes, rate: float) -> str:
    """Return the compressor to use: `wanted`, or for 'auto' the one that pays for a piece of the image, if
    who receives `unpacks` it.

    It may have been installed on some of the hosts only; what cannot be unpacked is of no use to them.
    """
    if wanted not in (AUTO, *NUMBERS):
        raise BadArguments(f"no such compressor: {wanted!r}")
    known = [name for name in available() if name in unpacks and name != NONE]
    if wanted != AUTO:
        return wanted if wanted in known else NONE
    samples = [Sample(NONE, 1.0, float("inf"))]
    for name in known:
        started = time.monotonic()
        packed = pack(name, content)
        samples.append(
            Sample(name, len(packed) / max(len(content), 1), len(content) / (time.monotonic() - started))
        )
    return best(samples, rate)
