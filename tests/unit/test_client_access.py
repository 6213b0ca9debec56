# SPDX-License-Identifier: Apache-2.0
"""Guests that are clients of their shares themselves: who is given a key, what they are told, and when it is taken back."""

from __future__ import annotations

from typing import Any, Callable
from xml.etree import ElementTree

import pytest

from semishared.errors import BadAttribute, BadRecord, CephUnavailable
from semishared.model import layout_share
from semishared.model import steps_share as s
from semishared.model.exchange import AskOned, Exchange, On, Say, drive
from semishared.model.shares import Tree
from semishared.opennebula.xml import Datastore, Image, Vm
from semishared.plan import client_access, gc, gc_shares
from semishared.plan.client_access import Clients
from semishared.share.ceph_clients import Key

MARKER = "0123456789abcdef" * 2
TREE = Tree("cephfs", "/srv/shares", MARKER, "cephfs/one", "shares")
ON_CEPH = {
    "SEMISHARED_FS": "cephfs", "SEMISHARED_FS_ROOT": "/srv/shares", "SEMISHARED_FS_VOLUME": "cephfs/one", "SEMISHARED_STORE": MARKER,
    "CEPH_USER": "shares", "BRIDGE_LIST": "h1",
}  # fmt: skip
ON_XFS = {"SEMISHARED_FS": "xfs", "SEMISHARED_FS_ROOT": "/srv/shares"}
CLIENT = {"SEMISHARED_SHARE_ACCESS": "client"}
ANSWER = {
    "monitors": "10.0.0.1:6789,[fd00::1]:6789", "fs": "cephfs", "path": "/volumes/one/share-5/0b1c", "user": "share-one-5-7-01234567",
    "key": "AQBY0/pViX+wBBAAUpPs9swy7rey1qPhzmDVGQ==", "access": "rw",
}  # fmt: skip
SHARE = "<DISK><DISK_ID>1</DISK_ID><IMAGE_ID>5</IMAGE_ID><DATASTORE_ID>110</DATASTORE_ID><MOUNT_TAG>data</MOUNT_TAG>"
SHARE += "<TM_MAD>semishared</TM_MAD><TYPE>FILESYSTEM</TYPE>{more}</DISK>"
OTHERS = "<DISK><DISK_ID>0</DISK_ID><IMAGE_ID>1</IMAGE_ID><TM_MAD>semishared</TM_MAD><TYPE>FILE</TYPE></DISK>"
OTHERS += "<DISK><DISK_ID>2</DISK_ID><IMAGE_ID>6</IMAGE_ID><TM_MAD>ssh</TM_MAD><TYPE>FILESYSTEM</TYPE></DISK>"
OTHERS += "<DISK><DISK_ID>3</DISK_ID><TM_MAD>semishared</TM_MAD><TYPE>FILESYSTEM</TYPE></DISK>"


def template(kind: str, number: int, attributes: dict[str, str]) -> ElementTree.Element:
    rows = "".join(f"<{name}>{value}</{name}>" for name, value in attributes.items())
    return ElementTree.fromstring(f"<{kind}><ID>{number}</ID><TEMPLATE>{rows}</TEMPLATE></{kind}>")


class Asked:
    """oned and a machine that gives keys; what they were asked."""

    def __init__(self, disks: str, store: dict[str, str], image: dict[str, str], answer: Callable[[Any], Any] = lambda _: ANSWER) -> None:
        self.vm = Vm(ElementTree.fromstring(f"<VM><ID>7</ID><TEMPLATE>{disks}</TEMPLATE></VM>"))
        self._known = {
            ("image", 5): Image(template("IMAGE", 5, image)),
            ("datastore", 110): Datastore(template("DATASTORE", 110, store)),
        }  # fmt: skip
        self._answer = answer
        self.steps: list[tuple[str, Any]] = []
        self.said: list[str] = []

    def do(self, wanted: Exchange) -> Any:
        if isinstance(wanted, AskOned):
            return self._known[wanted.what, wanted.id]
        if isinstance(wanted, Say):
            self.said += [text for _, text in wanted.lines(*wanted.about)]
            return None
        assert isinstance(wanted, On)
        self.steps += [(wanted.machine, step) for step in wanted.steps]
        return [self._answer(step) for step in wanted.steps]


def test_a_guest_is_told_what_a_client_needs_under_the_number_of_the_disk() -> None:
    asked = Asked(OTHERS + SHARE.format(more=""), ON_CEPH, CLIENT)
    found = drive(client_access.handed(asked.vm), asked.do)
    assert found.disks == (1,)
    assert asked.steps == [("h1", s.GiveKey(TREE, 5, 7, False))]
    assert found.lines.decode().splitlines() == [
        "SEMISHARED_SHARE_1_TAG='data'", "SEMISHARED_SHARE_1_MONITORS='10.0.0.1:6789,[fd00::1]:6789'", "SEMISHARED_SHARE_1_FS='cephfs'",
        "SEMISHARED_SHARE_1_PATH='/volumes/one/share-5/0b1c'", "SEMISHARED_SHARE_1_USER='share-one-5-7-01234567'",
        "SEMISHARED_SHARE_1_KEY='AQBY0/pViX+wBBAAUpPs9swy7rey1qPhzmDVGQ=='", "SEMISHARED_SHARE_1_ACCESS='rw'", "SEMISHARED_SHARES='1'",
    ]  # fmt: skip


def test_the_datastore_says_it_where_the_image_does_not_and_a_read_only_disk_gets_a_key_that_reads() -> None:
    asked = Asked(SHARE.format(more="<READONLY>YES</READONLY>"), {**ON_CEPH, **CLIENT}, {})
    drive(client_access.handed(asked.vm), asked.do)
    assert asked.steps == [("h1", s.GiveKey(TREE, 5, 7, True))]
    asked = Asked(SHARE.format(more=""), {**ON_CEPH, **CLIENT}, {"SEMISHARED_SHARE_ACCESS": "virtiofs"})
    # No share any more whose client it is: what was noted before has to go.
    assert drive(client_access.handed(asked.vm), asked.do) == Clients() and not asked.steps


def test_a_vm_without_shares_asks_nobody_for_anything() -> None:
    asked = Asked(OTHERS, ON_CEPH, CLIENT)
    assert drive(client_access.handed(asked.vm), asked.do) == Clients() and not asked.steps


@pytest.mark.parametrize(
    ("store", "image", "disk", "said"),
    [
        (ON_XFS, CLIENT, "", "of image 5 is client: datastore 110 is on xfs"),
        ({**ON_XFS, **CLIENT}, {}, "", "of datastore 110 is client: datastore 110 is on xfs"),
        (ON_CEPH, {"SEMISHARED_SHARE_ACCESS": "nfs"}, "", "is 'nfs', not one of virtiofs, client"),
        (ON_CEPH, CLIENT, "<MOUNT_TAG>a'; reboot '</MOUNT_TAG>", "MOUNT_TAG of disk 1"),
    ],
)
def test_what_no_guest_can_be_a_client_of_is_refused(store: dict[str, str], image: dict[str, str], disk: str, said: str) -> None:
    share = SHARE.format(more="").replace("<MOUNT_TAG>data</MOUNT_TAG>", disk) if disk else SHARE.format(more="")
    asked = Asked(share, store, image)
    with pytest.raises(BadAttribute) as caught:
        drive(client_access.handed(asked.vm), asked.do)
    assert said in caught.value.detail and not asked.steps


@pytest.mark.parametrize("name", client_access.TOLD)
@pytest.mark.parametrize("value", ["a'b", "a b", "$(a)", "a\nb", ""])
def test_no_answer_ends_its_quotes_nor_is_a_key_in_what_refuses_it(name: str, value: str) -> None:
    with pytest.raises(BadRecord) as caught:
        client_access.told({**ANSWER, name: value})
    assert ANSWER["key"] not in caught.value.detail


def test_the_keys_of_a_vm_that_is_gone_are_taken_back_or_it_is_said_who_does_it_later() -> None:
    asked = Asked("", ON_CEPH, {})
    drive(client_access.withdrawn(7, (110,)), asked.do)
    assert asked.steps == [("h1", s.TakeKeys(TREE, -1, 7))] and not asked.said

    def away(_: Any) -> Any:
        raise CephUnavailable("no answer")

    asked = Asked("", ON_CEPH, {}, away)
    drive(client_access.withdrawn(7, (110,)), asked.do)
    assert len(asked.said) == 1 and "`semishared gc`" in asked.said[0]
    asked = Asked("", ON_XFS, {})
    drive(client_access.withdrawn(7, (110,)), asked.do)
    assert not asked.steps


def test_gc_takes_the_keys_of_vms_that_oned_has_not() -> None:
    keys = [{**key._asdict(), "user": key.user(TREE)} for key in (Key(5), Key(5, 7), Key(5, 8), Key(5, 99))]
    known = gc.Known({7: "h1"}, frozenset({(110, 5)}), frozenset(), newest_vm=8)
    gone, newer = gc_shares.find(gc_shares.Shares("h1", 110, TREE, (), tuple(keys)), known)
    assert (gone.path, gone.keep, gone.steps()) == ("/srv/shares/.semishared/.keys/5-8.json", "", [s.TakeKeys(TREE, 5, 8)])
    assert newer.path.endswith("/5-99.json") and "restored" in newer.keep


def test_who_has_a_key_is_told_by_names_that_say_it() -> None:
    for key in (Key(5), Key(5, 7)):
        assert layout_share.key_of(key.note.rpartition("/")[2]) == key[:2]
    assert [layout_share.key_of(name) for name in ("5-7-1.json", "5-7.json.new", ".staged-5.json.x", "a.json")] == [None] * 4
    assert {key.user(TREE) for key in (Key(5), Key(5, 7))} == {"share-one-5-01234567", "share-one-5-7-01234567"}
