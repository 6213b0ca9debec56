# SPDX-License-Identifier: Apache-2.0
"""Marks for increments of backups, without QEMU: what is decided, and a year of backups by it."""

from __future__ import annotations

import json
import random
from typing import Any, Dict, List, Set, Tuple

import pytest

from semishared.model.disk import marks
from semishared.model.disk.marks import FIRST, UNKNOWN, Asked, Mark
from semishared.model.store import rbd_names
from semishared.tools import copy_on_read

NAME = marks.name("0123456789abcdef", 3)


def mark(number: int = 3, image: int = 7, after: int = UNKNOWN, **more: Any) -> Mark:
    return Mark(number, NAME, image, after, more.get("disks", (0, 1)), more.get("lost", {}))


def test_name_of_a_snapshot_says_whose_mark_it_is() -> None:
    found = rbd_names.backup(23, NAME)
    assert found == "semishared-backup-23-0123456789abcdef-3"
    assert rbd_names.backed_up(found) == 23 and rbd_names.is_passing(found)
    for other in ("7", "semishared-backup-23", "semishared-new", rbd_names.frozen("0" * 32), f"{found}x"):
        assert rbd_names.backed_up(other) is None


def test_the_first_one_is_a_full_backup_that_marks_what_it_can() -> None:
    found = marks.decide((), Asked(FIRST, UNKNOWN, 5), {0: "", 2: "it is on Ceph"}, NAME)
    assert (found.number, found.changed, found.whole) == (0, (), {})
    assert found.mark == Mark(0, NAME, UNKNOWN, 5, (0,), {2: "it is on Ceph"})


def test_what_changed_is_told_by_the_mark_of_the_increment_that_is_stored() -> None:
    found = marks.decide((mark(2), mark(3)), Asked(3, 7, 7), {0: "", 1: "", 2: ""}, "new")
    assert found.since == mark(3)
    assert (found.changed, found.whole) == ((0, 1), {2: marks.NOT_THEN})
    assert (found.mark.number, found.mark.image, found.mark.disks) == (4, 7, (0, 1, 2))


@pytest.mark.parametrize(
    "asked", [Asked(2, 7, 7), Asked(4, 7, 7), Asked(3, 8, 8)], ids=["older", "newer", "another chain"]
)
def test_a_mark_of_another_increment_is_none(asked: Asked) -> None:
    found = marks.decide((mark(3),), asked, {0: ""}, "new")
    assert found.since is None and set(found.whole) == {0}


def test_the_image_of_a_chain_is_known_from_its_second_backup_on() -> None:
    """A RESET whose first backup failed leaves a mark 0, which is not 0 of the older chain."""
    first = marks.decide((), Asked(FIRST, UNKNOWN, 20), {0: ""}, NAME).mark
    assert marks.decide((first,), Asked(0, 20, 20), {0: ""}, "new").since is None
    again = marks.decide((first,), Asked(0, 21, 21), {0: ""}, "new")
    assert again.since == first._replace(image=21) and again.changed == (0,)
    assert marks.decide((again.since,), Asked(0, 22, 22), {0: ""}, "new").since is None


def test_a_lost_mark_says_why_until_the_next_one() -> None:
    lost = mark().without(1, "restored").without(1, "again")
    assert lost == mark(disks=(0,), lost={1: "restored"})
    found = marks.decide((lost,), Asked(3, 7, 7), {0: "", 1: ""}, "new")
    assert (found.changed, found.whole) == ((0,), {1: "restored"})
    assert found.mark.disks == (0, 1)
    assert mark().without(None, "off").disks == ()


def test_it_is_read_as_it_is_written_and_what_is_not_understood_is_none() -> None:
    known = (mark(2, lost={4: "raw"}), mark(3, image=UNKNOWN, after=9, disks=()))
    data = {"version": marks.VERSION, "marks": json.loads(json.dumps(marks.to_data(known)))}
    assert marks.from_data(data) == known
    damaged: List[Any] = [
        None,
        [],
        {"version": 2, "marks": []},
        {"version": 1},
        {"version": 1, "marks": [{}]},
    ]
    for wrong in damaged:
        assert marks.from_data(wrong) == ()
    for field, value in (("name", "x"), ("name", NAME + "'/>"), ("disks", ["0"]), ("number", True)):
        assert marks.from_data({**data, "marks": [{**data["marks"][0], field: value}]}) == ()


def test_marks_of_disks_on_ceph_are_snapshots_and_no_other_mark_does_for_them() -> None:
    found = marks.decide((), Asked(FIRST, UNKNOWN, 5), {0: "", 1: "", 2: "it is read-only"}, NAME, {1, 2})
    assert (found.mark.disks, found.mark.snapshots) == ((0, 1), (1,))
    since = found.mark._replace(number=3, image=7)
    again = marks.decide((since,), Asked(3, 7, 7), {0: "", 1: ""}, "new", {1})
    assert (again.changed, again.whole, again.mark.snapshots) == ((0, 1), {}, (1,))
    moved = marks.decide((since,), Asked(3, 7, 7), {0: "", 1: ""}, "new", {0})
    assert (moved.changed, moved.whole) == ((), {0: marks.ELSEWHERE, 1: marks.ELSEWHERE})
    assert since.without(1, "restored").snapshots == () and since.without(0, "off").snapshots == (1,)


def test_sums_of_a_raw_disk_are_right_whatever_changed_it() -> None:
    found = marks.decide((), Asked(FIRST, UNKNOWN, 5), {0: "", 1: ""}, NAME, (), (1,)).mark
    assert found.sums == (1,)
    stored = found._replace(number=3, image=7)
    assert (
        stored.without(None, "restored").disks == stored.without(1, "restored").without(0, "").disks == (1,)
    )
    asked, disks = Asked(3, 7, 7), {0: "", 1: ""}
    assert marks.decide((stored,), asked, disks, "new", (), (1,)).changed == (0, 1)
    other = marks.decide((stored,), asked, disks, "new", (), (0,))
    assert other.changed == () and set(other.whole.values()) == {marks.ELSEWHERE}


def test_notes_of_older_versions_have_bitmaps_alone() -> None:
    known = mark()._replace(snapshots=(1,), sums=(0,))
    data = {"version": marks.VERSION, "marks": json.loads(json.dumps(marks.to_data((known,))))}
    assert marks.from_data(data) == (known,)
    damaged: List[Any] = [[7], ["1"], 1, [[]]]
    for wrong in damaged:
        for kind in ("snapshots", "sums"):
            assert marks.from_data({**data, "marks": [{**data["marks"][0], kind: wrong}]}) == ()
    del data["marks"][0]["snapshots"], data["marks"][0]["sums"]
    assert marks.from_data(data) == (mark(),)


@pytest.mark.parametrize(
    ("parts", "size", "wanted"),
    [
        ([], 1 << 20, []),
        ([(0, 1)], 1 << 20, [(0, 65536)]),
        ([(65535, 2)], 1 << 20, [(0, 65536), (65536, 65536)]),
        ([(1 << 16, 1 << 16), (0, 512), (512, 512)], 1 << 20, [(0, 65536), (65536, 65536)]),
        ([(1 << 20, 512), (4 << 20, 1)], (1 << 20) + 1024, [(1 << 20, 1024)]),
        ([(0, 3 << 16)], 8 << 20, [(0, 65536), (65536, 65536), (131072, 65536)]),
    ],
)
def test_what_changed_is_copied_by_whole_clusters(
    parts: List[Tuple[int, int]], size: int, wanted: List[Tuple[int, int]]
) -> None:
    assert list(copy_on_read.clusters(parts, size)) == wanted


# -- a year -----------------------------------------------------------------------------------------

BLOCKS, KEEP = 64, 7
Content = Tuple[int, ...]


class Year:
    """A VM with a disk, its bitmaps, what oned knows, and what the store has."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.holds: List[int] = [0] * BLOCKS
        self.bitmaps: Dict[str, Set[int]] = {}
        self.known: marks.Marks = ()
        self.last, self.image, self.newest, self.names = FIRST, UNKNOWN, 0, 0
        self.stored: List[Tuple[Dict[int, int], Content]] = []
        """Of each increment what it has, and what the disk held."""
        self.wholes = 0

    def write(self) -> None:
        for _ in range(self.random.randrange(6)):
            block = self.random.randrange(BLOCKS)
            self.holds[block] = self.random.randrange(1000)
            for bitmap in self.bitmaps.values():
                bitmap.add(block)

    def back_up(self, *, ends: str) -> None:
        """`ends`: stored, failed (the store's), or killed in the midst."""
        self.names += 1
        name = marks.name(f"{self.names:016x}", self.last + 1)
        asked = Asked(self.last, self.image, self.newest)
        found = marks.decide(self.known, asked, {0: ""}, name)
        self.known = tuple(one for one in (found.since, found.mark) if one)
        keep = {found.since.name} if found.since else set()
        self.bitmaps = {one: bits for one, bits in self.bitmaps.items() if one in keep}
        if found.since and found.since.name not in self.bitmaps:
            found = found.with_whole({0: "gone"})
        if ends == "killed" and self.random.random() < 0.5:
            return
        bits = self.bitmaps[found.since.name] if found.since and found.changed else set(range(BLOCKS))
        self.wholes += len(found.whole)
        copied = {block: self.holds[block] for block in bits}
        self.bitmaps[name] = set()
        if ends != "stored":
            return
        if self.last == FIRST:
            self.newest += self.random.randrange(1, 3)
            self.image, self.stored = self.newest, []
        self.last += 1
        self.stored.append((copied, tuple(self.holds)))
        if len(self.stored) > KEEP:
            (oldest, _), (next_, held) = self.stored[:2]
            self.stored[:2] = [({**oldest, **next_}, held)]

    def happens(self) -> None:
        """Something between two backups."""
        event = self.random.choice(["", "", "", "", "killed", "lost", "reset", "other backup"])
        if event == "killed":
            self.bitmaps = {}
        elif event == "lost":
            self.known = tuple(one.without(0, "restored") for one in self.known)
            self.holds = [self.random.randrange(1000) for _ in range(BLOCKS)]
        elif event == "reset":
            self.last, self.image = FIRST, UNKNOWN
        elif event == "other backup":
            self.newest += 1

    def restored(self, until: int) -> Content:
        found: Dict[int, int] = {}
        for copied, _ in self.stored[: until + 1]:
            found.update(copied)
        return tuple(found[block] for block in range(BLOCKS))


@pytest.mark.parametrize("seed", range(10))
def test_a_year_of_daily_backups_restores_on_every_day(seed: int) -> None:
    """KEEP_LAST 7, one in ten killed or not stored, with what breaks chains between."""
    year, stored = Year(seed), 0
    for _ in range(365):
        year.write()
        year.happens()
        year.write()
        chance = year.random.random()
        year.back_up(ends="killed" if chance < 0.05 else "failed" if chance < 0.1 else "stored")
        assert len(year.known) <= 2
        for number, (_, held) in enumerate(year.stored):
            assert year.restored(number) == held
        stored += len(year.stored)
    assert stored > 365 and year.wholes


def test_a_year_is_wrong_if_a_lost_mark_is_gone_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the year proves: with marks that are not lost, or whole increments that are none, it fails."""
    monkeypatch.setattr(Mark, "without", lambda self, disk, why: self)
    with pytest.raises(AssertionError):
        for seed in range(10):
            test_a_year_of_daily_backups_restores_on_every_day(seed)
