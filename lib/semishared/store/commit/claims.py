# SPDX-License-Identifier: Apache-2.0
"""The record of an image, which decides whether a disk may commit its diff; for any kind of store.

The record names the disk (model/refs.Owner) and the state of the image after the claim or the last commit.
Each store recognises that content in its own way (`state`). `touched` are the extents that commits have
written since the claim: if the guest was reverted and the diff no longer holds one of them, the commit writes
the base's data there.
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
"""Most bytes of the unpacked set of extents: that of 64 TiB."""
LIMIT = 4 << 20
"""Most bytes of a record: more than the largest set takes in any encoding."""


class Claim(NamedTuple):
    """The record of an image."""

    owner: Owner
    generation: str
    """The image's present generation, '' if it is unknown."""
    size: int
    """Bytes of the file or image on the store."""
    state: Tuple[object, ...]
    """What identifies this content, as the store sees it."""
    snapshots: Tuple[int, ...] = ()
    touched: FrozenSet[int] = frozenset()
    """Extents in which the image differs from `owner.generation`."""
    changing: bool = False
    """A commit is writing to the image (in stores that keep its former content)."""

    def to_data(self) -> dict[str, object]:
        return {**self._asdict(), "owner": self.owner.to_data(), "touched": _packed(self.touched)}

    @classmethod
    def from_data(cls, data: object) -> Optional[Claim]:
        """Return the record in JSON data, None if the data is not a valid record."""
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
    """Return the record in `text`; raise UnknownClaim for a damaged one: the image may have an owner."""
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
    """Raise StaleDiff if another host took the VM over after the diff's epoch."""
    if noted > owner.epoch:
        raise StaleDiff(
            f"the diff of {shown} is of SEQ {owner.epoch} of VM {owner.vm}'s history; at SEQ "
            f"{noted} another host took it over"
        )


def claimed(shown: str, before: Optional[Claim], new: Claim) -> Claim:
    """Return the record after a claim; `new` describes the image now.

    Raise StaleDiff, or CommitRefused if the image has another content than the diff's base.
    """
    owner = new.owner
    if before and before.owner.is_same(owner):
        if before.owner.epoch > owner.epoch:
            raise _stale(shown, before.owner, owner)
        if before.owner.generation == owner.generation and is_as(before.state, new.state):
            # The same diff, elsewhere or later: keep the record of its commits.
            return before._replace(owner=owner)
    if new.generation != owner.generation:
        raise CommitRefused(f"{shown} is of generation {new.generation or 'unknown'}, not {owner.generation}")
    return new


def is_as(was: Tuple[object, ...], now: Tuple[object, ...]) -> bool:
    """Return True if `now` is the recorded content; fields that old versions omitted count as equal."""
    return now[: len(was)] == was and bool(was) == bool(now)


def _stale(shown: str, claimed: Owner, own: Owner) -> StaleDiff:
    return StaleDiff(
        f"{shown} was claimed for SEQ {claimed.epoch} of VM {own.vm}'s history, and the diff is "
        f"of SEQ {own.epoch}"
    )


def is_of(claim: Optional[Claim], owner: Owner) -> bool:
    """Return True if `owner` may give up the claim: its own, with no later SEQ of its VM's history."""
    return claim is not None and claim.owner.is_same(owner) and claim.owner.epoch <= owner.epoch


def check(shown: str, claim: Optional[Claim], owner: Owner, now: Claim) -> Claim:
    """Return the claim if `owner` may commit to the image; `now` describes the image as it is.

    Raise NotOwner, StaleDiff, CommitRefused.
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
    """What a guest has written, in files of this machine, and the base below."""

    layers: Tuple[str, ...]
    """The qcow2 layers to commit, the lowest first; nothing writes to them. Their headers are not read."""
    base: str
    """The image of generation `Owner.generation` below the lowest layer."""
    format: str
    """Format of the base and of the image."""
    manifest: str
    """Path of the base's manifest."""
    last: str = ""
    """File in which a commit records the image's content for the next one; '' to write all each time."""
    rate: float = 0
    """Bytes per second to the store, 0 for no limit."""


class Committed(NamedTuple):
    """The result of a commit."""

    generation: str
    """The image's generation now, '' if it is unknown."""
    size: int
    """Virtual size in bytes."""
    dirty: int
    """Bytes of data in the diff, without zeros and discards."""
    written: int
    """Bytes sent to the store, including the journal."""
    seconds: float
    """Seconds until all was sent."""
    hashed: int
    """Bytes read for hashing, all on this machine."""
    waited: float
    """More seconds, for the hashes."""
    how: str
    """reflink, journal, whole or rbd; '' if the image had the content already."""

    def to_data(self) -> dict[str, object]:
        return self._asdict()
