# SPDX-License-Identifier: Apache-2.0
"""Records of disks: those that 0.1.0 wrote are read and written again as they are; the table of places that
they name.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from semishared.errors import BadRecord
from semishared.model.disk.place import IN_PLACE, PLACES
from semishared.model.disk.record import Record, described
from semishared.model.vm.move_steps import DescribedVm

DATASTORES = "/var/lib/one/datastores"
VM_DIR = f"{DATASTORES}/101/42"
SIDE = f"{DATASTORES}/100/.semishared/9b66"
GENERATION = "3d74dc9ec5b47b7c3ab0b4bfd7a9c1b2"
IMAGE = {"store": 100, "id": 7, "format": "raw", "source": f"{DATASTORES}/100/9b66", "generation": ""}
ACCESS = {
    "kind": "rbd",
    "user": "libvirt",
    "reader": "bases",
    "bridge_user": "bridge",
    "conf": "/etc/ceph/ceph.conf",
    "hosts": ["10.77.0.1:6791"],
    "secret": "00000000-0000-4000-8000-0000000000cc",
    "data_pool": "",
}
ON_CEPH = {
    "store": 105,
    "id": 35,
    "format": "raw",
    "source": "one/one-35",
    "generation": "",
    "access": ACCESS,
}
NETWORK = {
    "protocol": "rbd",
    "name": "one/one-35",
    "hosts": ["10.77.0.1:6791"],
    "user": "libvirt",
    "secret": "00000000-0000-4000-8000-0000000000cc",
    "conf": "/etc/ceph/ceph.conf",
}
MARKER = "0123456789abcdef0123456789abcdef"
# As the writers of 0.1.0 (84b7bda) left them on disk, one of each place, and what actions since have made of
# them.
WRITTEN: dict[str, dict[str, Any]] = {
    "overlay": {
        "version": 1,
        "disk": 1,
        "place": "local",
        "how": "overlay",
        "format": "qcow2",
        "path": f"{VM_DIR}/disk.1.snap/0",
        "readonly": False,
        "image": {**IMAGE, "generation": GENERATION},
    },
    "overlay of an image on Ceph": {
        "version": 1,
        "disk": 1,
        "place": "local",
        "how": "overlay",
        "format": "qcow2",
        "path": f"{VM_DIR}/disk.1.snap/2",
        "readonly": False,
        "image": {**ON_CEPH, "generation": GENERATION},
    },
    "copy": {
        "version": 1,
        "disk": 1,
        "place": "local",
        "how": "copy",
        "format": "raw",
        "path": f"{VM_DIR}/disk.1.snap/0",
        "readonly": False,
        "image": IMAGE,
    },
    "copy with a snapshot": {
        "version": 1,
        "disk": 1,
        "place": "local",
        "how": "copy",
        "format": "qcow2",
        "path": f"{VM_DIR}/disk.1.snap/1",
        "readonly": False,
        "image": IMAGE,
        "raw_layer": 0,
    },
    "volatile": {
        "version": 1,
        "disk": 1,
        "place": "local",
        "how": "volatile",
        "format": "raw",
        "path": f"{VM_DIR}/disk.1",
        "readonly": False,
    },
    "in place": {
        "version": 1,
        "disk": 1,
        "place": "shared",
        "how": "in-place",
        "format": "raw",
        "path": f"{SIDE}/image",
        "readonly": True,
        "image": IMAGE,
    },
    "in place on a marked store": {
        "version": 1,
        "disk": 1,
        "place": "shared",
        "how": "in-place",
        "format": "raw",
        "path": f"{SIDE}/image",
        "readonly": False,
        "image": {
            **IMAGE,
            "access": {
                **{key: "" for key in ACCESS},
                "kind": "dir",
                "hosts": [],
                "marker": MARKER,
                "cloud": MARKER,
            },
        },
    },
    "clone on the store": {
        "version": 1,
        "disk": 1,
        "place": "shared",
        "how": "store-clone",
        "format": "qcow2",
        "path": f"{SIDE}/clones/42-1.snap/0",
        "readonly": False,
        "image": IMAGE,
    },
    "in place on Ceph": {
        "version": 1,
        "disk": 1,
        "place": "shared",
        "how": "in-place",
        "format": "raw",
        "path": "",
        "readonly": False,
        "image": ON_CEPH,
        "network": NETWORK,
    },
    "clone on Ceph": {
        "version": 1,
        "disk": 1,
        "place": "shared",
        "how": "store-clone",
        "format": "raw",
        "path": "",
        "readonly": False,
        "image": ON_CEPH,
        "network": {**NETWORK, "name": "one/one-35-42-1"},
    },
}

OVER = {**NETWORK, "user": "boots", "snapshot": f"semishared-{GENERATION}"}
OVER_CEPH = {
    "version": 1,
    "disk": 1,
    "place": "local",
    "how": "remote-first",
    "format": "qcow2",
    "path": f"{VM_DIR}/disk.1.snap/0",
    "readonly": False,
    "image": {**ON_CEPH, "generation": GENERATION},
    "over": OVER,
}
WRITTEN["over the image on a store"] = {
    **{key: value for key, value in OVER_CEPH.items() if key != "over"},
    "image": {**IMAGE, "generation": GENERATION},
}
WRITTEN["over the image on Ceph"] = OVER_CEPH


@pytest.mark.parametrize(
    "changes",
    [
        {"over": None},
        {"over": {**OVER, "name": "one/one-36"}},
        {"over": {**OVER, "snapshot": ""}},
        {"over": NETWORK},
        {"over": {**OVER, "snapshot": "a@b"}},
        {"over": {**OVER, "snapshot": 1}},
        {"over": {**OVER, "user": ""}},
        {"over": "one/one-35"},
        {"image": {**IMAGE, "generation": GENERATION}},
        {"image": None},
        {"network": NETWORK},
    ],
)
def test_record_over_a_store_that_does_not_say_what_it_is_over_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRecord):
        Record.from_data({**OVER_CEPH, **changes}, 1)


@pytest.mark.parametrize("name", WRITTEN)
def test_record_of_version_1_is_read_and_written_again_as_it_was(name: str) -> None:
    data = WRITTEN[name]
    record = Record.parse(1, json.dumps(data, sort_keys=True).encode() + b"\n")
    assert json.dumps(record.to_data(), sort_keys=True) == json.dumps(data, sort_keys=True)
    assert (record.place.where, record.how) == (data["place"], data["how"])
    assert described(DescribedVm(True, [data])) == [record]


@pytest.mark.parametrize("name", WRITTEN)
def test_record_of_another_disk_or_version_is_refused(name: str) -> None:
    for data, disk, words in (
        (WRITTEN[name], 2, "disk 2 is that of disk 1"),
        ({**WRITTEN[name], "version": 2}, 1, "disk 1 has version 2, newer than 1"),
        ({**WRITTEN[name], "version": 0}, 1, "version 0"),
        ({**WRITTEN[name], "version": True}, 1, "no version"),
    ):
        with pytest.raises(BadRecord, match=words):
            Record.from_data(data, disk)


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "x"},
        {"image": {}},
        {"image": {**IMAGE, "source": 7}},
        {"image": {**IMAGE, "store": "../.."}},
        {"disk": True},
        {"image": {**IMAGE, "generation": None}},
        {"image": {**IMAGE, "access": {}}},
        {"raw_layer": "0"},
        {"raw_layer": "../x"},
    ],
)
def test_record_with_an_image_or_layer_that_nobody_would_write_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRecord, match="disk 1"):
        Record.from_data({**WRITTEN["overlay"], **changes}, 1)


def test_disk_that_is_an_image_in_a_store_says_which() -> None:
    found = {
        name: record.stored and record.stored.source
        for name, record in ((name, Record.from_data(WRITTEN[name])) for name in WRITTEN)
    }
    assert {name: source for name, source in found.items() if source} == {
        "in place": IMAGE["source"],
        "in place on a marked store": IMAGE["source"],
        "in place on Ceph": "one/one-35",
        "clone on Ceph": "one/one-35-42-1",
    }
    with pytest.raises(BadRecord, match="no image"):
        _ = Record.from_data(WRITTEN["volatile"]).of_image


def test_table_of_places_is_consistent() -> None:
    for name, place in PLACES.items():
        assert place.name == name
        assert place.snapshots in ("layers", "copies", "none") and place.backing in ("none", "base", "store")
        assert place.leases == (place.backing == "base"), "whoever lies over a base must hold it"
        assert place.backing != "none" or place.is_local or place.is_image
    assert [place for place in PLACES.values() if place.is_image] == [IN_PLACE]
