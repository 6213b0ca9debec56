# SPDX-License-Identifier: Apache-2.0
"""Decisions of the datastore actions: which paths may be read, which format is stored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import BadArguments, BadAttribute, NotSupported, RestrictedPath
from semishared.opennebula.xml import Datastore, Image
from semishared.plan.image.images import check_allowed, format_of, image_ref, stored_format

names = st.lists(st.sampled_from(["var", "tmp", "tmpX", "etc", "a"]), max_size=4)


def is_allowed(real: str, safe: list[str], restricted: list[str]) -> bool:
    try:
        check_allowed("/given", real, safe, restricted)
    except RestrictedPath:
        return False
    return True


@pytest.mark.parametrize(
    ("real", "safe", "restricted", "allowed"),
    [
        ("/var/tmp/image", ["/var/tmp"], ["/"], True),
        ("/var/tmp", ["/var/tmp"], ["/"], True),
        ("/var/tmpX/image", ["/var/tmp"], ["/"], False),
        ("/var/tmp2", ["/var/tmp"], ["/"], False),
        ("/var/tm", ["/var/tmp"], ["/"], False),
        ("/etc/passwd", ["/var/tmp"], ["/"], False),
        ("/etc/passwd", ["/"], ["/etc"], True),
        ("/", ["/var/tmp"], ["/"], False),
        ("/home/x", [], ["/etc"], True),
        ("/etc", [], ["/etc"], False),
        ("/etc/x", [], ["/etc"], False),
        ("/etcetera/x", [], ["/etc"], True),
        ("/srv/images/a", ["/srv/images"], ["/srv"], True),
        ("/srv/other/a", ["/srv/images"], ["/srv"], False),
        ("/srv/images/secret/a", ["/srv/images"], ["/srv/images/secret"], True),
        ("/x", [], [], True),
        ("/var/lib/one/datastores/1/x", ["/var/tmp", "/tmp"], ["/", "/var/lib/one"], False),
    ],
)
def test_paths_are_compared_by_component(
    real: str, safe: list[str], restricted: list[str], allowed: bool
) -> None:
    assert is_allowed(real, safe, restricted) == allowed


@given(names, names, names)
def test_safe_wins_and_restricted_means_below(
    real: list[str], safe: list[str], restricted: list[str]
) -> None:
    below_safe, below_restricted = real[: len(safe)] == safe, real[: len(restricted)] == restricted
    paths = ["/" + "/".join(parts) for parts in (real, safe, restricted)]
    assert is_allowed(paths[0], [paths[1]], [paths[2]]) == (below_safe or not below_restricted)


def test_the_refusal_names_the_path_as_given_and_not_where_it_leads() -> None:
    with pytest.raises(RestrictedPath) as caught:
        check_allowed("/var/tmp/link", "/root/secret", ["/var/tmp"], ["/"])
    assert "/var/tmp/link" in caught.value.detail
    assert "secret" not in caught.value.line()


@pytest.mark.parametrize(
    ("found", "type", "datastore_type", "attributes", "stored"),
    [
        ("raw", 0, 0, {}, "raw"),
        ("qcow2", 2, 0, {}, "qcow2"),
        ("vmdk", 0, 0, {}, "qcow2"),
        ("vpc", 0, 0, {}, "qcow2"),
        ("raw", 0, 0, {"DRIVER": "qcow2"}, "qcow2"),
        ("qcow2", 0, 0, {"DRIVER": "RAW"}, "raw"),
        ("vmdk", 0, 0, {"DRIVER": "raw"}, "raw"),
        ("raw", 0, 0, {"DRIVER": "qcow2", "CONVERT": "no"}, "raw"),
        ("vmdk", 0, 0, {"DRIVER": "raw", "CONVERT": "no"}, "qcow2"),
        ("raw", 1, 0, {"DRIVER": "qcow2"}, "raw"),
        ("raw", 3, 2, {"DRIVER": "qcow2"}, "raw"),
    ],
)
def test_stored_format(
    found: str, type: int, datastore_type: int, attributes: dict[str, str], stored: str
) -> None:
    template = "".join(f"<{key}>{value}</{key}>" for key, value in attributes.items())
    datastore = Datastore.parse(
        f"<DATASTORE><ID>1</ID><TYPE>{datastore_type}</TYPE><TEMPLATE>{template}</TEMPLATE></DATASTORE>"
    )
    assert stored_format(found, Image.parse(f"<IMAGE><TYPE>{type}</TYPE></IMAGE>"), datastore) == stored


def test_unknown_driver_of_the_datastore_is_named() -> None:
    datastore = Datastore.parse(
        "<DATASTORE><ID>7</ID><TYPE>0</TYPE><TEMPLATE><DRIVER>vhd</DRIVER></TEMPLATE></DATASTORE>"
    )
    with pytest.raises(BadAttribute, match="datastore 7.*'vhd'"):
        stored_format("raw", Image.parse("<IMAGE><TYPE>0</TYPE></IMAGE>"), datastore)


def of_store(**attributes: str) -> Datastore:
    template = "".join(f"<{key}>{value}</{key}>" for key, value in attributes.items())
    return Datastore.parse(
        f"<DATASTORE><ID>100</ID><TYPE>0</TYPE><TEMPLATE>{template}</TEMPLATE></DATASTORE>"
    )


@pytest.mark.parametrize(
    ("format", "attributes", "read_as"),
    [
        ("qcow2", {"DRIVER": "raw"}, "qcow2"),
        ("RAW", {"DRIVER": "qcow2"}, "raw"),
        ("", {"DRIVER": "QCOW2"}, "qcow2"),
        ("", {}, "raw"),
        ("", {"DISK_TYPE": "RBD", "CEPH_USER": "one", "DRIVER": "qcow2"}, "raw"),
    ],
)
def test_format_is_that_of_the_image_then_of_its_datastore(
    format: str, attributes: dict[str, str], read_as: str
) -> None:
    image, store = Image.parse(f"<IMAGE><ID>7</ID><FORMAT>{format}</FORMAT></IMAGE>"), of_store(**attributes)
    assert format_of(image, store) == read_as
    source = "one/one-7" if "DISK_TYPE" in attributes else "/store/7"
    found = image_ref(image, store, source)
    assert (found.store, found.id, found.format, found.source, found.generation) == (
        100,
        7,
        read_as,
        source,
        "",
    )


def test_image_that_its_store_cannot_have_is_refused() -> None:
    ceph = of_store(DISK_TYPE="RBD", CEPH_USER="one")
    with pytest.raises(NotSupported, match="'qcow2', not raw"):
        image_ref(
            Image.parse("<IMAGE><ID>7</ID><FORMAT>qcow2</FORMAT><SOURCE>one/one-7</SOURCE></IMAGE>"), ceph
        )
    for store, source in ((ceph, "/store/7"), (of_store(), "one/one-7"), (of_store(), "/store/../7")):
        with pytest.raises(BadArguments, match="SOURCE is not"):
            image_ref(
                Image.parse(f"<IMAGE><ID>7</ID><FORMAT>raw</FORMAT><SOURCE>{source}</SOURCE></IMAGE>"), store
            )
