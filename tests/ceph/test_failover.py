# SPDX-License-Identifier: Apache-2.0
"""A host with a VM on Ceph loses its power: the VM goes on elsewhere, and what the host has of it when it is
back is nobody's.

That a host which is only cut off writes nothing any more: test_fence.py. On a mounted store:
tests/system/test_failover.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lab.ceph import Cluster
from lab.cloud import DATASTORES, RBD_STORE, Cloud
from lab.guest import content
from lab.oned import Lcm

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
DATA = content("base", 0, 64)
MONITORED, ERROR = 2, 3
"""States of a host."""


@pytest.fixture()
def short_watches(cloud: Cloud, ceph: Cluster) -> Iterator[None]:
    """Have the cluster forget clients that died after seconds; at the end no host is fenced."""
    ceph.ask(["command", ["config set"], {"who": "osd", "name": "osd_client_watch_timeout", "value": "5"}])
    yield
    cloud.oned.forget_fences()
    cloud.oned.host("h1").state = MONITORED
    cloud.lab.node("h1").start()
    ceph.ask(
        ["command", ["config rm"], {"who": "osd", "name": "osd_client_watch_timeout"}],
        ["command", ["osd blocklist clear"], {}],
    )


def test_vm_on_ceph_is_taken_over(cloud: Cloud, ceph: Cluster, short_watches: None) -> None:
    """Disks in place, a clone in the pool, and an overlay over a base from it, which begins anew."""
    h1, h2 = cloud.lab.hosts
    images = [
        cloud.os_image("over-os", store=RBD_STORE, SEMISHARED_ON_HOST_FAILURE="recreate"),
        cloud.data_image("over-mine", DATA, persistent=True, store=RBD_STORE),
        cloud.data_image("over-beside", DATA, store=RBD_STORE, SEMISHARED_PLACE="shared"),
    ]
    vm = cloud.deploy("over", [{"IMAGE_ID": str(image)} for image in images], context=False)
    guest = cloud.guest(vm)
    for name in ("vda", "vdb", "vdc"):
        guest.write(name, name, 8192, 64)
    guest.sync()
    mine = cloud.source(images[1]).partition("/")[2]
    h1.kill()
    cloud.oned.vm_lose(vm)
    cloud.oned.host("h1").state = ERROR
    cloud.lab.fe.run([COMMAND, "fence", "h1", "--confirmed-off"], user="oneadmin", timeout=120)
    deadline = time.monotonic() + 60
    while ceph.images()[mine]["watchers"]:
        assert time.monotonic() < deadline, "the watch of a client that died does not end"
        time.sleep(0.5)
    cloud.oned.vm_migrate(vm, "h2")
    assert cloud.oned.state(vm) == ("ACTIVE", Lcm.RUNNING)
    guest = cloud.guest(vm)
    assert guest.node is h2
    for name in ("vdb", "vdc"):
        guest.check(name, name, 8192, 64)
        guest.check(name, "base", 0, 64)
    with pytest.raises(Exception, match="vda"):
        guest.check("vda", "vda", 8192, 64)

    h1.start()
    directory = f"/var/lib/one//datastores/101/{vm}"
    domain = cloud.lab.fe.path(f"/var/lib/one/vms/{vm}/deployment.0").read_bytes()
    tm = "/var/lib/one/remotes/tm/semishared"
    for node, argv in (
        (h1, ["/var/tmp/one/vmm/semishared/deploy", f"{directory}/deployment.0", "h1", str(vm), "h1"]),
        (cloud.lab.fe, [f"{tm}/mv", f"h1:{directory}", f"h2:{DATASTORES}/102/{vm}", str(vm), "102"]),
        (
            cloud.lab.fe,
            [f"{tm}/cpds", f"h1:{directory}/disk.0", "one/one-999", "-1", str(vm), str(RBD_STORE)],
        ),
    ):
        done = node.run(argv, user="oneadmin", input=domain, check=False, timeout=120)
        assert done.returncode == 1 and b"SS132" in done.stderr, (argv, done.stderr)
    assert h1.run(["virsh", "-q", "-c", "qemu:///system", "list", "--all", "--name"]).stdout.strip() == b""
    assert not [name for name in ceph.images() if name.startswith("one-999")]
    guest.check("vdb", "vdb", 8192, 64)
    cloud.terminate(vm)
    cloud.lab.fe.run([COMMAND, "gc", "--now"], timeout=60)
    assert cloud.leftovers() == []


def test_a_local_disk_of_a_persistent_image_begins_at_what_was_committed_last(
    cloud: Cloud, ceph: Cluster, short_watches: None
) -> None:
    """The lost host's writing since then is kept when it is back, and can become another image, but not this
    one.
    """
    h1, h2 = cloud.lab.hosts
    anew: dict[str, Any] = {"SEMISHARED_ON_HOST_FAILURE": "recreate"}
    image = cloud.data_image(
        "over-diff", DATA, persistent=True, store=RBD_STORE, SEMISHARED_PLACE="local", **anew
    )
    name = cloud.source(image).partition("/")[2]
    vm = cloud.deploy(
        "over-diff", [{"IMAGE_ID": str(disk)} for disk in (cloud.os_image("over-diff-os", **anew), image)]
    )
    guest = cloud.guest(vm)
    guest.write("vdb", "one", 1024, 64)
    cloud.lab.fe.run([COMMAND, "commit", str(vm)], timeout=120)
    guest.write("vdb", "lost", 2048, 64)
    guest.sync()
    h1.kill()
    cloud.oned.vm_lose(vm)
    cloud.oned.host("h1").state = ERROR
    cloud.lab.fe.run([COMMAND, "fence", "h1", "--confirmed-off"], timeout=120)
    cloud.oned.vm_migrate(vm, "h2")
    assert cloud.oned.state(vm) == ("ACTIVE", Lcm.RUNNING)
    guest = cloud.guest(vm)
    assert guest.node is h2
    guest.check("vdb", "one", 1024, 64)
    guest.write("vdb", "new", 2048, 64)

    h1.start()
    cloud.oned.forget_fences()
    cloud.oned.host("h1").state = MONITORED
    ceph.ask(["command", ["osd blocklist clear"], {}])
    cloud.lab.fe.run([COMMAND, "gc", "--now"], timeout=120)
    (kept,) = [
        path for path in cloud.files(h1, f"{DATASTORES}/101") if re.match(rf"\.kept-{vm}-[0-9a-f]+\Z", path)
    ]
    done = cloud.lab.fe.run([COMMAND, "commit", str(vm)], check=False, timeout=120)
    assert done.returncode == 1 and b"SS142" in done.stderr, done
    assert ceph.read(name, 64 << 10, 2048 << 10) == content("new", 2048, 64), (
        "the disk on h2 was committed, that on h1 was not"
    )
    said = cloud.lab.fe.run(
        [COMMAND, "commit", str(vm), "1", "--as-new-image", "lost"], timeout=120
    ).stdout.decode()
    (rescued,) = re.findall(r"--source one/(\S+)", said)
    assert ceph.read(rescued, 64 << 10, 2048 << 10) == content("lost", 2048, 64)
    ceph.remove(rescued)
    cloud.lab.fe.run([COMMAND, "gc", "--now", "--discard", kept], timeout=120)
    cloud.terminate(vm)
    cloud.lab.fe.run([COMMAND, "gc", "--now"], timeout=120)
    assert cloud.leftovers() == []
