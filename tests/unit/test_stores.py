# SPDX-License-Identifier: Apache-2.0
"""How a store is reached: what a datastore's attributes say, as oned serves them, and what is refused."""

from __future__ import annotations

import json
from typing import Any
from xml.etree.ElementTree import SubElement
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import BadArguments, BadAttribute, BadRecord
from semishared.model import steps as s
from semishared.model.disk.network_disk import NetworkDisk
from semishared.model.store import access, template
from semishared.opennebula import args
from semishared.opennebula.xml import Datastore

SECRET = "00000000-0000-4000-8000-0000000000cc"
# As recorded: datastore 105 of b-r2, whose CEPH_HOST has a port, and the bridges of 102 of b-v1.
RECORDED = {
    "ALLOW_ORPHANS": "YES",
    "CEPH_HOST": "10.77.0.1:6791",
    "CEPH_SECRET": SECRET,
    "CEPH_USER": "libvirt",
    "CLONE_TARGET": "SYSTEM",
    "DISK_TYPE": "RBD",
    "DS_MAD": "semishared",
    "LN_TARGET": "NONE",
    "POOL_NAME": "one",
    "SAFE_DIRS": "/lab /tmp /var/tmp",
    "TM_MAD": "semishared",
    "TYPE": "IMAGE_DS",
}


def datastore(**changes: Any) -> Datastore:
    values = {name: value for name, value in {**RECORDED, **changes}.items() if value is not None}
    inside = "".join(f"<{name}><![CDATA[{value}]]></{name}>" for name, value in values.items())
    return Datastore.parse(f"<DATASTORE><ID>105</ID><TYPE>0</TYPE><TEMPLATE>{inside}</TEMPLATE></DATASTORE>")


def test_recorded_datastore_is_reached_as_its_user() -> None:
    found = template.access(datastore())
    assert found == access.Access("rbd", "libvirt", "libvirt", "libvirt", "", ("10.77.0.1:6791",), SECRET, "")
    assert not found.can.is_mounted
    assert found.can.formats == ("raw",)
    assert template.pool(datastore()) == "one"
    assert template.machine(datastore(), 7) == "localhost"


def test_every_role_may_have_its_own_user_and_bridges_take_turns() -> None:
    store = datastore(
        SEMISHARED_CEPH_READER="bases",
        SEMISHARED_CEPH_BRIDGE_USER="bridge",
        CEPH_CONF="/etc/ceph/site.conf",
        EC_POOL_NAME="ec",
        CEPH_HOST="mon1 [fd00::1]:6789 mon3:3300",
        BRIDGE_LIST="h1 h2",
        POOL_NAME=None,
    )
    found = template.access(store)
    assert (found.user, found.reader, found.bridge_user, found.data_pool) == (
        "libvirt",
        "bases",
        "bridge",
        "ec",
    )
    assert found.conf == "/etc/ceph/site.conf"
    assert [template.machine(store, number) for number in (4, 5)] == ["h1", "h2"]
    assert template.pool(store) == "one"
    disk = NetworkDisk.of("one/one-5", found)
    assert disk.monitors == [("mon1", ""), ("fd00::1", "6789"), ("mon3", "3300")]


@pytest.mark.parametrize("hosts", ["mon1,mon2:6789", "mon1, mon2:6789", " mon1 mon2:6789,"])
@pytest.mark.fault(54, "monitors may have commas between them, as Sunstone's form writes them")
def test_monitors_with_commas(hosts: str) -> None:
    assert template.access(datastore(CEPH_HOST=hosts)).hosts == ("mon1", "mon2:6789")


@pytest.mark.parametrize("kind", ["FILE", "", None, "BLOCK"])
def test_any_other_disk_type_is_a_mounted_store(kind: str | None) -> None:
    none = dict.fromkeys(("CEPH_HOST", "CEPH_SECRET", "CEPH_USER", "POOL_NAME"))
    assert template.access(datastore(DISK_TYPE=kind, **none)) == access.MOUNTED


@pytest.mark.parametrize("kind", ["FILE", "", None, "BLOCK"])
@pytest.mark.parametrize("name", ["CEPH_HOST", "CEPH_SECRET", "CEPH_USER", "POOL_NAME"])
@pytest.mark.fault(54, "a datastore with an attribute of Ceph is never taken for a mounted tree")
def test_a_datastore_with_attributes_of_ceph_is_no_mounted_store(kind: str | None, name: str) -> None:
    others = {"CEPH_HOST", "CEPH_SECRET", "CEPH_USER", "POOL_NAME"} - {name}
    with pytest.raises(BadAttribute, match=f"105 has {name} of a store on Ceph, .* DISK_TYPE = RBD"):
        template.access(datastore(DISK_TYPE=kind, **dict.fromkeys(others)))


def test_a_template_without_disk_type_goes_by_what_oned_keeps_beside_it() -> None:
    for number, name in ((3, "rbd"), (0, "dir")):
        none = {} if number else dict.fromkeys(("CEPH_HOST", "CEPH_SECRET", "CEPH_USER", "POOL_NAME"))
        store = datastore(DISK_TYPE=None, **none)
        SubElement(store.element, "DISK_TYPE").text = str(number)
        assert template.kind(store).name == name and not template.is_whole(store)
        assert template.access(store).kind == name
        assert template.machine(store, 1) == ("localhost" if number else "")
    store = datastore(DISK_TYPE=None)
    SubElement(store.element, "DISK_TYPE").text = "10"
    assert template.is_shares(store)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CEPH_USER", None),
        ("CEPH_USER", ""),
        ("CEPH_USER", " "),
        ("CEPH_USER", "admin"),
        ("CEPH_USER", "client.libvirt"),
        ("CEPH_USER", "a b"),
        ("CEPH_USER", "-x"),
        ("CEPH_USER", "x:conf=/tmp/evil"),
        ("CEPH_USER", "x,y"),
        ("SEMISHARED_CEPH_READER", "admin"),
        ("SEMISHARED_CEPH_READER", "../x"),
        ("SEMISHARED_CEPH_BRIDGE_USER", "admin"),
        ("SEMISHARED_CEPH_BRIDGE_USER", "x\ny"),
        ("CEPH_CONF", "etc/ceph.conf"),
        ("CEPH_CONF", "/etc/ceph.conf:id=admin"),
        ("CEPH_CONF", "/etc/../tmp/c"),
        ("CEPH_CONF", "/a b"),
        ("CEPH_SECRET", "AQDabc=="),
        ("CEPH_SECRET", f"{SECRET}x"),
        ("CEPH_HOST", "10.0.0.1;10.0.0.2"),
        ("CEPH_HOST", "a:b"),
        ("CEPH_HOST", "h:6789/0"),
        ("CEPH_HOST", "'/><x"),
        ("EC_POOL_NAME", "a/b"),
        ("EC_POOL_NAME", "-p"),
        ("CEPH_KEY", "/etc/ceph/key"),
    ],
)
def test_hostile_or_missing_attribute_is_refused_by_its_name(name: str, value: str | None) -> None:
    with pytest.raises(BadAttribute) as caught:
        template.access(datastore(**{name: value}))
    assert name in caught.value.detail
    assert "105" in caught.value.detail


@pytest.mark.parametrize("value", ["a/b", "a@b", "-p", "a:b", ".rgw", "a b", "päl", "a=b", "a,b", "$(x)"])
def test_hostile_pool_is_refused(value: str) -> None:
    with pytest.raises(BadAttribute, match="POOL_NAME"):
        template.pool(datastore(POOL_NAME=value))


@pytest.mark.parametrize("value", ["h1;x", "-oProxyCommand=x", "h1 h/2"])
def test_hostile_bridge_is_refused(value: str) -> None:
    with pytest.raises(BadAttribute, match="BRIDGE_LIST"):
        template.machine(datastore(BRIDGE_LIST=value), 1)


HOSTILE = [
    "one/../x",
    "one/a@1",
    "one/a:id=admin",
    "one/-x",
    "-one/x",
    "one/a b",
    "one",
    "one/",
    "/one",
    "one/a/b",
    "one/ä",
    "",
    "json:{}",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_image_name_is_refused(name: str) -> None:
    with pytest.raises(BadArguments):
        access.check_source(template.access(datastore()), name)
    with pytest.raises(BadArguments):
        access.pool_and_name(name)


def test_source_fits_its_store_or_is_refused() -> None:
    rbd = template.access(datastore())
    assert access.check_source(rbd, "one/one-35") == "one/one-35"
    assert access.check_source(access.MOUNTED, "/var/x") == "/var/x"
    assert access.pool_and_name("one/one-35-2-0") == ("one", "one-35-2-0")
    with pytest.raises(BadArguments, match="plain absolute path"):
        access.check_source(access.MOUNTED, "one/one-35")


def test_arguments_name_images_of_either_store() -> None:
    # From b-r2.
    disk = "h1:/var/lib/one//datastores/101/50/disk.0"
    assert args.FromImage.parse(["fe:one/one-35", disk, "50", "105"]).source == "one/one-35"
    assert args.ToImage.parse([disk, "one/one-35", "50", "105"]).image == "one/one-35"
    assert args.ToImage.parse_copy([disk, "one/one-60", "-1", "50", "105"]).image == "one/one-60"
    for name in ("one/one-35@snap", "one/../35", "one-35", "x/y/z"):
        with pytest.raises(BadArguments):
            args.FromImage.parse([f"fe:{name}", disk, "50", "105"])


def test_image_of_a_mounted_store_says_nothing_of_its_access() -> None:
    image = s.ImageRef(100, 7, "raw", "/x")
    assert image.to_data() == {"store": 100, "id": 7, "format": "raw", "source": "/x", "generation": ""}
    assert s.ImageRef.from_data(image.to_data()) == image


def test_image_carries_its_access_through_json() -> None:
    image = s.ImageRef(105, 35, "raw", "one/one-35", "g", template.access(datastore()))
    assert s.ImageRef.from_data(json.loads(json.dumps(image.to_data()))) == image
    parts: list[dict[str, Any]] = [
        {"access": {}},
        {"access": None},
        {"access": {**image.access._asdict(), "x": 1}},
        {"more": 1},
    ]
    for part in parts:
        with pytest.raises(BadArguments):
            s.ImageRef.from_data({**image.to_data(), **part})


def test_network_disk_is_the_same_in_its_record() -> None:
    disk = NetworkDisk.of("one/one-35", template.access(datastore(CEPH_HOST="a b:1")))
    assert NetworkDisk.parse(json.loads(json.dumps(disk.to_data()))) == disk
    assert disk.to_data()["secret"] == SECRET


def test_network_disk_without_a_secret_is_refused() -> None:
    with pytest.raises(BadAttribute, match="CEPH_SECRET"):
        NetworkDisk.of("one/one-35", template.access(datastore(CEPH_SECRET=None)))


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": "nbd"},
        {"name": "one/x@1"},
        {"name": "x"},
        {"user": ""},
        {"user": "a b"},
        {"secret": ""},
        {"hosts": ["x y"]},
        {"hosts": "x"},
        {"hosts": [3]},
        {"conf": "x"},
        {"more": ""},
        {"user": None},
    ],
)
def test_network_disk_that_nobody_would_write_is_refused(change: dict[str, Any]) -> None:
    good = NetworkDisk.of("one/one-35", template.access(datastore())).to_data()
    with pytest.raises(BadRecord):
        NetworkDisk.parse({**good, **change})


@given(
    st.recursive(
        st.none() | st.text(max_size=5),
        lambda inner: st.dictionaries(st.text(max_size=5), inner) | st.lists(inner),
    )
)
def test_anything_else_is_no_network_disk(data: Any) -> None:
    with pytest.raises(BadRecord):
        NetworkDisk.parse(data)


def test_xml_in_an_attribute_is_text() -> None:
    with pytest.raises(BadAttribute):
        template.access(datastore(CEPH_USER=escape("<x/>")))
