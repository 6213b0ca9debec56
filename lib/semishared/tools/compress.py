# SPDX-License-Identifier: Apache-2.0
"""Compressors for data between hosts, the programs zstd and lzop, and the choice among them."""

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
"""Bytes per second of the network where no rate is given: 1 Gbit/s."""


def available() -> list[str]:
    """Return the compressors of this machine."""
    return [NONE, *(name for name, argv in PACK.items() if shutil.which(argv[0], path=PATH))]


def pack(name: str, content: Bytes) -> Bytes:
    """Return `content` compressed; raise ToolMissing, ToolFailed."""
    return content if name == NONE else filtered(PACK[name], content)


def unpack(name: str, packed: Bytes, size: int) -> Bytes:
    """Return the unpacked content; raise TransferCorrupt if it has not `size` bytes."""
    content = packed if name == NONE else filtered(UNPACK[name], packed)
    if len(content) != size:
        raise TransferCorrupt(f"{len(content)} bytes came out of {name} instead of {size}")
    return content


class Sample(NamedTuple):
    """The result of a compressor for a piece of the image."""

    name: str
    ratio: float
    """Packed by plain size."""
    speed: float
    """Plain bytes per second."""


def best(samples: Sequence[Sample], rate: float) -> str:
    """Return the compressor that moves most plain bytes per second at `rate`; of equals the cheapest."""
    link = rate or UNLIMITED

    def through(sample: Sample) -> float:
        return min(sample.speed, link / max(sample.ratio, 0.001))

    most = max(through(sample) for sample in samples)
    # Ignore a gain of a few percent: compressing takes CPU from the sender's guests.
    cheapest = sorted(samples, key=lambda sample: sample.name != NONE and 1 / sample.speed)
    return next(sample.name for sample in cheapest if through(sample) >= 0.93 * most)


def pays(link: float) -> bool:
    """Return False if the network has carried so many bytes per second that compressing cannot pay."""
    return link < UNLIMITED * 1.25


def choose(wanted: str, unpacks: Collection[str], content: bytes, rate: float) -> str:
    """Return `wanted` if the receiver `unpacks` it; for 'auto' the best compressor for a piece of the image.

    Return 'none' if this machine or the receiver lacks the wanted one.
    """
    if wanted not in (AUTO, *NUMBERS):
        raise BadArguments(f"no such compressor: {wanted!r}")
    known = [name for name in available() if name in unpacks and name != NONE]
    if wanted != AUTO:
        return wanted if wanted in known else NONE
    samples = [Sample(NONE, 1.0, float("inf"))]
    for name in known:
        started = time.monotonic()
        ratio = len(pack(name, content)) / max(len(content), 1)
        samples.append(Sample(name, ratio, len(content) / (time.monotonic() - started)))
    return best(samples, rate)
