# SPDX-License-Identifier: Apache-2.0
"""What the machine that gives keys asks the cluster's manager for, and when; that Ceph does it:
tests/shares/test_cephfs_clients.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from semishared.errors import CephRefused, MissingImage, ShareRefused
from semishared.model.share import names as share_names
from semishared.model.share.share import Share, Tree
from semishared.model.share.steps import TakenKeys
from semishared.share import ceph_clients, keys, life
from semishared.share.ceph_clients import Key
from semishared.tools import files

MARKER = "0123456789abcdef" * 2


@pytest.fixture()
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    (tmp_path / share_names.SHARES).mkdir(parents=True)
    # What is mounted there is no matter of these.
    monkeypatch.setattr(life, "checked", lambda tree: None)
    found = Tree("cephfs", str(tmp_path), MARKER, "cephfs/one", "shares")
    record = {
        "version": life.VERSION,
        "share": Share(5, 2, 1, 1 << 30).to_data(),
        "source": "/srv/shares/share-5/0b1c",
    }
    files.write_json(f"{tmp_path}/{share_names.record(5)}", record)
    return found


@pytest.fixture()
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return what the manager is asked for: verb and user."""
    verbs: list[tuple[str, str]] = []

    def ask(_: Any, verb: str, image: int, **words: object) -> str:
        if verb == "info":
            return '{"path": "/volumes/one/share-5/0b1c"}'
        verbs.append((verb, str(words["auth_id"])))
        return "AQBYpretended=="

    monkeypatch.setattr(ceph_clients.Clients, "_ask", ask)
    monkeypatch.setattr(ceph_clients.Clients, "_monitors", lambda _: "10.0.0.1:6789")
    return verbs


SOURCE = "/srv/shares/share-5/0b1c"


def test_an_image_of_the_same_number_and_another_source_gets_no_key(
    tree: Tree, asked: list[tuple[str, str]]
) -> None:
    for source in ("/srv/shares/share-5/ffff", "", "/srv/theirs/data"):
        with pytest.raises(
            ShareRefused, match="image 5 is .*, but its record .* says /srv/shares/share-5/0b1c"
        ):
            keys.give(tree, 5, source, 7, False)
    assert not asked and ceph_clients.listed(tree.root) == []
    assert keys.give(tree, 5, SOURCE, 7, False).user == "share-one-5-7-01234567"


def test_what_an_operator_has_stays_as_it_is_when_another_is_asked_for(
    tree: Tree, asked: list[tuple[str, str]]
) -> None:
    reads, writes = keys.give(tree, 5, SOURCE, -1, True), keys.give(tree, 5, SOURCE, -1, False)
    assert (reads.access, writes.access) == ("ro", "rw") and reads.user != writes.user
    assert asked == [("authorize", reads.user), ("authorize", writes.user)]
    assert set(ceph_clients.listed(tree.root)) == {Key(5, -1, True), Key(5)}
    assert keys.take(tree, 5, -1) == TakenKeys(2) and ceph_clients.listed(tree.root) == []


def test_what_a_user_of_ceph_is_not_let_ask_for_is_said(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(_: Any, verb: str, image: int, **words: object) -> str:
        asked.append((verb, image, words["auth_id"]))
        raise (CephRefused if verb == "evict" else MissingImage)("said")

    monkeypatch.setattr(ceph_clients.Clients, "_ask", ask)
    assert ceph_clients.of(tree).lacking_for_keys() == ["fs subvolume evict"]
    # Of a share that nobody can have, and of a user of ours.
    assert [verb for verb, _, _ in asked] == ["authorize", "deauthorize", "evict"]
    assert all(share_names.root_and_image(f"/srv/{share_names.tree(image)}")[1] < 0 for _, image, _ in asked)
    assert all(str(user).startswith("share-one-") for _, _, user in asked)


def test_a_vm_whose_disk_reads_by_now_has_no_key_that_writes(
    tree: Tree, asked: list[tuple[str, str]]
) -> None:
    writes = keys.give(tree, 5, SOURCE, 7, False).user
    keys.give(tree, 5, SOURCE, -1, False)
    del asked[:]
    reads = keys.give(tree, 5, SOURCE, 7, True).user
    assert asked == [("deauthorize", writes), ("evict", writes), ("authorize", reads)]
    assert set(ceph_clients.listed(tree.root)) == {Key(5), Key(5, 7, True)}
    assert len(os.listdir(f"{tree.root}/{share_names.KEYS}")) == 2
