# SPDX-License-Identifier: Apache-2.0
"""What is wrong with attributes is said before an action meets them."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path
from typing import Iterator

import pytest

from semishared.cli import setup
from semishared.cli.command import describe
from semishared.errors import BadAttribute
from semishared.model import attributes as rows
from semishared.model.share.share import BACKENDS
from semishared.model.store.access import CONF
from semishared.plan.image import attributes
from unit.sources import nodes

LIB = Path(__file__).resolve().parents[2] / "lib" / "semishared"
TABLE = "model/attributes.py"
OTHERS = {
    *("SEMISHARED_KILL_AT", "SEMISHARED_STOP_AT", "SEMISHARED_TRACE"),
    *("SEMISHARED_SHARES", "SEMISHARED_SHARE_"),
}
"""Variables of tests and of a guest's context, which are no attributes."""
CEPH = {
    "DISK_TYPE": "RBD",
    "CEPH_USER": "libvirt",
    "CEPH_SECRET": "1d2a6b1e-5f0c-4e0b-9a57-6f2f0e7a5c11",
    "CEPH_HOST": "mon1 mon2:6789",
}
CEPHFS = {"SEMISHARED_FS": "cephfs", "SEMISHARED_FS_VOLUME": "fs/one", "CEPH_USER": "shares"}
SHARES = {"DISK_TYPE": "FILESYSTEM", "SEMISHARED_FS": "btrfs", "SEMISHARED_FS_ROOT": "/srv/shares"}
SOUND = [
    ("image datastore", {"BRIDGE_LIST": "h1 h2", "STAGING_DIR": "/var/tmp"}),
    ("image datastore", {**SHARES, "BRIDGE_LIST": "h1"}),
    ("image datastore", {**SHARES, "SEMISHARED_FS": "plain", "SEMISHARED_FS_QUOTA": "no"}),
    ("image datastore", {**SHARES, **CEPHFS}),
    ("image datastore", {**SHARES, **CEPHFS, "SEMISHARED_SHARE_ACCESS": "Client"}),
    ("image", {"SEMISHARED_SHARE_ACCESS": "client"}),
    ("image", {}),
    ("image", {"SEMISHARED_PLACE": "Shared", "OTHER": "x"}),
    ("image datastore", {"SEMISHARED_LOCAL": "copy"}),
    ("image", {"SEMISHARED_LOCAL": "remote-first"}),
    ("image datastore", {"SEMISHARED_DETACH": "After-Boot"}),
    (
        "image datastore",
        {**CEPH, "SEMISHARED_CEPH_REMOTE": "m", "SEMISHARED_CEPH_REMOTE_SECRET": CEPH["CEPH_SECRET"]},
    ),
    ("image datastore", CEPH),
    ("image datastore", {**CEPH, "SEMISHARED_CEPH_READER": "r", "SEMISHARED_PLACE": "local"}),
    ("image", {"SEMISHARED_IO_CLASS": "Scratch"}),
    ("image datastore", {"SEMISHARED_IO_CLASS": "production"}),
    ("system datastore", {"SHARED": "no", "SEMISHARED_IO_CLASS": "normal"}),
    ("image", {"SEMISHARED_BASES": "RAM"}),
    ("image datastore", {"SEMISHARED_BASES": "disk"}),
    ("image", {"SEMISHARED_CLASS": "RAM"}),
    ("image datastore", {"SEMISHARED_CLASS": "ram, any"}),
    ("host", {"SEMISHARED_POOL": "/mnt/a /run/semishared-ram=ram"}),
    ("host", {"SEMISHARED_BASES_LIMIT": "200G", "SEMISHARED_BASES_FLOOR": "5%"}),
]
WRONG = [
    ("image datastore", {**SHARES, "SEMISHARED_FS": "zfs"}, "'zfs', not one of btrfs, xfs, cephfs, plain"),
    ("image datastore", {"DISK_TYPE": "FILESYSTEM", "SEMISHARED_FS": "btrfs"}, "has no SEMISHARED_FS_ROOT"),
    *[
        ("image datastore", {**SHARES, "SEMISHARED_FS_ROOT": path}, "not a plain absolute path")
        for path in ("srv", "/", "/srv/a b", "/srv/../etc", "/srv//x", "/srv/.x")
    ],
    ("image datastore", {**SHARES, "SEMISHARED_FS": "plain"}, "needs SEMISHARED_FS_QUOTA = no"),
    ("image datastore", {**SHARES, "SEMISHARED_FS_QUOTA": "no"}, "which only SEMISHARED_FS = plain knows"),
    ("image datastore", {**SHARES, "SEMISHARED_FS_QUOTA": "maybe"}, "not yes or no"),
    ("image datastore", {**SHARES, "BRIDGE_LIST": "h1 h2"}, "2 machines"),
    ("image datastore", {**SHARES, **CEPHFS, "SEMISHARED_FS_VOLUME": ""}, "has no SEMISHARED_FS_VOLUME"),
    ("image datastore", {**SHARES, **CEPHFS, "SEMISHARED_FS_VOLUME": "fs"}, "not FILE_SYSTEM/GROUP"),
    ("image datastore", {**SHARES, **CEPHFS, "CEPH_USER": ""}, "has no CEPH_USER"),
    ("image datastore", {**SHARES, **CEPHFS, "CEPH_USER": "admin"}, "not admin"),
    (
        "image datastore",
        {**SHARES, "SEMISHARED_FS_VOLUME": "fs/one"},
        "which only SEMISHARED_FS = cephfs has",
    ),
    ("image", {"SEMISHARED_FS": "btrfs"}, "means nothing in images"),
    ("image", {"SEMISHARED_PLCE": "shared"}, "is SEMISHARED_PLACE meant?"),
    ("image", {"SEMISHARED_LOCALE": "copy"}, "is SEMISHARED_LOCAL meant?"),
    ("image", {"SEMISHARED_XYZZY_QQ": "copy"}, "there is no attribute SEMISHARED_XYZZY_QQ"),
    ("image", {"SEMISHARED_PLACE": "here"}, "'here', not one of auto, shared, local"),
    (
        "image datastore",
        {**SHARES, "SEMISHARED_SHARE_ACCESS": "client"},
        "the datastore is on btrfs, only cephfs has clients",
    ),
    *[
        (holder, {"SEMISHARED_SHARE_ACCESS": "nfs"}, "'nfs', not one of virtiofs, client")
        for holder in ("image", "image datastore")
    ],
    *[
        (holder, {"SEMISHARED_BASES": "fast"}, "'fast', not one of disk, ram")
        for holder in ("image", "image datastore")
    ],
    ("image", {"SEMISHARED_DETACH": "now"}, "'now', not one of on-request, after-boot"),
    ("image datastore", {"SEMISHARED_DETACH": "now"}, "'now', not one of on-request, after-boot"),
    *[
        (holder, {"SEMISHARED_STAGE": "soon"}, "'soon', not one of no, on-upload")
        for holder in ("image", "image datastore")
    ],
    *[
        (holder, {"SEMISHARED_IO_CLASS": "fast"}, "'fast', not one of production, normal, scratch")
        for holder in ("image", "image datastore", "system datastore")
    ],
    *[
        (holder, {"SEMISHARED_CLASS": text}, f"{text!r}, not one of fast, slow, ram, any or several of them")
        for holder in ("image", "image datastore")
        for text in ("tape", "ram ram", "ram;any")
    ],
    ("system datastore", {"SEMISHARED_CLASS": "ram"}, "only in images and image datastores"),
    ("host", {"SEMISHARED_IO_CLASS": "scratch"}, "only in images and image datastores and system datastores"),
    ("image", {"SEMISHARED_PLACE": "shared", "SEMISHARED_LOCAL": "copy"}, "contradicts"),
    ("image", {"SEMISHARED_CEPH_READER": "r"}, "only in image datastores"),
    ("image datastore", {"SEMISHARED_BASES_LIMIT": "1G"}, "means nothing in image datastores, only in hosts"),
    ("image datastore", {"DISK_TYPE": "rbd"}, "in capitals"),
    ("image datastore", {"DRIVER": "vmdk"}, "'vmdk', not one of raw, qcow2"),
    ("image datastore", {"DISK_TYPE": "RBD"}, "has no CEPH_USER"),
    ("image datastore", {**CEPH, "CEPH_USER": "admin"}, "not admin"),
    ("image datastore", {**CEPH, "CEPH_SECRET": ""}, "no CEPH_SECRET"),
    ("image datastore", {**CEPH, "SEMISHARED_CEPH_REMOTE": "m"}, "only one of SEMISHARED_CEPH_REMOTE and"),
    (
        "image datastore",
        {**CEPH, "SEMISHARED_CEPH_REMOTE_SECRET": CEPH["CEPH_SECRET"]},
        "only one of SEMISHARED_CEPH_REMOTE and",
    ),
    ("image datastore", {**CEPH, "CEPH_HOST": "mon1;mon2"}, "no address"),
    ("image datastore", {**CEPH, "CEPH_KEY": "AQ"}, "keyring"),
    ("image datastore", {**CEPH, "DRIVER": "qcow2"}, "not one of raw"),
    ("image datastore", {"BRIDGE_LIST": "h1 h2;reboot"}, "'h2;reboot', which is no host name"),
    ("system datastore", {"SHARED": "YES"}, "SHARED = NO"),
    ("host", {"SEMISHARED_BASES_LIMIT": "much"}, "much"),
    ("host", {"SEMISHARED_PLACE": "shared"}, "means nothing in hosts"),
]


@pytest.mark.parametrize("holder, given", SOUND)
def test_sound(holder: str, given: dict[str, str]) -> None:
    assert attributes.problems(holder, given) == []


@pytest.mark.parametrize("holder, given, why", WRONG)
def test_wrong(holder: str, given: dict[str, str], why: str) -> None:
    (said,) = attributes.problems(holder, given)
    assert why in said and "-1" not in said


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    describe(parser, setup.ARGUMENTS)
    return parser.parse_args(words)


@pytest.mark.parametrize("word", ["A", "=b", "a b=c", "A=", "A=b\nc", "NAME=x", "tm_mad=ssh", "A=\x1b[m"])
def test_setup_refuses_what_is_no_attribute(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup.run(arguments("--set", word)) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1


def test_setup_prints_what_onedatastore_reads_and_what_to_click(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [
        word for name, value in CEPH.items() if name != "DISK_TYPE" for word in ("--set", f"{name}={value}")
    ]
    assert setup.run(arguments("--kind", "rbd", "--image", "fast", *pairs)) == 0
    said = capsys.readouterr().out
    assert (
        'NAME = "fast"\nTYPE = "IMAGE_DS"\nDS_MAD = "semishared"\nTM_MAD = "semishared"\nDISK_TYPE = "RBD"\n'
        in said
    )
    clicks = said[said.index("fast: Storage") :]
    assert clicks.index("  Custom Variables: \n") < clicks.index("    CEPH_USER = libvirt\n")
    assert "Mark the store" not in said, "on Ceph there is nothing to be mounted"


@pytest.mark.fault(65, "setup prints what to click with the labels that Sunstone 7.2 and 7.4 have")
def test_setup_prints_the_labels_of_sunstone(capsys: pytest.CaptureFixture[str]) -> None:
    """Labels: src/fireedge/src/modules/constants/translates.js of both."""
    assert setup.run(arguments()) == 0
    said = capsys.readouterr().out
    assert said[said.index("semi_img: Storage") : said.index("For the scheduler")].splitlines() == [
        "semi_img: Storage > Datastores > Create",
        "  General: Datastore type IMAGE, Name semi_img, Storage backend Custom",
        "    Datastore Custom, Custom DS_MAD semishared",
        "    Transfer Custom, Custom TM_MAD semishared",
        "  Select Cluster: the cluster of the hosts",
        "  Configuration attributes: nothing (for Custom it is empty)",
        "  Custom Variables: none",
        "  Finish",
        "  Mark the store when it is mounted: `semishared setup --apply` finds the datastore by its name.",
        "    Then it is in Storage > Datastores > semi_img > Info, panel Attributes: "
        "SEMISHARED_STORE = the id",
        "    that is in the tree's marker. Attributes that you add later go into that panel too, "
        "not through Update",
        "",
        "semi_sys: Storage > Datastores > Create",
        "  General: Datastore type SYSTEM, Name semi_sys, Storage backend Custom",
        "    Transfer Custom, Custom TM_MAD semishared",
        "  Select Cluster: the cluster of the hosts",
        "  Configuration attributes: nothing (for Custom it is empty)",
        "  Custom Variables: none",
        "  Finish",
        "",
    ]


def test_setup_names_everything_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        setup.run(
            arguments("--set", "SEMISHARED_PLCE=shared", "--set", "DRIVER=x", "--set-system", "SHARED=YES")
        )
        == 1
    )
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3 and all(line.startswith("semishared setup: semi_") for line in said)


@pytest.mark.reads_checkout
def test_page_names_the_attributes_that_there_are() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "attributes.md").read_text()
    assert set(re.findall(r"SEMISHARED_[A-Z_]+", page)) == set(rows.known())


def texts(module: str) -> Iterator[str]:
    """Yield the texts of a module, also those within others; not what documents it."""
    said = {id(node.value) for node in nodes(module) if isinstance(node, ast.Expr)}
    for node in nodes(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def spelt(module: str) -> set[str]:
    """Return the attributes that a module names itself, but for prose: alone, or before what it sets."""
    found = (re.fullmatch(r"(SEMISHARED_[A-Z_]+)(?: *= *[\[\"] *)?", text) for text in texts(module))
    return {match.group(1) for match in found if match} - OTHERS


@pytest.mark.reads_checkout
def test_an_attribute_is_spelt_in_its_row_alone() -> None:
    found = {str(path.relative_to(LIB)): spelt(path.read_text()) for path in sorted(LIB.rglob("*.py"))}
    assert found.pop(TABLE) == set(rows.known())
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.reads_checkout
def test_prose_names_attributes_that_there_are() -> None:
    for path in sorted(LIB.rglob("*.py")):
        names = set(re.findall(r"\bSEMISHARED_[A-Z_]+", path.read_text())) - OTHERS - {rows.PREFIX}
        assert names <= set(rows.known()), path


@pytest.mark.parametrize(
    "text",
    [
        "image.attribute('SEMISHARED_NEW')",
        "f'SEMISHARED_NEW = \"{value}\"'",
        "f'{name}: SEMISHARED_NEW' if x else {'SEMISHARED_NEW': 1}",
        "A = [('SEMISHARED_NEW', 1)]",
    ],
)
def test_an_attribute_that_is_spelt_elsewhere_is_found(text: str) -> None:
    assert spelt(text) == {"SEMISHARED_NEW"}


def test_prose_is_no_spelling() -> None:
    assert not spelt(
        "'of SEMISHARED_NEW'\nx = 'say SEMISHARED_NEW = local'\ny = f'SEMISHARED_NEW of {holder} is'"
    )


class Holder:
    """An object of oned's."""

    def __init__(self, number: int, said: str) -> None:
        self.id, self._said = number, said

    def attribute(self, name: str) -> str:
        return self._said if name == "SEMISHARED_NEW" else ""


WORDS = rows.Attribute("SEMISHARED_NEW", (rows.IMAGE, rows.IMAGE_DS), "", ("one", "two"), "two")
SEVERAL = WORDS._replace(several=True, default="", what="some")
FORM = rows.Attribute("SEMISHARED_NEW", (rows.IMAGE_DS,), form=CONF, what="a path", default="/")


@pytest.mark.parametrize(
    ("row", "image", "datastore", "said"),
    [
        (WORDS, "", "", ("two", "")),
        (WORDS, "", "One ", ("one", "datastore 9")),
        (WORDS, "TWO", "one", ("two", "image 5")),
        (WORDS, "two", "three", ("two", "image 5")),
        (SEVERAL, "", "", ("", "")),
        (SEVERAL, "two, ONE", "", ("two one", "image 5")),
        (FORM, "", "", ("/", "")),
        (FORM, "", "/A/b", ("/A/b", "datastore 9")),
    ],
)
def test_the_image_comes_before_its_datastore(
    row: rows.Attribute, image: str, datastore: str, said: tuple[str, str]
) -> None:
    assert row.said(Holder(5, image), Holder(9, datastore)) == said
    assert row.value(Holder(5, image), Holder(9, datastore)) == said[0]
    if not image:
        assert row.of_store(Holder(9, datastore)) == said[0] and row.said(None, Holder(9, datastore)) == said


@pytest.mark.parametrize(
    ("row", "text", "what"),
    [
        (WORDS, "three", "one of one, two"),
        (WORDS, "one two", "one of one, two"),
        (SEVERAL, "one one", "some"),
        (SEVERAL, ",", "some"),
        (SEVERAL, "one three", "some"),
        (FORM, "a", "a path"),
        (FORM, "/a/../b", "a path"),
    ],
)
def test_what_is_no_value_is_refused(row: rows.Attribute, text: str, what: str) -> None:
    with pytest.raises(BadAttribute) as caught:
        row.of_store(Holder(9, text))
    assert caught.value.detail == f"SEMISHARED_NEW of datastore 9 is {text!r}, not {what}"


@pytest.mark.parametrize("row", rows.known().values(), ids=rows.known())
def test_rows_are_sound(row: rows.Attribute) -> None:
    assert set(row.of) <= {rows.IMAGE, rows.IMAGE_DS, rows.SYSTEM_DS, rows.HOST} and row.of and row.doc
    assert not row.default or row.default in row.values
    is_said = rows.IMAGE in row.of and row is not rows.STATE
    assert not is_said or rows.IMAGE_DS in row.of, "the datastore says it of all its images"
    assert not (row.values and row.form) and (not row.form or row.what)
    assert row.line("x") == f'{row.name} = "x"\n'


def test_each_file_system_of_shares_has_a_row_that_says_what_it_can_do() -> None:
    assert tuple(BACKENDS) == rows.FS.values
