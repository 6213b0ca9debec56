# SPDX-License-Identifier: Apache-2.0
"""What a PATH may ask for, and what the programs of file systems say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semishared.errors import BadArguments, BadAttribute, NoQuota, ToolFailed
from semishared.model.refs import Refusal
from semishared.model.share import names as share_names
from semishared.model.share.share import Share, Tree, Use, first_uid, pools
from semishared.model.share.steps import HeldKey, ListedShare, RemoveShare
from semishared.opennebula.xml import Datastore
from semishared.plan.care import gc, gc_stores
from semishared.plan.share.shares import wanted
from semishared.share import btrfs, cephfs, xfs
from semishared.share.plain import most_files
from semishared.tools import mounts
from semishared.units import GiB, MiB, TiB

MOST = 16 * TiB
MOUNTS = r"""22 1 252:1 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 22 0:50 / /srv/a\040b rw,nosuid shared:2 - btrfs /dev/vdb rw,space_cache=v2
41 22 252:3 / /srv/shares rw,nosuid,nodev shared:3 - xfs /dev/vdc rw,attr2,prjquota
42 22 0:51 / /cephfs rw,nosuid - fuse.ceph-fuse ceph-fuse rw,user_id=0
43 22 252:4 / /srv/shares rw - ext4 /dev/vdd rw
"""


@pytest.mark.parametrize(
    ("path", "size"), [("new:10G", 10 * GiB), ("new:512M", 512 * MiB), ("new:2T", 2 * TiB)]
)
def test_a_path_asks_for_a_size(path: str, size: int) -> None:
    assert wanted(path, MOST, "btrfs") == (size, {})


def test_a_path_asks_for_a_layout_where_there_are_any() -> None:
    found = wanted("new:10G,stripes=4,object=1M,pool=fast.data", MOST, "cephfs", ("other", "fast.data"))
    assert found == (10 * GiB, {"stripes": 4, "object_size": MiB, "pool": "fast.data"})
    share = Share(1, 2, 3, *found[:1], **found[1])
    assert cephfs.layout(share) == "stripe_unit=262144 stripe_count=4 object_size=1048576"
    assert Share.from_data(share.to_data()) == share and cephfs.layout(Share(1, 2, 3, GiB)) == ""
    # CephFS takes no unit below 64 KiB, and only one that objects are a multiple of.
    assert cephfs.layout(share._replace(stripes=64, object_size=65536)).startswith("stripe_unit=65536 ")
    with pytest.raises(BadAttribute, match="shares on xfs have no layouts"):
        wanted("new:1G,stripes=4", MOST, "xfs")


@pytest.mark.parametrize(
    "option",
    [
        "stripes=3",
        "stripes=0",
        "stripes=128",
        "stripes",
        "object=1",
        "object=3M",
        "object=1G",
        "pool=a b",
        "pool=../x",
        "pool=",
        "stripes=2,stripes=2",
        "object=1M,object=1M",
        "uid=0",
        "stripes=2,",
    ],
)
def test_another_layout_is_refused(option: str) -> None:
    with pytest.raises(BadAttribute, match="stripes=1, 2, 4"):
        wanted(f"new:1G,{option}", MOST, "cephfs")


@pytest.mark.parametrize("named", [(), ("other", "fast.data")])
def test_a_pool_is_one_that_the_datastore_lets_users_name(named: tuple[str, ...]) -> None:
    with pytest.raises(
        BadAttribute, match="'pool=fast', which SEMISHARED_FS_POOLS of the datastore does not name"
    ):
        wanted("new:10G,pool=fast", MOST, "cephfs", named)


def test_names_of_pools_are_checked() -> None:
    rows = "<TEMPLATE><SEMISHARED_FS_POOLS>{}</SEMISHARED_FS_POOLS></TEMPLATE>"
    of = (
        Datastore(ElementTree.fromstring(f"<DATASTORE><ID>110</ID>{rows.format(text)}</DATASTORE>"))
        for text in ("a  b.c", "", "a,b")
    )
    assert [pools(next(of)), pools(next(of))] == [("a", "b.c"), ()]
    with pytest.raises(BadAttribute, match="'a,b'"):
        pools(next(of))


@pytest.mark.parametrize(
    "text",
    ["", "10", "-1G", "1.5G", "0M", "17T", "10g", "10G ", "١G", "10G,", "10G,stripes=2", "10G\nnew:1G"],
)
def test_another_path_is_refused(text: str) -> None:
    with pytest.raises(BadAttribute):
        wanted(f"new:{text}", MOST, "btrfs")


@given(st.text(max_size=40))
def test_any_text_is_a_size_within_bounds_or_refused(text: str) -> None:
    try:
        found, _ = wanted(f"new:{text}", MOST, "cephfs")
    except BadAttribute:
        return
    assert 0 < found <= MOST and found % MiB == 0


def test_what_a_path_lies_on_is_what_was_mounted_last_at_the_longest_point() -> None:
    listed = mounts.parse(MOUNTS)
    found = mounts.under("/srv/a b/x", listed)
    assert (found.point, found.type, found.options) == ("/srv/a b", "btrfs", ("rw", "space_cache=v2"))
    assert mounts.under("/srv/shares/share-1", listed).type == "ext4"
    assert (
        mounts.under("/srv/shares2", listed).point == "/"
        and mounts.under("/cephfs", listed).type == "fuse.ceph-fuse"
    )


SAID = """Qgroupid    Referenced    Exclusive  Max referenced  Max exclusive   Path 
--------    ----------    ---------  --------------  -------------   ---- 
0/256         33538048     33538048        {limit}           none   share-7
"""  # noqa: W291


def test_what_btrfs_says_of_a_subvolume() -> None:
    assert btrfs.parse(SAID.format(limit=33554432)) == Use(33538048, 33554432)
    assert btrfs.parse(SAID.format(limit="none")) == Use(33538048, -1)
    with pytest.raises(ToolFailed):
        btrfs.parse("ERROR: quotas not enabled")


@pytest.mark.parametrize(
    ("warns", "lapsed"),
    [
        ("WARNING: qgroup data inconsistent, rescan recommended\n", True),
        ("WARNING: rescan is running, qgroup data may be incorrect\n", True),
        ("sudo: unable to resolve host h1\n", False),
        ("", False),
    ],
)
def test_of_numbers_that_are_not_counted_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, warns: str, lapsed: bool
) -> None:
    monkeypatch.setattr(btrfs, "_shown", lambda _: warns + SAID.format(limit=33554432))
    fs = btrfs.Btrfs(Tree("btrfs", "/srv/shares"))
    if not lapsed:
        assert fs.use(7) == Use(33538048, 33554432) and fs.lapsed() == ("", "")
        return
    assert fs.lapsed()[1] == "btrfs quota rescan -w /srv/shares"
    with pytest.raises(NoQuota, match="no share is held to its size .*: btrfs quota rescan -w /srv/shares"):
        fs.use(7)


def test_where_a_share_is_says_whose_it_is() -> None:
    inside = "share-7/ce28cdf0-dac6-415c-83bb-70bd2adf41de"
    assert (
        share_names.root_and_image("/srv/shares/share-7")
        == ("/srv/shares", 7)
        == share_names.root_and_image(f"/srv/shares/{inside}")
    )
    for source in (
        "/srv/shares/share-07",
        "/srv/shares/share-7/x",
        "/share-7",
        f"/srv/shares/{inside}/x",
        "/srv/shares/gone-7",
        "share-7",
    ):
        assert share_names.root_and_image(source) == ("", -1), source


def test_of_shares_without_an_image_those_go_that_nobody_has_had() -> None:
    tree = Tree("btrfs", "/srv/shares", "0" * 32)
    there = ((1, ""), (2, "/srv/shares/share-2"), (3, ""), (4, "x"), (5, ""))
    rows = [ListedShare(image, 1, 70 + image, 1, source, -1) for image, source in there]
    rows[1] = rows[1]._replace(snapshots=["one", "two"])
    rows.append(ListedShare(6, -1, -1, -1, "", -1, wrong=Refusal("SS042", "no record")))
    rows.append(ListedShare(7, 1, 77, 1, "/srv/shares/share-7", -1))
    # Image 5 is in another datastore, and 7 was made later: ids that an oned whose database was restored has
    # given anew.
    images = frozenset({(110, 3), (110, 4), (111, 5), (110, 7)})
    known = gc.Known({}, images, frozenset(), born={3: 73, 5: 75, 7: 99})
    lost, kept, another, broken, later = gc_stores.find_in_shares(
        gc_stores.Shares("b0", 110, tree, tuple(rows), cloud="a" * 32), known
    )
    assert (lost.path, lost.keep, lost.steps()) == ("/srv/shares/share-1", "", [RemoveShare(tree, 1, "", 71)])
    assert kept.reason == "oned has no image 2, and 2 of its snapshots are there"
    assert (kept.path, kept.steps()) == ("/srv/shares/share-2", []) and "share drop 110 2" in kept.keep
    for item, image in ((another, 5), (later, 7)):
        assert (
            item.reason == f"oned has another image {image}"
            and f"share drop 110 {image}`" in item.keep
            and not item.steps()
        )
    assert (broken.path, broken.steps()) == ("/srv/shares/share-6", []) and broken.keep


def test_in_a_root_that_does_not_say_whose_it_is_gc_removes_nothing_and_advises_to_remove_nothing() -> None:
    tree, known = (
        Tree("cephfs", "/srv/shares", "0" * 32, "cephfs/one"),
        gc.Known({}, frozenset(), frozenset(), newest_vm=9),
    )
    rows = tuple(
        ListedShare(image, 1, 70, 1, source, -1) for image, source in ((1, ""), (2, "/srv/shares/share-2"))
    )
    keys = (HeldKey(5, 8, False, -1, "share-one-5-8-0"),)
    found = list(gc_stores.find_in_shares(gc_stores.Shares("h1", 110, tree, rows, keys), known))
    assert len(found) == 3
    for item in found:
        assert (
            item.keep
            == "/srv/shares does not say of which OpenNebula it is: `semishared share init 110` does"
        )
    assert not any(item.steps() for item in found[:2])


HELD = (
    "#2000000007      16384          0      16384     00 [--------]          2          0       1024  "
    "   00 [{grace}]\n\n"
)


def test_what_xfs_says_of_a_project() -> None:
    for grace in ("--------", "7 days", "-none-"):
        assert xfs.parse(HELD.format(grace=grace), 2000000007) == xfs.Held(16 << 20, 16 << 20, 2, 1024)
    assert xfs.parse("\n", 7) == xfs.Held()
    for text in (HELD, "#2000000008 1 0 1 00 [-] 1 0 1 00 [-]\n", "xfs_quota: cannot\n"):
        with pytest.raises(ToolFailed):
            xfs.parse(text, 2000000008 if text is HELD else 2000000007)


def test_share_with_as_many_files_as_its_new_size_holds_can_have_it() -> None:
    class Full(xfs.Xfs):
        held = xfs.Held(MiB, 2 * GiB, files=most_files(GiB))

        def _held(self, image: int) -> xfs.Held:
            return self.held

        def _limit(self, image: int, size: int, files: int) -> None:
            self.held = self.held._replace(limit=size, most_files=files)

    share = Full(Tree("xfs", "/srv/shares"))
    share.resize(7, GiB)
    assert share.held == xfs.Held(MiB, GiB, most_files(GiB), most_files(GiB))
    share.held = share.held._replace(files=most_files(GiB) + 1)
    with pytest.raises(BadArguments, match="65537 files are in the share of image 7"):
        share.resize(7, GiB)


def test_ranges_of_users_do_not_meet() -> None:
    assert [first_uid(number) for number in (0, 1, 2)] == [100000, 165536, 231072]
