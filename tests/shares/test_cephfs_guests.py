# SPDX-License-Identifier: Apache-2.0
"""A guest that has a share of CephFS by its host: what its root can do to the host, and what becomes of it when the cluster goes away."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.guest import Guest
from semishared.model.shares import UIDS, first_uid
from shares.ceph import CephShares
from shares.guests import Guests
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
    guests = Guests(cloud.cloud)
    both, read = (guests.image(name, "32M", uid=5) for name in ("both", "read"))
    vm = guests.deploy("hostile", both, read, host="h2")
    yield Tenant(cloud, guests.mounted(vm), both)
    cloud.cloud.terminate(vm)
    for image in (both, read):
        cloud.oned.image_delete(image)
    assert not cloud.subvolumes()


def test_root_of_a_hostile_guest_is_nobody_on_a_host_with_cephfs_either(tenant: Tenant) -> None:
    for name, row in ROWS.items():
        assert tenant.guest.run(row.script)[1] == row.said, name
    found = {path.name: os.lstat(path) for path in tenant.path().rglob("*")}
    assert {"id", "last", "far", "link", "up", "private", "file"} <= set(found) and not {"disk", "mem", "mine"} & set(found)
    assert {stat.S_IFMT(status.st_mode) for status in found.values()} == {stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR}
    assert all(FIRST <= number < FIRST + UIDS for status in found.values() for number in (status.st_uid, status.st_gid))
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
    for name, value in (("trusted.overlay.opaque", b"y"), ("ceph.quota.max_bytes", b"0"), ("ceph.dir.layout.pool_namespace", b"x")):
        for path in ("/both/attributes", "/both"):
            assert guest.set_attribute(path, name, value) == "Operation not permitted", (name, path)
    assert os.listxattr(tenant.path("attributes")) == ["user.mine"]


@pytest.mark.long
@pytest.mark.parametrize("daemon", ["osd", "mds"])
def test_a_cluster_that_goes_away_under_a_guest_and_comes_back_costs_it_the_time_alone(tenant: Tenant, daemon: str) -> None:
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
