# SPDX-License-Identifier: Apache-2.0
"""Which VMs and disks `semishared detach` is about, and what it prints of each."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from semishared.cli import detach as cli
from semishared.cli.command import describe
from semishared.errors import BadArguments, BadAttribute
from semishared.front import detach as front
from semishared.model.disk.record import Record
from semishared.model.vm.move_steps import DescribedVm
from semishared.opennebula.xml import Datastore, Image, Vm
from semishared.plan.disk import detach

RUNS = (3, 3)


def vm(number: int, states: tuple[int, int] = RUNS, host: str = "h1", disks: str = "") -> Vm:
    return Vm.parse(
        f"<VM><ID>{number}</ID><NAME>vm{number % 10}</NAME><STATE>{states[0]}</STATE><LCM_STATE>{states[1]}</LCM_STATE>"  # noqa: E501
        f"<TEMPLATE>{disks}</TEMPLATE><HISTORY_RECORDS><HISTORY><SEQ>0</SEQ><HOSTNAME>{host}</HOSTNAME><DS_ID>101</DS_ID></HISTORY>"
        "</HISTORY_RECORDS></VM>"
    )


def disk(number: int, image: int, **more: str) -> str:
    rows = {"DISK_ID": number, "IMAGE_ID": image, "DATASTORE_ID": 100, "TM_MAD": "semishared", **more}
    return "<DISK>" + "".join(f"<{name}>{value}</{name}>" for name, value in rows.items()) + "</DISK>"


def image(number: int, when: str = "", persistent: int = 0) -> Image:
    of = f"<ID>{number}</ID><PERSISTENT>{persistent}</PERSISTENT><DATASTORE_ID>100</DATASTORE_ID>"
    return Image.parse(
        f"<IMAGE>{of}<TEMPLATE><SEMISHARED_DETACH>{when}</SEMISHARED_DETACH></TEMPLATE></IMAGE>"
    )


def store(when: str = "") -> Datastore:
    return Datastore.parse(
        f"<DATASTORE><ID>100</ID><TEMPLATE><SEMISHARED_DETACH>{when}</SEMISHARED_DETACH></TEMPLATE></DATASTORE>"
    )


@pytest.mark.parametrize(
    "states, words",
    [(RUNS, ""), ((8, 0), ""), ((3, 4), "under way"), ((5, 0), "neither"), ((1, 0), "neither")],
)
def test_only_what_runs_or_is_powered_off_is_detached(states: tuple[int, int], words: str) -> None:
    why = detach.why_not(vm(7, states))
    assert (words in why) if words else not why
    wanted = detach.wanted(vm(7, states), "/data")
    assert (wanted.vm_dir, wanted.host, wanted.domain) == (
        "/data/101/7",
        "h1",
        "one-7" if states[0] == 3 else "",
    )


def test_vm_of_which_nothing_can_be_planned_is_one_row_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = Vm.parse("<VM><ID>7</ID><STATE>3</STATE><LCM_STATE>3</LCM_STATE><DEPLOY_ID>a b</DEPLOY_ID></VM>")
    vms = {7: odd, 8: vm(8, (3, 4))}

    class Oned:
        def vm(self, number: int) -> Vm:
            return vms[number]

        def datastores(self) -> list[Datastore]:
            return []

        hosts = datastores

    monkeypatch.setattr(front, "Oned", Oned)
    monkeypatch.setattr(front, "load", lambda: None)
    rows = front.detach([7, 8], lambda **_: None)
    assert {row["vm"]: row["how"] for row in rows} == {7: "failed", 8: "skipped"}
    assert "not a deploy id" in next(row["why"] for row in rows if row["vm"] == 7)


def test_due_are_disks_whose_image_or_else_datastore_says_so() -> None:
    machine = vm(
        7,
        disks=disk(0, 1)
        + disk(1, 2)
        + disk(2, 3)
        + disk(3, 5)
        + disk(4, 1, PERSISTENT="YES", DATASTORE_ID="7"),
    )
    images = {1: image(1), 2: image(2, "On-Request"), 3: image(3, "after-boot"), 5: image(5, persistent=1)}
    assert detach.due(machine, images, {100: store()}) == (2,)
    assert detach.due(machine, images, {100: store("after-boot")}) == (
        0,
        2,
        4,
    )  # what DISK says beside its image is its user's word
    assert detach.due(vm(7, (8, 0), disks=disk(0, 3)), images, {100: store()}) == ()
    with pytest.raises(
        BadAttribute, match="SEMISHARED_DETACH of image 4 is 'soon', not one of on-request, after-boot"
    ):
        detach.due(vm(7, disks=disk(0, 4)), {4: image(4, "soon")}, {100: store()})


def test_each_image_is_wanted_once_with_all_its_hosts() -> None:
    def remote(number: int, source: str) -> dict[str, Any]:
        of = {"store": 100, "id": 1, "format": "raw", "source": source, "generation": "ab"}
        path = f"/data/101/7/disk.{number}.snap/0"
        data = {
            "version": 1,
            "disk": number,
            "place": "local",
            "how": "remote-first",
            "format": "qcow2",
            "path": path,
            "image": of,
        }
        return Record.from_data(data).to_data()

    answer = DescribedVm(True, [remote(0, "/store/a"), remote(1, "/store/b")])
    found = [
        detach.found(detach.wanted(vm(number, host=host), "/data"), answer)
        for number, host in ((7, "h1"), (8, "h2"), (9, "h1"))
    ]
    assert {ref.source: hosts for ref, hosts in detach.images(found).items()} == {
        "/store/a": ["h1", "h2"],
        "/store/b": ["h1", "h2"],
    }


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    describe(parser, cli.ARGUMENTS)
    return parser.parse_args(words)


def test_vms_are_named_by_id_or_name_or_host() -> None:
    vms = [vm(1), vm(2, host="h2"), vm(3, (5, 0)), vm(13), vm(14)]
    assert [found.id for found in cli.meant(vms, arguments("2,vm1,2"))] == [2, 1]
    assert [found.id for found in cli.meant(vms, arguments("--all"))] == [1, 2, 13, 14]
    assert [found.id for found in cli.meant(vms, arguments("--host", "h2"))] == [2]
    for words, said in (("9", "no VM '9'"), ("vm3", "2 VMs are called 'vm3'"), ("1,,2", "no VM ''")):
        with pytest.raises(BadArguments, match=said):
            list(cli.meant(vms, arguments(words)))


def test_timer_is_printed_with_units_and_a_line_of_cron(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments("--print-timer")) == 0
    said = capsys.readouterr().out
    assert (
        said.count("detach --due") == said.count("publish --due") == 2
        and "[Timer]" in said
        and "/etc/cron.d/semishared-detach" in said
    )


def test_a_row_says_what_became_of_a_disk() -> None:
    asked = detach.wanted(vm(7), "/data")
    nothing = detach.row(asked, how="skipped", why=detach.NOTHING)
    assert cli.text_of(nothing, is_short=True) is None
    assert cli.text_of(nothing, is_short=False) == "VM 7 on h1: skipped: no disk of it reads from a store"
    done = {**detach.row(asked, how="detached", seconds=1.25), "disk": 2, "image": 4}
    assert cli.text_of(done, is_short=True) == "VM 7 on h1 disk 2 (image 4): detached in 1.2 s"
