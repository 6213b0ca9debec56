# SPDX-License-Identifier: Apache-2.0
"""Whether a diff may be committed to an image: what the image's record says, in any kind of store.

The record names the disk (model/refs.Owner) and says how the image was left: at the claim, or by the last
commit. How that content is recognised is the store's own affair (`state`). `touched` are the extents that
commits have written since the claim: where the guest was reverted and the diff holds one no more, the commit
writes what the base has there.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import FrozenSet, Iterable, Optional, Tuple

from ...errors import CommitRefused, NotOwner, StaleDiff, TooLarge, UnknownClaim
from ...model.refs import Owner
from ...named import NamedTuple
from ...tools.extents import EXTENT

MOST = 2 << 20
"""Bytes of the unpacked set of extents: of 64 TiB."""
LIMIT = 4 << 20
"""Bytes of a record, for who writes it and for who reads it: more than the largest set takes, however it was
written to.
"""


class Claim(NamedTuple):
    """The record of an image."""

    owner: Owner
    generation: str
    """What the image is now, '' if nobody knows its name."""
    size: int
    """In bytes, of the file or image on the store."""
    state: Tuple[object, ...]
    """What only this content has, as the store sees it."""
    snapshots: Tuple[int, ...] = ()
    touched: FrozenSet[int] = frozenset()
    """Extents in which the image is not `owner.generation` any more."""
    changing: bool = False
    """A commit is writing to it (stores that keep what it was before)."""

    def to_data(self) -> dict[str, object]:
        """Return the record as JSON data."""
        return {**self._asdict(), "owner": self.owner.to_data(), "touched": _packed(self.touched)}

    @classmethod
    def from_data(cls, data: object) -> Optional[Claim]:
        """Return the record in JSON data, None if there is none to be believed."""
        if not isinstance(data, dict) or set(data) != set(cls._fields):
            return None
        owner = Owner.from_data(data["owner"])
        try:
            found = cls(**{**data, "owner": owner, "touched": _unpacked(data["touched"])})
            found = found._replace(state=tuple(found.state), snapshots=tuple(map(int, found.snapshots)))
        except (TypeError, ValueError, zlib.error):
            return None
        return found if owner and isinstance(found.generation, str) and type(found.size) is int else None


def parse(shown: str, text: bytes | str) -> Claim:
    """Return the record of an image in what is written there; raise UnknownClaim: whose it is must not be
    taken for nobody's.
    """
    try:
        found = Claim.from_data(json.loads(text))
    except (ValueError, RecursionError):
        found = None
    if found is None:
        raise UnknownClaim(
            f"whose writing {shown} waits for cannot be understood: its record is damaged, or of "
            f"a newer version"
        )
    return found


def _packed(numbers: Iterable[int]) -> str:
    bits = bytearray()
    largest = max(numbers := list(numbers), default=0)
    if largest // 8 >= MOST:
        raise TooLarge(
            f"the record of an image holds {MOST * 8} extents of {EXTENT} bytes, and number "
            f"{largest} was written to"
        )
    for number in numbers:
        if number // 8 >= len(bits):
            bits.extend(bytes(number // 8 + 1 - len(bits)))
        bits[number // 8] |= 1 << number % 8
    return base64.b64encode(zlib.compress(bytes(bits))).decode() if bits else ""


def _unpacked(text: str) -> FrozenSet[int]:
    unpacking = zlib.decompressobj()
    bits = unpacking.decompress(base64.b64decode(text, validate=True), MOST) if text else b""
    if unpacking.unconsumed_tail:
        raise ValueError("more extents than an image has")
    return frozenset(
        8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte >> bit & 1
    )


def check_epoch(shown: str, owner: Owner, noted: int) -> None:
    """Raise StaleDiff if another host has taken the VM over, at an epoch after the diff's."""
    if noted > owner.epoch:
        raise StaleDiff(
            f"the diff of {shown} is of SEQ {owner.epoch} of VM {owner.vm}'s history; at SEQ "
            f"{noted} another host took it over"
        )


def claimed(shown: str, before: Optional[Claim], new: Claim) -> Claim:
    """Return the record after a claim; `new` has the image as it is now. Raise StaleDiff, or CommitRefused
    for another content.
    """
    owner = new.owner
    if before and before.owner.is_same(owner):
        if before.owner.epoch > owner.epoch:
            raise _stale(shown, before.owner, owner)
        if before.owner.generation == owner.generation and is_as(before.state, new.state):
            # The same diff, elsewhere or later: what it has committed stays noted.
            return before._replace(owner=owner)
    if new.generation != owner.generation:
        raise CommitRefused(f"{shown} is of generation {new.generation or 'unknown'}, not {owner.generation}")
    return new


def is_as(was: Tuple[object, ...], now: Tuple[object, ...]) -> bool:
    """Tell whether a content is the noted one: older versions noted less, which then counts as equal."""
    return now[: len(was)] == was and bool(was) == bool(now)


def _stale(shown: str, claimed: Owner, own: Owner) -> StaleDiff:
    return StaleDiff(
        f"{shown} was claimed for SEQ {claimed.epoch} of VM {own.vm}'s history, and the diff is "
        f"of SEQ {own.epoch}"
    )


def is_of(claim: Optional[Claim], owner: Owner) -> bool:
    """Tell whether `owner` may give up a claim: its own, of no later SEQ of its VM's history."""
    return claim is not None and claim.owner.is_same(owner) and claim.owner.epoch <= owner.epoch


def check(shown: str, claim: Optional[Claim], owner: Owner, now: Claim) -> Claim:
    """Return the record of an image that `owner` may commit to; `now` has the image as it is. Raise NotOwner,
    StaleDiff, CommitRefused.
    """
    if claim is None:
        raise NotOwner(f"{shown} was claimed for no disk, so not for disk {owner.disk} of VM {owner.vm}")
    if not claim.owner.is_same(owner):
        raise NotOwner(
            f"{shown} was claimed for disk {claim.owner.disk} of VM {claim.owner.vm} since, not "
            f"{owner.disk} of VM {owner.vm}"
        )
    if claim.owner.epoch > owner.epoch:
        raise _stale(shown, claim.owner, owner)
    if claim.owner.generation != owner.generation:
        raise NotOwner(
            f"{shown} was claimed for a diff over generation {claim.owner.generation}, not {owner.generation}"
        )
    if now.snapshots != claim.snapshots:
        raise CommitRefused(
            f"{shown} had the snapshots {_listed(claim.snapshots)} when it was claimed, and has "
            f"{_listed(now.snapshots)}"
        )
    if now.size != claim.size:
        how = "grown" if now.size > claim.size else "shrunk"
        raise CommitRefused(f"{shown} was {how} from {claim.size} to {now.size} bytes by somebody else")
    if not is_as(claim.state, now.state):
        raise CommitRefused(f"{shown} was written to by somebody else after it was claimed")
    return claim


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


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
