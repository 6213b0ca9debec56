# SPDX-License-Identifier: Apache-2.0
"""Running VMs whose disks read from a pool let go of it: then the pool may be away, and their guests do not
notice.
"""

from __future__ import annotations

import json
from typing import Any, Callable
from xml.etree import ElementTree

from lab.ceph import Cluster
from lab.cloud import RBD_STORE, Cloud
from lab.guest import content
from trimming import trimmed

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
KIB = 64
DATA = content("base", 0, KIB)
LETTERS = "bcd"


def detach(cloud: Cloud, *words: str) -> list[dict[str, Any]]:
    done = cloud.lab.fe.run([COMMAND, "detach", *words, "--json"], check=False, timeout=300)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return list(json.loads(done.stdout.splitlines()[-1])["rows"])


def watchers(cloud: Cloud, ceph: Cluster, image: int, host: str) -> list[str]:
    name = cloud.source(image).rpartition("/")[2]
    return [watcher for watcher in ceph.images()[name]["watchers"] if cloud.lab.node(host).ip in watcher]


def test_guests_that_have_let_go_of_the_pool_go_on_without_it(
    cloud: Cloud, ceph: Cluster, os_image: int, cell: Callable[..., None]
) -> None:
    """Two VMs on two hosts, one of them with snapshots; a third one is off; then the cluster is stopped."""
    far = content("far", 8192, KIB)
    image = cloud.data_image(
        "detach", DATA.ljust(8 << 20, b"\0") + far, store=RBD_STORE, SEMISHARED_LOCAL="remote-first"
    )
    disks = [{"IMAGE_ID": str(number)} for number in (os_image, *(image for _ in LETTERS))]
    vms = [cloud.deploy(f"detach-{host}", disks, host=host, context=False) for host in ("h1", "h2")]
    off = cloud.deploy("detach-off", disks[:2], context=False)
    cloud.oned.vm_poweroff(off, hard=True)
    guests = [cloud.guest(vm) for vm in vms]
    guests[0].write("vdb", "before", 1024, KIB)
    for number in (1, 2):
        cloud.oned.disk_snapshot_create(vms[0], number, "s0")
    for guest in guests:
        for letter in LETTERS:
            guest.loop(f"vd{letter}", f"loop-{letter}", 4096, 2048)
    assert all(watchers(cloud, ceph, image, host) for host in ("h1", "h2"))
    rows = detach(cloud, *(["--all"]))
    for guest in guests:
        for letter in LETTERS:
            counts = guest.loop_stop(f"vd{letter}")
            assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, counts
    assert sorted((row["vm"], row["disk"]) for row in rows if row["how"] == "detached") == [
        *((vm, number) for vm in vms for number in (1, 2, 3)),
        (off, 1),
    ]
    assert not any(watchers(cloud, ceph, image, host) for host in ("h1", "h2"))
    for vm, host in zip(vms, ("h1", "h2")):
        xml = cloud.lab.node(host).run(["virsh", "-q", "-c", "qemu:///system", "dumpxml", f"one-{vm}"]).stdout
        assert [disk for disk in ElementTree.fromstring(xml).iter("source") if disk.get("protocol")] == []
    with ceph.stopped():
        for guest in guests:
            for letter in LETTERS:
                guest.check(f"vd{letter}", "base", 0, KIB)
                guest.check(f"vd{letter}", "far", 8192, KIB)
                guest.write(f"vd{letter}", "alone", 2048, KIB)
        cloud.oned.disk_snapshot_create(vms[0], 1, "s1")
        cloud.oned.vm_resume(off)
        cloud.guest(off).check("vdb", "far", 8192, KIB)
    cloud.oned.disk_snapshot_delete(vms[0], 1, 0)
    cloud.oned.vm_migrate(vms[0], "h2", how="live")
    cloud.oned.vm_poweroff(vms[1], hard=True)
    cloud.oned.vm_resume(vms[1])
    for vm in vms:
        guest = cloud.guest(vm)
        for letter in LETTERS:
            guest.check(f"vd{letter}", "alone", 2048, KIB)
    cloud.guest(vms[0]).check("vdb", "before", 1024, KIB)
    trimmed(cloud, vms[0], "vdb", "vdc")
    for vm in (*vms, off):
        cloud.terminate(vm)
    assert cloud.leftovers() == []
    found = ceph.images()[cloud.source(image).rpartition("/")[2]]
    assert (found["watchers"], found["children"]) == ([], []) and len(found["snaps"]) == 1
    cell("detach", "remote-first", "rbd", ("live", "off"))
