# SPDX-License-Identifier: Apache-2.0
"""Attributes of OpenNebula's own drivers: each works, works differently, or is refused by name; none is
silently ignored.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from semishared.errors import BadAttribute
from semishared.front import stock_conf
from semishared.model import attributes, stock
from semishared.model.store import template
from semishared.opennebula.xml import Datastore
from semishared.plan.image import attributes as checks
from semishared.tools import qemu_img
from unit.sources import nodes

ROOT = Path(__file__).resolve().parents[2]
LIB = ROOT / "lib" / "semishared"
LISTED = Path(__file__).with_name("stock_attributes.txt")
OURS_BESIDE = {("datastore", "DISK_TYPE"), ("datastore", "LVM_THIN_ENABLE")}
"""What oned hands on from a datastore to the disk, of which alone stock's scripts read it."""
BY_ID = {f"{row.of}-{row.name}": row for row in stock.ROWS}
pytestmark = pytest.mark.reads_checkout


def listed() -> dict[tuple[str, str], list[str]]:
    lines = [line.split() for line in LISTED.read_text().splitlines() if not line.startswith("#")]
    return {(of, name): versions for of, name, *versions in lines}


def test_the_table_has_all_that_stocks_scripts_read_and_nothing_else() -> None:
    found = [(row.of, row.name) for row in stock.ROWS]
    assert len(found) == len(set(found)), "a name is there twice"
    assert set(found) - OURS_BESIDE == set(listed())
    assert {tag for versions in listed().values() for tag in versions} >= {"release-7.4.0", "release-7.2.0"}


def test_the_cheap_check_of_actions_knows_all_that_is_refused() -> None:
    assert stock.refusable() == attributes.REFUSABLE | {"DISK_TYPE"}
    (row,) = [row for row in stock.ROWS if row.name == "DISK_TYPE" and row.of == "datastore"]
    assert {"", *row.harmless} == {word.lower() for word in attributes.DISK_TYPES}


def spelt() -> set[str]:
    """Return the names that the package spells outside of the table, alone or at the end of a path."""
    found = set()
    for path in LIB.rglob("*.py"):
        if path.name == "stock.py":
            continue
        for node in nodes(path.read_text()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"(?:\A|/|\b)([A-Z][A-Z0-9_]+)(?=\Z|=|_\Z)", node.value))
    return found


def test_what_works_is_read_and_what_is_read_works() -> None:
    read = spelt()
    sums = {"MD5", "SHA1"}  # front/upload.py reads them by hashlib's names
    for row in stock.ROWS:
        if row.of in ("datastore", "image") and row.named and not row.name.startswith("*"):
            if row.verdict in (stock.STOCK, stock.DIFFERENT):
                assert row.name in read | sums, f"{row.name} of a {row.of} is read nowhere"
            elif row.verdict == stock.NOTHING:
                assert row.name not in read, f"{row.name} of a {row.of} is read, and said to have no effect"


@pytest.mark.parametrize("row", BY_ID.values(), ids=BY_ID)
def test_rows_are_sound(row: stock.Row) -> None:
    assert row.verdict in (stock.STOCK, stock.DIFFERENT, stock.REFUSED, stock.NOTHING)
    assert row.doc and not row.doc.endswith(".") and (row.named or row.verdict != stock.REFUSED)
    assert not row.harmless or row.verdict == stock.REFUSED or row.of == stock.CONFIGURATION


def values(row: stock.Row) -> tuple[str, ...]:
    """Return values that ask for something, of which none is harmless."""
    return ("YES", "no" if "yes" in row.harmless else "1", "x y")


@pytest.mark.fault(57, "an attribute of OpenNebula's own drivers that cannot work is refused by name")
@pytest.mark.parametrize("name", [name for name, row in BY_ID.items() if row.verdict == stock.REFUSED])
def test_what_cannot_work_is_refused_by_name_with_what_to_do(name: str) -> None:
    row = BY_ID[name]
    for value in ("", " ", *row.harmless, *(word.upper() for word in row.harmless)):
        stock.refuse(row.of, "it", {row.name: value})
    for value in values(row):
        if value.lower() in row.harmless:
            continue
        with pytest.raises(BadAttribute) as caught:
            stock.refuse(row.of, f"{row.of} 5", {"OTHER": "x", row.name: value})
        assert caught.value.detail.startswith(f"{row.name} = {value!r} of {row.of} 5 is refused: ")


@pytest.mark.parametrize(
    "name",
    [name for name, row in BY_ID.items() if row.verdict in (stock.REFUSED, stock.NOTHING) and row.named],
)
def test_setup_and_doctor_name_it_before(name: str) -> None:
    row = BY_ID[name]
    holders = {"datastore": attributes.IMAGE_DS, "image": attributes.IMAGE, "host": attributes.HOST}
    if row.of not in holders:
        pytest.skip("a user's DISK, and files of the site, are no template that they look at")
    beside = {"CEPH_USER": "a", "DISK_TYPE": "RBD"} if row.name == "CEPH_KEY" else {}
    said = checks.problems(holders[row.of], {**beside, row.name: "x"})
    assert said and any(row.name in text for text in said)


def test_a_mount_that_is_seen_to_be_there_is_taken() -> None:
    mounted = {"NFS_AUTO_ENABLE": "YES", "NFS_AUTO_HOST": "nas", "NFS_AUTO_PATH": "/a"}
    with pytest.raises(BadAttribute, match="NFS_AUTO_ENABLE = 'YES' of datastore 5 is refused: no machine"):
        stock.refuse("datastore", "datastore 5", mounted)
    assert len(checks.problems(attributes.IMAGE_DS, mounted)) == 3
    stock.refuse("datastore", "datastore 5", {**mounted, "SEMISHARED_STORE": "0" * 32})
    assert not checks.problems(attributes.IMAGE_DS, {**mounted, "SEMISHARED_STORE": "0" * 32})


def test_file_systems_that_a_site_may_name_are_those_that_can_be_made() -> None:
    assert {*stock_conf.KNOWN, stock_conf.SWAP} == {*qemu_img.MKFS}


def on_ceph(**template: str) -> Datastore:
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in {"DISK_TYPE": "RBD", **template}.items())
    return Datastore.parse(f"<DATASTORE><ID>5</ID><TEMPLATE>{inside}</TEMPLATE></DATASTORE>")


@pytest.mark.parametrize(
    ("said", "own", "is_trashed"),
    [("yes", "", True), ("yes", "no", False), ("no", "YES", True), ("", "", False), ("no", "", False)],
)
def test_ceph_conf_says_what_a_datastore_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, own: str, is_trashed: bool
) -> None:
    monkeypatch.setattr(stock_conf, "ETC", str(tmp_path))
    (tmp_path / "ceph").mkdir()
    (tmp_path / "ceph/ceph.conf").write_text(f"# CEPH_TRASH=maybe\nCEPH_TRASH={said}\n")
    datastore = on_ceph(**({"CEPH_TRASH": own} if own else {}))
    assert template.is_trashed(stock_conf.filled(datastore)) == is_trashed
    mounted = Datastore.parse("<DATASTORE><ID>5</ID><TEMPLATE/></DATASTORE>")
    assert not template.is_trashed(stock_conf.filled(mounted))


def test_a_pool_that_ceph_conf_alone_names_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_conf, "ETC", str(tmp_path))
    (tmp_path / "ceph").mkdir()
    (tmp_path / "ceph/ceph.conf").write_text("POOL_NAME=fast\n")
    assert "POOL_NAME of ceph.conf is 'fast', and datastore 5 has none" in stock_conf.other_pool(on_ceph())
    assert not stock_conf.other_pool(on_ceph(POOL_NAME="slow"))
    (tmp_path / "ceph/ceph.conf").write_text("POOL_NAME=one\n")
    assert not stock_conf.other_pool(on_ceph())
