# SPDX-License-Identifier: Apache-2.0
"""Shares on btrfs, and on a directory that nothing holds to a size: the executables, oned simulated as its
source has it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.oned import ActionFailed
from lab.oned.drivers import Refused
from lab.oned.states import Img
from semishared.errors import BadRecord, DataInTheWay, NoSpace
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, Tree, first_uid
from semishared.share import owners
from shares.cloud import SHARES, Killed, MiB, Shares, fill, on, template
from shares.conftest import make_btrfs, run
from tools.oned_site import ActionSite

MARKER = "0123456789abcdef" * 2


@pytest.fixture()
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up:
        yield up


@pytest.fixture()
def root(btrfs: Path, tmp_path: Path) -> Path:
    root = btrfs / tmp_path.name
    root.mkdir()
    return root


@pytest.fixture()
def shares(site: ActionSite, root: Path) -> Shares:
    return Shares(site, "btrfs", root)


def test_an_image_is_the_share_and_oned_counts_it(shares: Shares) -> None:
    image = shares.image("scratch", "new:32M")
    found, tree = shares.oned.image(image), shares.tree(image)
    assert (found.size, found.format, found.state, tree) == (
        32,
        "dir",
        Img.READY,
        shares.root / f"share-{image}",
    )
    status = tree.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (100000, 100000, 0o755)
    assert [call.action for call in shares.oned.calls if call.kind == "datastore"][-3:] == [
        "stat",
        "cp",
        "monitor",
    ]
    assert shares.oned.datastore(SHARES).total_mb == 512
    shares.oned.image_delete(image)
    assert not tree.exists() and not shares.listed() and os.listdir(shares.root) == [".semishared"]


def test_a_full_share_gets_an_error_and_its_neighbour_notices_nothing(shares: Shares) -> None:
    mine, other = shares.image("mine", "new:32M"), shares.image("other", "new:64M")
    size, said = fill(shares.tree(mine) / "file")
    assert said == "Disk quota exceeded" and 30 * MiB <= size <= 32 * MiB
    assert fill(shares.tree(other) / "file", 48) == (48 * MiB, "")
    run("sync", "-f", shares.root)
    rows = shares.listed()
    assert 31 * MiB < rows[mine]["used"] <= 32 * MiB and 48 * MiB <= rows[other]["used"] <= 49 * MiB
    assert "64.0 MiB" in shares.site.cli("share", "usage", str(other)).stdout
    shares.site.cli("share", "resize", str(mine), "48M")
    assert shares.listed()[mine]["size"] == 48 * MiB and fill(shares.tree(mine) / "more", 12) == (
        12 * MiB,
        "",
    )
    said = shares.site.cli("share", "resize", str(mine), "8M", code=2).stderr
    assert "cannot be held to 8.0 MiB" in said
    for image in (mine, other):
        shares.oned.image_delete(image)


def test_what_is_refused_says_why_and_leaves_nothing(shares: Shares, tmp_path: Path) -> None:
    before = sorted(shares.root.rglob("*"))
    for path, error, word in (
        ("new:10", "SS002", "with M, G or T"),
        ("new:0G", "SS002", "'0G'"),
        ("new:10G;reboot", "SS002", "reboot"),
        ("new:10G,stripes=4", "SS002", "stripes=4"),
        ("new:99999999T", "SS002", "at most"),
        ("10G", "SS003", "new:SIZE"),
        ("/etc", "SS022", "SAFE_DIRS"),
        ("relative/x", "SS003", "absolute"),
        (f"{tmp_path}/../etc", "SS001", "plain"),
    ):
        with pytest.raises(ActionFailed, match=word) as caught:
            shares.image("bad", path)
        assert str(caught.value).startswith(f"{error} "), path
    with pytest.raises(ActionFailed, match="TYPE of image .* has to be FILESYSTEM"):
        shares.oned.image_create(SHARES, "disk", path="new:10M")
    with pytest.raises(ActionFailed, match="holds no disks"):
        shares.oned.image_create(SHARES, "disk", size=10, type="DATABLOCK")
    with pytest.raises(ActionFailed, match="holds disks"):
        shares.oned.image_create(100, "share", path="new:10M", type="FILESYSTEM")
    assert sorted(shares.root.rglob("*")) == before


def test_oned_before_7_4_counts_nothing_and_is_refused(shares: Shares) -> None:
    shares.oned.settings = dataclasses.replace(shares.oned.settings, version="7.2.0")
    with pytest.raises(ActionFailed, match="before 7.4 OpenNebula asks nobody for the size") as caught:
        shares.image("scratch", "new:32M")
    assert "SS003" in str(caught.value) and not shares.listed()


def test_oned_clones_no_share_and_asks_nothing_without_a_path(shares: Shares) -> None:
    image = shares.image("scratch", "new:16M")
    with pytest.raises(Refused, match="cannot be cloned"):
        shares.oned.image_clone(image, "other")
    with pytest.raises(Refused, match="Missing PATH"):
        shares.image("none", "")
    with pytest.raises(ActionFailed, match="none is cloned"):
        shares.oned.image_clone(shares.site.image(), "disk", SHARES)
    shares.oned.image_delete(image)


@pytest.fixture()
def allowed() -> Iterator[Path]:
    """Return a directory on the way to which all may pass; that of tmp_path's is root's alone."""
    top = Path(tempfile.mkdtemp())
    try:
        top.chmod(0o711)
        (top / "allowed").mkdir()
        yield top / "allowed"
    finally:
        shutil.rmtree(top)


def test_a_directory_that_is_there_is_registered_below_safe_dirs_only_and_stays(
    shares: Shares, allowed: Path
) -> None:
    shares.oned.datastore_update(SHARES, f'SAFE_DIRS="{allowed} {shares.root}"')
    theirs, other = allowed / "theirs", shares.image("other", "new:16M")
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    before = theirs.stat()
    (allowed / "link").symlink_to("/etc")
    (allowed / "alias").symlink_to(theirs)
    image = shares.image("theirs", str(allowed / "alias"))
    assert (shares.tree(image), shares.oned.image(image).size) == (shares.root / f"share-{image}", 0)
    # What a daemon that is not ours would give.
    assert not os.listdir(shares.tree(image)) and shares.tree(image).stat().st_uid == 0
    row = shares.listed()[image]
    assert (row["directory"], row["used"], row["state"]) == (str(theirs), -1, "")
    assert f"ok, is {theirs}" in shares.site.cli("share", "list").stdout
    for words in (
        ("usage", str(image)),
        ("resize", str(image), "32M"),
        ("snapshot", "create", str(image), "x"),
    ):
        assert "SS003" in shares.site.cli("share", *words, code=2).stderr
    shares.oned.image_delete(image)
    assert theirs.stat() == before and (theirs / "file").read_text() == "theirs"
    assert sorted(os.listdir(shares.root)) == [".semishared", f"share-{other}"] and set(shares.listed()) == {
        other
    }
    closed, ours, above = allowed / "closed", allowed / "ours", allowed / "above"
    shares.oned.datastore_create(template("btrfs", above / "their/root"), SHARES + 1)
    for made in (closed / "in", ours / ".semishared", ours / "in", above / "their/root/in"):
        made.mkdir(parents=True)
    closed.chmod(0o700)
    for path, said in (
        (allowed / "link", "SAFE_DIRS"),
        (shares.tree(other), "no guest may be given"),
        (shares.root, "no guest may be given"),
        (allowed / "none", "is no directory"),
        (closed / "in", "closed .* lets no others pass"),
        (ours / "in", "which is ours"),
        (ours, "which is ours"),
        (above, "above has to do with root, .*/their/root"),
        (above / "their/root/in", "in has to do with"),
    ):
        with pytest.raises(ActionFailed, match=said):
            shares.image("bad", str(path))
    # What oned writes there by itself; hosts have its scripts below.
    shares.oned.datastore_update(SHARES, 'SAFE_DIRS="/var/tmp /var"')
    for path in (Path("/var/tmp"), Path("/var/tmp/one"), Path("/var")):
        with pytest.raises(ActionFailed, match="no guest may be given"):
            shares.image("bad", str(path))
    shares.oned.image_delete(other)


def test_a_registered_directory_without_its_image_is_forgotten_and_stays(
    shares: Shares, allowed: Path
) -> None:
    tree = shares.known()
    on(share_steps.MakeShare(tree, Share(777, 0, 1, 0, directory=str(allowed))))
    place = shares.root / "share-777"
    (place / "file").write_text("somebody's")
    assert "SS043" in shares.site.cli("share", "drop", str(SHARES), "777", code=2).stderr and allowed.is_dir()
    (place / "file").unlink()
    shares.site.cli("share", "drop", str(SHARES), "777")
    assert allowed.is_dir() and not place.exists() and not shares.listed()


def test_a_root_is_made_one_by_hand_and_belongs_to_one_datastore(site: ActionSite, root: Path) -> None:
    site.oned.datastore_create(template("btrfs", root), SHARES)
    with pytest.raises(ActionFailed, match="share init 110"):
        site.oned.image_create(SHARES, "early", path="new:1G", type="FILESYSTEM")
    site.cli("share", "init", str(SHARES))
    site.cli("share", "init", str(SHARES))
    site.oned.datastore_create(template("btrfs", root).replace("shares", "second", 1), 111)
    assert "belongs to datastore 110" in site.cli("share", "init", "111", code=2).stderr
    root.rename(root.with_name("away"))
    root.mkdir()
    with pytest.raises(ActionFailed, match="SS084"):
        site.oned.image_create(SHARES, "late", path="new:1M", type="FILESYSTEM")


def test_quotas_that_are_off_are_refused(site: ActionSite, tmp_path: Path) -> None:
    file, where = tmp_path / "file", tmp_path / "off"
    make_btrfs(file, 256)
    where.mkdir()
    run("mount", "-o", "loop", file, where)
    try:
        site.oned.datastore_create(template("btrfs", where), SHARES)
        assert "SS170" in site.cli("share", "init", str(SHARES), code=2).stderr
    finally:
        run("umount", where)
    assert "is it mounted?" in site.cli("share", "init", str(SHARES), code=2).stderr


def test_a_plain_directory_is_for_who_says_that_no_quota_is_meant(site: ActionSite, tmp_path: Path) -> None:
    root = tmp_path / "plain"
    root.mkdir()
    with pytest.raises(ActionFailed, match="needs SEMISHARED_FS_QUOTA = no"):
        site.oned.datastore_create(template("plain", root, NAME="none"), 111)
    assert "needs SEMISHARED_FS_QUOTA = no" in site.cli("share", "init", "111", code=2).stderr
    shares = Shares(site, "plain", root, SEMISHARED_FS_QUOTA="no")
    image = shares.image("scratch", "new:16M")
    assert fill(shares.tree(image) / "file", 20) == (20 * MiB, "")
    shares.oned.image_delete(image)
    assert os.listdir(root) == [".semishared"]


def test_what_a_killed_action_leaves_is_listed_and_dropped(shares: Shares) -> None:
    tree = shares.known()
    on(share_steps.MakeShare(tree, Share(777, 0, 1, 16 * MiB)))
    assert shares.listed()[777]["state"] == "OpenNebula has no such image"
    image = shares.image("scratch", "new:16M")
    assert "OpenNebula has image" in shares.site.cli("share", "drop", str(SHARES), str(image), code=2).stderr
    shares.site.cli("share", "drop", str(SHARES), "777")
    assert set(shares.listed()) == {image}
    shares.oned.image_delete(image)


def test_of_another_image_is_a_share_whose_id_oned_has_given_anew_and_it_can_be_dropped(
    shares: Shares,
) -> None:
    """As after its database was restored: in another datastore, or made at another time."""
    on(share_steps.MakeShare(shares.known(), Share(shares.site.image(), 0, 1, 16 * MiB)))
    other, image = sorted(shares.listed())[-1], shares.image("scratch", "new:16M")
    assert [row["state"] for row in shares.listed().values()] == [
        f"it is of another image {other} than OpenNebula has",
        "",
    ]
    shares.site.cli("share", "drop", str(SHARES), str(other))
    shares.oned.image(image).regtime += 1
    assert shares.listed()[image]["state"] == f"it is of another image {image} than OpenNebula has"
    shares.site.cli("share", "drop", str(SHARES), str(image))
    assert not shares.listed() and os.listdir(shares.root) == [".semishared"]


def test_a_share_that_is_not_held_to_its_size_says_so_and_is_held_anew(shares: Shares) -> None:
    image, other = shares.image("scratch", "new:16M"), shares.image("other", "new:32M")
    run("btrfs", "qgroup", "limit", str(8 * MiB), shares.tree(other))
    run("btrfs", "qgroup", "limit", "none", shares.tree(image))
    rows = shares.listed()
    assert (
        f"image {image} is held to nothing, not to 16.0 MiB: `semishared share resize {image} 16M`"
        in rows[image]["state"]
    )
    assert "held to 8.0 MiB, not to 32.0 MiB" in rows[other]["state"] and all(
        "SS170" in row["state"] for row in rows.values()
    )
    assert all(row["used"] >= 0 for row in rows.values())
    said = shares.site.cli("share", "usage", str(image)).stdout
    assert "of 16.0 MiB" in said and "held to nothing" in said
    for one, size in ((image, "16M"), (other, "32M")):
        shares.site.cli("share", "resize", str(one), size)
    assert not any(row["state"] for row in shares.listed().values())
    # So it is after quotas were off.
    run("btrfs", "quota", "disable", shares.root)
    run("btrfs", "quota", "enable", shares.root)
    run("btrfs", "quota", "rescan", "-w", shares.root)
    assert all("held to nothing" in row["state"] for row in shares.listed().values())
    for one in (image, other):
        shares.oned.image_delete(one)


def test_what_has_a_record_that_says_nothing_can_be_dropped(shares: Shares, allowed: Path) -> None:
    tree = shares.known()
    on(
        share_steps.MakeShare(tree, Share(777, 0, 1, 16 * MiB)),
        share_steps.MakeShare(tree, Share(778, 0, 1, 0, directory=str(allowed))),
    )
    (shares.root / "share-777/file").write_text("text")
    for image in (777, 778):
        (shares.root / f".semishared/.shares/{image}.json").write_text("")
    # Who means a certain one has to be told that nobody knows whether it is.
    for step in (
        share_steps.RemoveShare(tree, 777, f"{shares.root}/share-777"),
        share_steps.RemoveShare(tree, 777, "", 1),
    ):
        with pytest.raises(BadRecord):
            on(step)
    for image in (777, 778):
        shares.site.cli("share", "drop", str(SHARES), str(image))
    assert (
        os.listdir(shares.root) == [".semishared"]
        and os.listdir(shares.root / ".semishared/.shares") == []
        and allowed.is_dir()
    )


def test_each_owner_has_users_of_their_own(root: Path) -> None:
    tree = Tree("btrfs", str(root), on(share_steps.MarkRoot(Tree("btrfs", str(root)), MARKER))[0]["marker"])
    paths = [
        on(share_steps.MakeShare(tree, Share(number, owner, 1, 8 * MiB)))[0]["source"]
        for number, owner in ((1, 5), (2, 9), (3, 5))
    ]
    assert [os.stat(path).st_uid for path in paths] == [first_uid(owner) for owner in (5, 9, 5)]
    with pytest.raises(NoSpace, match="user 32766 of OpenNebula"):
        on(share_steps.MakeShare(tree, Share(4, 32766, 1, 8 * MiB)))
    assert len(on(share_steps.ListShares(tree))[0]["shares"]) == 3
    for number in (1, 2, 3):
        on(share_steps.RemoveShare(tree, number, paths[number - 1]))
    on(share_steps.RemoveShare(tree, 1, ""))


def test_a_root_whose_ranges_were_given_in_turn_goes_on_so(root: Path) -> None:
    tree = Tree("plain", str(root), MARKER)
    on(share_steps.MarkRoot(tree, MARKER))
    ranges = root / ".semishared/.uids"
    ranges.mkdir()
    for number, owner in ((0, 0), (1, 7)):
        (ranges / str(number)).write_text(json.dumps({"version": 1, "owner": owner}))
    paths = [
        on(share_steps.MakeShare(tree, Share(number, owner, 1, 8 * MiB)))[0]["source"]
        for number, owner in ((1, 7), (2, 1), (3, 0))
    ]
    assert [os.stat(path).st_uid for path in paths] == [first_uid(number) for number in (1, 2, 0)]


def test_a_broken_range_costs_nobody_whose_range_is_known(root: Path) -> None:
    tree = Tree("plain", str(root), MARKER)
    on(share_steps.MarkRoot(tree, MARKER))
    on(share_steps.MakeShare(tree, Share(1, 4, 1, 8 * MiB)))
    (root / ".semishared/.uids/5").write_text("")
    assert (
        os.stat(on(share_steps.MakeShare(tree, Share(2, 4, 1, 8 * MiB)))[0]["source"]).st_uid
        == first_uid(4)
        == owners.known_uid_of(str(root), 4)
    )
    # It may be theirs.
    for owner in (5, 6):
        with pytest.raises(BadRecord, match=r"\.uids/5 .* whose users"):
            on(share_steps.MakeShare(tree, Share(3, owner, 1, 8 * MiB)))
        with pytest.raises(BadRecord, match=r"\.uids/5 .* whose users"):
            owners.known_uid_of(str(root), owner)


def test_a_tree_without_a_record_is_nobodys_to_be_given(root: Path) -> None:
    tree = Tree("btrfs", str(root), MARKER)
    on(share_steps.MarkRoot(tree, MARKER))
    (root / "share-7").mkdir()
    (root / "share-7/secret").write_text("of another")
    with pytest.raises(DataInTheWay, match="share-7 .* has no record"):
        on(share_steps.MakeShare(tree, Share(7, 5, 1, 8 * MiB)))
    assert on(share_steps.ListShares(tree)) == [{"shares": []}] and (root / "share-7").stat().st_uid == 0


def test_of_what_was_seen_not_to_be_ready_nothing_is_removed_that_has_become_another(root: Path) -> None:
    tree = Tree("btrfs", str(root), MARKER)
    on(share_steps.MarkRoot(tree, MARKER))
    path = on(share_steps.MakeShare(tree, Share(7, 5, 70, 8 * MiB)))[0]["source"]
    record = root / ".semishared/.shares/7.json"
    ready = record.read_text()
    assert (
        on(share_steps.RemoveShare(tree, 7, "", 70)) == [{"removed": False}] and record.read_text() == ready
    )
    record.write_text(ready.replace(path, ""))
    assert on(share_steps.RemoveShare(tree, 7, "", 69)) == [{"removed": False}] and os.path.isdir(path)
    assert (
        on(share_steps.RemoveShare(tree, 7, "", 70)) == [{}]
        and not os.path.exists(path)
        and not record.exists()
    )


def test_a_share_that_is_broken_hides_no_other(shares: Shares) -> None:
    image, lost, bad = (shares.image(name, "new:16M") for name in ("scratch", "lost", "bad"))
    run("btrfs", "subvolume", "delete", shares.tree(lost))
    record = shares.root / f".semishared/.shares/{bad}.json"
    text = record.read_text()
    record.write_text("{}")
    rows = shares.listed()
    assert rows[image]["used"] >= 0 and not rows[image]["state"]
    assert rows[lost]["used"] == rows[bad]["used"] == -1
    assert "SS031" in rows[lost]["state"] and "no record of a share" in rows[bad]["state"]
    assert "no record of a share" in shares.site.cli("share", "list").stdout
    assert "SS031" in shares.site.cli("share", "usage", str(lost), code=2).stderr
    record.write_text(text)
    for one in (image, lost, bad):
        shares.oned.image_delete(one)
    assert not shares.listed()


def test_a_directory_is_registered_and_forgotten_whole_wherever_that_is_killed(
    root: Path, tmp_path: Path
) -> None:
    tree = Tree("plain", str(root), MARKER)
    on(share_steps.MarkRoot(tree, MARKER))
    theirs, place = tmp_path / "theirs", f"{root}/share-7"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    make, remove = (
        share_steps.MakeShare(tree, Share(7, 3, 1, 0, directory=str(theirs))),
        share_steps.RemoveShare(tree, 7, place),
    )
    killed = Killed(tmp_path)
    for step, least in ((make, 3), (remove, 2)):
        for at in range(1, 100):
            if step is remove:
                on(make)
            code = killed.run(step, at)
            if step is make:
                assert on(make) == [{"source": place}] and on(share_steps.ListShares(tree))[0]["shares"][0][
                    "directory"
                ] == str(theirs)
                run("rm", "-r", root / ".semishared/.uids")
            on(remove)
            assert on(share_steps.ListShares(tree)) == [{"shares": []}] and os.listdir(root) == [
                ".semishared"
            ]
            assert (theirs / "file").read_text() == "theirs"
            if not code:
                break
        assert at > least


@pytest.mark.parametrize("fs", ["btrfs", "plain"])
def test_killed_at_every_point_and_begun_again_it_ends_the_same(root: Path, tmp_path: Path, fs: str) -> None:
    tree = Tree(fs, str(root), MARKER)
    on(share_steps.MarkRoot(tree, MARKER))
    share = Share(7, 3, 1, 8 * MiB)
    make, remove = share_steps.MakeShare(tree, share), share_steps.RemoveShare(tree, 7, f"{root}/share-7")
    killed = Killed(tmp_path)
    for at in range(1, 100):
        code = killed.run(make, at)
        assert on(make) == [{"source": f"{root}/share-7"}]
        (row,) = on(share_steps.ListShares(tree))[0]["shares"]
        assert (row["source"], os.stat(f"{root}/share-7").st_uid) == (f"{root}/share-7", first_uid(3))
        on(share_steps.ResizeShare(tree, 7, 16 * MiB))
        on(share_steps.RemoveShare(tree, 7, ""))
        # The next owner's range is given in the first action alone.
        run("rm", "-r", root / ".semishared/.uids")
        if not code:
            break
    else:
        raise AssertionError("never done")
    assert at > 4
    for at in range(1, 100):
        on(make)
        Path(f"{root}/share-7/file").write_text("x")
        code = killed.run(remove, at)
        on(remove)
        assert on(share_steps.ListShares(tree)) == [{"shares": []}] and os.listdir(root) == [".semishared"]
        if not code:
            break
    assert at > 2
