# SPDX-License-Identifier: Apache-2.0
"""Increments of a VM that is off are merged (KEEP_LAST) as OpenNebula's rsync and restic drivers do it, and
each that is left is restored, in place and as images, of one disk or of all.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Iterator

import pytest

from increments.stores import Restic, Rsync
from lab.oned import ActionFailed
from tools.backup_site import BACKUP, IN_PLACE, OVERLAY, RAW, SIZE, Backups, backups


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Backups]:
    with backups(tmp_path, Rsync) as site:
        yield site


@pytest.fixture
def by_restic(tmp_path: Path) -> Iterator[Backups]:
    with backups(tmp_path, Restic) as site:
        yield site


@pytest.mark.fault(93, "increments that KEEP_LAST leaves are restored exactly, in place and as images")
def test_what_keep_last_leaves_is_restored(made: Backups) -> None:
    for number in range(6):
        made.write(0x10 + number, 512 + 256 * number)
        if number == 2:
            made.write(0, 512)  # zeros are a change
        if number == 3:
            for disk in made.holds:
                made.grow(disk, SIZE + 1 + disk)
            made.write(0x33, 8 * 1024 - 64)
            made.back_up(stores=False)
        made.back_up()
    made.check_all()
    for keep_last in (4, 2):
        made.store.flatten(keep_last)
        assert list(made.store.chain) == list(range(6 - keep_last, 6))
        made.check_all()
    with pytest.raises(ActionFailed, match=f"backup {BACKUP} has no increment 3, but 4, 5"):
        made.restore(3)
    # A chain goes on after a merge, and after its files were rebased by a restore.
    made.write(0x77, 3072)
    made.back_up()
    for increment in (4, 6):
        made.check_image(increment, OVERLAY)
    made.restore(5, IN_PLACE)
    made.check({**made.held[6], IN_PLACE: made.held[5][IN_PLACE]})
    made.restore(4)
    made.check(made.held[4])
    made.store.flatten(1)
    assert list(made.store.chain) == [6]
    made.check_all()
    made.restore(-1)
    made.check(made.held[6])


@pytest.mark.long  # restic makes a key for every one of its commands, which takes half a second of processor
@pytest.mark.skipif(shutil.which("restic") is None, reason="no restic")
@pytest.mark.fault(93, "the same of a repository of restic's, where increments are sorted by their time")
def test_what_keep_last_leaves_is_restored_from_restic(by_restic: Backups) -> None:
    made = by_restic
    del made.holds[IN_PLACE]
    for number in range(3):
        made.write(0x10 + number, 512 + 256 * number)
        if number == 1:
            made.grow(OVERLAY, SIZE + 1)
        made.back_up()
    made.check_image(0, OVERLAY)
    made.store.flatten(2)
    assert list(made.store.chain) == [1, 2]
    made.restore(1, OVERLAY)
    made.check({**made.held[2], OVERLAY: made.held[1][OVERLAY]})
    made.check_image(2, OVERLAY)
    made.restore(2)
    made.check(made.held[2])
    made.store.flatten(1)
    made.restore(-1, RAW)
    made.check(made.held[2])


@pytest.mark.fault(93, "an older increment is restored by its number, also the first of a chain")
def test_increment_is_restored_by_its_number(made: Backups) -> None:
    """The drivers' `ls` lists the files of the last one, unless it is told which one is meant."""
    for number in range(3):
        made.write(0x20 + number, 2048 + 256 * number)
        made.back_up()
    for increment in (0, 1, 2):
        made.restore(increment, OVERLAY)
        made.check({OVERLAY: made.held[increment][OVERLAY]})
