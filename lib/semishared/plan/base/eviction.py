# SPDX-License-Identifier: Apache-2.0
"""Choose the bases that leave a host: none with a lease, older generations first, then the longest unused.

    size_limit   all bases of the host together are at most this large, on whichever devices they lie
    free_floor   at least this much stays free on the file system of a new base, for the guests' overlays

A base that breaks a limit is refused if another host could have it as well. A base that a VM needs on this
host (the VM arrives or is saved, or a damaged base is replaced) is refused only if it does not fit. Guests'
own disks may use what bases leave free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Collection, Mapping, Sequence

from ...errors import BadAttribute, NoSpace
from ...model.attributes import BASES_FLOOR, BASES_LIMIT
from ...named import NamedTuple
from ...units import amount, human

if TYPE_CHECKING:
    from ...model.base.steps import DescribedBase, HeldBase, Listed
    from ...opennebula.xml import Host


class Limits(NamedTuple):
    """The limits of a host's base store in bytes; `most` -1 for no limit."""

    most: int
    floor: int


def limits(size_limit: str, free_floor: str, total: int, whole: int = 0) -> Limits:
    """Return the limits for a file system of `total` bytes; raise BadAttribute.

    `whole`: the bytes that the host has for bases; 0: the same.
    """
    return Limits(
        _bytes("size_limit", size_limit, whole or total, -1), _bytes("free_floor", free_floor, total, 0)
    )


def limits_of(host: Host | None, size_limit: str, free_floor: str, listed: Listed) -> Limits:
    """Return the limits for what a host lists: its own attributes, else those of all; raise BadAttribute."""
    size_limit, free_floor = BASES_LIMIT.text(host) or size_limit, BASES_FLOOR.text(host) or free_floor
    return limits(size_limit, free_floor, listed.total, listed.whole)


def _bytes(key: str, text: str, total: int, none: int) -> int:
    if text == "none":
        return none
    try:
        if text.endswith("%"):
            share = float(text[:-1])
            if 0 <= share <= 100:
                return int(total * share / 100)
        return amount(text)
    except ValueError:
        raise BadAttribute(
            f"{key} = {text!r} is neither a size (200G), nor a share (30%), nor none"
        ) from None


def superseded(bases: Sequence[HeldBase]) -> set[str]:
    """Return the bases of images of which the host has a younger one."""
    newest: dict[str, HeldBase] = {}
    for base in bases:
        known = newest.get(base.image)
        if known is None or (base.staged, base.name) > (known.staged, known.name):
            newest[base.image] = base
    return {base.name for base in bases if newest[base.image] is not base}


def missing(bases: Sequence[HeldBase], limit: Limits, free: int, needed: int = 0) -> int:
    """Return the bytes that have to go before `needed` more can come; 0 or less if there is room."""
    return max(_over(bases, limit, needed), limit.floor + needed - free)


def _over(bases: Sequence[HeldBase], limit: Limits, needed: int) -> int:
    return sum(base.bytes for base in bases) + needed - limit.most if limit.most >= 0 else 0


def choose(
    bases: Sequence[HeldBase], limit: Limits, free: int, needed: int = 0, keep: Collection[str] = ()
) -> list[str]:
    """Return the bases to remove, in that order, to make room for `needed` bytes; it may not be enough.

    Bases on the same file system go first, as many as it lacks: they count in the limit of the whole host
    too.
    """
    old = superseded(bases)
    candidates = [base for base in bases if not base.leases and base.name not in keep]
    candidates.sort(key=lambda base: (base.name not in old, base.used, base.name))
    over, short = _over(bases, limit, needed), limit.floor + needed - free
    chosen: list[str] = []
    for is_for_all in (False, True):
        for base in candidates:
            if base.name not in chosen and (over > 0 if is_for_all else short > 0 and base.here):
                chosen.append(base.name)
                over -= base.bytes
                short -= base.bytes
    return chosen


def number(data: Mapping[str, Any], key: str) -> int:
    """Return a number in a host's question, 0 if it is none."""
    value = data.get(key)
    return value if isinstance(value, int) else 0


def room(
    listed: Listed,
    limit: Limits,
    host: str,
    needed: int,
    *keep: str,
    must: bool = False,
    mends: bool = False,
) -> list[str]:
    """Return the bases to remove for a new one of `needed` bytes; raise NoSpace if that is not enough.

    With `must`, only the bytes have to fit, whatever the limits. A base that `mends` replaces a damaged one.
    """
    bases, free = listed.bases, listed.free
    if mends:
        limit = Limits(-1, 0)
    chosen = choose(bases, limit, free, needed, keep)
    stay = [base for base in bases if base.name not in chosen]
    gone = sum(base.bytes for base in bases if base.here) - sum(base.bytes for base in stay if base.here)
    left = missing(stay, Limits(-1, 0) if must else limit, free + gone, needed)
    if left > 0:
        what = "are missing" if must else "over its size limit or free-space floor"
        raise NoSpace(f"no space for a base of {human(needed)} on {host}: {human(left)} {what}")
    return chosen


def of_session(answers: Sequence[DescribedBase]) -> list[tuple[Listed, int]]:
    """Return what a host lists of each file system that a session's bases go to, and the bytes they need.

    `answers`: of the host for each base, with the bases and the room `where` that one would be made.
    """
    groups: dict[str, list[DescribedBase]] = {}
    for answer in answers:
        groups.setdefault(answer.where, []).append(answer)
    return [(group[0], sum(answer.needed for answer in group)) for group in groups.values()]


def after(listed: Listed, gone: Collection[str], coming: int) -> Listed:
    """Return what a host would list without `gone`, with `coming` bytes on its other file systems."""
    left = [base for base in listed.bases if base.name not in gone]
    freed = sum(base.bytes for base in listed.bases if base.here and base.name in gone)
    if coming:
        from ...model.base.steps import HeldBase

        left.append(HeldBase("", coming, 0, 0, ("0-0",), coming, False, "", False))
    return listed._replace(bases=left, free=listed.free + freed)


def room_for_disk(listed: Listed, floor: int, needed: int, last: Collection[str] = ()) -> list[str]:
    """Return the bases to remove for a guest's disk of `needed` bytes.

    Those in `last`, from which the disk comes, go only if all others are not enough.
    """
    bases, free = listed.bases, listed.free
    limit = Limits(-1, floor)
    chosen = choose(bases, limit, free, needed, last)
    gone = sum(base.bytes for base in bases if base.here and base.name in chosen)
    return chosen if missing([], limit, free + gone, needed) <= 0 else choose(bases, limit, free, needed)
