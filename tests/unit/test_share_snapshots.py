# SPDX-License-Identifier: Apache-2.0
"""Snapshots of shares over a file system that fails for some; those of real ones:
tests/shares/test_snapshots.py, test_cephfs.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from semishared.cli import share
from semishared.errors import DataInTheWay, MissingImage, ToolFailed
from semishared.model.share import names as share_names
from semishared.model.share.share import Share, Tree
from semishared.model.share.steps import ShareSnapshot
from semishared.share import btrfs, life
from semishared.share.btrfs import Btrfs
from semishared.share.plain import Plain
from semishared.tools import files

MARKER = "0123456789abcdef" * 2


class Some(Plain):
    """One that has snapshots: `names`, of which nothing can be found out about `bad`, and `gone` is removed
    while it is asked about.
    """

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self.names = ["bad", "good", "gone"]

    def snapshot(self, image: int, name: str) -> None:
        self.names.append(name)

    def snapshot_names(self, image: int) -> list[str]:
        return sorted(self.names)

    def known(self, image: int, name: str) -> ShareSnapshot:
        if name == "bad":
            raise ToolFailed("btrfs subvolume show: not understood")
        if name == "gone":
            self.names.remove(name)
            raise MissingImage("it is not there")
        return ShareSnapshot(name, 1000, 0, f"/srv/{name}", "")


@pytest.fixture()
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    (tmp_path / share_names.SHARES).mkdir(parents=True)
    found = Tree("plain", str(tmp_path), MARKER)
    some = Some(found)
    monkeypatch.setattr(life, "checked", lambda tree: some)
    files.write_json(
        f"{tmp_path}/{share_names.record(5)}",
        {
            "version": life.VERSION,
            "share": Share(5, 2, 1, 1 << 30).to_data(),
            "source": f"{tmp_path}/share-5",
        },
    )
    return found


def test_one_that_is_broken_hides_no_other(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    rows = life.list_snapshots(tree, 5).snapshots
    assert [(row.name, row.made, bool(row.wrong)) for row in rows] == [
        ("bad", -1, True),
        ("good", 1000, False),
    ]
    share.show_snapshots(rows)
    _, bad, good = capsys.readouterr().out.splitlines()
    assert "not understood" in bad and "SS031" in bad and "/srv/good" in good


def test_nor_does_it_make_a_new_one_fail(tree: Tree) -> None:
    assert life.make_snapshot(tree, 5, "new").name == "new"


def test_a_plain_directory_is_no_snapshot_of_btrfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(btrfs, "_shown", lambda _: "")
    fs = Btrfs(Tree("btrfs", str(tmp_path), MARKER))
    (tmp_path / share_names.snapshot(5, "x")).mkdir()
    (tmp_path / share_names.snapshot(5, "y")).write_text("")
    assert fs.snapshot_names(5) == [] and fs.there(5) == ""
    for name in ("x", "y"):
        with pytest.raises(DataInTheWay):
            fs.snapshot(5, name)
