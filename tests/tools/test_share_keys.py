# SPDX-License-Identifier: Apache-2.0
"""Whose keys for shares are given and taken, by the notes in the root: what the manager of a real cluster
does is in tests/shares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from semishared.errors import BadRecord, CephUnavailable, LateAction, StoreAbsent, ToolTimeout
from semishared.model.share import names as share_names
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, Tree
from semishared.share import ceph_clients, cephfs, keys, life
from semishared.share.ceph_clients import Key
from semishared.store.dir import marker
from semishared.tools import locks

MARKER = "0123456789abcdef" * 2


class Root:
    """A root of shares 5 and 6 that are ready, and what the manager is asked; it does not answer for the
    images in `silent`.
    """

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tree = Tree("cephfs", str(top), MARKER, "cephfs/one", "shares")
        self.asked: list[tuple[str, int]] = []
        self.silent: set[int] = set()
        marker.write(str(top), MARKER)
        for image in (5, 6):
            path = top / share_names.record(image)
            path.parent.mkdir(exist_ok=True)
            life._write(self.tree, Share(image, 1, 1, 1 << 30), f"{top}/share-{image}")
        monkeypatch.setattr(cephfs.CephFs, "check", lambda _: None)
        monkeypatch.setattr(cephfs.CephFs, "_ask", lambda _, verb, image, **words: self._ask(verb, image))
        monkeypatch.setattr(cephfs.CephFs, "_info", lambda _, image: {"path": f"/volumes/one/share-{image}"})
        monkeypatch.setattr(ceph_clients.Clients, "_monitors", lambda _: "10.0.0.1:6789")
        monkeypatch.setattr(keys, "LIMIT_S", 0.05)

    def _ask(self, verb: str, image: int) -> str:
        if image in self.silent:
            raise CephUnavailable(f"{verb} of {image}: no answer")
        self.asked.append((verb, image))
        return "AQBY0/pViX+wBBAAUpPs9swy7rey1qPhzmDVGQ=="

    def give(self, image: int, vm: int, seq: int = -1, readonly: bool = False) -> None:
        given = keys.give(self.tree, image, f"{self.tree.root}/share-{image}", vm, readonly, seq)
        assert given.access == ("ro" if readonly else "rw")

    def notes(self) -> list[Key]:
        return ceph_clients.listed(self.tree.root)

    def lock(self, image: int) -> Any:
        return locks.exclusive(f"{self.tree.root}/{share_names.lock(image)}")


@pytest.fixture()
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    return Root(tmp_path, monkeypatch)


def test_the_key_of_a_vm_that_runs_again_is_not_taken_by_an_action_of_before(root: Root) -> None:
    root.give(5, 7, 3)
    root.give(5, 7, 4)
    root.asked.clear()
    assert keys.take(root.tree, -1, 7, 3) == share_steps.TakenKeys(0) and not root.asked
    assert root.notes() == [Key(5, 7, False, 4)]
    assert (
        keys.take(root.tree, -1, 7, 4) == share_steps.TakenKeys(1)
        and root.asked == [("deauthorize", 5), ("evict", 5)]
        and not root.notes()
    )


@pytest.mark.parametrize("seq", [-1, 3, 4])
def test_a_key_of_no_later_time_is_taken(root: Root, seq: int) -> None:
    root.give(5, 7, 3)
    assert keys.take(root.tree, -1, 7, seq) == share_steps.TakenKeys(1) and not root.notes()


def test_a_note_of_a_version_that_knew_no_seq_is_anybodys(root: Root) -> None:
    root.give(5, 7, 3)
    path = Path(root.tree.root, share_names.key(5, 7, False))
    path.write_text('{"version": 1}')
    assert root.notes() == [Key(5, 7, False, -1)]
    assert keys.take(root.tree, -1, 7, 0) == share_steps.TakenKeys(1)


def test_a_boot_of_before_is_given_no_key_and_changes_nothing(root: Root) -> None:
    root.give(5, 7, 4)
    root.asked.clear()
    with pytest.raises(LateAction) as caught:
        root.give(5, 7, 3, readonly=True)
    assert "SEQ 4" in caught.value.detail and "/.keys/5-7.json" in caught.value.detail
    assert not root.asked and root.notes() == [Key(5, 7, False, 4)]


def test_an_operator_who_looks_at_a_key_leaves_its_seq(root: Root) -> None:
    root.give(5, 7, 4)
    root.give(5, 7)
    assert root.notes() == [Key(5, 7, False, 4)]


def test_what_another_action_has_taken_meanwhile_is_not_taken_twice(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.give(5, 7, 3)
    found = root.notes()
    monkeypatch.setattr(ceph_clients, "listed", lambda _: found)
    assert keys.take(root.tree, -1, 7, 3) == share_steps.TakenKeys(1)
    root.asked.clear()
    assert keys.take(root.tree, -1, 7, 3) == share_steps.TakenKeys(0) and not root.asked


def test_all_keys_are_tried_and_the_first_error_is_told(root: Root) -> None:
    root.give(5, 7, 3)
    root.give(6, 7, 3)
    root.silent = {5}
    root.asked.clear()
    with pytest.raises(CephUnavailable, match="deauthorize of 5"):
        keys.take(root.tree, -1, 7, 3)
    assert root.asked == [("deauthorize", 6), ("evict", 6)] and [key.image for key in root.notes()] == [5]


def test_a_share_that_is_held_is_waited_for_a_short_time_and_keeps_no_other(root: Root) -> None:
    root.give(5, 7, 3)
    root.give(6, 7, 3)
    root.asked.clear()
    with root.lock(5):
        with pytest.raises(ToolTimeout):
            keys.take(root.tree, -1, 7, 3)
        with pytest.raises(ToolTimeout):
            root.give(5, 8, 1)
        # Nor who has none.
        assert keys.take(root.tree, -1, 9, 3) == share_steps.TakenKeys(0)
    assert root.asked == [("deauthorize", 6), ("evict", 6)] and root.notes() == [Key(5, 7, False, 3)]


def test_notes_that_cannot_be_read_are_not_taken_for_none(root: Root) -> None:
    root.give(5, 7, 3)
    Path(marker.path_in(root.tree.root)).unlink()
    with pytest.raises(StoreAbsent):
        keys.take(root.tree, -1, 7, 3)


@pytest.mark.fault(
    30, "a key whose note cannot be read is named, hides no other one, and is taken by nobody but who says so"
)
@pytest.mark.parametrize("text", ["", "\0\0", '{"version": 1, "seq": "3"}'])
def test_a_note_that_cannot_be_read_hides_no_other(root: Root, text: str) -> None:
    root.give(5, 7, 3)
    root.give(5, 8, 3)
    root.give(6, 7, 3)
    path = Path(root.tree.root, share_names.key(5, 7, False))
    path.write_text(text)
    wrong = {(row.image, row.vm): row.wrong for row in keys.listed(root.tree).keys}
    said = wrong.pop((5, 7))
    assert wrong == {(5, 8): None, (6, 7): None}
    assert said and said.id == BadRecord.id and str(path) in said.detail
    for remove in (lambda: ceph_clients.of(root.tree).take_all(5), lambda: keys.take(root.tree, 5, 7, 3)):
        root.asked.clear()
        with pytest.raises(BadRecord, match=str(path)):
            remove()
        assert not root.asked and path.exists()
    with pytest.raises(BadRecord, match=str(path)):
        keys.take(root.tree, -1, 7, 3)
    assert [(key.image, key.vm) for key in root.notes()] == [(5, 7), (5, 8)]
    with pytest.raises(BadRecord, match=str(path)):
        keys.shown(root.tree, 5, f"{root.tree.root}/share-5", 7)
    assert keys.shown(root.tree, 5, f"{root.tree.root}/share-5", 8).access == "rw"
    assert keys.take(root.tree, 5, 7) == share_steps.TakenKeys(1) and [key.vm for key in root.notes()] == [8]
