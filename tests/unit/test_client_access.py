# SPDX-License-Identifier: Apache-2.0
"""Guests that are clients of their shares themselves: who is given a key, what they are told, and when it is
taken back.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Callable, Iterator
from xml.etree import ElementTree

import pytest

from semishared.errors import (
    BadAttribute,
    BadRecord,
    CephUnavailable,
    HostUnreachable,
    LateAction,
    MissingImage,
    NoSpace,
    OnedUnavailable,
    SemisharedError,
    VmGone,
)
from semishared.front import transfer
from semishared.front.action import Action
from semishared.model.exchange import AskOned, Exchange, Feed, On, Say, drive
from semishared.model.refs import Refusal
from semishared.model.share import names as share_names
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Tree
from semishared.model.steps import PrepareVm, RemovedVm
from semishared.opennebula.args import VmPlace
from semishared.opennebula.oned import Oned
from semishared.opennebula.report import Report
from semishared.opennebula.xml import Datastore, Image, Vm
from semishared.plan.care import gc, gc_stores
from semishared.plan.share import client_keys
from semishared.plan.share.client_keys import Clients
from semishared.share.ceph_clients import Key
from semishared.tools import context_iso

MARKER = "0123456789abcdef" * 2
TREE = Tree("cephfs", "/srv/shares", MARKER, "cephfs/one", "shares")
ON_CEPH = {
    "SEMISHARED_FS": "cephfs",
    "SEMISHARED_FS_ROOT": "/srv/shares",
    "SEMISHARED_FS_VOLUME": "cephfs/one",
    "SEMISHARED_STORE": MARKER,
    "CEPH_USER": "shares",
    "BRIDGE_LIST": "h1",
}
ON_XFS = {"SEMISHARED_FS": "xfs", "SEMISHARED_FS_ROOT": "/srv/shares"}
CLIENT = {"SEMISHARED_SHARE_ACCESS": "client"}
ANSWER = share_steps.GivenKey(
    "10.0.0.1:6789,[fd00::1]:6789",
    "cephfs",
    "/volumes/one/share-5/0b1c",
    "share-one-5-7-01234567",
    "AQBY0/pViX+wBBAAUpPs9swy7rey1qPhzmDVGQ==",
    "rw",
)
HISTORY = "<HISTORY_RECORDS><HISTORY><SEQ>3</SEQ><HOSTNAME>h2</HOSTNAME></HISTORY></HISTORY_RECORDS>"
PLACE = VmPlace("h2", "/var/lib/one/datastores/101/7", 7)
PREPARED = ("h2", PrepareVm(7, PLACE.path))
TAKEN = ("h1", share_steps.TakeKeys(TREE, -1, 7, 3))
SOURCE = "/srv/shares/share-5/0b1c"
SHARE = "<DISK><DISK_ID>1</DISK_ID><IMAGE_ID>5</IMAGE_ID><DATASTORE_ID>110</DATASTORE_ID><MOUNT_TAG>data</MOUNT_TAG>"  # noqa: E501
SHARE += f"<SOURCE>{SOURCE}</SOURCE>"
SHARE += "<TM_MAD>semishared</TM_MAD><TYPE>FILESYSTEM</TYPE>{more}</DISK>"
OTHERS = "<DISK><DISK_ID>0</DISK_ID><IMAGE_ID>1</IMAGE_ID><TM_MAD>semishared</TM_MAD><TYPE>FILE</TYPE></DISK>"
OTHERS += "<DISK><DISK_ID>2</DISK_ID><IMAGE_ID>6</IMAGE_ID><TM_MAD>ssh</TM_MAD><TYPE>FILESYSTEM</TYPE></DISK>"
OTHERS += "<DISK><DISK_ID>3</DISK_ID><TM_MAD>semishared</TM_MAD><TYPE>FILESYSTEM</TYPE></DISK>"


def template(kind: str, number: int, attributes: dict[str, str], more: str = "") -> ElementTree.Element:
    rows = "".join(f"<{name}>{value}</{name}>" for name, value in attributes.items())
    of = f"<DATASTORE_ID>110</DATASTORE_ID><SOURCE>{SOURCE}</SOURCE>" if kind == "IMAGE" else ""
    return ElementTree.fromstring(f"<{kind}><ID>{number}</ID>{of}<TEMPLATE>{rows}</TEMPLATE>{more}</{kind}>")


def _answer(step: Any) -> Any:
    known = {"TakeKeys": share_steps.TakenKeys(0), "RemoveVm": RemovedVm([])}
    return known.get(type(step).__name__, ANSWER)


class Asked:
    """oned and a machine that gives keys; what they were asked."""

    def __init__(
        self,
        disks: str,
        store: dict[str, str],
        image: dict[str, str],
        answer: Callable[[Any], Any] = _answer,
        running: int = 2,
    ) -> None:
        state = f"<LCM_STATE>{running}</LCM_STATE>"
        self.vm = Vm(
            ElementTree.fromstring(f"<VM><ID>7</ID>{state}<TEMPLATE>{disks}</TEMPLATE>{HISTORY}</VM>")
        )
        self._known = {
            ("image", 5): Image(template("IMAGE", 5, image, "<REGTIME>70</REGTIME>")),
            ("datastore", 110): Datastore(template("DATASTORE", 110, store)),
        }
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
    found = drive(client_keys.handed(asked.vm, PLACE), asked.do)
    assert found.disks == (1,)
    assert asked.steps == [PREPARED, ("h1", share_steps.GiveKey(TREE, 5, SOURCE, 7, False, 3))]
    assert found.lines.decode().splitlines() == [
        "SEMISHARED_SHARE_1_TAG='data'",
        "SEMISHARED_SHARE_1_MONITORS='10.0.0.1:6789,[fd00::1]:6789'",
        "SEMISHARED_SHARE_1_FS='cephfs'",
        "SEMISHARED_SHARE_1_PATH='/volumes/one/share-5/0b1c'",
        "SEMISHARED_SHARE_1_USER='share-one-5-7-01234567'",
        "SEMISHARED_SHARE_1_KEY='AQBY0/pViX+wBBAAUpPs9swy7rey1qPhzmDVGQ=='",
        "SEMISHARED_SHARE_1_ACCESS='rw'",
        "SEMISHARED_SHARES='1'",
    ]


def test_the_datastore_says_it_where_the_image_does_not_and_a_read_only_disk_gets_a_key_that_reads() -> None:
    asked = Asked(SHARE.format(more="<READONLY>YES</READONLY>"), {**ON_CEPH, **CLIENT}, {})
    drive(client_keys.handed(asked.vm, PLACE), asked.do)
    assert asked.steps == [PREPARED, ("h1", share_steps.GiveKey(TREE, 5, SOURCE, 7, True, 3))]
    asked = Asked(SHARE.format(more=""), {**ON_CEPH, **CLIENT}, {"SEMISHARED_SHARE_ACCESS": "virtiofs"})
    # No share any more whose client it is: what was noted before has to go.
    assert (
        drive(client_keys.handed(asked.vm, PLACE), asked.do) == Clients(roots=((5, MARKER, 70, False),))
        and not asked.steps
    )


def test_of_a_share_that_its_host_gives_it_is_noted_which_one_that_is() -> None:
    asked = Asked(OTHERS + SHARE.format(more=""), {**ON_XFS, "SEMISHARED_STORE": MARKER}, {})
    assert drive(client_keys.handed(asked.vm, PLACE), asked.do).roots == ((5, MARKER, 70, False),)
    asked = Asked(SHARE.format(more=""), ON_XFS, {})
    assert drive(client_keys.handed(asked.vm, PLACE), asked.do) == Clients()


@pytest.mark.parametrize("reads", [{"READONLY": "yes"}, {"PERSISTENT_TYPE": "IMMUTABLE"}])
@pytest.mark.parametrize("disk", ["", "<READONLY>NO</READONLY>"])
def test_an_image_to_be_read_is_so_whatever_a_vm_says_of_its_disk(reads: dict[str, str], disk: str) -> None:
    """oned takes READONLY of the image only where DISK, which any user writes, has none."""
    asked = Asked(
        SHARE.format(more=disk), ON_CEPH, {**CLIENT, **reads}, lambda step: ANSWER._replace(access="rw")
    )
    lines = drive(client_keys.handed(asked.vm, PLACE), asked.do).lines.decode().splitlines()
    assert (
        asked.steps == [PREPARED, ("h1", share_steps.GiveKey(TREE, 5, SOURCE, 7, True, 3))]
        and "SEMISHARED_SHARE_1_ACCESS='ro'" in lines
    )
    for marker in ("", MARKER):
        asked = Asked(SHARE.format(more=disk), {**ON_XFS, "SEMISHARED_STORE": marker}, reads)
        assert drive(client_keys.handed(asked.vm, PLACE), asked.do).roots == ((5, marker, 70, True),)


@pytest.mark.parametrize("state", [3, 17, 25])
@pytest.mark.parametrize("reads", ["NO", "YES"])
def test_a_guest_that_runs_keeps_the_key_by_which_it_has_mounted(state: int, reads: str) -> None:
    """oned has the context made anew for a NIC, or another CONTEXT; keys to write and to read are two, and
    one shuts out the other.
    """
    asked = Asked(SHARE.format(more=""), ON_CEPH, {**CLIENT, "READONLY": reads}, running=state)
    found = drive(client_keys.handed(asked.vm, PLACE), asked.do)
    assert asked.steps == [PREPARED, ("h1", share_steps.ShowKey(TREE, 5, SOURCE, 7))] and found.disks == (1,)

    def none(step: Any) -> Any:
        if isinstance(step, share_steps.ShowKey):
            raise MissingImage("VM 7 has no key")

    asked = Asked(SHARE.format(more=""), ON_CEPH, CLIENT, none, running=state)
    assert drive(client_keys.handed(asked.vm, PLACE), asked.do) == Clients(), (
        "one that was taken back is had again at the next boot"
    )


@pytest.mark.parametrize(("second", "readonly"), [("", False), ("<READONLY>YES</READONLY>", True)])
def test_a_share_that_is_two_disks_has_one_key_that_reads_if_both_do(second: str, readonly: bool) -> None:
    reads = SHARE.format(more="<READONLY>YES</READONLY>")
    other = SHARE.format(more=second).replace("<DISK_ID>1<", "<DISK_ID>4<").replace(">data<", ">again<")
    asked = Asked(
        reads + other,
        ON_CEPH,
        CLIENT,
        lambda step: ANSWER._replace(access="ro" if getattr(step, "readonly", False) else "rw"),
    )
    found = drive(client_keys.handed(asked.vm, PLACE), asked.do)
    assert asked.steps == [
        PREPARED,
        ("h1", share_steps.GiveKey(TREE, 5, SOURCE, 7, readonly, 3)),
    ] and found.disks == (
        1,
        4,
    )
    said = dict(line.partition("=")[::2] for line in found.lines.decode().splitlines())
    assert (said["SEMISHARED_SHARE_1_ACCESS"], said["SEMISHARED_SHARE_4_ACCESS"]) == (
        "'ro'",
        "'ro'" if readonly else "'rw'",
    )
    assert said["SEMISHARED_SHARE_1_TAG"] == "'data'" and said["SEMISHARED_SHARE_4_TAG"] == "'again'"


def test_a_vm_without_shares_asks_nobody_for_anything() -> None:
    asked = Asked(OTHERS, ON_CEPH, CLIENT)
    assert drive(client_keys.handed(asked.vm, PLACE), asked.do) == Clients() and not asked.steps


@pytest.mark.parametrize(
    ("store", "image", "disk", "said"),
    [
        (ON_XFS, CLIENT, "", "of image 5 is client: datastore 110 is on xfs"),
        ({**ON_XFS, **CLIENT}, {}, "", "of datastore 110 is client: datastore 110 is on xfs"),
        (ON_CEPH, {"SEMISHARED_SHARE_ACCESS": "nfs"}, "", "is 'nfs', not one of virtiofs, client"),
        (ON_CEPH, CLIENT, "<MOUNT_TAG>a'; reboot '</MOUNT_TAG>", "MOUNT_TAG of disk 1"),
    ],
)
def test_what_no_guest_can_be_a_client_of_is_refused(
    store: dict[str, str], image: dict[str, str], disk: str, said: str
) -> None:
    share = (
        SHARE.format(more="").replace("<MOUNT_TAG>data</MOUNT_TAG>", disk) if disk else SHARE.format(more="")
    )
    asked = Asked(share, store, image)
    with pytest.raises(BadAttribute) as caught:
        drive(client_keys.handed(asked.vm, PLACE), asked.do)
    assert said in caught.value.detail and not asked.steps


@pytest.mark.parametrize("name", share_steps.GivenKey._fields)
@pytest.mark.parametrize("value", ["a'b", "a b", "$(a)", "a\nb", ""])
def test_no_answer_ends_its_quotes_nor_is_a_key_in_what_refuses_it(name: str, value: str) -> None:
    with pytest.raises(BadRecord) as caught:
        client_keys.told(ANSWER._replace(**{name: value}))
    assert ANSWER.key not in caught.value.detail


def test_the_keys_of_a_vm_that_is_gone_are_taken_back_or_it_is_said_who_does_it_later() -> None:
    share = SHARE.format(more="")
    for taken in (0, 2):
        asked = Asked(share, ON_CEPH, {}, lambda _: share_steps.TakenKeys(taken))  # noqa: B023 - it is asked within this round
        drive(client_keys.withdrawn(asked.vm), asked.do)
        assert asked.steps == [TAKEN]
        # The MDS goes on serving who has mounted a directory below: how that is ended has to be said.
        assert len(asked.said) == bool(taken) and all("session evict" in text for text in asked.said)

    def away(_: Any) -> Any:
        raise CephUnavailable("no answer")

    asked = Asked(share, ON_CEPH, {}, away)
    drive(client_keys.withdrawn(asked.vm), asked.do)
    assert len(asked.said) == 1 and "`semishared gc`" in asked.said[0]
    for disks, store in ((share, ON_XFS), (OTHERS, ON_CEPH)):
        asked = Asked(disks, store, {})
        drive(client_keys.withdrawn(asked.vm), asked.do)
        assert not asked.steps


def test_gc_takes_the_keys_of_vms_that_oned_has_not() -> None:
    keys = [
        share_steps.HeldKey(*key[:4], key.user(TREE))
        for key in (Key(5), Key(5, 7), Key(5, 8), Key(5, 8, True), Key(5, 99))
    ]
    known = gc.Known({7: "h1"}, frozenset({(110, 5)}), frozenset(), newest_vm=8)
    gone, reading, newer = gc_stores.find_in_shares(
        gc_stores.Shares("h1", 110, TREE, (), tuple(keys), "a" * 32), known
    )
    assert (gone.path, gone.keep, gone.steps()) == (
        "/srv/shares/.semishared/.keys/5-8.json",
        "",
        [share_steps.TakeKeys(TREE, 5, 8)],
    )
    assert reading.path == "/srv/shares/.semishared/.keys/5-8-ro.json" and not reading.keep
    assert newer.path.endswith("/5-99.json") and "restored" in newer.keep


@pytest.mark.fault(30, "gc keeps a key whose note cannot be read, and says what takes it")
def test_gc_keeps_a_key_whose_note_cannot_be_read() -> None:
    rows = [share_steps.HeldKey(*key[:4], key.user(TREE)) for key in (Key(5, 8), Key(5, 8, True), Key(6, 8))]
    rows[1] = rows[1]._replace(wrong=Refusal("SS042", "5-8-ro.json on b0 is damaged"))
    known = gc.Known({}, frozenset({(110, 5)}), frozenset(), newest_vm=8)
    found = list(
        gc_stores.find_in_shares(gc_stores.Shares("b0", 110, TREE, (), tuple(rows), "a" * 32), known)
    )
    assert [item.keep for item in found[:2]] == [
        "5-8-ro.json on b0 is damaged: `semishared share credentials 5 --vm 8 --revoke` takes it all the same"
    ] * 2
    assert found[2].keep == ""


def test_who_has_a_key_is_told_by_names_that_say_it() -> None:
    every = (Key(5), Key(5, 7), Key(5, readonly=True), Key(5, 7, True))
    for key in every:
        assert share_names.key_of(key.note.rpartition("/")[2]) == key[:3]
    assert [
        share_names.key_of(name) for name in ("5-7-1.json", "5-7.json.new", ".staged-5.json.x", "a.json")
    ] == [None] * 4
    # Of who reads and who writes neither is ever made the other.
    assert [key.user(TREE) for key in every] == [
        "share-one-5-01234567",
        "share-one-5-7-01234567",
        "share-one-5-ro-01234567",
        "share-one-5-7-ro-01234567",
    ]


# -- the actions that give them and take them back
# ------------------------------------------------------------------------


class Front:
    """tm/context and tm/delete of VM 7, as far as the front-end goes; `fails` says which message a machine
    answers with an error.
    """

    def __init__(
        self,
        top: Path,
        monkeypatch: pytest.MonkeyPatch,
        disks: str,
        fails: Callable[[Any], SemisharedError | None],
    ) -> None:
        self.asked, self._fails = Asked(disks, ON_CEPH, CLIENT), fails
        self.context = top / "context.sh"
        self.context.write_text("ETH0_IP='10.0.0.1'\n")
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(Oned, "__init__", lambda _: None)
        monkeypatch.setattr(Oned, "vm", lambda _, number: self.asked.vm)
        monkeypatch.setattr(context_iso, "built", self._built)

    @contextmanager
    def _built(self, files: Any, more: bytes, datastores: str) -> Iterator[str]:
        yield str(self.context)

    def oned_is_silent(self, domain: str = "", seq: int = 0) -> None:
        """Let oned not answer; it has left the domain of the VM beside its context.sh."""

        def silent(_: Any, number: int) -> Vm:
            raise OnedUnavailable(f"one.vm.info {number}: no answer")

        self._monkeypatch.setattr(Oned, "vm", silent)
        if domain:
            (self.context.parent / f"deployment.{seq}").write_text(domain)

    def do(self, name: str) -> int:
        """Carry out an action; return which SEQ its messages carry."""
        argv = (
            [f"h2:{PLACE.path}", "7", "101"]
            if name == "delete"
            else [str(self.context), f"h2:{PLACE.path}/disk.4", "7", "101"]
        )
        action = Action(name, argv, Report(name))
        drive(transfer.PLANNED[name](action), self._answered)
        return action.seq

    def _answered(self, wanted: Exchange) -> Any:
        if isinstance(wanted, AskOned) and wanted.what == "vm":
            return Oned().vm(wanted.id)
        on = wanted.target if isinstance(wanted, Feed) else wanted
        if isinstance(on, On):
            error = next(filter(None, map(self._fails, on.steps)), None)
            if error:
                self.asked.steps += [(on.machine, step) for step in on.steps]
                raise error
        return self.asked.do(on)

    def names(self) -> list[str]:
        return [type(step).__name__ for _, step in self.asked.steps]


def only(name: str, error: SemisharedError | None) -> Callable[[Any], SemisharedError | None]:
    return lambda step: error if type(step).__name__ == name else None


@pytest.mark.parametrize(
    "error",
    [HostUnreachable("h2 does not answer"), NoSpace("no space left on h2"), LateAction("later"), None],
)
def test_keys_are_taken_back_whatever_became_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: SemisharedError | None
) -> None:
    front = Front(tmp_path, monkeypatch, SHARE.format(more=""), only("RemoveVm", error))
    with pytest.raises(type(error)) if error else nullcontext():
        front.do("delete")
    assert (
        front.names() == ["RemoveVm", "TakeKeys"] and front.asked.steps[-1] == TAKEN and not front.asked.said
    )


def test_a_silent_oned_keeps_no_vm_from_its_end_and_the_log_says_what_may_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(tmp_path, monkeypatch, SHARE.format(more=""), only("", None))
    front.oned_is_silent()
    assert front.do("delete") == -1 and front.names() == ["RemoveVm"]
    assert (
        len(front.asked.said) == 1
        and "VM 7" in front.asked.said[0]
        and "`semishared gc`" in front.asked.said[0]
    )
    front = Front(tmp_path, monkeypatch, OTHERS[: OTHERS.index("</DISK>") + 7], only("", None))
    front.do("delete")
    assert front.names() == ["RemoveVm"] and not front.asked.said


@pytest.mark.parametrize(
    "error", [VmGone("VM 7 was deleted on h2"), LateAction("VM 7 was deleted on h2 at SEQ 4")]
)
@pytest.mark.parametrize("at", ["NoteClients", "ReceiveFile"])
def test_a_context_that_came_too_late_leaves_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: SemisharedError, at: str
) -> None:
    front = Front(tmp_path, monkeypatch, SHARE.format(more=""), only(at, error))
    with pytest.raises(type(error)):
        front.do("context")
    names = front.names()
    assert (
        names[:2] == ["PrepareVm", "GiveKey"] and names[-1] == "TakeKeys" and front.asked.steps[-1] == TAKEN
    )


def test_a_context_that_fails_otherwise_keeps_the_key_of_the_vm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(
        tmp_path, monkeypatch, SHARE.format(more=""), only("ReceiveFile", NoSpace("no space left on h2"))
    )
    with pytest.raises(NoSpace):
        front.do("context")
    assert "TakeKeys" not in front.names()


WITH_SHARE = (
    "<domain><devices><filesystem type='mount'><source "
    "dir='/srv/shares/share-5'/></filesystem></devices></domain>"
)


def test_a_vm_with_shares_boots_only_where_oned_says_which_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(tmp_path, monkeypatch, SHARE.format(more=""), only("", None))
    assert front.do("context") == 3 and "NoteClients" in front.names()
    front = Front(tmp_path, monkeypatch, SHARE.format(more=""), only("", None))
    front.oned_is_silent("<domain/>", 9)
    front.oned_is_silent(WITH_SHARE, 10)
    with pytest.raises(OnedUnavailable):
        front.do("context")
    assert not front.names()


@pytest.mark.parametrize("domain", ["", "<domain><devices><disk/></devices></domain>"])
def test_a_vm_without_shares_boots_though_oned_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, domain: str
) -> None:
    front = Front(tmp_path, monkeypatch, "", only("", None))
    front.oned_is_silent(domain)
    assert front.do("context") == -1
    assert front.names() == ["PrepareVm", "ReplaceLostBases", "ReceiveFile"]
