# SPDX-License-Identifier: Apache-2.0
"""Sets of VMs: who belongs to one by what OpenNebula says, and what gets each of them to run."""

from __future__ import annotations

import argparse
import json
from typing import Callable, List
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.cli import cluster as cli
from semishared.cli.command import describe
from semishared.config import Config
from semishared.errors import BadArguments
from semishared.front import clusters as front
from semishared.front.staging_round import Wish
from semishared.opennebula.oned import Oned
from semishared.opennebula.xml import View, Vm, parse
from semishared.plan.care import clusters


def vm(number: int, name: str = "", labels: str = "", state: int = 8, lcm: int = 0, disk: str = "") -> Vm:
    return Vm(
        parse(
            f"<VM><ID>{number}</ID><NAME>{escape(name or f'vm-{number}')}</NAME><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE>"  # noqa: E501
            f"<TEMPLATE>{disk}</TEMPLATE><USER_TEMPLATE><LABELS>{escape(labels)}</LABELS></USER_TEMPLATE></VM>",
            "VM",
        )
    )


VMS = [
    vm(3, labels='web,it\'s "blue"'),
    vm(4, "db"),
    vm(5, "db", "web , x"),
    vm(12, "3"),
    vm(13, labels="web/inner"),
]


def ids(found: List[Vm]) -> List[int]:
    return [item.id for item in found]


@pytest.mark.parametrize(
    ("text", "expected"), [("3", [3]), ("4, 12,3", [4, 12, 3]), ("vm-3,3", [3]), ("12,12", [12])]
)
def test_vms_by_ids_and_names(text: str, expected: List[int]) -> None:
    assert ids(clusters.named(VMS, text)) == expected


@pytest.mark.parametrize(
    ("label", "expected"),
    [("web", [3, 5]), ("x", [5]), ('it\'s "blue"', [3]), (" web ", [3, 5]), ("web/inner", [13])],
)
def test_vms_by_their_label(label: str, expected: List[int]) -> None:
    assert ids(clusters.labelled(VMS, label)) == expected


def view(text: str) -> View:
    return View(parse(text, text[1:].split(">")[0]))


def service(body: str, name: str = "flow") -> View:
    return view(
        f"<DOCUMENT><ID>7</ID><NAME>{name}</NAME><TEMPLATE><BODY>{escape(body)}</BODY></TEMPLATE></DOCUMENT>"
    )


IN_ROLES = "<ROLE><VMS>3,5</VMS></ROLE><ROLE><NAME>none</NAME></ROLE><ROLE><VMS>12</VMS></ROLE>"
GROUP = view(f"<VM_GROUP><ID>2</ID><NAME>g</NAME><ROLES>{IN_ROLES}</ROLES></VM_GROUP>")
ROLES = {
    "roles": [
        {"name": "a", "nodes": [{"deploy_id": 3}, {"deploy_id": 99}]},
        {"name": "b"},
        {"nodes": [{"deploy_id": 4}]},
    ]
}


def test_vms_of_a_group_and_of_a_service() -> None:
    assert clusters.of_group(GROUP) == [3, 5, 12]
    assert clusters.of_group(
        view("<VM_GROUP><ROLES><ROLE><VMS>3, 5,²,x</VMS></ROLE></ROLES></VM_GROUP>")
    ) == [3, 5]
    assert clusters.of_service(service(json.dumps(ROLES))) == [3, 99, 4]
    assert ids(clusters.members(VMS, [3, 99, 4], "it")) == [3, 4], "who is gone belongs to nothing any more"


def test_a_group_or_a_service_is_named_by_its_id_first() -> None:
    other = view("<VM_GROUP><ID>9</ID><NAME>2</NAME></VM_GROUP>")
    assert clusters.one_of([other, GROUP], "2", "VM group") is GROUP
    assert clusters.one_of([other, GROUP], "g", "VM group") is GROUP


def test_document_names_only_vms_of_its_owner() -> None:
    vms = [
        Vm(parse(f"<VM><ID>{number}</ID><UID>{uid}</UID></VM>", "VM"))
        for number, uid in ((3, 0), (4, 7), (99, 8))
    ]
    assert ids(clusters.owned(vms, view("<DOCUMENT><ID>7</ID><UID>7</UID></DOCUMENT>"))) == [4]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: clusters.named(VMS, "3,nobody"), "no VM 'nobody'"),
        (lambda: clusters.named(VMS, "db"), "2 VMs are called 'db' in OpenNebula: name one by its id"),
        (lambda: clusters.named(VMS, ""), "no VM ''"),
        (lambda: clusters.named(VMS, "3,,4"), "no VM ''"),
        (lambda: clusters.named(VMS, "3' or '1'='1"), "no VM \"3' or '1'='1\""),
        (lambda: clusters.labelled(VMS, "blue"), "no VM has the label 'blue'"),
        (lambda: clusters.labelled(VMS, " "), "no VM has the label"),
        (lambda: clusters.one_of([GROUP], "x", "VM group"), "no VM group 'x'"),
        (lambda: clusters.one_of([GROUP, GROUP], "g", "VM group"), "2 VM groups are called 'g'"),
        (lambda: clusters.members(VMS, [99], "service 'x'"), "service 'x' has no VM"),
        (lambda: clusters.of_service(service("{")), "document 7 (flow) is no service"),
        (lambda: clusters.of_service(service('{"roles": 7}')), "no service"),
        (lambda: clusters.of_service(service('{"roles": [{"nodes": [{"deploy_id": "x"}]}]}')), "no service"),
        (lambda: clusters.of_service(service('{"roles": [7]}')), "no service"),
        (
            lambda: clusters.of_service(service('{"roles": [{"nodes": [{"deploy_id": 1e999}]}]}')),
            "no service",
        ),
    ],
)
def test_what_is_not_there_is_said_in_one_line(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(BadArguments) as caught:
        ask()
    assert said in caught.value.detail and "\n" not in caught.value.detail


def test_a_line_says_the_disk_where_it_is_of_one() -> None:
    of_vm = {"vm": 3, "name": "db", "how": "detached", "host": "h1", "why": ""}
    assert cli.line(of_vm) == "VM 3 (db) on h1: detached"
    assert cli.line({**of_vm, "disk": 0, "seconds": 1.26}) == "VM 3 (db) on h1 disk 0: detached in 1.3 s"
    assert cli.line({**of_vm, "disk": -1, "why": "so", "host": ""}) == "VM 3 (db) on no host: detached; so"


@given(st.text(max_size=40))
def test_any_body_is_a_service_or_bad_arguments(body: str) -> None:
    document = View(parse("<DOCUMENT><ID>7</ID><TEMPLATE><BODY/></TEMPLATE></DOCUMENT>", "DOCUMENT"))
    document.element.find("TEMPLATE/BODY").text = body  # type: ignore[union-attr]
    try:
        assert isinstance(clusters.of_service(document), list)
    except BadArguments:
        pass


@pytest.mark.parametrize(
    ("state", "lcm", "action", "is_failed"),
    [
        (8, 0, "resume", False),
        (5, 0, "resume", False),
        (4, 0, "resume", False),
        (9, 0, "resume", False),
        (3, 16, "resume", False),
        (2, 0, "release", False),
        (1, 0, "", False),
        (3, 3, "", False),
        (3, 20, "", False),
        (3, 36, "", True),
        (3, 39, "", True),
        (6, 0, "", True),
        (11, 0, "", True),
    ],
)
def test_what_gets_a_vm_to_run(state: int, lcm: int, action: str, is_failed: bool) -> None:
    found = clusters.start(vm(1, state=state, lcm=lcm))
    assert (found.action, bool(found.why)) == (action, is_failed)


def test_vm_that_is_off_again_has_failed_and_one_that_is_still_off_has_not() -> None:
    off, failed = vm(1, state=8), vm(1, state=3, lcm=36)
    assert clusters.why_failed(off, was_active=False) == "" and "off again" in clusters.why_failed(
        off, was_active=True
    )
    assert "LCM state 36" in clusters.why_failed(failed, was_active=False)
    assert clusters.why_failed(vm(1, state=3, lcm=20), was_active=True) == ""


def test_vms_of_other_drivers_are_not_ours() -> None:
    assert not clusters.is_ours(vm(1)) and not clusters.is_ours(
        vm(1, disk="<DISK><TM_MAD>ssh</TM_MAD></DISK>")
    )
    assert clusters.is_ours(
        vm(1, disk="<DISK><TM_MAD>ssh</TM_MAD></DISK><DISK><TM_MAD>semishared</TM_MAD></DISK>")
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("status --hosts h1", "status has no --hosts: it is for boot"),
        ("detach --compress zstd", "detach has no --compress"),
        ("commit --timeout 5", "commit has no --timeout"),
        ("status --rate 4M", "status has no --rate: it is for boot and detach and commit"),
        ("boot --timeout 0", "--timeout 0: from 1"),
        ("boot --timeout -5", "--timeout -5: from 1"),
        ("boot --timeout 99999999", "--timeout 99999999"),
        ("commit --rate fast", "not a rate"),
        ("detach --rate=", "not a rate: ''"),
    ],
)
def test_option_that_has_no_effect_is_none(words: str, said: str) -> None:
    parser = argparse.ArgumentParser()
    describe(parser, cli.ARGUMENTS)
    with pytest.raises(BadArguments) as caught:
        cli.check(parser.parse_args([*words.split(), "--vms", "3"]))
    assert said in caught.value.detail


@pytest.mark.parametrize(
    "words", ["boot --hosts h1 --rate 4M --compress none --timeout 1", "detach --rate 4M", "commit --rate 4M"]
)
def test_verbs_take_what_is_theirs(words: str) -> None:
    parser = argparse.ArgumentParser()
    describe(parser, cli.ARGUMENTS)
    cli.check(parser.parse_args([*words.split(), "--vms", "3"]))


def test_vm_that_does_not_come_up_in_time_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "POLL_S", 0)

    class Still(Oned):
        def __init__(self) -> None:
            self.asked: List[str] = []
            self.looks = 0

        def vm(self, number: int) -> Vm:
            return vm(number)

        def vms(self) -> List[Vm]:
            self.looks += 1
            return [vm(1)] if self.looks < 3 else []

        def act(self, number: int, action: str) -> None:
            self.asked.append(f"{action} {number}")

    oned, told = Still(), list[str]()
    boot = front.Boot(
        oned, Config(), lambda **event: told.append(event["event"]), Wish("auto", "auto", 0, True), 0
    )
    (row,) = boot.run([vm(1)], None)
    assert oned.asked == ["resume 1"] and (row["how"], row["why"]) == (
        "failed",
        "it does not run after 0 s: state 8/0",
    )
    assert told == ["vm"]
