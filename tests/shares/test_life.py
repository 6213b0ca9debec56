# SPDX-License-Identifier: Apache-2.0
"""What an operator sees of shares that guests have, and what becomes of both when a host or the file system
goes away and comes back.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from lab import Node
from lab.cloud import SYSTEM
from lab.oned import ActionFailed
from semishared.model.share.share import first_uid
from shares.cloud import SHARES, MiB
from shares.guests import SUDOERS, Shares, give_program
from shares.page import ROOT, rule
from system.test_monitoring import hung

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")

NAMESPACES = "/proc/sys/user/max_user_namespaces"
DAEMON = "/usr/lib/qemu/virtiofsd"
TAKE = f"""
printf 'admin:100000:65536\nbelow:34464:65536\n' >/etc/subuid
echo 0 >/tmp/none; mount --bind /tmp/none {NAMESPACES}
mount --bind /dev/null {DAEMON}
mount -o remount,bind,suid,nodev {ROOT}
"""
STRANGERS = f"""
mount -t tmpfs -o nosuid,nodev,mode=711 strangers {ROOT}; cd {ROOT}; mkdir -p .semishared/.shares .semishared/.uids share-$0
echo '{{"version": 1, "id": "ffffffffffffffffffffffffffffffff"}}' >.semishared/store
echo '{{"version": 1, "owner": 9}}' >.semishared/.uids/9
echo '{{"version": 1, "share": {{"image": '$0', "owner": 9, "born": '$1', "size": 1}}, "source": "{ROOT}/share-'$0'"}}' >share
mv share .semishared/.shares/$0.json
"""  # noqa: E501
GIVE = f"umount {NAMESPACES} {DAEMON}; mount -o remount,bind,nosuid,nodev {ROOT}; rm /etc/subuid"
SNAPSHOT = "/usr/local/sbin/semishared-btrfs snapshot /srv/shares share-0 snapshot-0-x"
DATA = "/srv/theirs"
THEIRS = f"""
mkdir {DATA}; mount -t tmpfs -o nosuid,nodev,mode=755 theirs {DATA}; cd {DATA}
echo public >public; (umask 077; echo private >private); ln -s /etc/shadow above; chown 1000:1000 public private
mkdir mine; chown "$1:$1" mine
"""  # noqa: E501
"""Data of the hosts' own users, and one directory that user 5's guests are to write to."""
PROMPT_S = 60
"""Far below what a hung file system would take: for ever."""


class Standing(NamedTuple):
    """A guest on each host, which have one share; h2's may only read it, until its root was away."""

    shares: Shares
    image: int
    one: int
    two: int

    @property
    def h1(self) -> Node:
        return self.shares.cloud.lab.hosts[0]

    @property
    def h2(self) -> Node:
        return self.shares.cloud.lab.hosts[1]

    def found(self) -> list[tuple[str, str, str]]:
        """Return what doctor finds of shares."""
        rows = self.shares.says("doctor", codes=(0, 1, 2))["findings"]
        return [
            (row["severity"], row["machine"], row["what"])
            for row in rows
            if re.search(f"shares|datastore {SHARES} ", row["what"])
        ]


@pytest.fixture(scope="module")
def standing(hosts: Shares) -> Iterator[Standing]:
    image = hosts.image("both", "32M", uid=5)
    one, two = hosts.deploy("one", image), hosts.create("two", image)
    hosts.oned.vm(two).disks[1]["READONLY"] = "YES"
    hosts.oned.vm_deploy(two, "h2", SYSTEM)
    hosts.mounted(one)
    yield Standing(hosts, image, one, two)
    hosts.clear()


def test_status_says_how_full_a_share_is_and_who_has_it(standing: Standing) -> None:
    shares = standing.shares
    assert (
        shares.cloud.guest(standing.one).run("dd if=/dev/zero of=/both/file bs=1M count=4 conv=fsync")[0] == 0
    )
    standing.h1.run(["sync", "-f", ROOT])
    other = shares.image("other", "16M")
    rows = {row["image"]: row for row in shares.says("status")["shares"]}
    row = rows[standing.image]
    assert 4 * MiB <= row["used"] < 5 * MiB and (row["size"], row["owner"], row["state"]) == (32 * MiB, 5, "")
    assert [(vm["vm"], vm["host"], vm["tag"], vm["readonly"]) for vm in row["vms"]] == [
        (standing.one, "h1", "both", False),
        (standing.two, "h2", "both", True),
    ]
    assert rows[other]["vms"] == []
    mine = [standing.image]
    for word, wanted in (("vm:one", mine), ("host:h2", mine), ("image:other", [other]), ("image:both", mine)):
        assert [row["image"] for row in shares.says("status", word)["shares"]] == wanted
    said = shares.cloud.lab.fe.run(
        ["/var/lib/one/remotes/lib/semishared/semishared", "status"]
    ).stdout.decode()
    assert f"{standing.two} two on h2, read-only" in said
    shares.oned.image_delete(other)


def test_guests_are_given_a_directory_that_was_there_before_as_its_owners_users_and_nothing_else_of_the_host(
    standing: Standing,
) -> None:
    shares, h1 = standing.shares, standing.h1
    h1.run(["sh", "-euc", THEIRS, "sh", str(first_uid(5))], user="root")
    shares.oned.datastore_update(SHARES, f'SAFE_DIRS="{DATA}"')
    work = shares.oned.image_create(SHARES, "work", path=DATA, type="FILESYSTEM", uid=5)
    to_read = 'READONLY="YES"'
    read = shares.oned.image_create(
        SHARES, "read", path=f"{DATA}/mine", type="FILESYSTEM", uid=5, attributes=to_read
    )
    # Its user may say what they like of the disk, and to oned that comes before what the image says.
    vm = shares.create("theirs", work, read, READONLY="NO")
    assert [disk.get("READONLY") for disk in shares.oned.vm(vm).disks[1:]] == ["NO", "NO"]
    shares.oned.vm_deploy(vm, "h1", SYSTEM)
    guest = shares.mounted(vm)
    tries = (
        "cat /work/public; stat -c %u:%g /work/public; cat /work/private; echo x >>/work/public; echo "
        "x >/work/new; ls /work"
    )
    assert guest.run(tries) == (
        0,
        "public\n65534:65534\ncat: can't open '/work/private': Permission denied\n"
        "sh: can't create /work/public: Permission denied\nsh: can't create /work/new: Permission "
        "denied\nabove\nmine\nprivate\npublic\n",
    )
    assert guest.run("chown 0 /work/private; rm /work/public; cat /work/above")[1] == (
        "chown: /work/private: Operation not permitted\nrm: can't remove '/work/public': Permission denied\n"
        "cat: can't open '/work/above': No such file or directory\n"
    )
    assert guest.run("cd /work/mine; cp /bin/busybox id; chmod 4755 id; mknod disk b 7 0; ls ../../..")[
        1
    ] == ("mknod: disk: Operation not permitted\n" + "\n".join(sorted(guest.run("ls /")[1].split())) + "\n")
    made = h1.path(f"{DATA}/mine/id").stat()
    assert (made.st_uid, made.st_mode & 0o7777) == (first_uid(5), 0o4755)
    # The same one, which this disk may only read.
    assert guest.run("ls /read; rm /read/id; echo >/read/new") == (
        1,
        "id\nrm: can't remove '/read/id': Read-only file system\nsh: can't create /read/new: "
        "Read-only file system\n",
    )
    shares.oned.vm_poweroff(vm, hard=True)
    h1.run(["umount", "-l", DATA], user="root")
    with pytest.raises(ActionFailed, match=rf"SS175 (?=.* on h1 is mounted without nosuid).*{DATA}"):
        shares.oned.vm_resume(vm)
    h1.run(["mount", "-t", "tmpfs", "-o", "nosuid,nodev", "another", DATA], user="root")
    with pytest.raises(ActionFailed, match=rf"SS020 (?=.* on h1 is not there).*{DATA}/mine"):
        shares.oned.vm_resume(vm)
    shares.cloud.terminate(vm)
    for image in (work, read):
        shares.oned.image_delete(image)
    h1.run(["umount", DATA], user="root")


def test_doctor_finds_what_keeps_guests_from_shares(standing: Standing) -> None:
    assert standing.found() == []
    standing.h2.run(["sh", "-euc", TAKE], user="root")
    standing.h1.path(SUDOERS).write_text(
        "".join(line for line in rule("oneadmin").splitlines(True) if "^snapshot " not in line)
    )
    try:
        found = standing.found()
    finally:
        standing.h2.run(["sh", "-euc", GIVE], user="root")
        standing.h1.path(SUDOERS).write_text(rule("oneadmin"))
    assert sorted(found) == [
        ("broken", "h1", f"datastore 110 (shares): sudo does not permit: {SNAPSHOT}"),
        (
            "broken",
            "h2",
            "shares of datastore 110: /srv/shares is mounted without nosuid: no guest gets a share",
        ),
        ("broken", "h2", "shares: the kernel allows no user namespaces, which guests' users are kept in"),
        ("broken", "h2", "shares: there is no virtiofsd"),
        (
            "warning",
            "h2",
            "shares: /etc/subuid gives 100000 to 165535 to admin, and they are users of guests, "
            "of user 0 of OpenNebula on",
        ),
    ]
    assert standing.found() == []


def test_a_file_system_that_hangs_holds_nobody_up_and_one_line_says_so(standing: Standing) -> None:
    shares = standing.shares
    shares.oned.vm_poweroff(standing.two, hard=True)
    with hung(standing.h1, ROOT), hung(standing.h2, ROOT):
        since = time.monotonic()
        assert (
            "broken",
            "h1",
            f"datastore {SHARES} (shares): {ROOT} on h1 hangs: no answer within 10 s",
        ) in standing.found()
        assert time.monotonic() - since < PROMPT_S
        since = time.monotonic()
        for words in (("status",), ("gc", "--dry-run")):
            assert "hangs: no answer" in str(shares.says(*words, codes=(2,))["errors"])
        assert time.monotonic() - since < PROMPT_S
        since = time.monotonic()
        with pytest.raises(ActionFailed, match=f"image {standing.image} on h2 hangs"):
            shares.oned.vm_resume(standing.two)
        assert time.monotonic() - since < PROMPT_S
    shares.oned.vm_resume(standing.two)
    assert shares.mounted(standing.two).run("ls /both") == (0, "file\n")


def test_a_root_that_is_away_costs_no_guest_that_runs_and_starts_none(standing: Standing) -> None:
    shares = standing.shares
    one, two = shares.cloud.guest(standing.one), standing.two
    shares.oned.vm_poweroff(two, hard=True)
    for host in (standing.h1, standing.h2):
        host.run(["umount", "-l", ROOT], user="root")
    assert one.run("echo meanwhile >/both/meanwhile; cat /both/meanwhile") == (0, "meanwhile\n")
    with pytest.raises(ActionFailed, match=rf"SS\d+ (?=.* on h2).*{ROOT}"):
        shares.oned.vm_resume(two)
    # What another datastore has there is not given in its place: share-N is in that somebody else's.
    standing.h2.run(
        ["sh", "-euc", STRANGERS, str(standing.image), str(shares.oned.image(standing.image).regtime)],
        user="root",
    )
    with pytest.raises(ActionFailed, match=rf"SS085 (?=.* on h2 is another datastore's store).*{ROOT}"):
        shares.oned.vm_resume(two)
    standing.h2.run(["umount", ROOT], user="root")
    with pytest.raises(ActionFailed, match="SS084"):
        shares.image("early", "16M")
    assert [(row[0], row[1]) for row in standing.found()] == [("broken", "h1")]
    for host in (standing.h1, standing.h2):
        shares.mount(host)
    shares.oned.vm(two).disks[1]["READONLY"] = "NO"
    shares.oned.vm_resume(two)
    assert shares.mounted(two).run("cat /both/meanwhile") == (0, "meanwhile\n")
    assert one.run("echo later >/both/later")[0] == 0
    assert shares.cloud.guest(two).run("cat /both/later") == (0, "later\n")


def test_a_host_that_is_started_again_has_the_share_and_nothing_of_before(standing: Standing) -> None:
    shares, h2 = standing.shares, standing.h2
    shares.cloud.terminate(standing.one)
    assert shares.cloud.guest(standing.two).run("echo kept >/both/kept; sync")[0] == 0
    h2.kill()
    shares.oned.vm_lose(standing.two)
    assert shares.path(standing.image).joinpath("kept").read_text() == "kept\n"
    h2.start()
    shares.oned.vm_find_off(standing.two)
    h2.path(SUDOERS).write_text(rule("oneadmin"))
    give_program(h2)
    # Before what /etc/fstab has is mounted.
    with pytest.raises(ActionFailed, match=rf"SS\d+ (?=.* on h2).*{ROOT}") as caught:
        shares.oned.vm_resume(standing.two)
    assert "\n" not in str(caught.value).strip()
    assert shares.daemons(1) == []
    shares.mount(h2)
    shares.oned.vm_resume(standing.two)
    guest = shares.mounted(standing.two)
    assert (
        guest.run("cat /both/kept; echo after >>/both/kept") == (0, "kept\n") and len(shares.daemons(1)) == 2
    )
    pidfiles = h2.run(
        ["find", "/run/libvirt/qemu", "/var/lib/libvirt/qemu", "-name", "*fs*.pid"], user="root"
    ).stdout.split()
    mounts = [
        line.split()[1]
        for line in h2.run(["cat", "/proc/mounts"]).stdout.decode().splitlines()
        if ROOT in line
    ]
    assert len(pidfiles) == 1 and mounts == [ROOT]
    shares.cloud.terminate(standing.two)
    assert shares.daemons(1) == [] and shares.cloud.leftovers() == []
    assert not h2.run(
        ["find", "/run/libvirt/qemu", "/var/lib/libvirt/qemu", "-name", "*fs*.pid"], user="root"
    ).stdout
    shares.oned.image_delete(standing.image)
    # Other tests have directories there that are none of oned's.
    assert [
        name for name in os.listdir(h2.path(ROOT)) if name.startswith(("share-", "gone-", "snapshot-"))
    ] == []
