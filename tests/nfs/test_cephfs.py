# SPDX-License-Identifier: Apache-2.0
"""CephFS by the kernel's client, besides what test_store.py has for each file system: what it is, and a host
that is cut off.
"""

from __future__ import annotations

import pytest

from lab.kernel_host import ONEADMIN
from nfs.cephfs import CephSite
from nfs.site import PATIENCE_S, STORE, Guest
from nfs.test_faults import wait_for
from nfs.test_store import examined

pytestmark = pytest.mark.long


def test_each_machine_is_a_client_of_its_own_kernel(cephfs_site: CephSite) -> None:
    machines = (cephfs_site.fe, *cephfs_site.hosts)
    clients = [client["client_metadata"] for client in cephfs_site.cluster.mds("session ls")]
    kernel = machines[0].run(["uname", "-r"]).out.strip()
    assert {(client["hostname"], client["kernel_version"]) for client in clients} == {
        (host.name, kernel) for host in machines
    }
    for host in machines:
        assert host.run(["stat", "-f", "-c", "%T", STORE]).out.strip() == "ceph"
    assert examined(cephfs_site, STORE)[STORE] == []


def test_a_host_that_was_cut_off_cannot_write_when_it_is_back(cephfs_site: CephSite) -> None:
    h1, h2 = cephfs_site.hosts
    image = cephfs_site.image("qcow2")
    old = Guest(h1, image.source, "qcow2")
    assert "wrote 65536/65536" in old.do("write -P 1 1M 64k")
    h1.cut()
    try:
        # Who opens the file waits until the metadata server has given up the client that has it, and shut it
        # out.
        wait_for("h2 may write", lambda: not h2.has_lock_refused(image.source), PATIENCE_S)
        new = Guest(h2, image.source, "qcow2")
        assert "wrote 65536/65536" in new.do("write -P 8 1M 64k")
    finally:
        h1.mend()
    assert "wrote" not in old.do("write -P 5 1M 64k")
    said = new.do("read -P 8 1M 64k")
    assert "read 65536/65536" in said and "verification failed" not in said
    new.end()
    old.kill()
    # As its admin does with such a host, short of a reboot.
    h1.script(f"umount -f {STORE} || umount -l {STORE}", timeout=PATIENCE_S)
    cephfs_site.mount(h1)
    h1.run(["qemu-img", "info", image.source], user=ONEADMIN)
