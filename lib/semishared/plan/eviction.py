# SPDX-License-Identifier: Apache-2.0
"""What leaves the base store of a host: never a leased base; of the others older generations first, then the least
recently leased.

    size_limit   all bases together are at most this large
    free_floor   at least this much stays free on the file system that they are on, for the guests' overlays
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from ..errors import BadAttribute
from ..opennebula.xml import Host
from ..units import amount


class Held(NamedTuple):
    """A base on a host."""

    name: str
    """<store>-<image>-<generation>"""
    bytes: int
    staged: float
    """When it was staged: seconds since the epoch."""
    used: float
    """When a lease on it was last taken or given up, or it was staged: seconds since the epoch."""
    leases: int

    @property
    def image(self) -> str:
        return self.name.rsplit("-", 1)[0]

    @classmethod
    def of(cls, row: dict[str, Any]) -> Held:
        """Return a base as a host lists it (base/scrub.py)."""
        return cls(row["name"], row["bytes"], row["staged"], row["used"], len(row["leases"]))


class Limits(NamedTuple):
    """What a host's base store may take, in bytes; `most` -1 for no limit."""

    most: int
    floor: int


def limits(size_limit: str, free_floor: str, total: int) -> Limits:
    """Return the limits for a file system of `total` bytes; raise BadAttribute."""
    return Limits(_bytes("size_limit", size_limit, total, -1), _bytes("free_floor", free_floor, total, 0))


def limits_of(host: Host | None, size_limit: str, free_floor: str, total: int) -> Limits:
    """Return the limits of a host: its own attributes, or else those that hold for all; raise BadAttribute."""
    own = (host.attribute("SEMISHARED_BASES_LIMIT"), host.attribute("SEMISHARED_BASES_FLOOR")) if host else ("", "")
    return limits(own[0] or size_limit, own[1] or free_floor, total)


def _bytes(key: str, text: str, total: int, none: int) -> int:
    if text == "none":
        return none
    try:
        if text.endswith("%"):
            share = float(text[:-1])
            if 0 <= share <= 100:
                return int(total * share / 100)
            raise ValueError
        return amount(text)
    except ValueError:
        raise BadAttribute(f"{key} = {text!r} is neither a size (200G), nor a share (30%), nor none") from None


def superseded(bases: Sequence[Held]) -> set[str]:
    """Return the bases of whose image the host has a younger one."""
    newest: dict[str, Held] = {}
    for base in bases:
        known = newest.get(base.image)
        if known is None or (base.staged, base.name) > (known.staged, known.name):
            newest[base.image] = base
    return {base.name for base in bases if newest[base.image] is not base}


def missing(bases: Sequence[Held], limit: Limits, free: int, needed: int = 0) -> int:
    """Return the bytes that have to go before `needed` more can come; 0 or less if there is room."""
    over = sum(base.bytes for base in bases) + needed - limit.most if limit.most >= 0 else 0
    return max(over, limit.floor + needed - free)


def choose(bases: Sequence[Held], limit: Limits, free: int, needed: int = 0, keep: str = "") -> list[str]:
    """Return the bases to remove, in that order, so that `needed` bytes more can come; it may not be enough."""
    old = superseded(bases)
    candidates = [base for base in bases if not base.leases and base.name != keep]
    candidates.sort(key=lambda base: (base.name not in old, base.used, base.name))
    chosen, left = [], missing(bases, limit, free, needed)
    for base in candidates:
        if left <= 0:
            break
        chosen.append(base.name)
        left -= base.bytes
    return chosen
