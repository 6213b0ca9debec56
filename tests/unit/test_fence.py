# SPDX-License-Identifier: Apache-2.0
"""Addresses and entries of blocklists, marks, and what doctor says of them; who is to be blocked:
plan/test_blocked.py.
"""

from __future__ import annotations

from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest

from lab.oned.template import parse, render
from semishared.cli import fence as cli
from semishared.config import Config, load
from semishared.errors import BadAttribute
from semishared.front.fence import Proof
from semishared.model.store.rbd_names import FOR_EVER_S, Blocklist, ip_of, whole
from semishared.model.store.template import fence_user
from semishared.opennebula.xml import Host
from semishared.plan.care import fence as plan
from semishared.plan.care.diagnosis import of_fenced, of_keys, of_means
from semishared.plan.image.attributes import datastore
from semishared.plan.store.ceph_caps import fence as key

BOOT, NEXT = "6f0c2a4e-0000-4000-8000-000000000001", "6f0c2a4e-0000-4000-8000-000000000002"
MARK = plan.Mark(
    plan.FENCED, 2, BOOT, 1700000000, "", ("f/10.0.0.3:0/0", "f/[fd00::3]:0/0", "g/10.0.0.3:0/0")
)


def machines(front_end: str = "10.0.0.1", **told: str) -> plan.Machines:
    return plan.Machines(
        "h1", {name: frozenset(text.split()) for name, text in told.items()}, frozenset(front_end.split())
    )


def host(mark: plan.Mark | None = None, boot: str = BOOT, addresses: str = "") -> Host:
    told = f'SEMISHARED = [ BOOT = "{boot}", ADDRESSES = "{addresses}" ]' if boot else ""
    template = parse(f"{mark.template(1, 'c0de') if mark else ''}\n{told}")
    return Host.parse(
        f"<HOST><ID>1</ID><NAME>h1</NAME><STATE>2</STATE><TEMPLATE>{render(template)}</TEMPLATE></HOST>"
    )


# -- whom to block
# -----------------------------------------------------------------------------------------------------


def test_an_address_that_came_later_is_not_shut_out_by_entries_of_before() -> None:
    whose = machines(h1="10.0.0.3 10.0.0.5 172.17.0.1", h2="172.17.0.1")
    assert plan.unlisted(whose, [], ["10.0.0.3:0/0", "10.0.0.5:0/0"]) == ()
    assert plan.unlisted(whose, [], ["10.0.0.3:0/0"]) == ("10.0.0.5",)
    assert plan.unlisted(whose, ["10.0.0.3", "10.0.0.5"], []) == (), "an OSD's, of which no client was seen"
    assert plan.unlisted(machines(h2="10.0.0.4"), [], ["10.0.0.3:0/0"]) == (), "from a lock"
    assert plan.unlisted(machines(h2="10.0.0.4"), [], []) == ("h1",)


def test_addresses_as_ceph_writes_them() -> None:
    assert [ip_of(text) for text in ("10.0.0.3:0/128", "[fd00::3]:0/7", "10.0.0.3:6801/12")] == [
        "10.0.0.3",
        "fd00::3",
        "10.0.0.3",
    ]
    assert [whole("10.0.0.3"), whole("fd00::3")] == ["10.0.0.3:0/0", "[fd00::3]:0/0"]


@pytest.mark.fault(
    27,
    "another machine's address in another spelling is that machine's address, and what is none is nobody's",
)
@pytest.mark.parametrize(
    ("printed", "read"),
    [
        ("10.0.0.4 fd00::4", {"10.0.0.4", "fd00::4"}),
        ("fd00:0::4 FD00::4 fd00:0:0:0:0:0:0:4", {"fd00::4"}),
        ("::ffff:10.0.0.4", {"10.0.0.4"}),
        ('010.0.0.4 10.0.0.4/24 10.0.0.4:0/7 10.4 fe80::1%eth0 x" 0x0a000004 [fd00::4]', set()),
    ],
)
def test_addresses_that_are_printed_are_read_in_one_spelling(printed: str, read: set[str]) -> None:
    element = ElementTree.fromstring(
        "<HOST><TEMPLATE><SEMISHARED><ADDRESSES/></SEMISHARED></TEMPLATE></HOST>"
    )
    element[0][0][0].text = printed
    assert plan.addresses_of(Host(element)) == read


@pytest.mark.fault(27, "what a host prints as its boot id writes nothing into the mark of its fence")
def test_a_boot_id_is_one_or_none() -> None:
    assert plan.boot_id(BOOT) == BOOT
    for text in (f'{BOOT[:-1]}"', f"{BOOT}\n", f"{BOOT}0", 'x", OFF = "command', "", BOOT.upper()):
        assert plan.boot_id(text) == ""
    assert plan.not_anew(MARK, NEXT, float("nan"), 100.0), "nor is what is no number a time since its start"


def test_an_entry_that_ends_soon_is_lacking() -> None:
    listed = Blocklist({"a:0/0": FOR_EVER_S - 9.0, "b:0/0": 3600.0})
    assert listed.lacks(("a:0/0", "b:0/0", "c:0/0")) == ("b:0/0", "c:0/0")


# -- marks
# -------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_a_mark_is_read_as_it_was_written() -> None:
    for mark in (MARK, plan.Mark(plan.BEGUN, 1, "", 5, "confirmed", (), "oneadmin@fe")):
        assert plan.mark_of(host(mark)) == mark
    assert (
        plan.mark_of(host()) == plan.Mark()
        and plan.boot_of(host()) == BOOT
        and plan.boot_of(host(boot="")) == ""
    )
    assert MARK.entries("f") == ("10.0.0.3:0/0", "[fd00::3]:0/0")
    assert escape(MARK.template(1, "c0de")) == MARK.template(1, "c0de")


def test_a_fence_counts_and_forgets_no_entry() -> None:
    again = plan.begun(MARK, BOOT, ["f/10.0.0.3:0/0", "f/10.0.0.9:0/0"], 7)
    assert (again.state, again.epoch, again.off, again.since) == (plan.BEGUN, 2, "", 7)
    assert again.blocked == (*MARK.blocked, "f/10.0.0.9:0/0")
    assert plan.begun(MARK, NEXT, [], 7).epoch == 3, "it was started since"
    assert plan.begun(MARK._replace(state=plan.LIFTED), BOOT, [], 7).epoch == 3
    assert plan.begun(plan.Mark(), "", [], 7).epoch == 1


@pytest.mark.parametrize(
    ("boot", "up_s", "may"), [(BOOT, 1, False), (NEXT, 1, True), (NEXT, 100, False), (NEXT, 101, False)]
)
def test_a_host_is_let_in_with_another_boot_that_began_after_the_fence(
    boot: str, up_s: float, may: bool
) -> None:
    mark = MARK._replace(clock="fe:1000.0")
    passed = plan.passed_s(mark, "fe:1100.0")
    assert (plan.not_anew(mark, boot, up_s, passed) == "") == may
    assert plan.not_anew(mark._replace(boot=""), boot, up_s, passed) == "" or up_s >= 100


@pytest.mark.parametrize("told", [BOOT, ""])
def test_who_cannot_know_whether_a_boot_is_of_before_asks_for_one_more(told: str) -> None:
    mark = MARK._replace(boot=told, clock="fe:1000.0")
    for clock in ("fe2:1100.0", ":1100.0"):
        assert plan.passed_s(mark, clock) is None
    assert "nobody knows" in plan.not_anew(mark, NEXT, 1, None)
    mark = mark._replace(asked=NEXT)
    assert plan.not_anew(mark, NEXT, 1, None)
    assert plan.not_anew(mark, "another", 1, None) == ""
    assert plan.not_anew(mark._replace(boot=""), "", 1, 100.0), "a host that says no boot"


# -- settings, keys, doctor
# ------------------------------------------------------------------------------------------------


def test_the_key_reads_images_and_shuts_out() -> None:
    assert key("fencer", ["one", "two", "one"]).command() == (
        "ceph auth get-or-create client.fencer mon 'profile rbd-read-only, allow command \"osd blocklist\"' "
        "osd 'profile rbd-read-only pool=one, profile rbd-read-only pool=two'"
    )
    for user in ("admin", "", "a b"):
        with pytest.raises(BadAttribute):
            key(user, ["one"])


def test_a_key_that_lies_on_hosts_shuts_nobody_out() -> None:
    assert fence_user(datastore({"CEPH_USER": "libvirt", "SEMISHARED_CEPH_FENCE_USER": "fencer"})) == "fencer"
    with pytest.raises(BadAttribute, match="who has another role"):
        fence_user(datastore({"CEPH_USER": "libvirt", "SEMISHARED_CEPH_FENCE_USER": "libvirt"}))


def test_the_command_is_words_and_a_path(tmp_path: object) -> None:
    def written(text: str) -> Config:
        path = f"{tmp_path}/semishared.conf"
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"[fence]\ncommand = {text}\n")
        return load(path)

    assert written("none").fencing == [] and Config().fencing == []
    assert written("/sbin/off --how 'at once'").fencing == ["/sbin/off", "--how", "at once"]
    for text in ("off", "", "'/sbin/off", "./off"):
        with pytest.raises(BadAttribute, match="neither /a/program"):
            written(text)


def test_doctor_says_what_became_of_fenced_hosts() -> None:
    def said(mark: plan.Mark, boot: str = "") -> list[str]:
        return [
            f"{item.severity} {item.mend}" for item in of_fenced({"h1": mark}, {"h1": boot} if boot else {})
        ]

    assert said(plan.Mark(), BOOT) == said(MARK) == said(MARK._replace(state=plan.LIFTED), NEXT) == []
    assert said(MARK, BOOT) == ["2 restart h1; then semishared fence --lift h1"]
    assert said(MARK, NEXT) == ["1 semishared fence --lift h1"]
    assert said(MARK._replace(state=plan.BEGUN)) == ["2 semishared fence h1"]
    assert of_means("", {"110": ""}, "fe") == []
    assert [item.what for item in of_means("/x is not there", {"110": "no key"}, "fe")] == [
        "[fence] command: /x is not there",
        "datastore 110: a dead host cannot be shut out: no key",
    ]


def test_doctor_compares_the_keys_of_front_ends() -> None:
    path = "/k"

    def said(**answers: dict[str, str] | str) -> list[tuple[int, str, str, str]]:
        return [(item.severity, item.machine, item.what, item.mend) for item in of_keys(answers, "fe", path)]

    good = {"why_not": "", "code": "1", "on": "ext4"}
    assert said(fe=good, fe2=good) == []
    ((level, machine, what, mend),) = said(fe=good, fe2={**good, "code": "2"})
    assert (
        (level, machine) == (2, "fe2")
        and "another than that of fe" in what
        and mend.endswith("scp -p /k fe2:/k")
    )
    ((level, machine, what, mend),) = said(fe={"why_not": "is missing", "code": "", "on": "ext4"}, fe2=good)
    assert (
        (level, machine) == (2, "fe")
        and what == "/k is missing: hosts cannot be fenced from here"
        and "setup --key" in mend
    )
    ((level, machine, what, _),) = said(fe=good, fe2="no route")
    assert (level, machine) == (1, "fe2") and "nobody knows whether" in what and "no route" in what
    for kind, wrong in (("nfs4", 1), ("fuse.sshfs", 1), ("fuseblk", 0), ("xfs", 0)):
        found = said(fe={**good, "on": kind})
        assert len(found) == wrong and all("other machines may have too" in row[2] for row in found)


def test_doctor_names_a_mark_that_is_not_believed() -> None:
    (found,) = of_fenced({"h1": plan.Mark(strange="why")}, {"h1": BOOT})
    assert (found.severity, found.machine, found.what) == (2, "h1", "why")


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ("command", ["the fencing command has switched it off"]),
        ("confirmed", ["it is off, as admin@fe said"]),
        ("", []),
    ],
)
def test_the_command_says_by_what_a_host_is_known_to_be_off(off: str, said: list[str]) -> None:
    first, *others = cli.shown(Proof("h1", 2, BOOT, 1700000000, off, ("f/10.0.0.3:0/0",), ("x",), "admin@fe"))
    assert first == f"h1 is shut out (fence 2, boot {BOOT}):" and others == [
        *said,
        "10.0.0.3:0/0 is on the blocklist of cluster f",
        "not done, and not needed while it is off: x",
    ]
