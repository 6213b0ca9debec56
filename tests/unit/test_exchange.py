# SPDX-License-Identifier: Apache-2.0
"""How a plan is carried out, and how far it is rehearsed: with machines that are lists of answers."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import pytest

from semishared.cli.plan import rehearse
from semishared.errors import HostUnreachable, MissingImage, SemisharedError
from semishared.front import action as front
from semishared.model import steps as s
from semishared.model.exchange import On, Plan, Say, While
from semishared.opennebula.report import Report

LOOK, ACT, REST = (
    s.DescribeVm(1, "/d/101/1"),
    s.PrepareVm(1, "/d/101/1"),
    s.RestGuest(1, "/d/101/1", "one-1", "SUSPEND"),
)
DISK = s.DescribeDisk(s.DiskRef(1, 0, "/d/101/1"), "")


class Machine:
    """A conversation in which a machine answers each message with the next of its answers; an error is
    raised.
    """

    opened: List[Machine] = []
    script: Dict[str, List[Any]] = {}

    def __init__(self, host: str, *_: Any, **__: Any) -> None:
        self.host, self.moved, self.warnings, self.seq, self.is_busy = (
            host,
            {"sent": 1},
            list[str](),
            -1,
            False,
        )
        self.came, self.seconds = dict[str, int](), 2.0
        self.evicted: List[str] = []
        self.heard: List[List[str]] = []
        self.closed: Optional[bool] = None
        Machine.opened.append(self)

    def run(self, steps: Any, data: Any = (), sha256: str = "", answer: Any = None) -> List[object]:
        self.heard.append([type(step).__name__ for step in steps])
        self.is_busy = True
        said = Machine.script[self.host].pop(0)
        if said == "asks":
            answer({"rests": "one-1"})
            said = [{}]
        if isinstance(said, HostUnreachable):
            raise said
        self.is_busy = False
        if isinstance(said, SemisharedError):
            raise said
        return list(said)

    def close(self, *, is_over: bool = True) -> None:
        self.closed = is_over


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Dict[str, List[Any]]:
    from semishared.wire import session

    monkeypatch.setattr(session, "Session", Machine)
    Machine.opened, Machine.script = [], {}
    return Machine.script


def action() -> front.Action:
    return front.Action("clone", [], Report("clone"))


def heard() -> Dict[str, List[List[str]]]:
    return {machine.host: machine.heard for machine in Machine.opened}


def test_one_conversation_per_machine_closed_at_the_end(machines: Dict[str, List[Any]]) -> None:
    machines.update(a=[["x"], ["y"]], b=[["z"]])
    got: List[Any] = []

    def plan() -> Plan:
        got.append((yield On("a", (LOOK,))))
        got.append((yield On("b", (LOOK,))))
        got.append((yield On("a", (ACT,))))

    front.carry_out(plan(), action())
    assert got == [["x"], ["z"], ["y"]]
    assert heard() == {"a": [["DescribeVm"], ["PrepareVm"]], "b": [["DescribeVm"]]}
    assert [machine.closed for machine in Machine.opened] == [True, True]


def test_an_error_is_raised_where_the_plan_asked_and_its_undo_is_done(machines: Dict[str, List[Any]]) -> None:
    machines.update(a=[MissingImage("not there"), ["undone"]])

    def plan() -> Plan:
        try:
            yield On("a", (ACT,))
        except SemisharedError:
            yield On("a", (LOOK,))
            raise

    with pytest.raises(MissingImage):
        front.carry_out(plan(), action())
    assert heard() == {"a": [["PrepareVm"], ["DescribeVm"]]}, (
        "in the same conversation: the host side listens on"
    )
    assert Machine.opened[0].closed is False


def test_a_conversation_that_broke_off_is_closed_at_once_and_begun_anew_for_the_undo(
    machines: Dict[str, List[Any]],
) -> None:
    machines.update(a=[HostUnreachable("gone"), ["undone"]])

    def plan() -> Plan:
        try:
            yield On("a", (ACT,))
        except SemisharedError:
            assert Machine.opened[0].closed is False
            yield On("a", (LOOK,))

    front.carry_out(plan(), action())
    assert [machine.heard for machine in Machine.opened] == [[["PrepareVm"]], [["DescribeVm"]]]


@pytest.mark.parametrize("bridge", ["a", "b"])
def test_what_is_to_be_done_while_a_machine_waits_is_done_elsewhere_even_there(
    machines: Dict[str, List[Any]], bridge: str
) -> None:
    machines.update({"a": ["asks"], bridge: (["asks"] if bridge == "a" else []) + [["held"]]})
    got: List[Any] = []

    def plan() -> Plan:
        got.append((yield While(On("a", (REST,)), On(bridge, (ACT,)))))

    front.carry_out(plan(), action())
    assert got == [([{}], ["held"])]
    assert [machine.host for machine in Machine.opened] == ["a", bridge]


def test_a_rehearsal_looks_until_something_acts_and_ends_where_an_answer_is_looked_at(
    machines: Dict[str, List[Any]],
) -> None:
    machines.update(a=[[{"records": []}, {"layers": {}}]])

    def plan() -> Plan:
        seen, described = yield On("a", (LOOK, DISK))
        assert (seen, described) == ({"records": []}, {"layers": {}})
        answers = yield On("a", (ACT,))
        yield Say(lambda *_: pytest.fail("nothing was answered"), tuple(answers))
        (again,) = yield On("a", (LOOK,))
        try:
            if again["present"]:
                pytest.fail("nobody has answered")
        except Exception:  # noqa: BLE001 - nothing that an undo could catch
            yield On("a", (ACT,))
        pytest.fail("the rehearsal is over")

    script = rehearse(plan(), action())
    assert heard() == {"a": [["DescribeVm", "LookAtDisk"]]}
    assert [(len(part.steps), part.answers is not None) for part in script.messages] == [
        (2, True),
        (1, False),
        (1, False),
    ]
    assert script.is_open


def test_a_disk_that_has_to_be_recovered_first_is_nothing_to_decide_on(
    machines: Dict[str, List[Any]],
) -> None:
    machines.update(a=[[s.UnsettledDisk(True)]])

    def plan() -> Plan:
        (found,) = yield On("a", (DISK,))
        if "on_store" in found:
            pytest.fail("nobody knows")

    assert rehearse(plan(), action()).is_open


def test_a_look_that_fails_is_how_the_action_would_fail(machines: Dict[str, List[Any]]) -> None:
    machines.update(a=[MissingImage("not there")])

    def plan() -> Plan:
        yield On("a", (LOOK,))

    with pytest.raises(MissingImage):
        rehearse(plan(), action())
