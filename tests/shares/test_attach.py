# SPDX-License-Identifier: Apache-2.0
"""Shares in real guests, in the lab: what they see of each other, what a hostile one can do to its host and
to others, and their life.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, NamedTuple

import pytest

from lab.cloud import SYSTEM
from lab.guest import Guest
from lab.oned import ActionFailed
from lab.oned.drivers import Call, Refused
from lab.oned.states import Vm as State
from semishared.model.share.share import UIDS, first_uid
from shares.cloud import MiB
from shares.guests import Shares
from shares.page import ROOT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")

FIRST, SECOND = first_uid(5), first_uid(9)
"""Root of the guests of the first owner on the hosts, and of the second one."""
NET_RAW = bytes.fromhex("0100000200200000000000000000000000000000")
"""cap_net_raw+ep, as setcap(8) writes it."""


OPEN = """
for at in $(pgrep -x virtiofsd | sed 's|.*|/proc/&/fd/*|'); do
    [ -f "$at" ] || continue
    printf '%s %s\n' "$(sed -n 's/^flags:.*\\(.\\)$/\\1/p' "${at%/fd/*}/fdinfo/${at##*/}")" "$(readlink "$at")"
done
"""  # noqa: E501
"""Names the regular files that daemons have open, each after the last octal digit of its flags: 0 if it is
not for writing.
"""


class Tenants(NamedTuple):
    """User 5 has two guests on h1: a share in both, one that the second may only read, a small one; user 9
    has one each on h2.
    """

    shares: Shares
    both: int
    read: int
    small: int
    alone: int
    one: int
    two: int
    other: int
    calls: list[Call]
    """Of the drivers, until these were up."""

    def guest(self, vm: int) -> Guest:
        return self.shares.cloud.guest(vm)

    def path(self, name: str) -> Path:
        return self.shares.path(self.both) / name


@pytest.fixture(scope="module")
def tenants(hosts: Shares) -> Iterator[Tenants]:
    shares, before = hosts, len(hosts.oned.calls)
    both, read, small = (
        shares.image(name, size, uid=5) for name, size in (("both", "32M"), ("read", "16M"), ("small", "1M"))
    )
    alone = shares.image("alone", "32M", uid=9, persistent=True)
    one, two = shares.deploy("one", both, read, small), shares.create("two", both, read)
    shares.oned.vm(two).disks[2]["READONLY"] = "YES"
    shares.oned.vm_deploy(two, "h1", SYSTEM)
    other = shares.deploy("other", alone, host="h2")
    for vm in (one, two, other):
        shares.mounted(vm)
    yield Tenants(shares, both, read, small, alone, one, two, other, shares.oned.calls[before:])
    shares.clear()


def test_two_guests_see_what_the_other_writes(tenants: Tenants) -> None:
    one, two = tenants.guest(tenants.one), tenants.guest(tenants.two)
    assert one.run("echo first >/both/file && chown 1000:1000 /both/file")[0] == 0
    assert two.run("cat /both/file; stat -c %u:%g /both/file; echo second >>/both/file") == (
        0,
        "first\n1000:1000\n",
    )
    assert one.run("sleep 1; cat /both/file") == (0, "first\nsecond\n")
    found = tenants.path("file").stat()
    assert (found.st_uid, found.st_gid, found.st_size) == (FIRST + 1000, FIRST + 1000, 13)


def test_no_transfer_action_is_called_for_a_share(tenants: Tenants) -> None:
    calls = [call for call in tenants.calls if call.kind == "tm"]
    assert {call.action for call in calls} == {"clone", "context"}
    assert [call.action for call in calls].count("clone") == 3


QEMUS = "/usr/lib/qemu/virtiofsd"


def test_locks_of_several_guests_are_the_hosts_and_of_one_alone_its_own(tenants: Tenants) -> None:
    # Of QEMU's daemon, and of one host: on two they hold if the file system has them for both.
    one, two, alone = tenants.guest(tenants.one), tenants.guest(tenants.two), tenants.guest(tenants.other)
    # Debian 13 has a link there, to the one in Rust.
    found = tenants.shares.cloud.lab.hosts[0].run(["find", QEMUS, "-type", "f"], check=False).stdout
    is_qemus = found.decode().strip() == QEMUS
    for how in ("posix", "flock"):
        assert one.lock(f"/both/{how}", how) == ""
        if not is_qemus:  # the one in Rust has none: each guest's are its own
            assert two.lock(f"/both/{how}", how) == ""
            one.unlock()
            two.unlock()
            continue
        assert two.lock(f"/both/{how}", how) == "Resource temporarily unavailable"
        assert two.lock(f"/both/{how}", how, wait=True) == "Operation not supported"
        one.unlock()
        assert two.lock(f"/both/{how}", how) == ""
        two.unlock()
        assert alone.lock(f"/alone/{how}", how, wait=True) == ""
        alone.unlock()


def test_read_only_is_so_whatever_the_guest_tries(tenants: Tenants) -> None:
    one, two = tenants.guest(tenants.one), tenants.guest(tenants.two)
    assert one.run("echo text >/read/file")[0] == 0
    assert two.run(
        "cat /read/file; mount -o remount,rw /read; echo more >>/read/file; rm /read/file; mkdir /read/new"
    ) == (
        1,
        "text\nsh: can't create /read/file: Read-only file system\nrm: can't remove '/read/file': "
        "Read-only file system\n"
        "mkdir: can't create directory '/read/new': Read-only file system\n",
    )
    assert os.listdir(tenants.shares.path(tenants.read)) == ["file"]


class Row(NamedTuple):
    """What root of a hostile guest does in /both, what it is told, and what then has to be true of the
    host.
    """

    script: str
    said: str
    then: Callable[[Tenants], bool]


def as_user(tenants: Tenants, uid: int, *words: str) -> str:
    """Return what a program on h1 says, run as a user that h1 does not know."""
    argv = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *words]
    done = tenants.shares.cloud.lab.hosts[0].run(argv, user="root", check=False)
    return (done.stdout + done.stderr).decode().strip()


def kinds(tenants: Tenants) -> set[int]:
    """Return the kinds of files in the share."""
    return {stat.S_IFMT(os.lstat(path).st_mode) for path in tenants.path(".").rglob("*")}


def in_range(path: Path) -> bool:
    """Tell whether a file belongs to a user of the first owner's guests."""
    return FIRST <= os.lstat(path).st_uid < FIRST + UIDS and FIRST <= os.lstat(path).st_gid < FIRST + UIDS


ROWS = {
    "setuid": Row(
        "cp /bin/busybox /both/id; chmod 6755 /both/id; stat -c %a:%u /both/id",
        "6755:0\n",
        lambda t: in_range(t.path("id"))
        and as_user(t, 65534, "/srv/shares/" + t.shares.path(t.both).name + "/id", "-u") == "65534",
    ),
    "block device": Row(
        "mknod /both/disk b 7 0",
        "mknod: /both/disk: Operation not permitted\n",
        lambda t: stat.S_IFBLK not in kinds(t),
    ),
    "character device": Row(
        "mknod /both/mem c 1 1",
        "mknod: /both/mem: Operation not permitted\n",
        lambda t: stat.S_IFCHR not in kinds(t),
    ),
    "chown to the last user": Row(
        "echo >/both/last; chown 65534:65535 /both/last; stat -c %u:%g /both/last",
        "65534:65535\n",
        lambda t: (t.path("last").stat().st_uid, t.path("last").stat().st_gid)
        == (FIRST + 65534, FIRST + 65535),
    ),
    "chown beyond the range": Row(
        "echo >/both/far; chown 70000 /both/far; chown 0:65536 /both/far; chown 4294901760 /both/far",
        "chown: /both/far: Invalid argument\n" * 3,
        lambda t: in_range(t.path("far")),
    ),
    "..": Row(
        "cd /both; ls ..//../../both/../proc/1/comm", "..//../../both/../proc/1/comm\n", lambda t: True
    ),
    "symbolic link": Row(
        "ln -s /etc/passwd /both/link; cat /both/link; ln -s ../share-0 /both/up; ls /both/up/",
        "cat: can't open '/both/link': No such file or directory\nls: /both/up/: No such file or directory\n",
        lambda t: os.lstat(t.path("link")).st_uid == FIRST,
    ),
    "hard link to another share": Row(
        "echo >/read/mine; ln /read/mine /both/mine",
        "ln: /both/mine: Invalid cross-device link\n",
        lambda t: not t.path("mine").exists(),
    ),
    "private file": Row(
        "mkdir -m 700 /both/private; echo secret >/both/private/file; stat -c %u /both/private",
        "0\n",
        lambda t: "Permission denied"
        in as_user(t, SECOND, "cat", "/srv/shares/" + t.shares.path(t.both).name + "/private/file"),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_root_of_a_hostile_guest_is_nobody_on_the_host(tenants: Tenants, name: str) -> None:
    row = ROWS[name]
    assert tenants.guest(tenants.one).run(row.script)[1] == row.said
    assert all(map(in_range, tenants.path(".").rglob("*")))
    assert row.then(tenants)


def test_the_guest_of_another_owner_gets_at_nothing_of_the_first_from_inside(tenants: Tenants) -> None:
    """Its daemon sees its own share alone, and is a user of its own owner's."""
    one, other, name = tenants.guest(tenants.one), tenants.guest(tenants.other), tenants.path(".").name
    assert (
        one.run("mkdir -p /both/theirs; echo secret >/both/theirs/file; chmod 666 /both/theirs/file; sync")[0]
        == 0
    )
    before = sorted(path.name for path in tenants.path(".").iterdir())
    for path in (
        f"/alone/../{name}",
        f"/alone/up/{name}",
        f"/alone/above/{name}",
        f"/alone/root{ROOT}/{name}",
    ):
        links = f"ln -sfn .. /alone/up; ln -sfn {ROOT} /alone/above; ln -sfn / /alone/root"
        code, said = other.run(f"{links}; cat {path}/theirs/file; echo mine >{path}/theirs/new")
        assert code and "secret" not in said, said
    # Nor has its VM a device of that tag.
    code, said = other.run("mkdir -p /tried; mount -t virtiofs both /tried")
    assert code and "failed" in said
    assert other.run("rm /alone/up /alone/above /alone/root")[0] == 0
    assert sorted(path.name for path in tenants.path(".").iterdir()) == before
    assert os.listdir(tenants.path("theirs")) == ["file"]


def test_extended_attributes_are_the_guests_alone(tenants: Tenants) -> None:
    guest, path = tenants.guest(tenants.one), tenants.path("attributes")
    assert guest.run("cp /bin/busybox /both/attributes")[0] == 0
    assert guest.set_attribute("/both/attributes", "user.mine", b"1") == ""
    assert (
        guest.set_attribute("/both/attributes", "trusted.overlay.opaque", b"y") == "Operation not permitted"
    )
    guest.set_attribute("/both/attributes", "security.capability", NET_RAW)
    assert "trusted.overlay.opaque" not in os.listxattr(path)
    if "security.capability" in os.listxattr(path):
        # Of that root alone: 24 bytes, whose last four say whose.
        found = os.getxattr(path, "security.capability")
        assert (len(found), int.from_bytes(found[20:], "little")) == (24, FIRST)


def test_what_tells_cephfs_quotas_and_layouts_a_guest_can_neither_set_nor_read(tenants: Tenants) -> None:
    guest = tenants.guest(tenants.one)
    assert guest.run("echo >/both/limits")[0] == 0
    for name, value in (("ceph.quota.max_bytes", b"0"), ("ceph.dir.layout.pool", b"other")):
        assert guest.set_attribute("/both/limits", name, value) == "Operation not permitted"
        assert guest.attribute("/both/limits", name) == "No data available"
    assert guest.set_attribute("/both/limits", "user.ceph.mine", b"1") == ""
    assert guest.attribute("/both/limits", "user.ceph.mine") == ""


def test_the_same_user_of_two_owners_is_two_on_the_host(tenants: Tenants) -> None:
    for vm, share in ((tenants.one, "both"), (tenants.other, "alone")):
        assert tenants.guest(vm).run(f"echo >/{share}/same; chown 1000 /{share}/same")[0] == 0
    assert tenants.path("same").stat().st_uid == FIRST + 1000
    assert (tenants.shares.path(tenants.alone) / "same").stat().st_uid == SECOND + 1000


def test_what_a_taken_over_daemon_could_do(tenants: Tenants) -> None:
    shares = tenants.shares
    for host, first, count in ((0, FIRST, 10), (1, SECOND, 2)):
        for name in ("uid_map", "gid_map"):
            assert [text.split() for text in shares.of_daemons(name, host)] == [
                ["0", str(first), "65536"]
            ] * count
        for text in shares.of_daemons("status", host):
            rows = dict(line.split(":\t") for line in text.splitlines() if ":\t" in line)
            assert (
                set(rows["Uid"].split()) == set(rows["Gid"].split()) == {str(first)}
                and not rows["Groups"].strip()
            )
    h1 = shares.cloud.lab.hosts[0]
    roots = [
        h1.run(["ls", "-di", f"/proc/{pid}/root/"], user="root").stdout.split()[0] for pid in shares.daemons()
    ]
    # Of what it sees its share is the root (256: of a subvolume).
    assert roots == [b"256"] * 10
    for node in shares.cloud.lab.hosts:
        files = [
            line.split(" ", 1)
            for line in node.run(["sh", "-euc", OPEN], user="root").stdout.decode().splitlines()
        ]
        assert any(name.endswith("-fs.pid") for _, name in files), files
        # But for the guest's memory.
        assert not [name for mode, name in files if mode != "0" and not name.startswith("/memfd:")], files


def test_a_full_share_is_full_in_the_guest_and_its_neighbour_notices_nothing(tenants: Tenants) -> None:
    one, other = tenants.guest(tenants.one), tenants.guest(tenants.other)
    code, said = one.run("dd if=/dev/urandom of=/both/big bs=1M count=64; sync", 240)
    assert "Disk quota exceeded" in said or "No space left" in said, said
    assert 8 * MiB < tenants.path("big").stat().st_size <= 32 * MiB
    assert (
        one.run("mkdir /both/more")[1] == "mkdir: can't create directory '/both/more': Disk quota exceeded\n"
    )
    assert (
        other.run("dd if=/dev/zero of=/alone/file bs=1M count=16 conv=fsync && rm /alone/file", 240)[0] == 0
    )
    code, said = one.run("rm /both/big", 240)
    assert code == 0, said


def test_files_without_data_are_counted_too(tenants: Tenants) -> None:
    # With long names, which the file system counts: it is full of fewer.
    script = (
        "cd /small; n=$(printf %0200d 0); i=0; while [ $i -lt 9999 ] && : >$n$i; do i=$((i+1)); done; "
        "echo made $i"
    )
    said = tenants.guest(tenants.one).run(script, 240)[1]
    assert "Disk quota exceeded" in said and "made 9999" not in said, said
    assert tenants.guest(tenants.other).run("echo >/alone/small")[0] == 0


def test_a_daemon_that_is_killed_is_one_guests_loss_until_it_is_started_again(tenants: Tenants) -> None:
    shares, oned = tenants.shares, tenants.shares.oned
    # The second of the two may have followed the first one by then.
    shares.cloud.lab.hosts[1].run(["kill", "-9", *map(str, shares.daemons(1))], user="root", check=False)
    until = time.monotonic() + 30
    while shares.daemons(1) and time.monotonic() < until:
        time.sleep(0.1)
    assert shares.daemons(1) == []
    assert tenants.guest(tenants.one).run("echo still >/both/there && cat /both/there") == (0, "still\n")
    oned.vm_poweroff(tenants.other, hard=True)
    # Cold, to the other host.
    oned.vm_migrate(tenants.other, "h1")
    oned.vm_resume(tenants.other)
    assert len(shares.daemons(0)) == 12 and shares.daemons(1) == []
    assert shares.mounted(tenants.other).run("stat -c %u /alone/same") == (0, "1000\n")


def test_what_oned_refuses_leaves_the_guest_as_it_was(tenants: Tenants) -> None:
    oned, vm = tenants.shares.oned, tenants.other
    asked = {
        "Filesystem disks are not supported": (
            lambda: oned.vm_suspend(vm),
            lambda: oned.vm_stop(vm),
            lambda: oned.vm_migrate(vm, "h2"),
        ),
        "cannot be live-migrated": (lambda: oned.vm_migrate(vm, "h2", how="live"),),
        "Can not attach disks FILESYSTEM": (lambda: oned.disk_attach(vm, tenants.both),),
        "can not be detached": (lambda: oned.disk_detach(vm, 1),),
        "can not be resized": (lambda: oned.disk_resize(vm, 1, 4096),),
    }
    for said, tries in asked.items():
        for ask in tries:
            with pytest.raises(Refused, match=said):
                ask()
    assert tenants.guest(vm).run("cat /proc/mounts >/alone/mounts")[0] == 0


def test_libvirt_saves_no_guest_with_a_share_and_moves_none(tenants: Tenants) -> None:
    # What oned refuses first, for whoever asks libvirt.
    h1, oned = tenants.shares.cloud.lab.hosts[0], tenants.shares.oned
    domain = oned.vm(tenants.other).deploy_id
    for words in (["save", domain, "/var/tmp/saved"], ["migrate", "--live", domain, "qemu+ssh://h2/system"]):
        done = h1.run(["virsh", "-c", "qemu:///system", *words], check=False)
        assert done.returncode and re.search("vhost-user-fs|virtiofs", done.stderr.decode()), (
            done.stderr.decode()
        )
    assert tenants.guest(tenants.other).run("cat /alone/mounts")[0] == 0


def test_a_vm_that_is_undeployed_leaves_no_daemon_and_comes_back(tenants: Tenants) -> None:
    shares, oned, vm = tenants.shares, tenants.shares.oned, tenants.other
    oned.vm_undeploy(vm, hard=True)
    assert oned.vm(vm).state == State.UNDEPLOYED and len(shares.daemons()) == 10
    oned.vm_resume(vm)
    oned.vm_deploy(vm, "h2", SYSTEM)
    assert len(shares.daemons(1)) == 2


def test_a_host_whose_mount_is_not_safe_gives_no_share(tenants: Tenants) -> None:
    shares, oned, vm = tenants.shares, tenants.shares.oned, tenants.other
    h2 = shares.cloud.lab.hosts[1]
    oned.vm_poweroff(vm, hard=True)
    assert shares.daemons(1) == []
    for options, said in (
        ("remount,bind,suid,nodev", "without nosuid"),
        ("remount,bind,nosuid,dev", "without nodev"),
    ):
        h2.run(["mount", "-o", options, ROOT], user="root")
        with pytest.raises(ActionFailed, match=said) as caught:
            oned.vm_resume(vm)
        assert "SS175" in str(caught.value)
    h2.run(["umount", ROOT], user="root")
    with pytest.raises(ActionFailed, match="SS175|SS013"):
        oned.vm_resume(vm)
    assert shares.daemons(1) == []
    shares.mount(h2)


def test_nothing_is_left_but_the_shares_until_they_are_deleted(tenants: Tenants) -> None:
    shares = tenants.shares
    root = shares.path(tenants.both).parent
    for vm in (tenants.one, tenants.two, tenants.other):
        shares.cloud.terminate(vm)
    assert shares.daemons(0) == shares.daemons(1) == [] and shares.cloud.leftovers() == []
    assert (shares.path(tenants.alone) / "mounts").exists()
    for image in (tenants.both, tenants.read, tenants.small, tenants.alone):
        shares.oned.image_delete(image)
    assert os.listdir(root) == [".semishared"]
