# SPDX-License-Identifier: Apache-2.0
"""What is due to a live migration is asked for until libvirtd, which may be busy at the moment, has done it;
and not once more.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, List

import pytest

from semishared.errors import ToolFailed, ToolTimeout
from semishared.guest import domain, libvirtd
from semishared.model.vm.live_steps import MigrateOptions
from semishared.vmm import live_migration

BUSY = 3
"""Times that libvirtd refuses."""


class Busy:
    """Stands for a libvirtd that gets to what is asked at the fourth time."""

    def __init__(self) -> None:
        self.asked: List[str] = []
        self.now = 0.0

    def ask(self, name: str, verb: str, do: Callable[[Any], Any]) -> None:
        self.asked.append(verb)
        if self.asked.count(verb) <= BUSY:
            raise ToolFailed(f"{verb} {name}: cannot acquire state change lock")

    def job(self, name: str) -> dict[str, int]:
        return {"memory_processed": 1, "data_total": 100, "data_remaining": 50}


@pytest.fixture()
def busy(monkeypatch: pytest.MonkeyPatch) -> Busy:
    found = Busy()
    monkeypatch.setattr(domain, "ask", found.ask)
    monkeypatch.setattr(domain, "job", found.job)
    return found


def look(
    options: MigrateOptions, seconds: float, rounds: object = None
) -> tuple[live_migration._Job, List[str]]:
    said: List[str] = []
    job = live_migration._Job("one-5", options, rounds, said.append)  # type: ignore[arg-type]
    job._progress._began -= seconds
    for _ in range(2 * BUSY + 2):
        job.look()
    return job, said


@pytest.mark.parametrize(
    ("at_limit", "verb"), [("suspend", "suspend"), ("abort", "domjobabort"), ("postcopy", "migrate-postcopy")]
)
def test_the_limit_is_kept_by_a_busy_libvirtd_too(busy: Busy, at_limit: str, verb: str) -> None:
    job, said = look(MigrateOptions(limit_s=5, at_limit=at_limit), 6)
    assert busy.asked == [verb] * (BUSY + 1)
    assert [line for line in said if "not there after" in line] == [
        f"not there after 6 s: {at_limit} ({job.how_far()})"
    ]
    assert "(50 % there)" in job.how_far()
    assert job.given_up == (at_limit == "abort") and not job.is_due


def test_before_its_limit_nothing_is_done(busy: Busy) -> None:
    job, _ = look(MigrateOptions(limit_s=5, at_limit="abort"), 2)
    assert not busy.asked and job.is_due


def test_the_speed_of_memory_is_set_once_it_has_begun(busy: Busy) -> None:
    job, _ = look(MigrateOptions(memory_mib_s=100, values={"MIGRATE_DISKS": ["vda"]}), 0)
    assert busy.asked == ["migrate-setspeed"] * (BUSY + 1) and not job.is_due


def test_after_the_first_round_the_rest_is_sent_on_demand(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [None, (2,), None, (1,)]
    monkeypatch.setattr(live_migration, "next_said", lambda heard, seconds: said.pop() if said else None)
    job, _ = look(MigrateOptions(after_precopy=True), 0, object())
    assert busy.asked == ["migrate-postcopy"] * (BUSY + 1) and not job.is_due


def test_who_gives_up_by_hand_is_told_whether_that_was_heard(busy: Busy) -> None:
    job, _ = look(MigrateOptions(), 0)
    assert [job.abort() for _ in range(BUSY + 1)] == [False] * BUSY + [True]


def test_a_call_that_does_not_return_when_its_migration_was_aborted_is_given_up(
    busy: Busy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Never:
        """A call of libvirt whose other host is cut off at once."""

        def __init__(self, what: str, do: Callable[[Any], Any]) -> None:
            do(None)

        def is_over(self, within_s: float) -> bool:
            return False

    monkeypatch.setattr(live_migration, "_moved", lambda *asked: asked[-1].set())
    monkeypatch.setattr(live_migration, "_of_libvirt", lambda options: (0, {}))
    monkeypatch.setattr(live_migration, "RETURNS_S", 0.0)
    monkeypatch.setattr(libvirtd, "Call", Never)
    monkeypatch.setattr(domain, "hearing", lambda *_: nullcontext())
    with pytest.raises(ToolTimeout, match="has aborted the migration of one-5 and does not return"):
        live_migration.migrate("one-5", "qemu+ssh://h2/system", MigrateOptions(), lambda _: None)
    assert busy.asked == ["domjobabort"] * (BUSY + 1)
