# SPDX-License-Identifier: Apache-2.0
"""The record of a share on a plain directory, in this process: removed durably, and what is damaged removes
nothing of others.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semishared.errors import BadRecord
from semishared.model.share import names as share_names
from semishared.model.share.share import Share, Tree
from semishared.share import life
from semishared.store.dir import marker
from tools.unreadable import eio

ID = "0123456789abcdef" * 2
MiB = 1 << 20


@pytest.fixture()
def tree(tmp_path: Path) -> Tree:
    root = tmp_path / "shares"
    root.mkdir()
    marker.write(str(root), ID)
    tree = Tree("plain", str(root), ID)
    for number in (7, 8):
        life.make(tree, Share(number, 3, 1, 16 * MiB))
        Path(root, f"share-{number}/file").write_text("theirs")
    return tree


@pytest.mark.fault(49, "the record of a share that was removed is gone after a power cut too")
def test_the_removal_of_a_record_is_durable(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = f"{tree.root}/{share_names.record(7)}", list[str]()
    real = os.fsync

    def fsync(fd: int) -> None:
        real(fd)
        if not os.path.exists(path):
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", fsync)
    life.remove(tree, 7, f"{tree.root}/share-7")
    assert not os.path.exists(path) and os.path.dirname(path) in synced


@pytest.mark.fault(
    30, "a share whose record cannot be read is not removed for who knows whose it is, and hides no other"
)
@pytest.mark.parametrize("damage", ["zeroed", "cut", "a directory", "EIO"])
def test_a_share_whose_record_cannot_be_read_stays(tree: Tree, damage: str) -> None:
    path = Path(f"{tree.root}/{share_names.record(7)}")
    text = path.read_bytes()

    def refused() -> None:
        with pytest.raises(BadRecord, match=str(path)):
            life.remove(tree, 7, f"{tree.root}/share-7")
        rows = life.listed(tree).shares
        assert [(row.image, bool(row.wrong)) for row in rows] == [(7, True), (8, False)]

    if damage == "EIO":
        with eio(path):
            refused()
    else:
        path.unlink()
        if damage == "a directory":
            path.mkdir()
        else:
            path.write_bytes(bytes(len(text)) if damage == "zeroed" else text[: len(text) // 2])
        refused()
    assert (Path(tree.root) / "share-7/file").read_text() == "theirs"
