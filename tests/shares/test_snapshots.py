# SPDX-License-Identifier: Apache-2.0
"""What shares were, on btrfs; on CephFS: test_cephfs.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from semishared.errors import BadArguments, DataInTheWay, MissingImage
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, Tree
from shares.cloud import Killed, MiB, Shares, fill, on
from shares.conftest import run
from shares.page import PAGES
from tools.oned_site import ActionSite

MARKER = "0123456789abcdef" * 2


@pytest.fixture()
def root(btrfs: Path, tmp_path: Path) -> Path:
    root = btrfs / tmp_path.name
    root.mkdir()
    return root


@pytest.fixture()
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up:
        yield up


@pytest.fixture()
def shares(site: ActionSite, root: Path) -> Shares:
    return Shares(site, "btrfs", root)


def test_a_snapshot_keeps_what_was_counts_nowhere_and_goes_with_its_share(shares: Shares) -> None:
    image = shares.image("scratch", "new:32M")
    cli, tree = shares.site.cli, shares.tree(image)
    (tree / "file").write_bytes(b"first" * 1000)
    fill(tree / "big", 8)
    said = cli("share", "snapshot", "create", str(image), "one").stdout
    kept = shares.root / f"snapshot-{image}-one"
    assert said == f"snapshot one of the share of image {image}: {kept}\n"
    (tree / "file").write_bytes(b"second")
    (tree / "big").unlink()
    assert (kept / "file").read_bytes() == b"first" * 1000
    with pytest.raises(OSError, match="Read-only"):
        (kept / "new").write_text("")
    # All of its size is the share's again, though what it had is kept.
    size, full = fill(tree / "more")
    assert full == "Disk quota exceeded" and size >= 30 * MiB
    run("sync", "-f", shares.root)
    (row,) = json.loads(cli("share", "snapshot", "list", str(image), "--json").stdout)["snapshots"]
    assert row["name"] == "one" and abs(time.time() - row["made"]) < 300 and 8 * MiB <= row["alone"] < 9 * MiB
    assert (row["path"], row["in_guest"]) == (str(kept), "")
    assert "8.0 MiB" in cli("share", "snapshot", "list", str(image)).stdout
    assert shares.listed()[image]["snapshots"] == ["one"]
    assert "SS043" in cli("share", "snapshot", "create", str(image), "one", code=2).stderr
    cli("share", "snapshot", "create", str(image), "two")
    cli("share", "snapshot", "remove", str(image), "one")
    assert shares.listed()[image]["snapshots"] == ["two"] and not kept.exists()
    assert "SS020" in cli("share", "snapshot", "remove", str(image), "one", code=2).stderr
    shares.oned.image_delete(image)
    assert os.listdir(shares.root) == [".semishared"]


def test_what_is_wanted_back_comes_as_the_page_says_and_no_link_of_a_guest_leads_anywhere(
    shares: Shares, tmp_path: Path
) -> None:
    page = PAGES
    assert not [line for line in page.splitlines() if "cp -a" in line and "/share-42" in line]
    (block,) = re.findall(r"(?m)^    oneimage disable 43 .*\n((?:    .*\n)+?)    oneimage enable 43\n", page)
    image, new = (shares.image(name, "new:32M") for name in ("scratch", "new"))
    tree, back, victim = shares.tree(image), shares.tree(new), tmp_path / "victim"
    victim.write_text("the host's")
    (tree / "below").mkdir()
    (tree / "below/file").write_text("what was")
    (tree / "link").symlink_to(victim)
    os.chown(tree / "below/file", 101000, 101000)
    shares.site.cli("share", "snapshot", "create", str(image), "one")
    (tree / "below/file").unlink()
    (tree / "below/file").symlink_to(victim)
    words = (
        block.replace("/srv/shares", str(shares.root))
        .replace("-42-NAME", f"-{image}-one")
        .replace("share-43", back.name)
    )
    run("sh", "-euc", words)
    found = back / "below/file"
    assert (found.read_text(), found.stat().st_uid, back.stat().st_uid) == ("what was", 101000, 100000)
    assert victim.read_text() == "the host's" and (back / "link").is_symlink()
    # Nor into one that somebody has had.
    (back / "below/file").unlink()
    (back / "below/file").symlink_to(victim)
    with pytest.raises(subprocess.CalledProcessError):
        run("sh", "-euc", words)
    assert victim.read_text() == "the host's"
    for one in (image, new):
        shares.oned.image_delete(one)


def test_a_directory_that_is_called_like_a_snapshot_is_none_and_in_nobodys_way(shares: Shares) -> None:
    image = shares.image("scratch", "new:16M")
    cli, theirs = shares.site.cli, shares.root / f"snapshot-{image}-theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    cli("share", "snapshot", "create", str(image), "one")
    assert "SS043" in cli("share", "snapshot", "create", str(image), "theirs", code=2).stderr
    assert [
        row["name"]
        for row in json.loads(cli("share", "snapshot", "list", str(image), "--json").stdout)["snapshots"]
    ] == ["one"]
    assert "SS020" in cli("share", "snapshot", "remove", str(image), "theirs", code=2).stderr
    assert shares.listed()[image]["snapshots"] == ["one"]
    shares.oned.image_delete(image)
    assert sorted(os.listdir(shares.root)) == [".semishared", theirs.name] and os.listdir(theirs) == ["file"]


NAMES = ("", ".", "..", "../share-8", "a/b", "-r", "_x", "a b", "a\n", "ä", "x" * 65, "$(reboot)")


def test_what_a_snapshot_may_not_be_called(shares: Shares) -> None:
    image = shares.image("scratch", "new:16M")
    marker, cloud = (
        str(shares.oned.datastores[110].template[f"SEMISHARED_{name}"]) for name in ("STORE", "CLOUD")
    )
    tree = Tree("btrfs", str(shares.root), marker, cloud=cloud)
    for name in NAMES:
        for step in (
            share_steps.MakeSnapshot(tree, image, name),
            share_steps.RemoveSnapshot(tree, image, name),
        ):
            with pytest.raises(BadArguments, match="letters, digits"):
                on(step)
    with pytest.raises(MissingImage):
        on(share_steps.MakeSnapshot(tree, 999, "one"))
    assert sorted(os.listdir(shares.root)) == [".semishared", f"share-{image}"]
    for words in (["make", "1", "x"], ["create", "1"], []):
        said = "create takes IMAGE and NAME" if len(words) == 2 else "one of create, list, remove"
        assert said in shares.site.cli("share", "snapshot", *words, code=2).stderr
    shares.oned.image_delete(image)


def test_a_file_system_without_snapshots_says_so(site: ActionSite, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    shares = Shares(site, "plain", tmp_path / "plain", SEMISHARED_FS_QUOTA="no")
    image = shares.image("scratch", "new:16M")
    said = shares.site.cli("share", "snapshot", "create", str(image), "one", code=2).stderr
    assert "SS003" in said and "shares on plain have no snapshots" in said
    assert shares.site.cli("share", "snapshot", "list", str(image)).stdout.split()[0] == "NAME"
    shares.oned.image_delete(image)


def test_the_share_of_another_is_not_made_where_a_snapshot_has_outlived_its_own(root: Path) -> None:
    tree = Tree("btrfs", str(root), MARKER)
    on(share_steps.MarkRoot(tree, MARKER))
    on(share_steps.MakeShare(tree, Share(7, 0, 1, 8 * MiB)), share_steps.MakeSnapshot(tree, 7, "old"))
    run("btrfs", "subvolume", "delete", root / "share-7")
    (root / ".semishared/.shares/7.json").unlink()
    with pytest.raises(DataInTheWay, match="snapshot-7-old .* has no record"):
        on(share_steps.MakeShare(tree, Share(7, 5, 2, 8 * MiB)))
    run("btrfs", "subvolume", "delete", root / "snapshot-7-old")


def test_killed_at_every_point_a_snapshot_is_there_or_not_and_none_outlives_its_share(
    root: Path, tmp_path: Path
) -> None:
    tree = Tree("btrfs", str(root), MARKER)
    on(share_steps.MarkRoot(tree, MARKER))
    killed = Killed(tmp_path)
    steps = (
        share_steps.MakeSnapshot(tree, 7, "two"),
        share_steps.RemoveSnapshot(tree, 7, "one"),
        share_steps.RemoveShare(tree, 7, f"{root}/share-7"),
    )
    points = []
    for step in steps:
        for at in range(1, 100):
            on(
                share_steps.MakeShare(tree, Share(7, 0, 1, 8 * MiB)),
                share_steps.MakeSnapshot(tree, 7, "one"),
                share_steps.MakeSnapshot(tree, 7, "other"),
            )
            (root / "share-7/file").write_text("x")
            code = killed.run(step, at)
            if step is steps[2]:
                on(step)
            else:
                names = {row["name"] for row in on(share_steps.ListSnapshots(tree, 7))[0]["snapshots"]}
                wanted = {"one", "other", "two"} if step is steps[0] else {"other"}
                assert (
                    names in (wanted, {"one", "other"})
                    and sorted(names) == on(share_steps.ListShares(tree))[0]["shares"][0]["snapshots"]
                )
                on(share_steps.RemoveShare(tree, 7, ""))
            assert os.listdir(root) == [".semishared"] and on(share_steps.ListShares(tree)) == [
                {"shares": []}
            ]
            if not code:
                points.append(at - 1)
                break
    assert points[0] >= 1 and points[1] >= 1 and points[2] >= 6
