# SPDX-License-Identifier: Apache-2.0
"""Marks for backups that carry only what changed: what a VM's disks had when an increment was made.

A mark is a bitmap of QEMU's in a disk's qcow2 layers, from the moment of one backup on; of a disk on Ceph, a
snapshot of that moment; of a raw file, sums of its blocks then. oned raises LAST_INCREMENT_ID only when the
backup driver has stored the increment, so after any failure it asks for the same one again: two marks live,
that of the last stored increment and that of the next.

QEMU and libvirt know a bitmap by its name alone, and what else marks a disk is found by it. So each mark has
a name that no other ever had, and an action that changes a disk otherwise than through its QEMU, or by
copying its files, takes it out of all marks before its first step (`without`); but sums are right whatever
changed it. A disk without a mark gets a *whole* increment, zeros too.
"""

from __future__ import annotations

import re
from typing import Any, Collection, Mapping, Optional, Tuple

from ...named import NamedTuple

PREFIX = "ss-"
VERSION = 1
UNKNOWN = -1
FIRST = -1
"""What oned asks for when there is no increment yet."""
NAME = r"ss-[0-9a-f]{16}-[0-9]{1,9}\Z"


def name(random: str, number: int) -> str:
    """Return the name of a mark's bitmaps; `random`: 16 hex digits."""
    return f"{PREFIX}{random}-{number}"


def is_name(text: str) -> bool:
    """Tell whether a bitmap is a mark of ours."""
    return re.match(NAME, text) is not None


class Asked(NamedTuple):
    """The increment that oned asks for."""

    since: int
    """The last one that is stored, FIRST for none."""
    image: int
    """Its backup image, UNKNOWN for none."""
    newest: int
    """The highest id of a backup image that the VM has, UNKNOWN for none."""

    @property
    def number(self) -> int:
        return self.since + 1


class Mark(NamedTuple):
    """What was marked when an increment was made."""

    number: int
    """Of that increment."""
    name: str
    image: int
    """Its backup image, UNKNOWN until oned has said so."""
    after: int
    """The image is newer than this one: oned counts upwards."""
    disks: Tuple[int, ...]
    """Whose bitmaps have recorded every write since, or whose snapshots or sums are of that moment."""
    lost: Mapping[int, str]
    """Why another disk has none."""
    snapshots: Tuple[int, ...] = ()
    """Those of `disks` that have a snapshot."""
    sums: Tuple[int, ...] = ()
    """Those of `disks` of which there are sums."""

    @property
    def bitmaps(self) -> Tuple[int, ...]:
        """Those of `disks` that have bitmaps."""
        return tuple(disk for disk in self.disks if disk not in (*self.snapshots, *self.sums))

    def is_of(self, asked: Asked) -> bool:
        """Tell whether what oned has stored last is this increment."""
        known = self.image == asked.image if self.image != UNKNOWN else asked.image > self.after
        return self.number == asked.since and known

    def without(self, disk: Optional[int], why: str) -> Mark:
        """Return the mark without a disk, or without all (None), but for those with sums."""
        gone = [one for one in self.disks if disk in (None, one) and one not in self.sums]
        kept = tuple(one for one in self.disks if one not in gone)
        snapshots = tuple(one for one in self.snapshots if one in kept)
        return self._replace(disks=kept, lost={**self.lost, **dict.fromkeys(gone, why)}, snapshots=snapshots)


Marks = Tuple[Mark, ...]
"""Of a VM: at most two."""


class Increment(NamedTuple):
    """How a backup is made."""

    number: int
    since: Optional[Mark]
    """The mark that `changed` goes by."""
    changed: Tuple[int, ...]
    """Disks of which only the changes are left."""
    whole: Mapping[int, str]
    """Why of another disk all is."""
    mark: Mark
    """That of this increment."""

    def with_whole(self, disks: Mapping[int, str]) -> Increment:
        """Return the same with other disks whole too, as their marks turned out to be of no use."""
        changed = tuple(disk for disk in self.changed if disk not in disks)
        return self._replace(changed=changed, whole={**self.whole, **disks})


def decide(
    marks: Marks,
    asked: Asked,
    disks: Mapping[int, str],
    new_name: str,
    on_ceph: Collection[int] = (),
    raw: Collection[int] = (),
) -> Increment:
    """Return how the increment is made; `disks`: why each cannot have a mark, '' if it can.

    `on_ceph`, `raw`: those of which a mark is a snapshot, or sums.
    """
    since = next((mark for mark in marks if mark.is_of(asked)), None) if asked.since != FIRST else None
    whole, changed = {}, []
    for disk, why in disks.items() if asked.since != FIRST else ():
        lost = since.lost.get(disk, NOT_THEN) if since else NO_MARK.format(asked.since)
        if since and disk in since.disks and not why:
            if (disk in since.snapshots, disk in since.sums) == (disk in on_ceph, disk in raw):
                changed.append(disk)
            else:
                whole[disk] = ELSEWHERE
        else:
            whole[disk] = why or lost
    marked = tuple(disk for disk, why in disks.items() if not why)
    lost_at_once = {disk: why for disk, why in disks.items() if why}
    of_image = asked.image if asked.since != FIRST else UNKNOWN
    snapshots, sums = (tuple(disk for disk in marked if disk in those) for those in (on_ceph, raw))
    mark = Mark(asked.number, new_name, of_image, asked.newest, marked, lost_at_once, snapshots, sums)
    kept = since._replace(image=asked.image) if since else None
    return Increment(asked.number, kept, tuple(changed), whole, mark)


NOT_THEN = "it was in no backup of this chain"
ELSEWHERE = "it was of another format, or on another kind of store, then"
NO_MARK = "this host knows no mark of increment {}"


# -- as JSON data, of the note names.marks ----------------------------------------------------------


LISTS = ("disks", "snapshots", "sums")


def to_data(marks: Marks) -> Any:
    """Return marks as JSON data."""
    lost = [{str(disk): why for disk, why in mark.lost.items()} for mark in marks]
    return [
        {
            **{
                name: list(value) if isinstance(value, tuple) else value
                for name, value in mark._asdict().items()
            },
            "lost": why,
        }
        for mark, why in zip(marks, lost)
    ]


def from_data(data: object) -> Marks:
    """Return the marks in JSON data, none if it is not of this version: then disks are whole."""
    if (
        not isinstance(data, dict)
        or data.get("version") != VERSION
        or not isinstance(data.get("marks"), list)
    ):
        return ()
    try:
        return tuple(_mark(one) for one in data["marks"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return ()


def _mark(data: Mapping[str, Any]) -> Mark:
    # Notes of older versions have bitmaps alone.
    snapshots, sums = (tuple(data.get(kind, ())) for kind in ("snapshots", "sums"))
    numbers = (data["number"], data["image"], data["after"], *data["disks"])
    if not all(type(number) is int for number in numbers) or not is_name(data["name"]):
        raise ValueError
    if not {*snapshots, *sums} <= set(data["disks"]) or {*snapshots} & {*sums}:
        raise ValueError
    lost = {int(disk): str(why) for disk, why in data["lost"].items()}
    return Mark(
        data["number"],
        data["name"],
        data["image"],
        data["after"],
        tuple(data["disks"]),
        lost,
        snapshots,
        sums,
    )
