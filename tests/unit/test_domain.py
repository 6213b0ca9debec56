# SPDX-License-Identifier: Apache-2.0
"""Golden files in golden/domain: CASE.in.xml and CASE.records.json become CASE.out.xml. REGENERATE=1 rewrites
the last.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from semishared.errors import BadArguments, BadRecord, MigrationRefused, NotSupported
from semishared.model.disk.place import PLACES
from semishared.model.disk.record import Record
from semishared.model.steps import State
from semishared.model.vm.live_steps import MigrateOptions
from semishared.opennebula.xml_edit import Markup, escape
from semishared.plan.libvirt.domain import (
    AttachMessage,
    Domain,
    check_system_snapshot,
    disk_number,
    disks_of_ours,
)
from semishared.plan.vm.checkpoint import with_active_layers
from semishared.plan.vm.live_migration import Moving, Outcome, is_proved, moving, options, outcome
from semishared.plan.vm.migration import parsed

GOLDEN = Path(__file__).parent / "golden" / "domain"
CASES = sorted(path.name[: -len(".in.xml")] for path in GOLDEN.glob("*.in.xml"))
VM_DIR = "/var/lib/one//datastores/101/7"
IN_PLACE = "/var/lib/one/datastores/100/.semishared/abc/image"


def record(disk: int = 0, how: str = "overlay", format: str = "qcow2", path: str = "") -> Record:
    default = IN_PLACE if how in ("in-place", "store-clone") else f"/var/lib/one/datastores/101/7/disk.{disk}"
    return Record(disk, PLACES[how], format, path or default)


def record_text(**changes: object) -> bytes:
    data: dict[str, object] = {
        "version": 1,
        "disk": 0,
        "place": "local",
        "how": "overlay",
        "format": "qcow2",
        "path": "/var/lib/one/datastores/101/7/disk.0",
        "readonly": False,
    }
    return json.dumps({**data, **changes}).encode()


@pytest.mark.parametrize("case", CASES)
def test_domain_is_rewritten_as_in_the_golden_file(case: str) -> None:
    before = (GOLDEN / f"{case}.in.xml").read_bytes()
    listed = json.loads((GOLDEN / f"{case}.records.json").read_bytes())
    records = {item["disk"]: Record.parse(item["disk"], json.dumps(item).encode()) for item in listed}
    chains = {
        item["disk"]: [(path, format) for path, format in item["chain"]] for item in listed if "chain" in item
    }
    after = Domain(before, VM_DIR).with_records(records, chains)
    assert Domain(after, VM_DIR).with_records(records, chains) == after
    golden = GOLDEN / f"{case}.out.xml"
    if os.environ.get("REGENERATE"):
        golden.write_bytes(after)
    assert after == golden.read_bytes()
    # What the golden files cannot show to the eye: it is XML, and says what the records say.
    disks = ElementTree.fromstring(after).findall("devices/disk")
    for item in records.values():
        wanted = f"{VM_DIR}/disk.{item.disk}" if item.is_local else item.path
        found = [disk for disk in disks if _source(disk) in (wanted, wanted.replace("//", "/"))]
        types = {driver.get("type") for disk in found for driver in disk.findall("driver")}
        assert types == {item.format}
        if item.disk in chains:
            assert [chain_in(disk) for disk in found] == [chains[item.disk]] * len(found)


def chain_in(disk: ElementTree.Element) -> list[tuple[str, str]]:
    """Return the files that a disk lies over; it says of the last that nothing is below."""
    found, below = [], disk.find("backingStore")
    while below is not None and below.get("type") == "file":
        format = below.find("format")
        assert format is not None
        found.append((_source(below), format.get("type", "")))
        below = below.find("backingStore")
    assert below is not None and len(below) == 0 and not below.attrib
    return found


def _source(disk: ElementTree.Element) -> str:
    source = disk.find("source")
    return "" if source is None else source.get("file", "")


def test_golden_cases_are_found() -> None:
    assert len(CASES) >= 11


@pytest.mark.parametrize("case", CASES)
def test_domain_without_records_stays_as_it_is_to_the_byte(case: str) -> None:
    before = (GOLDEN / f"{case}.in.xml").read_bytes()
    assert Domain(before, VM_DIR).with_records({}) == before


def test_rewriting_twice_changes_nothing_more() -> None:
    before = (GOLDEN / "mixed-with-context-iso.in.xml").read_bytes()
    records = {0: record(0, "in-place", "raw"), 1: record(1)}
    once = Domain(before, VM_DIR).with_records(records)
    assert Domain(once, VM_DIR).with_records(records) == once


@pytest.mark.parametrize(
    ("kind", "protocol", "may_be"), [("network", "rbd", True), ("network", "iscsi", False)]
)
def test_only_a_disk_on_rbd_may_be_ours_without_its_target(kind: str, protocol: str, may_be: bool) -> None:
    source = f"<source protocol='{protocol}' name='one/x'/>"
    disk = f"<disk type='{kind}' device='disk'>{source}<target dev='vda'/></disk>"
    assert Domain(f"<domain><devices>{disk}</devices></domain>".encode(), VM_DIR).has_unknown == may_be


def test_disk_numbers_are_those_of_the_vm_directory_only() -> None:
    text = (GOLDEN / "foreign-disks-untouched.in.xml").read_bytes()
    assert Domain(text, VM_DIR).disk_numbers == [0, 1, 9]


@pytest.mark.parametrize(
    ("path", "vm_dir", "number"),
    [
        ("/a//b/7/disk.3", "/a/b/7", 3),
        ("/a/b/7/disk.3", "//a/b//7/", 3),
        ("/a/b/7/disk.12", "/a/b/7", 12),
        ("/a/b/77/disk.3", "/a/b/7", None),
        ("/a/b/7/disk.3.snap/0", "/a/b/7", None),
        ("/a/b/7/disk.", "/a/b/7", None),
        ("/a/b/7/disk.3\n", "/a/b/7", None),
        ("/a/b/7/disk.\u0663", "/a/b/7", None),
        ("/a/b/7/../7/disk.3", "/a/b/7", None),
        ("", "/a", None),
    ],
)
def test_disk_number(path: str, vm_dir: str, number: object) -> None:
    assert disk_number(path, vm_dir) == number


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<domain>",
        b"<other/>",
        b"\0<domain/>",
        b"\xff\xfe<\0d\0",
        b"<domain>\xff</domain>",
        b'<!DOCTYPE domain [<!ENTITY x "y">]><domain>&x;</domain>',
        b"<domain/><domain/>",
        b"<a>" * 300 + b"</a>" * 300,
        "<domain></domain>".encode("utf-16"),  # expat takes that, whatever it was told
    ],
)
def test_markup_refuses_what_oned_never_sends(text: bytes) -> None:
    with pytest.raises(BadArguments):
        Markup(text, "domain")


@pytest.mark.parametrize(
    "disk",
    [
        "<disk type='block'><source dev='{0}/disk.0'/></disk>",
        "<disk type='block'><source file='{0}/disk.0'/></disk>",
        "<disk><source file='{0}/disk.0'/></disk>",
    ],
)
def test_disk_of_ours_that_is_no_file_for_oned_is_refused(disk: str) -> None:
    text = f"<domain><devices>{disk.format(VM_DIR)}</devices></domain>".encode()
    with pytest.raises(NotSupported):
        Domain(text, VM_DIR).with_records({0: record()})


@pytest.mark.parametrize(
    "extra", ["<source file='/etc/passwd'/>", "<driver type='raw'/><driver type='qcow2'/>"]
)
def test_disk_of_ours_with_two_sources_or_drivers_is_refused(extra: str) -> None:
    text = (
        f"<domain><devices><disk type='file'><source "
        f"file='{VM_DIR}/disk.0'/>{extra}</disk></devices></domain>"
    )
    with pytest.raises(BadArguments):
        Domain(text.encode(), VM_DIR).with_records({0: record()})


def test_record_is_read() -> None:
    parsed = Record.parse(
        3, record_text(disk=3, how="in-place", place="shared", format="raw", path="/a//b/image")
    )
    assert parsed == Record(3, PLACES["in-place"], "raw", "/a/b/image")
    assert not parsed.is_local


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b"null",
        b'"x"',
        b"{}",
        record_text(version="1"),
        record_text(version=2),
        record_text(disk=1),
        record_text(disk="0"),
        record_text(how="stage"),
        record_text(how=None),
        record_text(how=["overlay"]),
        record_text(place="shared"),
        record_text(format="vmdk"),
        record_text(format=None),
        record_text(format={}),
        record_text(path=""),
        record_text(path=None),
        record_text(path="disk.0"),
        record_text(path="/a/../etc/passwd"),
        record_text(path="/a\n/b"),
        record_text(path="/a\0b"),
    ],
)
def test_record_that_cannot_be_believed_is_refused_in_one_line(text: bytes) -> None:
    with pytest.raises(BadRecord) as caught:
        Record.parse(0, text)
    assert "disk 0" in caught.value.line() and "\n" not in caught.value.line()


def test_newer_record_says_so() -> None:
    with pytest.raises(BadRecord, match="version 2, newer than 1"):
        Record.parse(0, record_text(version=2, format="qcow3"))


def test_disks_of_ours_come_from_vm_xml() -> None:
    disks = "".join(
        f"<DISK><DISK_ID><![CDATA[{number}]]></DISK_ID><TARGET>vd{number}</TARGET><TM_MAD><![CDATA[{tm}]]></TM_MAD></DISK>"
        for number, tm in ((0, "semishared"), (1, "ceph"), (2, "semishared"), ("x", "semishared"))
    )
    assert disks_of_ours(f"<VM><TEMPLATE>{disks}</TEMPLATE></VM>".encode()) == {0: "vd0", 2: "vd2"}


def message(disk: str) -> bytes:
    return (
        "<VMM_DRIVER_ACTION_DATA><HOST>h1</HOST><VM><ID>7</ID><TEMPLATE>"
        "<DISK><DISK_ID>0</DISK_ID><DRIVER><![CDATA[raw]]></DRIVER></DISK>"
        f"<DISK><ATTACH><![CDATA[YES]]></ATTACH>{disk}</DISK>"
        "<X><![CDATA[<DRIVER>raw</DRIVER> & ü]]></X></TEMPLATE></VM></VMM_DRIVER_ACTION_DATA>"
    ).encode()


@pytest.mark.parametrize(
    ("disk", "wanted"),
    [
        (
            "<DISK_ID><![CDATA[5]]></DISK_ID><DISK_TYPE><![CDATA[FILE]]></DISK_TYPE><DRIVER><![CDATA[raw]]></DRIVER>"
            "<FORMAT><![CDATA[raw]]></FORMAT><TYPE><![CDATA[FILE]]></TYPE>",
            "<DISK_ID><![CDATA[5]]></DISK_ID><DISK_TYPE><![CDATA[FILE]]></DISK_TYPE><DRIVER>qcow2</DRIVER>"
            "<FORMAT>qcow2</FORMAT><TYPE><![CDATA[FILE]]></TYPE>",
        ),
        (
            "<DISK_ID>5</DISK_ID><TYPE>RBD</TYPE><DISK_TYPE>RBD</DISK_TYPE>",
            "<DISK_ID>5</DISK_ID><TYPE>FILE</TYPE><DISK_TYPE>FILE</DISK_TYPE><DRIVER>qcow2</DRIVER><FORMAT>qcow2</FORMAT>",
        ),
        (
            "<DISK_ID>5</DISK_ID><DRIVER/><FORMAT></FORMAT><TYPE>swap</TYPE><DISK_TYPE>BLOCK</DISK_TYPE>",
            "<DISK_ID>5</DISK_ID><DRIVER>qcow2</DRIVER><FORMAT>qcow2</FORMAT><TYPE>swap</TYPE><DISK_TYPE>FILE</DISK_TYPE>",
        ),
        (
            "<DISK_ID>5</DISK_ID><DRIVER>qcow2</DRIVER><FORMAT>qcow2</FORMAT><TYPE>BLOCK_CDROM</TYPE>",
            "<DISK_ID>5</DISK_ID><DRIVER>qcow2</DRIVER><FORMAT>qcow2</FORMAT><TYPE>CDROM</TYPE><DISK_TYPE>FILE</DISK_TYPE>",
        ),
    ],
)
def test_attach_message_names_a_file_of_the_records_format(disk: str, wanted: str) -> None:
    attach = AttachMessage(message(disk))
    assert attach.number == 5
    assert attach.with_record(record(5)) == message(wanted)


@pytest.mark.parametrize(
    "text", [message("").replace(b"YES", b"NO"), message("</DISK><DISK><ATTACH>YES</ATTACH>")]
)
def test_attach_message_without_exactly_one_disk_is_refused(text: bytes) -> None:
    with pytest.raises(BadArguments):
        AttachMessage(text)


@pytest.mark.parametrize(
    "disk", ["", "<DISK_ID>-1</DISK_ID>", "<DISK_ID>\u0663</DISK_ID>", "<DISK_ID>5; rm</DISK_ID>"]
)
def test_attach_message_without_a_disk_number_is_refused(disk: str) -> None:
    with pytest.raises(BadArguments):
        AttachMessage(message(disk)).number  # noqa: B018


@pytest.mark.parametrize("value", ["a", "it's", '"', "a<b>&amp;", "\u00fc $(x);", "' onload='x"])
@pytest.mark.parametrize(
    "tag", ["<source file='old'/>", '<source file="old" x="1"></source>', "<source/>", "<source></source>"]
)
def test_any_attribute_value_comes_back_as_it_was(tag: str, value: str) -> None:
    text = Markup(f"<domain>{tag}<end/></domain>".encode(), "domain")
    text.set_attribute(text.root.children[0], "file", value)
    source = ElementTree.fromstring(text.result()).find("source")
    assert source is not None and source.get("file") == value and "onload" not in source.attrib
    assert text.result().endswith(b"<end/></domain>")


def test_escape_leaves_no_markup() -> None:
    assert not re.search("[<>'\"]|&(?!(amp|lt|gt|apos|quot);)", escape("<>&'\"&amp;"))


def live(*disks: str) -> bytes:
    return f"<domain id='1'><devices>{''.join(disks)}</devices></domain>".encode()


def live_disk(path: str, kind: str = "file", more: str = "") -> str:
    attribute = {"file": "file", "block": "dev", "network": "protocol='rbd' name"}[kind]
    return f"<disk type='{kind}'><source {attribute}='{escape(path)}'/><target dev='vda'/>{more}</disk>"


CONTEXT = live_disk(f"{VM_DIR}/disk.1", more="<readonly/>")


def test_vm_in_place_with_context_iso_may_move() -> None:
    domain = live(
        live_disk(IN_PLACE), CONTEXT, live_disk("pool/image", "network"), "<disk type='file' device='cdrom'/>"
    )
    assert moving(domain, VM_DIR, {0: record(0, "in-place", "raw")}, 1) == Moving([IN_PLACE], [])


def test_name_in_the_vm_directory_stands_for_its_record() -> None:
    domain = live(live_disk(f"{VM_DIR}/disk.0"))
    assert moving(domain, VM_DIR, {0: record(0, "in-place", "raw")}, -1) == Moving([IN_PLACE], [])


@pytest.mark.parametrize("how", ["overlay", "copy", "volatile"])
def test_local_disk_moves_by_its_delta(how: str) -> None:
    delta = "/var/lib/one/datastores/101/7/disk.2.snap/1000000"
    records = {0: record(0, "in-place", "raw"), 2: record(2, how, path=delta)}
    domain = live(live_disk(IN_PLACE), live_disk(f"{VM_DIR}/disk.2.snap/1000000").replace("vda", "vdc"))
    assert moving(domain, VM_DIR, records, 1) == Moving([IN_PLACE], ["vdc"])


@pytest.mark.parametrize("opened", ["disk.2.snap/0", "disk.2"])
def test_local_disk_without_its_delta_may_not_move_and_is_named(opened: str) -> None:
    records = {0: record(0, "in-place", "raw"), 2: record(2, path=f"/var/lib/one/datastores/101/7/{opened}")}
    with pytest.raises(MigrationRefused, match="disk 2"):
        moving(live(live_disk(IN_PLACE), live_disk(f"{VM_DIR}/{opened}")), VM_DIR, records, 1)


def test_local_disk_that_the_guest_has_not_open_stops_the_migration() -> None:
    records = {2: record(2, path="/var/lib/one/datastores/101/7/disk.2.snap/1000000")}
    with pytest.raises(MigrationRefused, match="disk 2"):
        moving(live(), VM_DIR, records, 1)


@pytest.mark.parametrize(
    ("disk", "named"),
    [
        (live_disk(f"{VM_DIR}/disk.3"), "disk 3"),
        (live_disk(f"{VM_DIR}/disk.1"), "disk 1"),
        (live_disk(f"{VM_DIR}/disk.3", more="<readonly/>"), "disk 3"),
        (live_disk("/var/lib/one/datastores/102/foreign"), "disk vda"),
        (live_disk(IN_PLACE + ".snap/1"), "disk vda"),
        (live_disk(IN_PLACE, "block"), "disk vda"),
        (live_disk("/dev/sdb", "block"), "disk vda"),
        ("<disk type='volume'><source pool='p' volume='v'/></disk>", "a disk"),
        ("<disk type='dir'><source dir='/srv'/></disk>", "a disk"),
    ],
)
def test_any_disk_that_is_not_known_to_be_shared_stops_the_migration(disk: str, named: str) -> None:
    with pytest.raises(MigrationRefused, match=named):
        moving(live(live_disk(IN_PLACE), disk), VM_DIR, {0: record(0, "in-place", "raw")}, 1)


@pytest.mark.parametrize(
    ("proof", "proved"),
    [
        ({"version": 1, "to": "h2", "shared_checked": ["/var/lib/one//datastores/100/"]}, True),
        ({"version": 1, "to": "h2", "shared_checked": ["/var/lib/one/datastores/10"]}, False),
        (
            {"version": 1, "to": "h2", "shared_checked": ["/var/lib/one/datastores/100/.semishared/abd"]},
            False,
        ),
        ({"version": 1, "to": "h3", "shared_checked": ["/var/lib/one/datastores/100"]}, False),
        ({"version": 2, "to": "h2", "shared_checked": ["/var/lib/one/datastores/100"]}, False),
        ({"version": 1, "to": "h2", "shared_checked": ["/"]}, False),
        ({"version": 1, "to": "h2", "shared_checked": [""]}, False),
        ({"version": 1, "to": "h2", "shared_checked": "/var"}, False),
        ({"version": 1, "to": "h2", "shared_checked": [1]}, False),
        ({"version": 1, "to": "h2"}, False),
        (None, False),
        ([], False),
    ],
)
def test_unsafe_needs_the_proof_for_every_disk(proof: object, proved: bool) -> None:
    assert is_proved([IN_PLACE], proof, "h2") is proved
    assert is_proved([IN_PLACE, "/srv/other/image"], proof, "h2") is False


def test_options_of_site_vm_and_ours() -> None:
    assert options(["--verbose"], "20,10", "YES", True, True) == [
        "--verbose",
        "--auto-converge",
        "--auto-converge-initial",
        "20",
        "--auto-converge-increment",
        "10",
        "--compressed",
        "--persistent",
        "--undefinesource",
        "--unsafe",
    ]
    assert options([], "", "NO", False, False) == []
    assert options(["--unsafe"], "", "", False, True) == ["--unsafe"]


@pytest.mark.parametrize(
    "site", [["--copy-storage-all"], ["--live", "--migrate-disks", "vda"], ["--migrate-disks=vda"]]
)
def test_options_that_copy_disks_are_refused(site: list[str]) -> None:
    with pytest.raises(NotSupported):
        options(site, "", "", False, False)


@pytest.mark.parametrize("value", ["x", "20;reboot", "20,--unsafe", "1,2,3", ","])
def test_auto_converge_is_numbers(value: str) -> None:
    with pytest.raises(BadArguments):
        options([], value, "", False, False)


def test_words_of_virsh_migrate_in_libvirts_terms() -> None:
    words = [
        "--live",
        "--verbose",
        "--bandwidth=20",
        "--compressed",
        "--comp-methods",
        "xbzrle,mt",
        "--timeout",
        "60",
    ]
    values = {"BANDWIDTH": 20, "COMPRESSION": ["xbzrle", "mt"]}
    assert parsed([*words, "--timeout-postcopy"]) == MigrateOptions(
        ("LIVE", "COMPRESSED"), values, 60, "postcopy"
    )
    assert parsed(["--postcopy-after-precopy"]).after_precopy and not parsed(["--live"]).after_precopy
    ours = options([], "20,10", "", True, True)
    assert parsed(["--live", *ours]) == MigrateOptions(
        ("LIVE", "AUTO_CONVERGE", "PERSIST_DEST", "UNDEFINE_SOURCE", "UNSAFE"),
        {"AUTO_CONVERGE_INITIAL": 20, "AUTO_CONVERGE_INCREMENT": 10},
    )


@pytest.mark.parametrize(
    "words", [["--bandwidth"], ["--bandwidth", "fast"], ["--timeout", "-1"], ["--migrateuri"]]
)
def test_option_of_virsh_migrate_without_its_value(words: list[str]) -> None:
    with pytest.raises(BadArguments, match=words[0]):
        parsed(words)


@pytest.mark.parametrize("word", ["--xml", "--no-such-option", "vda"])
def test_option_of_virsh_migrate_that_nobody_knows_is_named(word: str) -> None:
    with pytest.raises(NotSupported, match=word):
        parsed(["--live", word])


def test_target_is_touched_only_if_the_vm_is_seen_running_here() -> None:
    touching = {Outcome.REMOVE_TARGET, Outcome.UNDEFINE_TARGET}
    for source in State:
        for target in State:
            if outcome(source, target) in touching:
                assert source is State.RUNNING and target in (State.PAUSED, State.OFF)
            if outcome(source, target) is Outcome.MOVED:
                assert target is State.RUNNING and source in (State.ABSENT, State.OFF)
    assert outcome(State.RUNNING, State.RUNNING) is Outcome.IN_DOUBT
    assert outcome(State.RUNNING, State.UNKNOWN) is Outcome.IN_DOUBT
    assert outcome(State.RUNNING, State.ABSENT) is Outcome.STAYED


def test_checkpoint_is_brought_to_the_active_layers() -> None:
    """Paths keep the directory they were saved with: the stock restore replaces that."""
    disk = (
        "<disk type='file'><driver name='qemu' type='{}'/><source file='{}' index='1'/>"
        "<backingStore type='file'><format type='raw'/><source file='/gone'/><backingStore/></backingStore>"
        "<target dev='{}'/></disk>"
    )
    clone = "/s/100/.semishared/abc/clones/7-3.snap"
    old = "/var/lib/one//datastores/104/7"
    text = "<domain><devices>{}</devices></domain>".format(
        disk.format("raw", f"{old}/disk.0.snap/0", "vda")
        + disk.format("qcow2", f"{clone}/1", "vdb")
        + disk.format("qcow2", IN_PLACE, "vdc")
        + disk.format("qcow2", "/a/disk.9.snap/4", "vdd")
    )
    records = {
        0: record(0, "copy", "qcow2", "/var/lib/one/datastores/101/7/disk.0.snap/3"),
        3: record(3, "store-clone", "qcow2", f"{clone}/2"),
        2: record(2, "in-place", "qcow2"),
    }
    lease = "/var/lib/one/datastores/.semishared/bases/100-1-ab/leases/7-3"
    here = "/var/lib/one/datastores/101/7/disk.0.snap"
    chains = {
        0: [(f"{here}/2", "qcow2"), (f"{here}/0", "raw")],
        3: [(f"{clone}/1", "qcow2"), (lease, "raw")],
        2: [],
    }
    after = with_active_layers(text.encode(), records, chains)
    assert with_active_layers(after, records, chains) == after
    found = ElementTree.fromstring(after).findall("devices/disk")
    assert [_source(disk) for disk in found] == [
        f"{old}/disk.0.snap/3",
        f"{clone}/2",
        IN_PLACE,
        "/a/disk.9.snap/4",
    ]
    assert [disk.find("driver").get("type") for disk in found] == ["qcow2"] * 4  # type: ignore[union-attr]
    wanted = [
        [(f"{old}/disk.0.snap/2", "qcow2"), (f"{old}/disk.0.snap/0", "raw")],
        chains[3],
        [],
        [("/gone", "raw")],
    ]
    assert [chain_in(disk) for disk in found] == wanted


@pytest.mark.parametrize(("how", "format"), [("in-place", "raw"), ("copy", "raw"), ("volatile", "raw")])
def test_snapshot_of_the_whole_vm_is_refused_by_the_disk_that_cannot(how: str, format: str) -> None:
    good = {
        0: record(0),
        1: record(1, "in-place"),
        2: Record(2, PLACES["in-place"], "raw", IN_PLACE, readonly=True),
    }
    check_system_snapshot(good)
    with pytest.raises(NotSupported, match=rf"disk 3 \({how}, {format}\)"):
        check_system_snapshot({**good, 3: record(3, how, format)})


def test_local_disk_with_layers_is_opened_at_the_active_one() -> None:
    text = (
        f"<domain><devices><disk type='file'><source "
        f"file='{VM_DIR}/disk.0'/><driver/></disk></devices></domain>"
    ).encode()
    after = Domain(text, VM_DIR).with_records(
        {0: record(0, path="/var/lib/one/datastores/101/7/disk.0.snap/12")}
    )
    assert f"file='{VM_DIR}/disk.0.snap/12'".encode() in after
