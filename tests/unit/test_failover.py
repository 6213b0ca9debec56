# SPDX-License-Identifier: Apache-2.0
"""Which VMs of a lost host come up elsewhere as `semishared failover` says it, and what doctor warns of."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from semishared.cli import failover as cli
from semishared.cli import main
from semishared.errors import BadArguments, BrokenChain, OnedUnavailable
from semishared.front import fence_facts
from semishared.opennebula.xml import Datastore, Host, Image, View, Vm
from semishared.plan.care.diagnosis import Cloud, of_cloud
from semishared.tools import layers


def disk(number: int, image: int = -1, **more: str) -> str:
    of = {"IMAGE_ID": image, "SOURCE": f"/images/{image}"} if image >= 0 else {}
    rows = {"DISK_ID": number, "DATASTORE_ID": 100, "TM_MAD": "semishared", **of, **more}
    return "<DISK>" + "".join(f"<{name}>{value}</{name}>" for name, value in rows.items()) + "</DISK>"


def vm(number: int, disks: str = "", state: int = 3, lcm: int = 16, hosts: tuple[str, ...] = ("h1",)) -> Vm:
    """Return a VM as oned has it; the host h1 has the id 1."""
    history = "".join(
        f"<HISTORY><SEQ>{seq}</SEQ><HOSTNAME>{name}</HOSTNAME><HID>{name[1:2]}</HID></HISTORY>"
        for seq, name in enumerate(hosts)
    )
    return Vm.parse(
        f"<VM><ID>{number}</ID><NAME>vm-{number}</NAME><STATE>{state}</STATE><LCM_STATE>{lcm}</LCM_STATE>"
        f"<TEMPLATE>{disks}</TEMPLATE><HISTORY_RECORDS>{history}</HISTORY_RECORDS></VM>"
    )


def image(number: int, **attributes: str) -> Image:
    rows = "".join(f"<{name}>{value}</{name}>" for name, value in attributes.items())
    of = f"<ID>{number}</ID><NAME>image-{number}</NAME><DATASTORE_ID>100</DATASTORE_ID><SOURCE>/images/{number}</SOURCE>"  # noqa: E501
    kind = "<PERSISTENT>1</PERSISTENT><FORMAT>raw</FORMAT>" if "PERSISTENT_TYPE" in attributes else ""
    return Image.parse(f"<IMAGE>{of}{kind}<VMS><ID>1</ID><ID>7</ID></VMS><TEMPLATE>{rows}</TEMPLATE></IMAGE>")


class Known:
    """What oned says, and whom it was asked to reschedule."""

    def __init__(self, *vms: Vm, refused: tuple[int, ...] = ()) -> None:
        self._vms, self._refused, self.asked = {item.id: item for item in vms}, refused, list[int]()
        self.images = {
            1: image(1),
            2: image(2, SEMISHARED_ON_HOST_FAILURE="recreate"),
            3: image(3, SEMISHARED_PLACE="shared"),
            4: image(4, SEMISHARED_LOCAL="odd"),
            5: image(5, PERSISTENT_TYPE="shareable"),
        }

    def vms(self) -> list[Vm]:
        return list(self._vms.values())

    def vm(self, number: int) -> Vm:
        return self._vms[number]

    def image(self, number: int) -> Image:
        return self.images[number]

    def datastore(self, number: int) -> Datastore:
        return Datastore.parse(f"<DATASTORE><ID>{number}</ID><TEMPLATE/></DATASTORE>")

    def reschedule(self, number: int) -> None:
        if number in self._refused:
            raise OnedUnavailable("wrong state")
        self.asked.append(number)


def rescheduled(oned: Any, item: Vm, is_dry: bool) -> bool:
    """Have a VM come up elsewhere, print its line, and tell whether it waits."""
    row = cli.rescheduled(oned, item, is_dry)
    print(f"VM {item.id} ({item.name}) {cli.text_of(row)}")
    return bool(row["why"])


@pytest.mark.parametrize(
    ("disks", "words"),
    [
        (disk(0, 1, CLONE="NO"), None),
        (disk(0, 3, CLONE="YES"), None),
        (disk(0, 2, CLONE="YES"), None),
        (disk(0, TYPE="swap"), None),
        (disk(0, TYPE="fs", SEMISHARED_ON_HOST_FAILURE="Recreate"), None),
        (disk(0, 1, CLONE="YES", TM_MAD="ceph", TYPE="RBD"), None),
        (disk(0, 1, CLONE="YES"), "disk 0: SEMISHARED_ON_HOST_FAILURE is wait for image 1"),
        (disk(0, 3, CLONE="YES") + disk(1, 2, CLONE="YES") + disk(2, 1, CLONE="YES"), "disk 2: "),
        (disk(0, TYPE="fs"), "disk 0: SEMISHARED_ON_HOST_FAILURE is wait"),
        (disk(0, 1, CLONE="YES", TM_MAD="qcow2"), "disk 0: it is of driver qcow2"),
        (disk(0, 5, CLONE="NO"), "onevm migrate 7 HOST"),
        (disk(0, 1, CLONE="NO", SHAREABLE="YES"), None),
        (
            disk(0, 1, CLONE="NO", SOURCE="/etc/shadow"),
            "names '/etc/shadow' in datastore 100, and its image 1 is '/images/1'",
        ),
        (disk(0, 3, CLONE="YES", DATASTORE_ID="101"), "names '/images/3' in datastore 101"),
        (
            disk(0, TYPE="fs", IMAGE_ID="1", SOURCE="/images/1", CLONE="NO"),
            "disk 0: SEMISHARED_ON_HOST_FAILURE is wait",
        ),
        (
            disk(0, TYPE="fs", IMAGE_ID="0_1", SOURCE="/images/1", CLONE="NO"),
            "disk 0: SEMISHARED_ON_HOST_FAILURE is wait",
        ),
        (disk(0, 4, CLONE="YES"), "SEMISHARED_LOCAL of image 4"),
    ],
)
def test_a_vm_is_rescheduled_or_waits_for_a_reason(
    disks: str, words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    oned: Any = Known()
    waits = rescheduled(oned, vm(7, disks), False)
    said = capsys.readouterr().out
    assert waits == (words is not None) and oned.asked == ([] if words else [7])
    assert (words or "is rescheduled") in said and "VM 7 (vm-7)" in said


def test_a_disk_with_snapshots_is_not_made_anew(capsys: pytest.CaptureFixture[str]) -> None:
    found = vm(7, disk(0, 2, CLONE="YES"))
    found.element.append(
        ElementTree.fromstring("<SNAPSHOTS><DISK_ID>0</DISK_ID><SNAPSHOT><ID>3</ID></SNAPSHOT></SNAPSHOTS>")
    )
    oned: Any = Known()
    assert rescheduled(oned, found, False) and "snapshots 3" in capsys.readouterr().out


def test_those_that_were_off_under_way_or_are_refused_are_named_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    oned: Any = Known(
        vm(1),
        vm(2, state=5, lcm=0),
        vm(3, lcm=61, hosts=("h1", "h2")),
        vm(4, hosts=("h1", "h2")),
        vm(5),
        vm(6, lcm=61, hosts=("h3", "h2")),
        refused=(5,),
    )
    assert [rescheduled(oned, item, False) for item in cli.those_of(oned, 1)] == [False, True, True, True]
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in said] == ["VM 1", "VM 2", "VM 3", "VM 5"]
    assert "5/0" in said[1] and "onevm recover --retry 3" in said[2] and "wrong state" in said[3]
    assert oned.asked == [1]


def test_a_vm_that_is_off_waits_for_its_user_and_one_without_files_there_is_none_of_the_hosts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    oned: Any = Known(
        vm(1, disk(0, 1, CLONE="YES"), state=8, lcm=0),
        *(vm(2 + state, state=state, lcm=0) for state in (1, 2, 4, 9)),
    )
    assert [rescheduled(oned, item, False) for item in cli.those_of(oned, 1)] == [True]
    (line,) = capsys.readouterr().out.splitlines()
    assert "onevm migrate 1 HOST" in line and "disk 0: SEMISHARED_ON_HOST_FAILURE is wait for image 1" in line


def test_a_dry_run_asks_for_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    oned: Any = Known()
    assert not rescheduled(oned, vm(1), True) and oned.asked == []
    assert "would be" in capsys.readouterr().out


def test_a_hook_names_its_host_in_base64() -> None:
    text = base64.b64encode(b"<HOST><ID>3</ID><NAME>h3</NAME></HOST>")
    assert cli.named(text + b"\n") == "h3"
    for wrong in (b"", b" \n", base64.b64encode(b"<VM/>")):
        with pytest.raises(BadArguments):
            cli.named(wrong)


@pytest.mark.parametrize("seconds", ["-5", "99999999999999999999"])
def test_a_wait_that_nobody_can_wait_is_an_error_in_one_line(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["failover", "--hook", "--wait", seconds]) == 2
    said = capsys.readouterr().err
    assert f"--wait {seconds}: from 0 to" in said and said.count("\n") == 1


def test_a_host_that_is_seen_or_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hosts:
        state = 3

        def hosts(self) -> list[Host]:
            return [Host.parse(f"<HOST><ID>1</ID><NAME>h1</NAME><STATE>{self.state}</STATE></HOST>")]

    oned: Any = Hosts()
    # MONITORING_MONITORED and MONITORED; then ERROR, MONITORING_ERROR and OFFLINE, and nobody is asked.
    monkeypatch.setattr(fence_facts, "answers_ssh", lambda host, connect_s: pytest.fail("asked"))
    for oned.state in (1, 2):
        with pytest.raises(BadArguments, match="not lost"):
            cli.lost(oned, "h1", 0, 10)
    for oned.state in (3, 5, 8):
        assert cli.lost(oned, "h1", 0, 10)
    with pytest.raises(BadArguments, match="no host h2"):
        cli.lost(oned, "h2", 0, 10)
    # INIT, DISABLED and those that are monitored just now: the host says it.
    for oned.state in (0, 4, 6, 7):
        monkeypatch.setattr(
            fence_facts, "answers_ssh", lambda host, connect_s: (host, connect_s) == ("h1", 10)
        )
        with pytest.raises(BadArguments, match="h1: it answers"):
            cli.lost(oned, "h1", 0, 10)
        monkeypatch.setattr(fence_facts, "answers_ssh", lambda host, connect_s: False)
        assert cli.lost(oned, "h1", 0, 10)


# -- what doctor says
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        ([], ""),
        ([("semishared failover --hook", "$TEMPLATE")], ""),
        ([("ft/host_error.rb", "$TEMPLATE -m -p 5")], "passes over"),
        ([("ft/host_error.rb", "$TEMPLATE -m -p 5"), ("/x/semishared failover --hook", "$TEMPLATE")], ""),
        (
            [("ft/host_error.rb", "$TEMPLATE -r -p 5"), ("/x/semishared failover --hook", "$TEMPLATE")],
            "removes VMs",
        ),
        ([("ft/host_error.rb", "$TEMPLATE --delete")], "removes VMs"),
    ],
)
def test_doctor_knows_opennebulas_own_hook(hooks: list[tuple[str, str]], words: str) -> None:
    views = [
        View(
            ElementTree.fromstring(
                f"<HOOK><TEMPLATE><COMMAND>{command}</COMMAND><ARGUMENTS>{words}</ARGUMENTS></TEMPLATE></HOOK>"
            )
        )
        for command, words in hooks
    ]
    found = [item.what for item in of_cloud(Cloud(hooks=views), "fe") if "hook" in item.what]
    assert len(found) == bool(words) and all(words in text for text in found)


def test_doctor_names_images_whose_vms_nobody_schedules() -> None:
    found = of_cloud(Cloud(images=[image(1), image(2, PERSISTENT_TYPE="SHAREABLE")]), "fe")
    assert [item.what for item in found if "SHAREABLE" in item.what] == [
        "image 2 (image-2) is SHAREABLE: the scheduler gives its VMs no system datastore of semishared"
    ]


# -- which layer a guest wrote to
# --------------------------------------------------------------------------------------


def test_the_topmost_layer_is_the_one_of_the_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = {"0": "", "1": "0", "2": "1"}
    for name in below:
        (tmp_path / name).touch()
    monkeypatch.setattr(layers, "backing_of", lambda path: (below[path.rpartition("/")[2]], "qcow2"))
    assert [layers.topmost(str(tmp_path), number) for number in (0, 1, 2)] == [2, 2, 2]
    (tmp_path / "3").touch()
    below["3"] = "1"
    assert layers.topmost(str(tmp_path), 3) == 3
    with pytest.raises(BrokenChain, match="which of them"):
        layers.topmost(str(tmp_path), 1)
