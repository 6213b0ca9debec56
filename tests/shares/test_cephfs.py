# SPDX-License-Identifier: Apache-2.0
"""Shares on CephFS, as oned's actions and the operator's command make them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from lab.ceph import fs
from lab.oned import ActionFailed
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, Tree
from shares.ceph import AS_HOST, CephShares
from shares.cloud import SHARES
from shares.page import ROOT

MiB = 1 << 20
LATE_S = 15
"""Within how long a client notices that a share is full: docs/how-to/shares.md says seconds."""
BEYOND = 64 * MiB
"""How much one client may have written by then: the page says what was measured, which the lab's disks limit
too.
"""
WRITE = """
import os, sys, time
path, full, late, written, since = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), 0, 0.0
os.mkdir(os.path.dirname(path))
with open(path, "wb", buffering=0) as file:
    try:
        while not since or time.monotonic() < since + 2 * late:
            written += file.write(os.urandom(1 << 20))
            since = since or (time.monotonic() if written >= full else 0)
        print(written, -1, "nothing")
    except OSError as e:
        print(written, round(time.monotonic() - (since or time.monotonic()), 1), e.strerror)
"""


@pytest.fixture()
def tree(cloud: CephShares) -> Tree:
    return cloud.tree


def test_an_image_is_a_subvolume_with_the_layout_that_it_asks_for(cloud: CephShares) -> None:
    image = cloud.image("scratch", "new:32M,stripes=4,object=1M")
    source = cloud.source(image)
    assert (
        re.fullmatch(rf"{ROOT}/share-{image}/[0-9a-f-]{{36}}", source) and cloud.oned.image(image).size == 32
    )
    code = (
        "import os, sys; s = os.stat(sys.argv[1]); print(s.st_uid, s.st_gid, oct(s.st_mode), "
        "os.getxattr(sys.argv[1], sys.argv[2]))"
    )
    said, _ = cloud.does(["python3", "-c", code, source, "ceph.dir.layout"])
    assert said == (
        "100000 100000 0o40755 b'stripe_unit=262144 stripe_count=4 object_size=1048576 "
        f"pool={fs.NAME}.data pool_namespace=semishared-{cloud.tree.marker}-share-{image}'\n"
    )
    cloud.cli("resize", str(image), "48M")
    assert cloud.listed()[image]["size"] == 48 * MiB
    cloud.oned.image_delete(image)
    assert not cloud.listed() and not cloud.subvolumes()


def test_a_full_share_is_refused_writes_and_its_neighbour_notices_nothing(cloud: CephShares) -> None:
    mine, other = cloud.image("mine", "new:32M"), cloud.image("other", "new:64M")
    words = ["python3", "-c", WRITE, f"{cloud.source(mine)}/below/file", str(32 * MiB), str(LATE_S)]
    written, late, said = cloud.does(words)[0].split(" ", 2)
    print(f"full share: {int(written) / MiB:.1f} of 32 MiB, refused after {late} s")
    assert (
        said == "Disk quota exceeded\n"
        and 31 * MiB <= int(written) <= 32 * MiB + BEYOND
        and float(late) <= LATE_S
    )
    fill = ["dd", "if=/dev/urandom", "bs=1M", "count=32", "conv=fsync", "status=none"]
    assert cloud.does([*fill, f"of={cloud.source(other)}/file"]) == ("", "")
    assert "quota exceeded" in cloud.does([*fill, f"of={cloud.source(mine)}/more"], check=False)[1]
    assert "32.0 MiB of 64.0 MiB" in cloud.cli("usage", str(other))
    assert "cannot be held to 8.0 MiB" in cloud.cli("resize", str(mine), "8M", code=2)
    for image in (mine, other):
        cloud.oned.image_delete(image)
    assert not cloud.subvolumes()


def test_what_the_cluster_refuses_says_why_and_can_be_dropped(cloud: CephShares) -> None:
    with pytest.raises(ActionFailed, match="invalid pool layout 'none'"):
        cloud.image("lost", "new:32M,pool=none")
    ((image, row),) = cloud.listed().items()
    assert row["state"] == "not ready"
    assert cloud.gc() == {}
    cloud.oned.image_delete(image)
    assert cloud.gc() == {f"{ROOT}/share-{image}": "removed"} and not cloud.listed()


def test_a_maker_whose_mount_lets_guests_programs_be_setuid_makes_nothing_and_doctor_says_so(
    cloud: CephShares,
) -> None:
    cloud.host.run(["mount", "-o", "remount,bind,suid,nodev", ROOT], user="root", cwd="/")
    try:
        with pytest.raises(ActionFailed, match=rf"SS175 (?=.* on h1 is mounted without nosuid).*{ROOT}"):
            cloud.image("early", "new:16M")
        said = cloud.lab.fe.run(
            ["/var/lib/one/remotes/lib/semishared/semishared", "doctor", "--json"], check=False, timeout=120
        )
        rows = [
            row
            for row in json.loads(said.stdout)["findings"]
            if row["what"].startswith(f"datastore {SHARES} ")
        ]
        assert [(row["severity"], row["machine"], "without nosuid" in row["what"]) for row in rows] == [
            ("broken", "h1", True)
        ]
    finally:
        cloud.host.run(["mount", "-o", "remount,bind,nosuid,nodev", ROOT], user="root", cwd="/")
    image = cloud.image("later", "new:16M")
    cloud.oned.image_delete(image)


def test_a_share_that_may_hold_data_is_kept_until_it_is_dropped_by_hand(
    cloud: CephShares, tree: Tree
) -> None:
    _, made = cloud.step(share_steps.MakeShare(tree, Share(777, 0, 1, 8 * MiB)))
    code = "from semishared.share import attached; import sys; print(attached.check(777, sys.argv[1]).first)"
    done = cloud.host.run(["python3", "-c", code, made["source"]], env={"PYTHONPATH": "/var/tmp/one/lib"})
    assert done.stdout == b"100000\n"
    assert cloud.gc() == {made["source"]: ""} and 777 in cloud.listed()
    cloud.cli("drop", str(SHARES), "777")
    assert cloud.gc() == {} and not cloud.subvolumes()


def namespace_of(cloud: CephShares, path: str) -> str:
    """Return which namespace the objects of a directory are in."""
    code = "import os, sys; print(os.getxattr(sys.argv[1], 'ceph.dir.layout.pool_namespace').decode())"
    return cloud.does(["python3", "-c", code, path])[0].strip()


def test_a_key_for_one_share_opens_no_other(cloud: CephShares) -> None:
    """Also not the one that the image of the same number has in another OpenNebula, which has a group of its
    own.
    """
    mine, other = cloud.image("mine", "new:16M"), cloud.image("other", "new:16M,stripes=2,object=1M")
    second = cloud.second_group()
    theirs = str(cloud.step(share_steps.MakeShare(second, Share(mine, 0, 1, 16 * MiB)))[1]["source"])
    sources = {name: cloud.source(image) for name, image in (("mine", mine), ("other", other))}
    for path in (*sources.values(), theirs):
        cloud.does(["dd", "if=/dev/zero", f"of={path}/file", "bs=1M", "count=1", "conv=fsync", "status=none"])
    cloud.lab.ceph.node.run(
        ["ceph", "fs", "subvolume", "authorize", fs.NAME, f"share-{mine}", "tenant", "one"],
        user="root",
        cwd="/",
    )
    cloud.lab.ceph.give_key(cloud.host, "tenant", cloud.lab.ceph.key("tenant"))

    def objects(namespace: str) -> tuple[int, str]:
        words = ["rados", "--id", "tenant", "-p", f"{fs.NAME}.data", "-N", namespace, "ls"]
        done = cloud.host.run(words, cwd="/", check=False)
        return done.returncode, (done.stdout or done.stderr).decode()

    code, said = objects(namespace_of(cloud, sources["mine"]))
    assert code == 0 and said.count("\n") == 1
    for namespace in (
        namespace_of(cloud, sources["other"]),
        namespace_of(cloud, theirs),
        f"fsvolumens_share-{mine}",
        "",
    ):
        code, said = objects(namespace)
        assert code and "Operation not permitted" in said, namespace
    paths = [
        *(path.replace(ROOT, "/volumes/one") for path in (*sources.values(), ROOT)),
        theirs.replace(second.root, "/volumes/two"),
    ]
    for number, path in enumerate(paths):
        at = f"/srv/as-tenant-{number}"
        cloud.host.run(["mkdir", at], user="root")
        words = ["ceph-fuse", "--id", "tenant", "--client_fs", fs.NAME, "-r", path, at]
        done = cloud.host.run(words, user="root", cwd="/", check=False)
        assert (done.returncode == 0) == (number == 0), (path, done)
        if number == 0:
            cloud.host.run(["umount", at], user="root")
    cloud.step(share_steps.RemoveShare(second, mine, theirs))
    assert cloud.does(["wc", "-c", f"{sources['mine']}/file"])[0].split()[0] == str(MiB)
    cloud.host.run(["umount", second.root], user="root")
    for image in (mine, other):
        cloud.oned.image_delete(image)


def test_the_key_of_hosts_sets_neither_quota_nor_layout(cloud: CephShares) -> None:
    image = cloud.image("scratch", "new:16M")
    source = cloud.source(image)
    code = "import os, sys; os.setxattr(sys.argv[1], sys.argv[2], sys.argv[3].encode())"
    for name, value in (("ceph.quota.max_bytes", "0"), ("ceph.dir.layout.pool", f"{fs.NAME}.data")):
        _, said = cloud.does(["python3", "-c", code, source.replace(ROOT, AS_HOST), name, value], check=False)
        assert "PermissionError" in said, said
        # By the other key its owner may.
        assert cloud.does(["python3", "-c", code, source, name, value]) == ("", "")
    assert cloud.does(["touch", f"{source.replace(ROOT, AS_HOST)}/file"]) == ("", "")
    cloud.oned.image_delete(image)


def test_a_snapshot_keeps_what_was_and_goes_with_its_share(cloud: CephShares) -> None:
    image = cloud.image("scratch", "new:16M")
    path = Path(cloud.source(image))
    cloud.does(["sh", "-c", f"echo first >{path}/file"])
    made = json.loads(cloud.cli("snapshot", "create", str(image), "before", "--json"))["snapshot"]
    cloud.does(["sh", "-c", f"echo second >{path}/file"])
    for old in (f"{made['path']}/{path.name}/file", f"{path}/{made['in_guest']}/file"):
        assert cloud.does(["cat", old]) == ("first\n", "")
    (row,) = json.loads(cloud.cli("snapshot", "list", str(image), "--json"))["snapshots"]
    assert row == made and abs(time.time() - row["made"]) < 300 and row["alone"] == -1
    assert cloud.listed()[image]["snapshots"] == ["before"]
    assert "SS043" in cloud.cli("snapshot", "create", str(image), "before", code=2)
    cloud.cli("snapshot", "create", str(image), "a.second-1")
    cloud.cli("snapshot", "remove", str(image), "before")
    assert "SS020" in cloud.cli("snapshot", "remove", str(image), "before", code=2)
    assert cloud.listed()[image]["snapshots"] == ["a.second-1"]
    cloud.oned.image_delete(image)
    assert not cloud.listed() and not cloud.subvolumes()


@pytest.mark.long
def test_files_without_data_end_in_a_guest_and_a_neighbour_still_makes_some(cloud: CephShares) -> None:
    guests = cloud.guests
    small, other = guests.image("small", "1M", uid=5), guests.image("other", "1M", uid=9)
    vms = [guests.deploy(name, image, host="h2") for name, image in (("many", small), ("few", other))]
    many, few = map(guests.mounted, vms)
    said = many.run("cd /small; i=0; while [ $i -lt 9999 ] && : >$i; do i=$((i+1)); done; echo made $i", 540)[
        1
    ]
    print(f"files of 1024: {said.split()[-1]}")
    assert "Disk quota exceeded" in said and "made 9999" not in said, said
    assert few.run("echo >/other/one")[0] == 0
    for vm in vms:
        cloud.cloud.terminate(vm)
    for image in (small, other):
        cloud.oned.image_delete(image)


@pytest.mark.long
def test_killed_at_every_point_and_begun_again_it_ends_the_same(cloud: CephShares, tree: Tree) -> None:
    make, remove = (
        share_steps.MakeShare(tree, Share(7, 0, 1, 8 * MiB, 2, MiB)),
        share_steps.RemoveShare(tree, 7, ""),
    )
    for at in range(1, 100):
        code, _ = cloud.step(make, at)
        source = cloud.step(make)[1]["source"]
        said, _ = cloud.does(["stat", "-c", "%u %a", source])
        assert said == "100000 755\n" and cloud.subvolumes() == ["share-7"]
        if not code:
            break
        cloud.step(remove)
    assert at > 4
    for at in range(1, 100):
        cloud.does(["touch", f"{cloud.step(make)[1]['source']}/file"])
        code, _ = cloud.step(remove, at)
        cloud.step(remove)
        assert not cloud.subvolumes() and cloud.step(share_steps.ListShares(tree))[1]["shares"] == []
        if not code:
            break
    assert at > 1


@pytest.mark.long
def test_a_cluster_without_a_manager_is_not_waited_for_for_ever(cloud: CephShares) -> None:
    with cloud.lab.ceph.stopped("mgr"), pytest.raises(ActionFailed) as caught:
        cloud.image("none", "new:32M")
    assert "SS027" in str(caught.value)
