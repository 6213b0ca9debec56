# SPDX-License-Identifier: Apache-2.0
"""Shares on NFS: directories without a quota (`plain`), made by a machine whose root the server takes for
root, given to guests by one whose root it does not. That they need SEMISHARED_FS_QUOTA = no, whatever they
are on, is in shares/test_btrfs.py.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator

import pytest

from lab import caches
from lab.kernel_host import ONEADMIN, KernelHostError
from nfs.site import EXPORT, PATIENCE_S, Host, HostSide, NfsSite
from semishared.errors import MissingImage, NotPermitted, SemisharedError
from semishared.model.share import steps as share_steps
from semishared.model.share.share import Share, Tree, first_uid
from shares.page import ROOT, rule

MiB = 1 << 20
MARKER = "0123456789abcdef" * 2
TREE = Tree("plain", ROOT, MARKER)
SERVE = """
modprobe loop
truncate -s 320M "$0/disk"
mkfs.xfs -q "$0/disk"
mkdir -p "$0/shares"
mount -o loop "$0/disk" "$0/shares"
chown "$1:$2" "$0/shares"
chmod 711 "$0/shares"
exportfs -o rw,sync,no_subtree_check,root_squash,fsid=7 "$3:$0/shares"
exportfs -o rw,sync,no_subtree_check,no_root_squash,fsid=7 "$4:$0/shares"
"""
MOUNT = """
grep -q ^oneadmin: /etc/shadow || echo 'oneadmin:*:19000::::::' >>/etc/shadow # sudo takes who is in passwd alone for locked
mkdir -p "$1"
mount -t nfs4 -o vers=4.2,hard,nosuid,nodev "$0:/shares" "$1"
"""  # noqa: E501
MAY = """
import contextlib, os, sys
from semishared.errors import SemisharedError
from semishared.share import attached
from semishared.vmm import virtiofsd
try:
    with contextlib.nullcontext() if os.geteuid() else virtiofsd.as_drivers_user():
        print(attached.check(int(sys.argv[1]), sys.argv[2], sys.argv[3], 1).first)
except SemisharedError as e:
    print(e.id, e.detail)
"""
"""Whether a host gives a share, and as whom: what deploy asks as oneadmin, and its daemon then as root."""
GUEST = """
import os, sys
from semishared.vmm import virtiofsd
virtiofsd.into_namespace(int(sys.argv[1]))
os.chdir(sys.argv[2])
with open("file", "wb") as file:
    file.write(bytes(1 << 20))
    os.fsync(file.fileno())
os.chmod("file", 0o6700)
for words in (("file", 1000, 1000), ("file", 70000, 0)):
    try:
        os.chown(*words)
        print("given")
    except OSError as e:
        print(e.strerror)
"""
"""What the daemon of a guest does there for its root."""


def squashed(site: NfsSite) -> Host:
    """Return the machine whose root is nobody for the server."""
    return site.hosts[0]


@pytest.fixture(scope="module")
def drivers() -> Iterator[str]:
    """Return where the package is its user's, as it is on hosts: what that user has in the root of shares is
    to be trusted.

    It lies on this machine, whose files all hosts have: to copy it takes an emulated one seconds.
    """
    with tempfile.TemporaryDirectory(prefix="drivers-", dir="/var/tmp") as top:
        os.chmod(top, 0o755)
        subprocess.run(["cp", "-r", f"{caches.CHECKOUT}/lib", f"{top}/lib"], check=True)
        subprocess.run(["chown", "-R", "{}:{}".format(*ONEADMIN), f"{top}/lib"], check=True)
        yield f"{top}/lib"


@pytest.fixture(scope="module")
def maker(nfs_site: NfsSite) -> Host:
    """Return the machine that makes shares, with the lines of the page for sudo."""
    h1, h2 = nfs_site.hosts
    nfs_site.fe.run(["bash", "-euc", SERVE, EXPORT, *map(str, ONEADMIN), h1.address, h2.address])
    for host in (h1, h2):
        host.put("/etc/sudoers.d/semishared-shares", rule("oneadmin").encode(), 0o440)
        host.run(["bash", "-euc", MOUNT, nfs_site.fe.address, ROOT], timeout=PATIENCE_S)
        assert host.run(["stat", "-f", "-c", "%T", ROOT]).out == "nfs\n"
    h2.on(share_steps.MarkRoot(TREE, MARKER))
    return h2


def may(host: Host, drivers: str, image: int, user: tuple[int, int] | None) -> str:
    """Return what a host says to a share; `user`: None for root, which its server takes for nobody."""
    words = [str(image), f"{ROOT}/share-{image}", MARKER]
    return host.python(MAY, *words, user=user, env={"PYTHONPATH": drivers}).out.strip()


def left(host: Host) -> str:
    """Return what there is in the root besides what is ours."""
    return host.run(
        ["find", ROOT, "-mindepth", "1", "-not", "-path", f"{ROOT}/.semishared*"], user=ONEADMIN
    ).out


def test_where_root_is_nobody_no_share_is_made_and_one_line_says_why(nfs_site: NfsSite, maker: Host) -> None:
    host = squashed(nfs_site)
    with pytest.raises(
        NotPermitted, match=f"{ROOT}/share-1 on h1 is on NFS, .*no_root_squash.* Operation not permitted"
    ) as caught:
        host.on(share_steps.MakeShare(TREE, Share(1, 5, 1, 8 * MiB)))
    assert "\n" not in caught.value.line()
    # As oned has the image deleted then, there; nobody but oneadmin has had what there is yet.
    (row,) = host.on(share_steps.ListShares(TREE))[0]["shares"]
    assert (row["image"], row["source"]) == (1, "")
    host.on(share_steps.RemoveShare(TREE, 1, f"{ROOT}/share-1"))
    assert host.on(share_steps.ListShares(TREE)) == [{"shares": []}] and left(maker) == ""


def test_one_machine_makes_it_and_another_gives_it_at_once(
    nfs_site: NfsSite, maker: Host, drivers: str
) -> None:
    host, owner = squashed(nfs_site), 5
    before = may(host, drivers, 2, ONEADMIN)
    assert before.startswith("SS175 "), before
    made = maker.on(
        share_steps.MakeShare(TREE, Share(2, owner, 1, 8 * MiB)),
        share_steps.MakeShare(TREE, Share(3, 9, 1, 8 * MiB)),
    )
    assert [row["source"] for row in made] == [f"{ROOT}/share-2", f"{ROOT}/share-3"]
    # This host knows, from a moment ago, that it is not there.
    assert may(host, drivers, 2, ONEADMIN) == may(host, drivers, 2, None) == str(first_uid(owner))
    said = host.python(GUEST, str(first_uid(owner)), f"{ROOT}/share-2").out.splitlines()
    # For the server root of a guest is an ordinary user.
    assert said == ["Operation not permitted", "Invalid argument"]
    assert (
        maker.run(["stat", "-c", "%a:%u:%g:%s", f"{ROOT}/share-2/file"]).out.strip()
        == f"6700:{first_uid(5)}:{first_uid(5)}:{MiB}"
    )
    other = GUEST.replace('open("file", "wb")', 'open("../share-2/file", "rb")')
    assert "Permission denied" in host.python(other, str(first_uid(9)), f"{ROOT}/share-3", check=False).err
    rows = {row["image"]: row for row in maker.on(share_steps.ListShares(TREE))[0]["shares"]}
    assert [(rows[image]["size"], rows[image]["used"]) for image in (2, 3)] == [(8 * MiB, -1)] * 2
    assert maker.on(share_steps.ResizeShare(TREE, 2, 16 * MiB)) == [{"before": 8 * MiB}]
    maker.on(
        share_steps.RemoveShare(TREE, 2, f"{ROOT}/share-2"),
        share_steps.RemoveShare(TREE, 3, f"{ROOT}/share-3"),
    )
    assert may(host, drivers, 2, ONEADMIN).startswith("SS") and left(maker) == ""
    with pytest.raises(MissingImage):
        maker.on(share_steps.ResizeShare(TREE, 2, 8 * MiB))


@pytest.mark.long  # a process of its own for each point, in emulation; on a file system of the machine itself: shares/test_btrfs.py  # noqa: E501
def test_killed_at_every_point_gc_removes_what_is_left(maker: Host) -> None:
    make_it, remove_it = (
        share_steps.MakeShare(TREE, Share(7, 3, 1, 8 * MiB)),
        share_steps.RemoveShare(TREE, 7, f"{ROOT}/share-7"),
    )
    points = {}
    for name, step in (("make", make_it), ("remove", remove_it)):
        for at in range(1, 100):
            if step is remove_it:
                maker.on(make_it)
                maker.python(GUEST, str(first_uid(3)), f"{ROOT}/share-7")
            side = HostSide(maker, {"SEMISHARED_KILL_AT": str(at)})
            try:
                side.on(step)
                points[name] = at - 1
            except KernelHostError:
                pass
            except SemisharedError as e:
                raise AssertionError(e.line()) from None
            finally:
                side.end()
            rows = maker.on(share_steps.ListShares(TREE))[0]["shares"]
            # What gc asks for of one that is not ready; one that is, its image has.
            for row in rows:
                maker.on(
                    share_steps.RemoveShare(TREE, 7, row["source"], -1 if row["source"] else row["born"])
                )
            assert maker.on(share_steps.ListShares(TREE)) == [{"shares": []}] and left(maker) == ""
            if name in points:
                break
    assert points["make"] > 3 and points["remove"] > 2, points
