# SPDX-License-Identifier: Apache-2.0
"""Disks on Ceph in the domain XML, from what oned was seen to write in each configuration (the recordings
b-*).

golden/network/CASE.json names a recording (or an XML beside it) and the records; CASE.out.xml is what libvirt
is given. REGENERATE=1 rewrites that.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import traces
from semishared.errors import BadArguments, BadRecord, MigrationRefused, NotSupported
from semishared.model.disk.place import PLACES
from semishared.model.disk.record import Record
from semishared.opennebula.xml import Vm
from semishared.plan.libvirt.domain import AttachMessage, Domain, disks_of_ours
from semishared.plan.vm.checkpoint import with_active_layers
from semishared.plan.vm.live_migration import moving

GOLDEN = Path(__file__).parent / "golden" / "network"
CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))
SECRET = "00000000-0000-4000-8000-0000000000cc"
IMAGE = {
    "protocol": "rbd",
    "name": "one/one-35",
    "hosts": ["10.77.0.1:6791"],
    "user": "libvirt",
    "secret": SECRET,
    "conf": "",
}


def network_record(disk: int = 0, how: str = "in-place", **changes: object) -> Record:
    return Record.parse(disk, record_text(disk=disk, how=how, network={**IMAGE, **changes}))


def record_text(**changes: object) -> bytes:
    data: dict[str, object] = {
        "version": 1,
        "disk": 0,
        "place": "shared",
        "how": "in-place",
        "format": "raw",
        "path": "",
    }
    return json.dumps({**data, "readonly": False, "network": IMAGE, **changes}).encode()


def recorded(name: str) -> tuple[bytes, dict[int, str]]:
    """Return the domain XML of a recording and the targets in the VM that oned had then."""
    if name.endswith(".xml"):
        return (GOLDEN / name).read_bytes(), {0: "sda", 1: "vda", 2: "vdb", 3: "sdb"}
    recording = traces.load(name)
    for step in recording["steps"]:
        for path, key in step["files"].items():
            if "/deployment." in path:
                (vm,) = (value for of, value in step["info_after"].items() if of.startswith("vm."))
                text = traces.body(recording, vm).replace("<![CDATA[semirbd]]>", "<![CDATA[semishared]]>")
                return traces.body(recording, key).encode(), disks_of_ours(text.encode())
    raise AssertionError(f"no deployment in {name}")


def chains_of(case: str) -> dict[int, list[tuple[str, str]]]:
    listed = json.loads((GOLDEN / f"{case}.json").read_bytes())["records"]
    return {
        item["disk"]: [(path, format) for path, format in item["chain"]] for item in listed if "chain" in item
    }


def load(case: str) -> tuple[bytes, str, dict[int, str], dict[int, Record]]:
    described = json.loads((GOLDEN / f"{case}.json").read_bytes())
    before, targets = recorded(described["recording"])
    vm_dir = re.search(rb"system_datastore><!\[CDATA\[(.*?)\]\]>", before)
    assert vm_dir
    records = {
        item["disk"]: Record.parse(item["disk"], json.dumps(item).encode()) for item in described["records"]
    }
    return before, vm_dir.group(1).decode(), targets, records


@pytest.mark.parametrize("case", CASES)
def test_domain_of_a_recording_becomes_the_golden_file(case: str) -> None:
    before, vm_dir, targets, records = load(case)
    chains = chains_of(case)
    after = Domain(before, vm_dir, targets).with_records(records, chains)
    golden = GOLDEN / f"{case}.out.xml"
    if os.environ.get("REGENERATE"):
        golden.write_bytes(after)
    assert after == golden.read_bytes()
    assert Domain(after, vm_dir, targets).with_records(records, chains) == after

    # What the golden files cannot show to the eye: each disk is what its record says, and nothing else has
    # changed.
    was, found = disks_by_target(before), disks_by_target(after)
    assert was.keys() == found.keys()
    numbers = {target: number for number, target in targets.items()}
    for target, disk in found.items():
        record = records.get(numbers.get(target, -1))
        if record is None:
            assert ElementTree.tostring(disk) == ElementTree.tostring(was[target])
            continue
        source = disk.find("source")
        (driver,) = disk.findall("driver")
        assert source is not None and driver.get("type") == record.format
        attributes = {name: value for name, value in driver.attrib.items() if name != "type"}
        old = was[target].find("driver")
        assert old is None or attributes == {
            name: value for name, value in old.attrib.items() if name != "type"
        }
        if record.network:
            assert (disk.get("type"), source.get("protocol"), source.get("name")) == (
                "network",
                "rbd",
                record.network.name,
            )
            assert [
                (host.get("name"), host.get("port", "")) for host in source.findall("host")
            ] == record.network.monitors
            assert [config.get("file") for config in source.findall("config")] == [record.network.conf][
                : bool(record.network.conf)
            ]
            (auth,) = disk.findall("auth")
            secret = auth.find("secret")
            assert auth.get("username") == record.network.user and secret is not None
            assert secret.attrib == {"type": "ceph", "uuid": record.network.secret}
        else:
            assert disk.get("type") == "file" and disk.find("auth") is None and len(source) == 0
            wanted = record.path if not record.is_local else record.active(f"{vm_dir}/disk.{record.disk}")
            assert source.attrib == {"file": wanted}
        if record.network or was[target].get("type") == "network" or record.format == "qcow2":
            below = [
                (_file(layer), format.get("type"))
                for layer in disk.iter("backingStore")
                for format in layer.findall("format")
            ]
            assert (
                below == chains.get(record.disk, [])
                and len(list(disk.iter("backingStore"))) == len(below) + 1
            )
        kept = [child.tag for child in was[target] if child.tag not in ("source", "auth", "driver")]
        assert [c.tag for c in disk if c.tag not in ("source", "auth", "driver", "backingStore")] == kept


def _file(layer: ElementTree.Element) -> str | None:
    source = layer.find("source")
    return None if source is None else source.get("file")


def disks_by_target(text: bytes) -> dict[str, ElementTree.Element]:
    found = {}
    for disk in ElementTree.fromstring(text).findall("devices/disk"):
        target = disk.find("target")
        assert target is not None
        found[target.get("dev", "")] = disk
    return found


def test_every_recording_with_ceph_has_a_golden_file() -> None:
    used = {json.loads((GOLDEN / f"{case}.json").read_bytes())["recording"] for case in CASES}
    assert {name for name in traces.names() if name.startswith("b-")} <= used


@pytest.mark.parametrize("case", CASES)
def test_domain_without_records_stays_as_it_is_to_the_byte(case: str) -> None:
    before, vm_dir, targets, _ = load(case)
    assert Domain(before, vm_dir, targets).with_records({}) == before


def test_disks_are_known_by_their_targets() -> None:
    before, vm_dir, targets, _ = load("persistent-and-overlay")
    assert targets == {0: "vda", 1: "vdb", 2: "vdc", 3: "vdd"}
    assert Domain(before, vm_dir, targets).disk_numbers == [0, 1, 2, 3, 4]
    without = Domain(before, vm_dir)
    assert without.disk_numbers == [2, 3, 4] and without.has_unknown
    assert not Domain(before, vm_dir, {}).has_unknown  # all of them are others'


def test_second_disk_of_one_target_is_left_alone() -> None:
    """libvirt refuses it; ours must not give it the first one's key."""
    text = "<domain><devices>{}</devices><devices>{}</devices></domain>".format(
        "<disk type='network'><source protocol='rbd' name='one/one-35'/><target dev='vda'/></disk>",
        "<disk type='network'><source protocol='rbd' name='x/secret'/><target dev='vda'/></disk>",
    ).encode()
    after = Domain(text, "/d/101/7", {0: "vda"}).with_records({0: network_record()})
    assert (
        b"<source protocol='rbd' name='x/secret'/><target dev='vda'/>" in after and after.count(b"<auth") == 1
    )


@pytest.mark.parametrize(
    "text",
    [
        record_text(network={}),
        record_text(network="rbd"),
        record_text(network=[IMAGE]),
        record_text(network={**IMAGE, "x": 1}),
        record_text(path="/x"),
        record_text(how="overlay", place="local"),
        record_text(place="local"),
        record_text(format="qcow2"),
        record_text(network=None),
    ],
)
def test_record_that_is_half_a_network_disk_is_refused(text: bytes) -> None:
    with pytest.raises(BadRecord) as caught:
        Record.parse(0, text)
    assert "disk 0" in caught.value.line() and "\n" not in caught.value.line()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("protocol", "nbd"),
        ("protocol", None),
        ("name", "one"),
        ("name", ""),
        ("name", "one/a:id=admin"),
        ("name", "one/a@snap"),
        ("name", "one/../x y"),
        ("name", "a/b/c"),
        ("name", "-p/one"),
        ("name", "one/a\n"),
        ("name", ["one/a"]),
        ("hosts", "10.0.0.1"),
        ("hosts", [1]),
        ("hosts", ["a b"]),
        ("hosts", ["h:x"]),
        ("hosts", ["h:1:2"]),
        ("hosts", ["h'/>"]),
        ("hosts", [""]),
        ("user", ""),
        ("user", None),
        ("user", "a' x='"),
        ("user", "-n"),
        ("user", "a b"),
        ("secret", ""),
        ("secret", "x"),
        ("secret", SECRET + "0"),
        ("secret", None),
        ("conf", "x"),
        ("conf", "/a b"),
        ("conf", "/a'/><x"),
        ("conf", None),
        ("hosts", ["[::1"]),
        ("hosts", ["[::x]:1"]),
    ],
)
def test_hostile_value_of_a_network_disk_is_refused(key: str, value: object) -> None:
    with pytest.raises(BadRecord, match="disk 0"):
        Record.parse(0, record_text(network={**IMAGE, key: value}))


@pytest.mark.parametrize(
    "changes", [{"hosts": [], "conf": "/etc/ceph/b.conf"}, {"hosts": ["10.0.0.1", "[fd00::1]:6789"]}]
)
def test_monitors_that_the_stock_script_cannot_be_told_are_refused_at_a_hot_attach(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(NotSupported, match="disk 5"):
        AttachMessage(attach_messages()[0][1].encode()).with_record(network_record(5, **changes))


# -- hot attach ---------------------------------------------------------------------------------------


def attach_messages() -> list[tuple[str, str]]:
    found = []
    for name in ("b-r1-rbd-real-image-attr", "b-r2-rbd-real-wrappers", "b-r3-rbd-real-wrappers"):
        recording = traces.load(name)
        for step in recording["steps"]:
            for call in step["calls"]:
                if call["action"] == "attach_disk":
                    found.append((name[:4], traces.body(recording, call["argv"][4][len("@base64:") :])))
    return found


def attached(message: bytes) -> dict[str, str]:
    (disk,) = ElementTree.fromstring(message).findall("VM/TEMPLATE/DISK[ATTACH='YES']")
    assert len({child.tag for child in disk}) == len(disk)
    return {child.tag: child.text or "" for child in disk}


@pytest.mark.parametrize(("name", "text"), attach_messages())
@pytest.mark.parametrize("cdrom", [False, True])
def test_attach_message_of_a_recording_names_what_the_record_says(name: str, text: str, cdrom: bool) -> None:
    before = text.encode()
    if cdrom:
        before = re.sub(rb"(YES\]\]></ATTACH>.*?<TYPE><!\[CDATA\[)(RBD|FILE)", rb"\1\2_CDROM", before)
    was = attached(before)
    record = network_record(5, hosts=["a:1", "b"], name="one/x-50-5", how="store-clone")
    message = AttachMessage(before)
    assert message.number == 5 and message.is_ours
    changed = {
        "TYPE": "RBD_CDROM" if cdrom else "RBD",
        "DISK_TYPE": "RBD",
        "SOURCE": "one/x-50-5",
        "CLONE": "NO",
        "CEPH_HOST": "a:1 b",
        "CEPH_USER": "libvirt",
        "CEPH_SECRET": SECRET,
        "DRIVER": "raw",
        "FORMAT": "raw",
    }
    assert attached(message.with_record(record)) == {**was, **changed}
    local = Record(5, PLACES["overlay"], "qcow2", "/var/lib/one/datastores/101/50/disk.5.snap/0")
    changed = {
        "TYPE": "CDROM" if cdrom else "FILE",
        "DISK_TYPE": "FILE",
        "DRIVER": "qcow2",
        "FORMAT": "qcow2",
    }
    assert attached(AttachMessage(before).with_record(local)) == {**was, **changed}
    assert record.source("/d//101/50/disk.5") == "/d//101/50/disk.5"
    assert len(ElementTree.fromstring(before).findall("VM/TEMPLATE/DISK")) == 5


# -- suspend and resume, live migration -----------------------------------------------------------------


def test_checkpoint_with_a_disk_on_ceph_keeps_it() -> None:
    before, vm_dir, targets, records = load("persistent-and-store-clone")
    running = Domain(before, vm_dir, targets).with_records(records)
    assert with_active_layers(running, records) == running


def live(*disks: str) -> bytes:
    return f"<domain id='1'><devices>{''.join(disks)}</devices></domain>".encode()


def live_disk(name: str, protocol: str = "rbd") -> str:
    return f"<disk type='network'><source protocol='{protocol}' name='{name}'/><target dev='vda'/></disk>"


def test_vm_on_ceph_may_move() -> None:
    records = {0: network_record(), 1: network_record(1, "store-clone", name="one/one-36-50-1")}
    assert moving(live(live_disk("one/one-35"), live_disk("one/one-36-50-1")), "/d/101/50", records, 2) == (
        [],
        [],
    )


def test_local_disk_beside_one_on_ceph_may_not_move() -> None:
    records = {0: network_record(), 1: Record(1, PLACES["overlay"], "qcow2", "/d/101/50/disk.1.snap/0")}
    with pytest.raises(MigrationRefused, match="disk 1"):
        moving(live(live_disk("one/one-35")), "/d/101/50", records, 2)


def test_vm_of_the_recordings_is_read() -> None:
    recording = traces.load("b-r2-rbd-real-wrappers")
    vm = Vm.parse(traces.body(recording, recording["steps"][1]["info_after"]["vm.50"]).encode())
    assert [disk.id for disk in vm.disks] == [0, 1, 2, 3]


def test_two_sources_are_refused() -> None:
    disk = (
        "<disk type='network'><source protocol='rbd' name='a/b'/><source protocol='rbd' "
        "name='a/c'/><target dev='vda'/></disk>"
    )
    with pytest.raises(BadArguments):
        Domain(live(disk), "/d/101/7", {0: "vda"}).with_records({0: network_record()})
