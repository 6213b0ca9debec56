# SPDX-License-Identifier: Apache-2.0
"""Daily backups of a running guest that writes, is switched off and on, and moves; the backup datastore
merges the oldest, some backups are killed, some are not stored: each increment that is left restores exactly.

The decision alone, over a year: tests/unit/test_marks.py.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple

import pytest

from lab.caches import HERE as LAB
from lab.cloud import Cloud

from .kept import Kept
from .rig import Rig
from .stores import Rsync
from .test_events import moved_live, moved_off, off_and_on, suspended

KINDS = ("overlay", "in place")
DATASTORE = 107


class Day(NamedTuple):
    """What happens before a backup, and how that ends."""

    event: Callable[[Rig], None]
    ends: str
    """stored, lost (by the datastore), or killed so many tenths of a second after it began."""


def quiet(rig: Rig) -> None:
    """Nothing but what the guest writes."""


class Daily(Kept):
    """Backups in a datastore that keeps so many."""

    def __init__(self, rig: Rig, where: Path, keep_last: int) -> None:
        super().__init__(rig.model, where)
        self.keep_last = keep_last
        where = where / str(DATASTORE)
        where.mkdir()
        self.store = Rsync(where, rig.vm)

    def on(self, day: Day) -> None:
        """Make a backup, as oned has drivers do."""
        tenths = int(day.ends) if day.ends.isdigit() else -1
        if tenths >= 0:
            self._killed(tenths)
        else:
            sums = self.model.sums()
            done = self.call("prebackup_live")
            assert done.returncode == 0, done.stderr.decode()
            if day.ends == "stored":
                self.last += 1
                self.store.keep(self.last, self.copies)
                self.sums.append(sums)
        if self.last == 0:
            self._image = self._images[0] + 1
            self._images[1:] = [self._image]
        done = self.call("postbackup_live")
        assert done.returncode == 0, done.stderr.decode()
        self.store.flatten(self.keep_last)

    def _killed(self, tenths: int) -> None:
        driver = self.model.cloud.lab.fe.popen(
            self.argv("prebackup_live"),
            user="oneadmin",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert driver.stdin
        driver.stdin.write(self.xml())
        driver.stdin.close()
        time.sleep(tenths / 10)
        driver.kill()
        driver.wait()

    def check(self, since: int = 0) -> None:
        """See that what the datastore sends of each increment is what the disks held then."""
        chain: List[str] = []
        for number, name in self.store.chain.items():
            chain.append(f"{number}:{name}")
            if number < since:
                continue
            held: Dict[int, str] = {}
            for disk in self.sums[number]:
                path = f"{self.store.base}/{self.model.vm}/{name}/disk.{disk}.{number}"
                url = f"rsync://{DATASTORE}//{','.join(chain)}{path}"
                sent, raw = self.where / "sent", self.where / "raw"
                with sent.open("wb") as file:
                    subprocess.run([LAB / "stock/datastore/chain_downloader", url], check=True, stdout=file)
                subprocess.run(["qemu-img", "convert", "-f", "qcow2", "-O", "raw", sent, raw], check=True)
                held[disk] = hashlib.sha256(raw.read_bytes()).hexdigest()
            assert held == self.sums[number], f"increment {number}"


def month(seed: int) -> List[Day]:
    """Return thirty days, of which one in ten has no backup."""
    chosen = random.Random(seed)
    events = [quiet] * 6 + [off_and_on, moved_live, moved_off, suspended]
    ends = ["stored"] * 27 + ["lost", *(str(chosen.randrange(20)) for _ in range(2))]
    chosen.shuffle(ends)
    return [Day(chosen.choice(events), how) for how in ends]


WEEK = [
    Day(quiet, "stored"),
    Day(off_and_on, "stored"),
    Day(quiet, "lost"),
    Day(moved_live, "stored"),
    Day(quiet, "5"),
    Day(quiet, "stored"),
    Day(quiet, "stored"),
]


@pytest.mark.fault(93, "each increment that KEEP_LAST leaves of a guest that lives on restores exactly")
@pytest.mark.parametrize(
    ("days", "keep_last"),
    [(WEEK, 3), pytest.param(month(1), 7, marks=pytest.mark.long)],
    ids=["week", "month"],
)
def test_daily_backups(cloud: Cloud, tmp_path: Path, days: List[Day], keep_last: int) -> None:
    rig = Rig(cloud, tmp_path, f"daily-{len(days)}", KINDS)
    daily = Daily(rig, tmp_path, keep_last)
    chosen = random.Random(len(days))
    for number, day in enumerate(days):
        for write in range(3):
            rig.model.write(f"{number}-{write}", chosen.randrange(0, 7680, 4), chosen.choice((4, 64, 256)))
        day.event(rig)
        rig.model.write(f"{number}-after", chosen.randrange(0, 7680, 4), 64)
        daily.on(day)
        daily.check(since=daily.last)
        if number % 7 == 6:
            daily.check()
    stored = sum(day.ends == "stored" for day in days)
    assert list(daily.store.chain) == list(range(stored - keep_last, stored))
    daily.check()
    rig.close()
