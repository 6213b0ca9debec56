# SPDX-License-Identifier: Apache-2.0
"""What the vector SEMISHARED of a VM says, and the line of an image."""

from __future__ import annotations

from typing import Any, List, Optional

import pytest

from lab.oned import template
from semishared.model.base.steps import KeptDisk, ReportedDisk, ReportedVm
from semishared.model.disk.place import PLACES
from semishared.opennebula.xml import Image, Vm
from semishared.plan.care import vm_vector
from semishared.plan.care.vm_vector import Facts

SINCE = "2026-11-28 01:24 UTC"


def vm(*disks: int, driver: str = "semishared", said: str = "") -> Vm:
    """Return VM 12; disk N is of image 7 + N on store 100."""
    inner = "".join(
        f"<DISK><DISK_ID>{n}</DISK_ID><IMAGE_ID>{7 + n}</IMAGE_ID><DATASTORE_ID>100</DATASTORE_ID>"
        f"<TM_MAD>{driver}</TM_MAD></DISK>"
        for n in disks
    )
    return Vm.parse(f"<VM><ID>12</ID><TEMPLATE>{inner}</TEMPLATE><USER_TEMPLATE>{said}</USER_TEMPLATE></VM>")


def disk(number: int, how: str, uncommitted: Optional[int] = None, snapshots: int = 0) -> ReportedDisk:
    return ReportedDisk(
        number, how, "local", "qcow2", "/x", 0, snapshots, None, "normal", uncommitted, "", None
    )


def facts(disks: List[ReportedDisk], **more: Any) -> Facts:
    seen = ReportedVm(12, 101, disks, "")
    return Facts(vm(*(one.disk for one in disks)), "h2", seen, **more)


def test_every_place_has_its_words() -> None:
    assert vm_vector.LIVES.keys() == set(PLACES.values())
    disks = [disk(number, how, 0 if how == "diff" else None) for number, how in enumerate(PLACES)]
    assert vm_vector.vector(facts(disks)) == {
        "DISK0": "overlay on h2, base image 7",
        "DISK1": "diff on h2, of image 8",
        "DISK2": "copy on h2, of image 9",
        "DISK3": "remote-first on h2, reads image 10 on store 100",
        "DISK4": "volatile on h2",
        "DISK5": "in place on store 100",
        "DISK6": "clone on store 100, of image 13",
        "DETACHED": "no: disks 3 5 6 on store 100",
        "UNCOMMITTED": "no",
    }


def test_what_is_not_committed_is_said_with_its_time() -> None:
    said = facts([disk(0, "diff", 12 << 20, 2), disk(1, "overlay", snapshots=1)], since=SINCE)
    assert vm_vector.vector(said) == {
        "DISK0": "diff on h2, of image 7, 2 snapshots",
        "DISK1": "overlay on h2, base image 8, 1 snapshot",
        "DETACHED": "yes",
        "UNCOMMITTED": f"12.0 MiB since {SINCE}",
    }
    assert said.may_change and not facts([disk(1, "overlay")]).may_change
    what = f"on h2, disk 0 of VM 12: 12.0 MiB not committed since {SINCE}"
    assert vm_vector.image_states(said) == {7: what}
    assert vm_vector.image_states(facts([disk(0, "diff", 0)])) == {7: "on h2, disk 0 of VM 12: all committed"}


def test_a_disk_that_is_not_seen_is_no_disk_in_order() -> None:
    unseen = Facts(vm(0), "h2", None, "SS010 h2: no route to host", error="failover: waits")
    assert vm_vector.vector(unseen) == {
        "DISK0": "on h2, not seen: SS010 h2: no route to host",
        "LAST_ERROR": "failover: waits",
    }
    seen = ReportedVm(12, 101, [disk(0, "overlay")], "", {"1": "no JSON"})
    found = vm_vector.vector(Facts(vm(0, 1, 2), "h2", seen))
    assert found["DISK1"] == "cannot be read on h2: no JSON"
    assert found["DISK2"] == "no record on h2: semishared doctor"
    assert "DETACHED" not in found and "UNCOMMITTED" not in found, "neither is known"
    failed = Facts(vm(0), "h2", ReportedVm(12, 101, [], ""), is_settled=False)
    assert vm_vector.vector(failed)["DISK0"] == "not on h2"
    assert vm_vector.vector(Facts(vm(0), "h2", ReportedVm(12, 101, [], "no directory")))["DISK0"] == (
        "cannot be read on h2: no directory"
    )
    assert "unknown kind" in vm_vector.vector(facts([disk(0, "other")]))["DISK0"]


def test_disks_of_other_drivers_are_not_spoken_of() -> None:
    other = Facts(vm(0, 1, driver="ssh"), "h2", ReportedVm(12, 101, [], ""))
    assert vm_vector.vector(other) == {}
    assert list(vm_vector.vector(other._replace(seen=ReportedVm(12, 101, [disk(1, "overlay")], "")))) == [
        "DISK1",
        "DETACHED",
        "UNCOMMITTED",
    ]


@pytest.mark.parametrize(
    "text",
    [
        'a " ] , ERROR = "x',
        "back\\slash",
        "two\nlines\tand\x1b[1m",
        "Größe \u202e",
        "x" * 300,
        "",
        " blanks  ",
    ],
)
def test_no_text_of_others_is_more_than_one_value(text: str) -> None:
    fields = {"DISK0": "overlay on h2, base image 7", "LAST_ERROR": vm_vector.plain(text)}
    assert len(fields["LAST_ERROR"]) <= vm_vector.LONGEST and fields["LAST_ERROR"].isascii()
    assert template.parse(vm_vector.vm_template(fields)) == {"SEMISHARED": fields}
    line = vm_vector.plain(text)
    assert template.parse(vm_vector.image_template(line)) == {"SEMISHARED_STATE": line or {}}


def test_only_what_differs_is_written() -> None:
    fields = {"DISK0": "volatile on h2", "UNCOMMITTED": "no"}
    there = "<SEMISHARED><DISK0>volatile on h2</DISK0><UNCOMMITTED>no</UNCOMMITTED></SEMISHARED>"
    assert vm_vector.is_said(vm(0, said=there), fields)
    for other in ("", there + there, there.replace("no<", "yes<"), "<SEMISHARED>text</SEMISHARED>"):
        assert not vm_vector.is_said(vm(0, said=other), fields)
    assert vm_vector.is_said(vm(), {}) and not vm_vector.is_said(vm(said=there), {})

    def image(inner: str) -> Image:
        return Image.parse(f"<IMAGE><TEMPLATE>{inner}</TEMPLATE></IMAGE>")

    line = image("<SEMISHARED_STATE>on h2</SEMISHARED_STATE>")
    assert vm_vector.is_state(line, "on h2") and not vm_vector.is_state(line, "")
    assert vm_vector.is_state(image(""), "") and not vm_vector.is_state(image(""), "on h2")


def test_what_a_vm_that_is_gone_has_left_is_said_of_its_image() -> None:
    kept = [KeptDisk("/x", 12, 0, {"id": 7}, 12 << 20, 0), KeptDisk("/y", 12, 1, None, 1, 0)]
    assert vm_vector.kept_states(12, "h2", kept) == {
        7: "on h2, kept of disk 0 of VM 12: 12.0 MiB not committed"
    }


def test_why_the_vector_is_not_restricted() -> None:
    """What oned does with each form of VM_RESTRICTED_ATTR (src/template/Template.cc:787)."""
    new: template.Template = {"SEMISHARED": {"DISK0": "overlay on h2"}, "NOTE": "mine"}
    old: template.Template = {"SEMISHARED": {"DISK0": "overlay on h1"}, "NOTE": "mine, edited"}
    assert template.restricted_change(dict(old), new, ["SEMISHARED"], append=False) == "", (
        "a vector is no value"
    )
    assert template.restricted_change({"NOTE": "x"}, new, ["SEMISHARED"], append=False) == ""
    refused = template.restricted_change(dict(old), new, ["SEMISHARED/DISK0"], append=False)
    assert refused == "SEMISHARED", "a form that was opened before we published is refused as a whole"
    state: template.Template = {"SEMISHARED_STATE": "on h2"}
    assert template.restricted_change(
        {"SEMISHARED_STATE": "on h1"}, state, ["SEMISHARED_STATE"], append=False
    )
