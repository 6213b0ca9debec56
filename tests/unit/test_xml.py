# SPDX-License-Identifier: Apache-2.0
"""Views over OpenNebula's XML, on recorded documents and on what no OpenNebula would send."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import BadArguments
from semishared.opennebula import values
from semishared.opennebula.values import decode
from semishared.opennebula.xml import Datastore, DriverData, Host, Image, Vm, parse
from semishared.units import MiB

FIXTURES = Path(__file__).parent / "fixtures"


def fixture(name: str) -> bytes:
    return (FIXTURES / f"{name}.xml").read_bytes()


def test_recorded_vm_is_read() -> None:
    vm = Vm.parse(fixture("vm"))
    assert (vm.id, vm.lcm_state, vm.context_disk, vm.system_datastores) == (2, 1, 4, [101])
    assert [disk.id for disk in vm.disks] == [0, 1, 2, 3]
    in_place, copied = vm.disk(0), vm.disk(1)
    assert (in_place.image_id, in_place.is_clone, in_place.driver, in_place.store_id) == (
        0,
        False,
        "semishared",
        100,
    )
    assert (copied.image_id, copied.is_clone, copied.format, copied.size) == (1, True, "raw", 16 * MiB)
    assert (vm.disk(2).image_id, vm.disk(2).is_volatile) == (-1, True)


@pytest.mark.fault(
    46,
    "what is removed on a host that a VM has left is of the SEQ at which it was there, however "
    "late that is asked",
)
def test_seq_on_a_host_is_that_of_the_last_time_there() -> None:
    records = "".join(
        f"<HISTORY><SEQ>{seq}</SEQ><HOSTNAME>{host}</HOSTNAME></HISTORY>"
        for seq, host in enumerate(("h1", "h2", "h1", "h3"))
    )
    vm = Vm.parse(f"<VM><ID>7</ID><HISTORY_RECORDS>{records}</HISTORY_RECORDS></VM>".encode())
    assert [vm.seq_on(host) for host in ("h1", "h2", "h3", "h4")] == [2, 1, 3, 3]


def test_vm_says_which_disk_it_does_not_have() -> None:
    with pytest.raises(BadArguments, match="VM 2 has no disk 7"):
        Vm.parse(fixture("vm")).disk(7)


def test_recorded_image_and_datastore_are_read() -> None:
    image, datastore = Image.parse(fixture("image-1")), Datastore.parse(fixture("datastore-100"))
    assert (image.id, image.is_persistent, image.format, image.size) == (1, False, "raw", 16 * MiB)
    assert image.attribute("MY_OWN") == "x"
    assert image.attribute("SEMISHARED_PLACE") == ""
    assert (datastore.id, datastore.type, datastore.attribute("SAFE_DIRS")) == (100, 0, "/lab /tmp /var/tmp")
    assert Image.parse(fixture("image-0-persistent")).is_persistent


def test_missing_and_odd_numbers_have_a_default() -> None:
    image = Image.parse(
        "<IMAGE><ID>x</ID><SIZE>-5</SIZE><TYPE> 2</TYPE><DATASTORE_ID>2 </DATASTORE_ID></IMAGE>"
    )
    assert (image.id, image.size, image.type, image.store_id) == (-1, 0, 2, -1)


def test_texts_are_read_as_oned_reads_them() -> None:
    rows = [json.loads(line) for line in (FIXTURES / "oned_values.json").read_text().splitlines()]
    assert len(rows) > 1000 and any(row[1] != row[2] for row in rows) and any(row[3] for row in rows)
    for text, of_32_bits, of_64_bits, is_yes in rows:
        assert (values.integer(text, 32), values.integer(text), values.is_yes(text)) == (
            of_32_bits,
            of_64_bits,
            is_yes,
        ), repr(text)


@pytest.mark.fault(22, "a disk that is volatile to oned has no image, whatever its user wrote")
@pytest.mark.parametrize(
    "more", ["<IMAGE_ID>9</IMAGE_ID>", "<IMAGE_ID>0_9</IMAGE_ID>", "<IMAGE>other</IMAGE>"]
)
@pytest.mark.parametrize("kind", ["fs", "FS", "swap", "Swap"])
def test_a_disk_that_oned_calls_volatile_is_of_no_image(kind: str, more: str) -> None:
    disk = Vm.parse(
        f"<VM><TEMPLATE><DISK><DISK_ID>0</DISK_ID><TYPE>{kind}</TYPE><SOURCE>/x</SOURCE>{more}</DISK></TEMPLATE></VM>"
    ).disk(0)
    assert (disk.is_volatile, disk.image_id, disk.source) == (True, -1, "")


@pytest.mark.fault(22, "a size is what oned counts for it")
@pytest.mark.parametrize(
    ("said", "size"), [("10_000", 0), ("9 ", 0), ("\u0669", 0), (" 9", 9), ("+9", 9), ("0x9", 0), ("-9", 0)]
)
def test_a_size_is_what_oned_counts(said: str, size: int) -> None:
    disk = Vm.parse(
        f"<VM><TEMPLATE><DISK><DISK_ID>0</DISK_ID><SIZE>{said}</SIZE></DISK></TEMPLATE></VM>"
    ).disk(0)
    assert disk.size == size * MiB


@pytest.mark.fault(22, "a disk is read-only where oned takes it for that")
@pytest.mark.parametrize(
    ("said", "is_readonly"),
    [("YES", True), ("yes", True), ("YES ", False), (" YES", False), ("ye\u017f", False)],
)
def test_a_disk_is_read_only_where_oned_says_so(said: str, is_readonly: bool) -> None:
    vm = Vm.parse(
        f"<VM><TEMPLATE><DISK><DISK_ID>0</DISK_ID><READONLY>{said}</READONLY></DISK></TEMPLATE></VM>"
    )
    assert vm.disk(0).is_readonly is is_readonly


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<VM>",
        b"<IMAGE/>",
        b"VM",
        b"<VM/><VM/>",
        b"\xff\xfe",
        b"<VM>&x;</VM>",
        b"<VM>\0</VM>",
        b'<?xml version="1.0" encoding="no-such"?><VM/>',
        b'<?xml version="1.0" encoding="utf-7"?><VM/>',
        b'<?xml version="1.0" encoding="idna"?><VM/>',
        b'<!DOCTYPE VM [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;">]><VM>&c;</VM>',
    ],
)
def test_what_is_no_vm_is_refused(text: bytes) -> None:
    with pytest.raises(BadArguments):
        Vm.parse(text)


@given(st.binary(max_size=200))
def test_any_bytes_on_stdin_are_a_document_or_bad_arguments(data: bytes) -> None:
    for text in (
        data,
        base64.b64encode(data),
        base64.b64encode(b"<DS_DRIVER_ACTION_DATA>" + data + b"</DS_DRIVER_ACTION_DATA>"),
    ):
        try:
            DriverData(text)
        except BadArguments:
            pass
        try:
            parse(data, "VM")
        except BadArguments:
            pass


def test_driver_data_has_its_parts_or_empty_ones() -> None:
    data = DriverData(
        base64.b64encode(b"<DS_DRIVER_ACTION_DATA><IMAGE><ID>4</ID></IMAGE></DS_DRIVER_ACTION_DATA>")
    )
    assert data.image.id == 4
    assert (data.datastore.id, data.datastore.base_path) == (-1, "")


def test_base64_may_have_line_breaks() -> None:
    assert decode(b"YWJj\nZGVm\n") == b"abcdef"


@pytest.mark.parametrize(
    ("clusters", "host", "is_near"),
    [
        (
            ["<CLUSTERS><ID>0</ID><ID>100</ID></CLUSTERS>"],
            "<CLUSTER_ID>100</CLUSTER_ID><VM_MAD>kvm</VM_MAD>",
            True,
        ),
        (["<CLUSTERS><ID>0</ID></CLUSTERS>"], "<CLUSTER_ID>100</CLUSTER_ID><VM_MAD>kvm</VM_MAD>", False),
        (
            ["<CLUSTERS><ID>0</ID></CLUSTERS>", "<CLUSTERS><ID>100</ID></CLUSTERS>"],
            "<CLUSTER_ID>100</CLUSTER_ID>",
            True,
        ),
        ([""], "<CLUSTER_ID>100</CLUSTER_ID>", True),
        (["<CLUSTERS/>"], "<CLUSTER_ID>100</CLUSTER_ID>", True),
        ([], "<CLUSTER_ID>100</CLUSTER_ID>", True),
        (["<CLUSTERS><ID>0</ID></CLUSTERS>"], "<CLUSTER_ID>0</CLUSTER_ID><VM_MAD>LXC</VM_MAD>", False),
    ],
)
def test_hosts_to_which_vms_of_datastores_may_come(clusters: list[str], host: str, is_near: bool) -> None:
    datastores = [Datastore.parse(f"<DATASTORE>{text}</DATASTORE>") for text in clusters]
    assert Host.parse(f"<HOST>{host}</HOST>").is_near(datastores) == is_near
