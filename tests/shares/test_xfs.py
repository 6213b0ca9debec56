# SPDX-License-Identifier: Apache-2.0
"""Shares on XFS with project quotas, as oneadmin with the lines for sudoers of the page, in a kernel host:
few machines' own kernels have such quotas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from lab.kernel_host import ONEADMIN, KernelHost, KernelHostError
from nfs.site import HostSide
from semishared.errors import BadArguments, NoQuota, SemisharedError
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, Tree, first_uid
from semishared.share.xfs import FIRST_PROJECT
from shares.page import ROOT, rule

MiB = 1 << 20
MARKER = "0123456789abcdef" * 2
TREE = Tree("xfs", ROOT, MARKER)
MOUNT = """
modprobe xfs
mkdir -p "$0" /srv/off
mount -o prjquota,nosuid,nodev /dev/vda "$0"
mount /dev/vdb /srv/off
chown "$1:$2" "$0" /srv/off
chmod 711 "$0"
grep -q ^oneadmin: /etc/shadow || echo 'oneadmin:*:19000::::::' >>/etc/shadow # sudo takes who is in passwd alone for locked
"""  # noqa: E501
EMPTY = """
import os, sys
made = 0
try:
    while made < 3000:
        os.close(os.open(f"{sys.argv[1]}/{made}", os.O_CREAT | os.O_WRONLY))
        made += 1
except OSError as e:
    print(made, e.strerror)
"""


TAKEN_OVER = """
import fcntl, os, struct, sys
from semishared.vmm import virtiofsd
path, first, project = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
virtiofsd.into_namespace(first)
fd, room = os.open(path, os.O_RDONLY), bytes(28)
flags, *rest = struct.unpack("=IIIII8s", fcntl.ioctl(fd, 0x801C581F, room))
for wanted in ((flags, *rest[:2], project, *rest[3:]), (flags & ~0x200, *rest)):
    try:
        fcntl.ioctl(fd, 0x401C5820, struct.pack("=IIIII8s", *wanted))
        print("done")
    except OSError as e:
        print(e.strerror)
made, said = 0, ""
try:
    with open(f"{path}/file", "wb", buffering=0) as file:
        while made < 64:
            made += file.write(bytes(1 << 20)) >> 20
        os.fsync(fd)
except OSError as e:
    said = e.strerror
print(made, said)
"""
"""What root of a guest can do at worst: with its daemon, in whose namespace this is, it can do whatever the
kernel lets that.
"""


@pytest.fixture(scope="module")
def host() -> Iterator[KernelHost]:
    with KernelHost("shares", disks={"shares": 500, "off": 320}) as host:
        host.put("/etc/sudoers.d/semishared-shares", rule("oneadmin").encode(), 0o440)
        host.run(["bash", "-euc", MOUNT, ROOT, *map(str, ONEADMIN)])
        HostSide(host).on(share_steps.MarkRoot(TREE, MARKER))
        yield host


@pytest.fixture(scope="module")
def side(host: KernelHost) -> HostSide:
    return HostSide(host)


def make(side: HostSide, image: int, owner: int, mib: int) -> str:
    """Make a share; return its path."""
    return str(side.on(share_steps.MakeShare(TREE, Share(image, owner, 1, mib * MiB)))[0]["source"])


def drop(side: HostSide, *images: int) -> None:
    """Remove shares."""
    for image in images:
        side.on(share_steps.RemoveShare(TREE, image, ""))


def fill(host: KernelHost, path: str, owner: int, mib: int) -> tuple[int, str]:
    """Write a file as root of a guest of the owner; return how many MiB went in, and what was said."""
    uid = first_uid(owner)
    words = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={mib}", "conv=fsync", "status=none"]
    said = host.run(words, user=(uid, uid), check=False).err
    return int(host.run(["stat", "-c", "%s", path]).out) // MiB, said.strip().rpartition(": ")[2]


def projects(host: KernelHost) -> list[str]:
    """Return what the file system knows of projects of ours."""
    said = host.run(["xfs_quota", "-x", "-c", "report -p -N -n -b -i", ROOT]).out
    return [line for line in said.splitlines() if line.startswith(f"#{FIRST_PROJECT // 10**9}")]


def test_a_full_share_gets_an_error_and_its_neighbour_notices_nothing(
    host: KernelHost, side: HostSide
) -> None:
    mine, other = make(side, 1, 5, 32), make(side, 2, 9, 64)
    assert fill(host, f"{mine}/file", 5, 40) == (32, "No space left on device")
    assert fill(host, f"{other}/file", 9, 48) == (48, "")
    rows = {row["image"]: row for row in side.on(share_steps.ListShares(TREE))[0]["shares"]}
    assert rows[1]["used"] == 32 * MiB and rows[2]["used"] == 48 * MiB
    assert host.run(["df", "--output=size", "-BM", mine]).out.split()[-1] == "32M"
    # Not even root has a file of one counted for the other.
    assert "cross-device" in host.run(["ln", f"{mine}/file", f"{other}/linked"], check=False).err
    assert side.on(share_steps.ResizeShare(TREE, 1, 48 * MiB)) == [{"before": 32 * MiB}]
    assert fill(host, f"{mine}/more", 5, 12) == (12, "")
    with pytest.raises(BadArguments, match="cannot be held to 8.0 MiB"):
        side.on(share_steps.ResizeShare(TREE, 1, 8 * MiB))
    drop(side, 1, 2)
    assert host.run(["ls", "-A", ROOT]).out == ".semishared\n" and not projects(host)


def test_empty_files_end_too_and_a_neighbour_still_makes_some(host: KernelHost, side: HostSide) -> None:
    mine, other = make(side, 3, 5, 8), make(side, 4, 9, 64)
    found = host.run(["/usr/bin/python3", "-IS", "-c", EMPTY, mine], user=(first_uid(5),) * 2).out
    assert found == "1023 No space left on device\n"
    host.run(["sh", "-c", f"cd {other} && seq 2000 | xargs touch"], user=(first_uid(9),) * 2)
    # There is room, but nobody could make a file any more.
    with pytest.raises(BadArguments, match=r"2001 files .* held to 24.0 MiB, it may have 1536"):
        side.on(share_steps.ResizeShare(TREE, 4, 24 * MiB))
    assert side.on(share_steps.ResizeShare(TREE, 4, 48 * MiB)) == [{"before": 64 * MiB}]
    drop(side, 3, 4)


def test_a_daemon_that_a_guest_has_taken_over_is_held_to_the_share_too(
    host: KernelHost, side: HostSide
) -> None:
    mine, other = make(side, 5, 5, 16), make(side, 6, 9, 16)
    found = host.python(TAKEN_OVER, mine, str(first_uid(5)), str(FIRST_PROJECT + 6)).out.splitlines()
    assert found == ["Invalid argument", "Invalid argument", "16 No space left on device"]
    assert fill(host, f"{other}/file", 9, 15) == (15, "")
    drop(side, 5, 6)


def test_projects_of_others_are_left_alone_and_quotas_have_to_be_on(host: KernelHost, side: HostSide) -> None:
    theirs = FIRST_PROJECT + 99
    host.script(f"mkdir {ROOT}/theirs; xfs_quota -x -c 'project -s -p {ROOT}/theirs {theirs}' {ROOT}")
    limit = f"#{theirs}  0  0  8192  00 [--------]  1  0  500  00 [--------]"
    with pytest.raises(NoQuota, match=f"project {theirs}, in which 1 other"):
        make(side, 99, 5, 8)
    host.run(["xfs_quota", "-x", "-c", f"limit -p bhard=8m ihard=500 {theirs}", ROOT])
    with pytest.raises(NoQuota, match=f"project {theirs}, in which 1 other"):
        make(side, 99, 5, 8)
    assert side.on(share_steps.ListShares(TREE)) == [{"shares": []}]
    # Nor where somebody has put them there since the share was begun; what is left of it goes, and no limit
    # of theirs with it.
    began = {"version": 1, "share": Share(99, 5, 1, 8 * MiB).to_data(), "source": ""}
    host.put(f"{ROOT}/.semishared/.shares/99.json", json.dumps(began).encode())
    with pytest.raises(NoQuota, match=f"project {theirs}, in which 1 other"):
        make(side, 99, 5, 8)
    drop(side, 99)
    assert [row.split() for row in projects(host)] == [limit.split()] and host.run(
        ["ls", ROOT]
    ).out == "theirs\n"
    with pytest.raises(NoQuota, match=f"is in project {theirs} itself"):
        side.on(share_steps.MarkRoot(Tree("xfs", f"{ROOT}/theirs"), MARKER))
    host.run(["rm", "-r", f"{ROOT}/theirs"])
    with pytest.raises(NoQuota, match=f"project {theirs}, for which others have set a limit"):
        make(side, 99, 5, 8)
    host.run(["xfs_quota", "-x", "-c", f"limit -p bhard=0 ihard=0 {theirs}", ROOT])
    make(side, 99, 5, 8)
    drop(side, 99)
    assert not projects(host)
    with pytest.raises(NoQuota, match="not mounted with prjquota"):
        side.on(share_steps.MarkRoot(Tree("xfs", "/srv/off"), MARKER))


def test_a_tree_that_has_come_out_of_its_project_is_told_and_not_taken_for_held(
    host: KernelHost, side: HostSide
) -> None:
    """As one that was brought over to another file system, by what keeps no projects: its limit would hold
    nothing, however it is set.
    """
    path, project = make(side, 7, 5, 8), FIRST_PROJECT + 7
    fill(host, f"{path}/a", 5, 2)
    host.run(["xfs_quota", "-x", "-c", f"project -C -p {path} {project}", ROOT])
    mend = f"xfs_quota -x -c 'project -s -p {path} {project}' {ROOT}"
    ((row,),) = (answer["shares"] for answer in side.on(share_steps.ListShares(TREE)))
    assert (
        row["wrong"]["id"] == NoQuota.id
        and f"(as root, while no VM has it: {mend})" in row["wrong"]["detail"]
    )
    with pytest.raises(NoQuota, match=f"is not in project {project}: no limit holds it"):
        side.on(share_steps.ResizeShare(TREE, 7, 16 * MiB))
    host.run(["bash", "-ec", mend])
    ((row,),) = (answer["shares"] for answer in side.on(share_steps.ListShares(TREE)))
    assert "wrong" not in row and row["used"] >= 2 * MiB
    assert fill(host, f"{path}/b", 5, 16)[1] in ("No space left on device", "Disk quota exceeded")
    drop(side, 7)
    assert not projects(host)


@pytest.mark.long
def test_killed_at_every_point_and_begun_again_it_ends_the_same(host: KernelHost, side: HostSide) -> None:
    make_it, remove_it = (
        share_steps.MakeShare(TREE, Share(7, 3, 1, 8 * MiB)),
        share_steps.RemoveShare(TREE, 7, f"{ROOT}/share-7"),
    )
    points = {}
    host.run(["rm", "-rf", f"{ROOT}/.semishared/.uids"])
    for name, step in (("make", make_it), ("remove", remove_it)):
        for at in range(1, 100):
            if step is remove_it:
                side.on(make_it)
                fill(host, f"{ROOT}/share-7/file", 3, 2)
            killed = HostSide(host, {"SEMISHARED_KILL_AT": str(at)})
            code = _code(killed, step)
            side.on(step)
            if step is make_it:
                (row,) = side.on(share_steps.ListShares(TREE))[0]["shares"]
                assert (row["source"], row["used"]) == (f"{ROOT}/share-7", 0)
                assert fill(host, f"{ROOT}/share-7/file", 3, 12)[0] == 8
                side.on(remove_it)
                host.run(["rm", "-r", f"{ROOT}/.semishared/.uids"])
            assert side.on(share_steps.ListShares(TREE)) == [{"shares": []}] and not projects(host)
            assert host.run(["ls", "-A", ROOT]).out == ".semishared\n"
            killed.end()
            if not code:
                points[name] = at - 1
                break
    assert points["make"] > 5 and points["remove"] > 3


def _code(side: HostSide, step: share_steps.MakeShare | share_steps.RemoveShare) -> int:
    try:
        side.on(step)
    except KernelHostError:
        return 1
    except SemisharedError as e:
        raise AssertionError(e.line()) from None
    return 0
