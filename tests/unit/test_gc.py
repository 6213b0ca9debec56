# SPDX-License-Identifier: Apache-2.0
"""Plan of gc: what the machines said against what oned knows; libvirt's part, hosts that cannot be asked, and
the command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from lab.oned import Lcm
from semishared.cli import command as shared
from semishared.cli import gc as command
from semishared.cli import main
from semishared.config import Config
from semishared.errors import BadArguments, HostUnreachable
from semishared.model import steps as s
from semishared.model.leftover_steps import (
    BaseStore,
    Discard,
    Domains,
    Seen,
    SeenBase,
    SeenClone,
    SeenEpoch,
    SeenLease,
    SeenLock,
    SeenMachine,
    SeenSide,
    SeenStore,
    SeenUpload,
    SeenVm,
    Staged,
    Unlinked,
)
from semishared.opennebula.xml import Vm
from semishared.plan.care import diagnosis, gc, gc_places, gc_stores
from semishared.store import writers
from semishared.store.dir import leftovers

LOCATION = "/ds"
HEX = "0123456789abcdef" * 2


Kind = TypeVar("Kind", bound=Seen)


def item(kind: type[Kind], path: str, /, **more: Any) -> Kind:
    return kind(**{"path": path, "seen": "1", "age": 9999, "bytes": 10, **more})


def vm(number: int, kind: str = "dir", **more: Any) -> SeenVm:
    name = str(number) if kind == "dir" else f".{kind}-{number}"
    facts: dict[str, Any] = {"system": 101, "vm": number, "kind": kind, "entries": ["disk.0"], "staged": []}
    return item(SeenVm, f"{LOCATION}/101/{name}", **{**facts, **more})


def side(name: str = HEX, *clones: SeenClone, image: bool) -> SeenSide:
    path = f"{LOCATION}/100/.semishared/{name}"
    return item(SeenSide, path, name=name, clones=list(clones), entries=[], image=image)


def store(**more: Any) -> SeenStore:
    return SeenStore(f"{LOCATION}/100", [], [], [], [], [])._replace(**more)


def machine(name: str = "h1", **more: Any) -> gc.Machine:
    nothing = SeenMachine([], False, BaseStore([], [], []), [], [], [], [], Domains(), [], [])
    return gc.Machine(name, LOCATION, nothing._replace(**more))


def find(*machines: gc.Machine, older_than: int = 3600, all_seen: bool = True) -> list[gc.Finding]:
    known = gc.Known({5: "h1"}, frozenset(), frozenset(), past=frozenset({(7, 1, f"/ds/100/{HEX}")}))
    return gc.find(list(machines), known, older_than, all_seen)


def test_what_no_link_leads_to_goes_with_its_vm_and_what_is_of_a_base_at_once() -> None:
    place = "/mnt/a/.semishared"
    names = [(f"layers/{number}-0-0123456789ab", number) for number in (5, 7, 8)]
    names.append((f"bases/100-1-{HEX}", -1))
    there = [item(Unlinked, f"{place}/{name}", vm=number, replaced=False) for name, number in names]
    found = find(machine(unlinked=there, domains=Domains(["one-8"], [])))
    assert [(gone.vm, bool(gone.keep)) for gone in found] == [(5, True), (7, False), (8, True), (-1, False)]
    assert found[1].steps() == [Discard("unlinked", f"{place}/layers/7-0-0123456789ab", LOCATION, 7, "1")]
    assert find(machine(unlinked=there), older_than=10000) == []
    there[0] = there[0]._replace(replaced=True)
    assert not find(machine(unlinked=there))[0].keep, "what a move of a disk has left is none of it"


@pytest.mark.fault(
    45, "a command that names what a host, or a lock's holder, has named can be copied as it stands"
)
def test_a_command_to_be_copied_is_quoted() -> None:
    for name, shown in ((".kept-7-0", ".kept-7-0"), (".kept-7-0; curl x|sh", "NAME")):
        (kept,) = find(machine(vms=[vm(7, kind="kept", path=f"{LOCATION}/101/{name}")]))
        other = "if another VM has had its image since, semishared commit 7 DISK --as-new-image NEW"
        assert kept.keep == f"semishared commit 7; {other}; or semishared gc --discard {shown}"
    cookie = "it'; curl x|sh; '"
    locked = writers._locked_by_hand(writers.Locker("client.4", cookie, "10.0.0.1:0/1"), "one/one-7")
    commands = [shlex.split(words) for words in re.findall("`(rbd .*?)`", locked)]
    assert commands == [
        ["rbd", "lock", "ls", "one/one-7"],
        ["rbd", "lock", "rm", "one/one-7", cookie, "client.4"],
    ]


def test_vm_that_oned_does_not_know_goes_unless_a_domain_is_it_or_uses_it() -> None:
    assert find(machine(vms=[vm(5)])) == []
    (found,) = find(machine(vms=[vm(7)]))
    assert [s.to_data(step) for step in found.steps()] == [
        s.to_data(step) for step in (s.CheckNotRunning("one-7"), s.RemoveVm(7, "/ds/101/7"))
    ] and not found.keep
    uses = Domains(["other"], ["/ds/101/7/disk.0"])
    for domains in (Domains(["one-7"], []), uses, Domains(error="no libvirtd")):
        (kept,) = find(machine(vms=[vm(7)], domains=domains))
        assert kept.keep, domains
    found, _ = find(machine(vms=[vm(7)], domains=Domains(["one-77"], ["/ds/101/77/disk.0"])))
    assert not found.keep, "VM 77 is another"


@pytest.mark.fault(
    49, "a domain of which nothing is left but deleted files is named by gc, and how it is ended"
)
def test_a_domain_on_deleted_files_is_named() -> None:
    files = [f"/ds/101/{number}/disk.0" for number in (5, 7, 77)] + ["/srv/7/disk.0"]
    domains = Domains(["one-7", "one-5", "theirs"], files)
    found = find(machine(domains=domains, vms=[vm(77, kind="dir")]))
    (orphan,) = [gone for gone in found if gone.kind == "domain"]
    assert (orphan.vm, orphan.path) == (7, "/ds/101/7") and "virsh destroy one-7" in orphan.keep


def test_what_is_younger_than_the_limit_is_not_even_named() -> None:
    young = machine(vms=[vm(7, age=3599), vm(8, kind="incoming", age=10)])
    assert find(young) == []
    assert len(find(young, older_than=0)) == 2


@pytest.mark.fault(61, "gc says how much is too young to be removed, and when all of it can go")
def test_what_is_too_young_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lock = item(SeenLock, "/ds/.semishared/locks/vm-9", vm=9, age=10)
    young = machine(
        vms=[vm(7, age=3599), vm(8, kind="incoming", age=1000), vm(10, age=5)],
        domains=Domains(["one-10"], []),
        root=BaseStore([], [], [lock]),
    )
    everything = gc.of_any_age([young], gc.Known({}, frozenset(), frozenset()), True)
    old, left = gc.aged(everything, 3600)
    assert old == [] and [found.vm for found in left] == [7, 8], "not what stays, nor locks"
    command.report(argparse.Namespace(json=False, dry_run=True), old, [], command.Survey(), left, 3600)
    assert capsys.readouterr().out == (
        "0 to remove (0 B), 0 kept, 0 errors; 2 younger than 1 h (20 B): all of it can go in 44 min\n"
    )
    command.report(argparse.Namespace(json=True, dry_run=True), old, [], command.Survey(), left, 3600)
    totals = json.loads(capsys.readouterr().out)["totals"]
    assert (totals["young"], totals["young_bytes"], totals["young_for_s"]) == (2, 20, 2600)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1, "1 s"), (59, "59 s"), (60, "1 min"), (61, "2 min"), (3600, "1 h"), (7261, "2 h 2 min")],
)
def test_times_in_words(seconds: int, said: str) -> None:
    assert command.spell(seconds) == said


@pytest.mark.fault(61, "gc offers the command that works on a kept disk, by what oned says of its image")
def test_a_kept_disk_whose_image_takes_nothing_becomes_another_image() -> None:
    lease = SeenLease(f"/ds/.semishared/bases/100-3-{HEX}/leases/7-2", 9999, 7, 2)
    base = item(
        SeenBase, f"/ds/.semishared/bases/100-3-{HEX}", name=f"100-3-{HEX}", leases=[lease], staged=[]
    )
    seen = machine(
        vms=[vm(7, kind="kept", path=f"{LOCATION}/101/.kept-7-0", entries=["disk.2.snap", ".semishared"])],
        root=BaseStore([base], [], []),
    )

    def keep(**more: Any) -> str:
        known = gc.Known({}, frozenset({(100, 3)}), frozenset(), **more)
        (kept,) = [found for found in gc.find([seen], known, 0, True) if found.kind == "kept"]
        return kept.keep

    then = "semishared commit 7 2 --as-new-image NEW, or semishared gc --discard .kept-7-0"
    assert keep(holders={3: frozenset({7, 9})}) == f"VM 9 has image 3: {then}"
    gone = gc.find([seen], gc.Known({}, frozenset({(101, 3)}), frozenset()), 0, True)
    assert gone[0].keep == f"oned has no image 3 any more: {then}"
    assert keep(cloned=frozenset({3})) == f"image 3 is not persistent any more: {then}"
    for more in ({}, {"holders": {3: frozenset({7}), 4: frozenset({9})}}, {"cloned": frozenset({4})}):
        assert keep(**more).startswith("semishared commit 7; ")


CLONE = item(SeenClone, f"/ds/100/.semishared/{HEX}/clones/7-1", vm=7, disk=1, cloud="")


def test_clone_on_the_store_counts_the_domains_of_all_hosts() -> None:
    front_end = machine("fe", stores=[store(sides=[side(HEX, CLONE, image=True)])])
    (found,) = find(front_end, machine("h1"))
    assert (found.kind, found.keep) == ("clone", "")
    for host in (
        machine("h1", domains=Domains(["one-7"], [])),
        machine("h1", domains=Domains([], [CLONE.path])),
        machine("h1", domains=Domains(error="no libvirtd")),
    ):
        assert find(front_end, host)[0].keep
    assert find(front_end, all_seen=False)[0].keep


def test_a_host_to_which_none_of_our_vms_comes_may_be_without_libvirt() -> None:
    """One of LXC, or of another cluster: what it has of ours stays, since nobody can say what uses it;
    elsewhere it is no reason.
    """
    front_end = machine("fe", stores=[store(sides=[side(HEX, CLONE, image=True)])])
    lxc = replace(
        machine("lxc1", vms=[vm(8)], domains=Domains(error="virsh is not installed")), is_near=False
    )
    assert [(found.kind, bool(found.keep)) for found in find(front_end, lxc)] == [
        ("clone", False),
        ("vm", True),
    ]
    assert find(front_end, replace(lxc, is_near=True))[0].keep


def test_image_that_is_reserved_or_on_its_way_keeps_its_side() -> None:
    own = side(image=False)
    assert [found.kind for found in find(machine(stores=[store(sides=[own])]))] == ["side"]
    upload = item(SeenUpload, f"/ds/100/.semishared/.uploads/{HEX}", name=HEX, held=True)
    assert find(machine(stores=[store(sides=[own], uploads=[upload])])) == []
    reserved = gc.Known({}, frozenset(), frozenset({f"/ds/100/{HEX}"}))
    assert gc.find([machine(stores=[store(sides=[own])])], reserved, 0, True) == []
    foreign = side("notes", image=False)
    assert find(machine(stores=[store(sides=[foreign])])) == []


def test_what_is_not_ours_in_a_store_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lost+found of an ext4 is root's: oneadmin may not read it."""
    for name in (HEX, f"{HEX}.snap", "lost+found", "others.snap"):
        (tmp_path / name).mkdir()
    listdir = os.listdir

    def refusing(path: str) -> list[str]:
        if path.endswith(("lost+found", "others.snap")):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    found = leftovers.look(str(tmp_path))
    assert [image.name for image in found.images] == [HEX, f"{HEX}.snap"]


def test_doctor_says_what_gc_could_not_look_at_unless_more_is_wrong_there() -> None:
    errors = [{"machine": name, "error": "PermissionError"} for name in ("fe", "h1", "h2")]
    others = [
        diagnosis.Finding(diagnosis.BROKEN, "h1", "not synced", "sync"),
        diagnosis.Finding(diagnosis.WARNING, "fe", "old", "x"),
    ]
    (found,) = diagnosis.of_unseen(errors, {"fe", "h1"}, others)
    assert (found.severity, found.machine) == (diagnosis.WARNING, "fe") and "PermissionError" in found.what


def test_an_epoch_goes_with_its_vm_if_it_is_this_clouds_and_no_host_is_missing() -> None:
    def epoch(number: int, cloud: str = "") -> SeenEpoch:
        return item(SeenEpoch, f"/ds/100/.semishared/.epochs/{number}-4", vm=number, cloud=cloud)

    found = find(machine("fe", stores=[store(epochs=[epoch(5), epoch(7), epoch(8, "ab" * 16)])]))
    assert [(one.kind, one.path, one.keep) for one in found] == [("epoch", epoch(7).path, "")]
    # It may be a host that has what the epoch warns of.
    assert find(machine("fe", stores=[store(epochs=[epoch(7)])]), all_seen=False) == []


def place(number: int, machine_name: str, *disks: int) -> dict[int, gc_places.Place]:
    return {number: gc_places.Place(machine_name, 101, frozenset(disks))}


@pytest.mark.parametrize(
    ("home", "stray", "keep"),
    [
        (vm(5), vm(5), ""),
        (None, vm(5), "it may be the only directory of VM 5"),
        (vm(5, entries=[]), vm(5), "disk.0 of VM 5 is not on h1"),
        # The third disk is none of the VM's any more.
        (vm(5), vm(5, entries=["disk.0", "disk.2"]), ""),
        (vm(5, system=103), vm(5), "it may be the only directory of VM 5"),
        (vm(5, seq=4), vm(5, seq=3), ""),
        (vm(5, seq=3), vm(5, seq=4), "it is of SEQ 4 of the VM's history"),
        # 0.1.0 noted none.
        (vm(5, seq=-1), vm(5, seq=4), "it is of SEQ 4 of the VM's history"),
        (vm(5, seq=-1), vm(5, seq=-1), ""),
    ],
)
def test_directory_of_a_vm_that_oned_has_elsewhere_goes_if_it_is_whole_there(
    home: SeenVm | None, stray: SeenVm, keep: str
) -> None:
    known = gc.Known({5: "h1"}, frozenset(), frozenset(), places=place(5, "h1", 0, 1))
    h1, h2 = machine("h1", vms=[home] if home else []), machine("h2", vms=[stray])
    found = [item for item in gc.find([h1, h2], known, 0, True) if item.machine == "h2"]
    assert [(item.kind, item.keep.startswith(keep) if keep else item.keep) for item in found] == [
        ("stray", True if keep else "")
    ]
    runs = machine("h2", vms=[stray], domains=Domains(["one-5"], []))
    assert [item.keep for item in gc.find([h1, runs], known, 0, True) if item.machine == "h2"] != [""]
    # Nobody was asked, or oned is at work on it.
    assert (
        gc.find([machine("h1", vms=[vm(5)]), h2], gc.Known({5: "h1"}, frozenset(), frozenset()), 0, True)
        == []
    )


def test_which_vms_oned_is_asked_about_and_what_it_says() -> None:
    found = [
        ("h1", vm(5)),
        ("h2", vm(5)),
        ("h2", vm(6)),
        ("h1", vm(7)),
        ("fe", vm(8)),
        ("h1", vm(9, kind="incoming")),
    ]
    assert gc_places.in_question(found, {5: "h1", 6: "h1", 7: "h1", 9: "h2"}) == {5, 6}
    history = (
        "<HISTORY_RECORDS><HISTORY><HOSTNAME>h1</HOSTNAME><DS_ID>101</DS_ID></HISTORY></HISTORY_RECORDS>"
    )

    def said(state: int, lcm: int = 0, records: str = history) -> gc_places.Place | None:
        text = f"<VM><ID>5</ID><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE><TEMPLATE><DISK><DISK_ID>3</DISK_ID></DISK></TEMPLATE>"  # noqa: E501
        return gc_places.place_of(Vm.parse(f"{text}{records}</VM>"), "fe", lambda host: False)

    assert said(3, 3) == said(8) == said(5) == gc_places.Place("h1", 101, frozenset({3}))
    assert said(4) == said(9) == gc_places.Place("fe", 101, frozenset({3}))
    # PENDING, DONE, cloning, and all that is under way, unknown or has failed.
    assert (
        {said(state) for state in (0, 1, 2, 6, 10, 11)}
        == {None}
        == {said(3, lcm) for lcm in range(70) if lcm != 3}
    )
    assert said(8, records="") is None


@pytest.mark.fault(43, "from every failure state it is known where a VM's files may be")
def test_where_the_files_of_a_vm_may_be_that_waits_for_recover() -> None:
    def said(state: int, lcm: int, *hosts: tuple[str, int]) -> list[tuple[str, int]]:
        records = "".join(
            f"<HISTORY><HOSTNAME>{host}</HOSTNAME><DS_ID>{system}</DS_ID></HISTORY>" for host, system in hosts
        )
        text = f"<VM><ID>5</ID><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE><HISTORY_RECORDS>{records}</HISTORY_RECORDS></VM>"  # noqa: E501
        return [
            place[:2] for place in gc_places.after_failure(Vm.parse(text), "fe", lambda host: host == "front")
        ]

    failures = {number for name, number in vars(Lcm).items() if name.endswith("_FAILURE")}
    for lcm in range(70):
        found = said(3, lcm, ("h0", 101), ("h1", 101), ("h2", 102))
        assert found == ([("fe", 102), ("h2", 102), ("h1", 101)] if lcm in failures else []), lcm
    assert (
        said(3, 40, ("front", 101)) == [("fe", 101)] and said(3, 40) == [] and said(4, 40, ("h1", 101)) == []
    )


class Sessions:
    """Conversations with machines, of which some are lost."""

    def __init__(self, *lost: str, host: str = "") -> None:
        self.lost, self.host = lost, host

    def __call__(self, host: str, *words: object) -> Any:
        return Sessions(*self.lost, host=host)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *words: object) -> None:
        pass

    def run(self, steps: list[s.Step]) -> list[Any]:
        if self.host in self.lost:
            raise HostUnreachable(f"{self.host} has said nothing for 25 s")
        return [SimpleNamespace(token="t", seen="1", removed=True) for _ in steps]

    def ask(self, step: s.Step) -> Any:
        return self.run([step])[0]


@pytest.mark.parametrize(
    ("lost", "results", "machine_name"),
    [
        # The home of the stray: what else is on h1 goes.
        (
            "h2",
            ["h2, where VM 5 belongs, cannot be asked: h2 has said nothing for 25 s", "removed", ""],
            "h2",
        ),
        ("h1", ["SS010 h1 has said nothing for 25 s; ", "not reached", ""], "h1"),
    ],
)
def test_what_becomes_of_the_rest_where_a_machine_is_lost(
    lost: str,
    results: list[str],
    machine_name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in (command, shared):
        monkeypatch.setattr(module, "Session", Sessions(lost))
    survey = command.Survey()
    survey.known = gc.Known({5: "h2"}, frozenset(), frozenset(), places=place(5, "h2", 0))
    h1 = machine("h1", vms=[vm(5)], staged=[item(Staged, "/ds/101/.staged-x")])
    found = gc.find([h1, machine("h2", vms=[vm(5, entries=["disk.0"])])], survey.known, 0, True)
    found.append(replace(found[0], kind="image", keep="it may be somebody's"))
    said = command.remove(found, Config(), survey)
    assert [text[: len(wanted)] for text, wanted in zip(said, results)] == results and said[1:] == results[1:]
    assert [error["machine"] for error in survey.errors] == [machine_name]
    command.report(argparse.Namespace(json=False, dry_run=False), found, said, survey)
    assert "would remove" not in capsys.readouterr().out
    command.report(argparse.Namespace(json=True, dry_run=False), found, said, survey)
    rows = json.loads(capsys.readouterr().out)["findings"]
    assert [row["result"] for row in rows] == said


def test_set_aside_directory_of_a_known_vm_is_kept_while_it_is_the_only_one() -> None:
    (kept,) = find(machine(vms=[vm(5, kind="outgoing")]))
    assert kept.keep
    (found,) = find(machine(vms=[vm(5, kind="outgoing"), vm(5)]))
    assert (found.kind, found.keep) == ("outgoing", "")


def test_lease_with_its_disk_or_a_staged_one_stays() -> None:
    lease = SeenLease("/ds/.semishared/bases/b/leases/5-0", 9999, 5, 0)
    base = item(SeenBase, "/ds/.semishared/bases/b", name="b", leases=[lease], staged=[])
    root = BaseStore([base], [], [])
    for entries in (["disk.0"], ["disk.0.snap"], [".staged-disk.0.ab12"]):
        assert find(machine(root=root, vms=[vm(5, entries=entries)])) == []
    for entries in (["disk.00"], ["disk.1"], [".staged-disk.01.ab12"]):
        assert [found.kind for found in find(machine(root=root, vms=[vm(5, entries=entries)]))] == ["lease"]


@pytest.mark.parametrize(
    ("text", "wanted"), [("90", 90), ("90s", 90), ("30m", 1800), ("2h", 7200), ("7d", 604800)]
)
def test_ages(text: str, wanted: int) -> None:
    assert command.seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "h", "-1h", "1w", "1.5h", "9999999999"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(BadArguments):
        command.seconds(text)


def test_command_line_knows_its_subcommands_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.parser("gc").parse_args(["gc", "--dry-run", "--json"]).older_than is None
    for argv in ([], ["nothing"], ["gc", "--now", "--older-than", "1h"]):
        with pytest.raises(SystemExit) as end:
            main.main(argv)
        assert end.value.code == 2
        assert capsys.readouterr().err


def test_each_kind_that_is_found_is_a_row_of_the_table() -> None:
    known = {kind.name for kind in gc.KINDS}
    text = "".join(Path(str(module.__file__)).read_text() for module in (gc, gc_stores))
    found = set(re.findall(r'(?:_finding\(\s*|_left\(\w+\.machine, )"(\w+)"', text))
    found |= {"vm", "incoming", "outgoing", "removed", "kept", "changing", "image", "lent", "snapshot"}
    assert {"clone", "lease", "share", "key", "stray"} <= found and found == known
