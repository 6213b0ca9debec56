# SPDX-License-Identifier: Apache-2.0
"""Guests that have a share of CephFS by their host.

What root of one can do to the host, what two of them on two hosts see of each other, and what becomes of one
when the cluster goes away.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from lab import roots
from lab.guest import Guest
from lab.oned import ActionFailed
from semishared.model.share.share import UIDS, first_uid
from shares.ceph import COMMAND, CephShares
from shares.cloud import SHARES
from shares.page import ROOT
from shares.test_attach import ROWS

FIRST = first_uid(5)
BACK_S = 120
"""Within how long what waits for the cluster goes on, once it is back."""


class Tenant(NamedTuple):
    """A guest of user 5's on h2 with two shares."""

    cloud: CephShares
    guest: Guest
    both: int

    def path(self, name: str = "") -> Path:
        """Return where h2 has something of the share `both`, seen from outside."""
        return self.cloud.lab.hosts[1].path(f"{self.cloud.source(self.both)}/{name}")


@pytest.fixture(scope="module")
def tenant(cloud: CephShares) -> Iterator[Tenant]:
    guests = cloud.guests
    both, read = (guests.image(name, "32M", uid=5) for name in ("both", "read"))
    vm = guests.deploy("hostile", both, read, host="h2")
    yield Tenant(cloud, guests.mounted(vm), both)
    cloud.cloud.terminate(vm)
    assert guests.daemons(1) == []
    for image in (both, read):
        cloud.oned.image_delete(image)
    assert not cloud.subvolumes()


def test_root_of_a_hostile_guest_is_nobody_on_a_host_with_cephfs_either(tenant: Tenant) -> None:
    for name, row in ROWS.items():
        assert tenant.guest.run(row.script)[1] == row.said, name
    found = {path.name: os.lstat(path) for path in tenant.path().rglob("*")}
    assert {"id", "last", "far", "link", "up", "private", "file"} <= set(found) and not {
        "disk",
        "mem",
        "mine",
    } & set(found)
    assert {stat.S_IFMT(status.st_mode) for status in found.values()} == {
        stat.S_IFREG,
        stat.S_IFLNK,
        stat.S_IFDIR,
    }
    assert all(
        FIRST <= number < FIRST + UIDS
        for status in found.values()
        for number in (status.st_uid, status.st_gid)
    )
    assert (found["last"].st_uid, found["last"].st_gid) == (FIRST + 65534, FIRST + 65535)

    def does(uid: int, *words: str) -> str:
        argv = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *words]
        done = tenant.cloud.lab.hosts[1].run(argv, user="root", cwd="/", check=False)
        return (done.stdout + done.stderr).decode().strip()

    source = tenant.cloud.source(tenant.both)
    assert found["id"].st_mode & 0o6000 and does(65534, f"{source}/id", "-u") == "65534"
    assert "Permission denied" in does(first_uid(9), "cat", f"{source}/private/file")


def test_attributes_that_the_host_or_ceph_goes_by_are_not_the_guests(tenant: Tenant) -> None:
    guest = tenant.guest
    assert guest.run("cp /bin/busybox /both/attributes")[0] == 0
    assert guest.set_attribute("/both/attributes", "user.mine", b"1") == ""
    for name, value in (
        ("trusted.overlay.opaque", b"y"),
        ("ceph.quota.max_bytes", b"0"),
        ("ceph.dir.layout.pool_namespace", b"x"),
    ):
        for path in ("/both/attributes", "/both"):
            assert guest.set_attribute(path, name, value) == "Operation not permitted", (name, path)
    assert os.listxattr(tenant.path("attributes")) == ["user.mine"]


def test_guests_of_two_hosts_have_one_share_with_its_locks_and_what_it_was(tenant: Tenant) -> None:
    cloud, guests, one = tenant.cloud, tenant.cloud.guests, tenant.guest
    h3, before = cloud.lab.node("h3"), cloud.subvolumes()
    alone = guests.image("alone", "32M", uid=9)
    vm = guests.deploy("second", tenant.both, alone, host="h3")
    two = guests.mounted(vm)
    assert one.run("echo first >/both/shared && chown 1000 /both/shared") == (0, "")
    assert two.run("cat /both/shared; stat -c %u /both/shared; echo second >>/both/shared") == (
        0,
        "first\n1000\n",
    )
    assert one.run("sleep 1; cat /both/shared") == (0, "first\nsecond\n")
    # virtiofsd in Rust, which hosts of Debian 13 have, knows no locks: each guest's are its own.
    held = "Resource temporarily unavailable" if h3.root == roots.MACHINE else ""
    for how in ("posix", "flock"):
        assert one.lock(f"/both/{how}", how) == ""
        assert two.lock(f"/both/{how}", how) == held
        for guest in (one, two):
            guest.unlock()
        assert two.lock(f"/both/{how}", how) == ""
        two.unlock()

    script = (
        "mkdir -m 700 /both/closed && chown 1000 /both/closed && echo x >/both/closed/file && cat "
        "/both/closed/file"
    )
    assert one.run(script) == (0, "x\n")
    made = json.loads(cloud.cli("snapshot", "create", str(tenant.both), "before", "--json"))["snapshot"]
    assert one.run("echo third >/both/shared") == (0, "")
    for guest in (one, two):
        assert guest.run(f"cat /both/{made['in_guest']}/shared") == (0, "first\nsecond\n")
        for script in (
            f"rm /both/{made['in_guest']}/shared",
            "mkdir /both/.snap/mine",
            f"rmdir /both/{made['in_guest']}",
        ):
            assert guest.run(script)[0], script

    # Late, as the page says, and then for the guest of the other host too; the other share has its room.
    late = "Disk quota exceeded"
    assert late in one.run("dd if=/dev/zero of=/both/big bs=1M count=256 conv=fsync", 240)[1]
    assert two.run("dd if=/dev/zero of=/alone/file bs=1M count=16 conv=fsync && rm /alone/file", 240)[0] == 0
    assert late in two.run("sleep 5; dd if=/dev/zero of=/both/more bs=1M count=256 conv=fsync", 240)[1]

    # The client of h3 dies, and is started again.
    h3.run(["sh", "-euc", 'kill -9 $(pgrep -x ceph-fuse); umount -l "$0"', ROOT], user="root")
    assert two.run("cat /both/shared")[0]
    assert one.run("cat /both/shared") == (0, "third\n")
    guests.oned.vm_poweroff(vm, hard=True)
    with pytest.raises(ActionFailed, match=rf"SS\d+ (?=.* on h3).*{ROOT}"):
        guests.oned.vm_resume(vm)
    found = json.loads(cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False, timeout=120).stdout)[
        "findings"
    ]
    assert f"shares of datastore {SHARES}: {ROOT} is not mounted" in [
        row["what"] for row in found if row["machine"] == "h3"
    ]
    assert not [row for row in found if row["machine"] == "h2" and "shares" in row["what"]]
    CephShares.mount(h3)
    guests.oned.vm_resume(vm)
    assert guests.mounted(vm).run("cat /both/shared") == (0, "third\n")
    assert one.run("rm -f /both/big /both/more")[0] == 0
    cloud.cloud.terminate(vm)
    assert guests.daemons(2) == [] and len(guests.daemons(1)) == 4
    cloud.oned.image_delete(alone)
    assert cloud.subvolumes() == before


@pytest.mark.long
@pytest.mark.parametrize("daemon", ["osd", "mds"])
def test_a_cluster_that_goes_away_under_a_guest_and_comes_back_costs_it_the_time_alone(
    tenant: Tenant, daemon: str
) -> None:
    guest, ceph = tenant.guest, tenant.cloud.lab.ceph
    assert guest.run("echo before >/both/before; sync", 120)[0] == 0
    ceph.stop(daemon)
    with ThreadPoolExecutor(1) as beside:
        try:
            write = f"dd if=/bin/busybox of=/both/while-{daemon} conv=fsync 2>/dev/null && echo done"
            writes = beside.submit(guest.run, write, 60 + BACK_S)
            time.sleep(5)
            assert not writes.done()
        finally:
            ceph.start(daemon)
            ceph.ask(["wait", [daemon], {}])
        assert writes.result() == (0, "done\n")
    assert guest.run(f"cat /both/before; cmp /bin/busybox /both/while-{daemon}", 120) == (0, "before\n")
    assert guest.run("echo after >/both/after; sync; cat /both/after", 120) == (0, "after\n")
