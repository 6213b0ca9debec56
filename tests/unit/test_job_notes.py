# SPDX-License-Identifier: Apache-2.0
"""What the note of moving bytes says: of which disk it is, where from, and how fast."""

from __future__ import annotations

import pytest

from semishared.host import jobs
from semishared.model import steps as s
from semishared.stage.bases_in_progress import Account, Targets
from semishared.tools import jobs as notes
from semishared.tools import progress

BASE = s.StageBase("/bases", s.ImageRef(100, 7, "raw", "/store/7"))
OVERLAY = s.CreateOverlay(s.DiskRef(5, 1, "/vms/5"), BASE.image, 0, "")


@pytest.mark.fault(92, "what a deploy copies is shown at its disk, with its source and rate")
def test_a_base_is_shown_at_the_disk_that_it_is_for() -> None:
    plan = [BASE, s.PrepareVm(5, "/vms/5"), OVERLAY]
    noted = jobs.begun("clone", BASE, plan, 3.0)._fixed
    assert (noted["vm"], noted["disk"], noted["image"]) == (5, 1, "image 7")
    both = [*plan, OVERLAY._replace(disk=s.DiskRef(5, 2, "/vms/5"))]
    noted = jobs.begun("premigrate", BASE, both, 3.0)._fixed
    assert (noted["vm"], noted["disk"]) == (5, -1), "it may be of either"
    noted = jobs.begun("clone", s.PrepareVm(5, "/vms/5"), plan, 3.0)._fixed
    assert (noted["vm"], noted["disk"]) == (5, -1), "what is of a whole VM"


@pytest.mark.fault(92, "what a deploy copies is shown at its disk, with its source and rate")
def test_a_source_that_had_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "goal", progress.Goal())
    account = Account(Targets(lambda target: None), lambda **_: None)
    account.tell("here", now=True)
    assert progress.goal.source == "", "nothing has come from there"
    account.came("store", 0, 4096)
    assert progress.goal.source == "the store"
    account.tell("h2", now=True)
    assert progress.goal.source == "the store", "h2 has sent nothing"


@pytest.mark.fault(92, "what a deploy copies is shown at its disk, with its source and rate")
def test_what_came_before_the_first_look_counts_for_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes.Note, "_write", lambda note, data: None)
    monkeypatch.setattr(progress, "goal", progress.Goal())
    note = notes.Note("clone", "fetch", since_s=3.0)
    # An extent that came at once, and the wait for the next one.
    progress.reached(4 << 20, 16 << 20)
    note.look()
    note.look()
    rate = note.data["rate"]
    assert isinstance(rate, int) and (1 << 20) < rate <= (4 << 20) // 3, rate
