# SPDX-License-Identifier: Apache-2.0
"""VMs that are started and watched while oned answers, and does not."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest

from semishared.config import Config
from semishared.errors import OnedUnavailable
from semishared.front import clusters
from semishared.front.staging_round import Wish
from semishared.opennebula.xml import Vm, parse


class Oned:
    """Two VMs; `away` is how often from now on nothing is said."""

    def __init__(self) -> None:
        self.states = {3: (8, 0), 4: (8, 0)}
        self.away = 0
        self.refused: List[int] = []

    def vm(self, number: int) -> Vm:
        if number in self.refused:
            raise OnedUnavailable(f"nothing of {number}")
        state, lcm = self.states[number]
        return Vm(
            parse(
                f"<VM><ID>{number}</ID><NAME>n</NAME><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE><TEMPLATE/></VM>",
                "VM",
            )
        )

    def vms(self) -> List[Vm]:
        self.away -= 1
        if self.away >= 0:
            raise OnedUnavailable("away")
        return [self.vm(number) for number in self.states if number not in self.refused]

    def act(self, number: int, action: str) -> None:
        assert action == "resume"
        self.states[number] = (3, 3)


def booted(oned: Oned, monkeypatch: pytest.MonkeyPatch, limit_s: float = 60) -> Dict[int, Any]:
    monkeypatch.setattr(clusters, "POLL_S", 0.01)
    vms = [oned.vm(3), oned.vm(4)]
    oned.refused = [4] if oned.away < 0 else []
    boot = clusters.Boot(oned, Config(), lambda **_: None, Wish("auto", "auto", 0, True), limit_s)  # type: ignore[arg-type]
    return {row["vm"]: (row["how"], row["why"]) for row in boot.run(vms, None)}


def test_vm_of_which_oned_says_nothing_is_not_started_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oned = Oned()
    oned.away = -1
    assert booted(oned, monkeypatch) == {3: ("booted", ""), 4: ("failed", "nothing of 4")}


def test_started_ones_are_watched_on_after_oned_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    oned = Oned()
    oned.away = 3
    assert booted(oned, monkeypatch) == {3: ("booted", ""), 4: ("booted", "")}


def test_oned_that_stays_away_ends_it_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    oned = Oned()
    oned.away = 1 << 20
    assert booted(oned, monkeypatch, 0.05) == {3: ("failed", "away"), 4: ("failed", "away")}
