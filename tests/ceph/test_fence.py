# SPDX-License-Identifier: Apache-2.0
"""A host that is cut off with a guest that writes: shut out from the front-end alone, and what comes back
writes nothing.

Clients one by one, partial success, kills: tests/tools/test_fence.py. Over NFS: tests/nfs/test_fence.py.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

from lab import Node
from lab.ceph import POOL, USER, Cluster
from lab.cloud import DATASTORES, RBD_STORE, STORE, Cloud
from lab.guest import Guest
from semishared.cli.caps import FENCE_USER
from semishared.plan.store.ceph_caps import fence as fence_key

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
PROBE = ["/usr/bin/python3", "-I", "/var/tmp/one/lib/semishared/host/probe.py"]
BOOT_ID = "/proc/sys/kernel/random/boot_id"
KIB, AT = 64, 1024
MONITORED, ERROR = 2, 3


def fence(cloud: Cloud, *words: str, code: int = 0) -> str:
    """Run `semishared fence` on the front-end; return what it says."""
    done = cloud.lab.fe.popen([COMMAND, "fence", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.communicate(timeout=120)[0].decode()
    assert done.returncode == code, said
    return said


def monitored(cloud: Cloud, host: Node) -> None:
    """Let oned have what the host's probe says."""
    said = f"<X><DATASTORE_LOCATION>{DATASTORES}</DATASTORE_LOCATION></X>".encode()
    cloud.oned.host_update(cloud.oned.host(host.name).id, host.run(PROBE, input=said).stdout.decode())


def writes(guest: Guest, seconds: float = 2) -> int:
    """Return how many writes of its loop succeed in some seconds."""
    before = guest.loop_stat("vdb")
    time.sleep(seconds)
    after = guest.loop_stat("vdb")
    return after["writes"] - before["writes"]


def write_from(host: Node, image: str, pattern: int) -> int:
    """Write to an image from a host, as its guests would; return the exit code."""
    words = [
        "qemu-io",
        "-f",
        "raw",
        "-c",
        f"write -P {pattern} {AT}k {KIB}k",
        f"rbd:{image}:id={USER}:rados_osd_op_timeout=10",
    ]
    return host.popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(60)


@pytest.fixture()
def keyed(cloud: Cloud, ceph: Cluster) -> Iterator[None]:
    """Give the front-end the key that shuts hosts out, and have the mounted store in another cluster's reach
    than that of the hosts.
    """
    ceph.give_key(cloud.lab.fe, FENCE_USER, ceph.make_key(fence_key(FENCE_USER, [POOL])))
    rbd, mounted = cloud.oned.datastores[RBD_STORE], cloud.oned.datastores[STORE]
    rbd.template["SEMISHARED_CEPH_FENCE_USER"] = FENCE_USER
    mounted.clusters = [1]
    ceph.ask(["command", ["config set"], {"who": "osd", "name": "osd_client_watch_timeout", "value": "5"}])
    try:
        yield
    finally:
        cloud.lab.fe.path(f"/etc/ceph/ceph.client.{FENCE_USER}.keyring").unlink()
        del rbd.template["SEMISHARED_CEPH_FENCE_USER"]
        mounted.clusters = [0]
        ceph.ask(
            ["command", ["config rm"], {"who": "osd", "name": "osd_client_watch_timeout"}],
            ["command", ["osd blocklist clear"], {}],
        )


def test_a_host_that_was_cut_off_and_fenced_writes_nothing_when_it_is_back(
    cloud: Cloud, ceph: Cluster, keyed: None
) -> None:
    h1, h2 = cloud.lab.hosts
    os_image = cloud.os_image("fence-os", store=RBD_STORE)
    number = cloud.data_image("fence-data", b"", persistent=True, store=RBD_STORE)
    image = cloud.source(number)
    name = image.partition("/")[2]
    vm = cloud.deploy("fenced", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(number)}], context=False)
    monitored(cloud, h1)
    monitored(cloud, h2)
    guest = cloud.guest(vm)
    guest.loop("vdb", "before", AT, 4096)
    deadline = time.monotonic() + 60
    while not writes(guest):
        assert time.monotonic() < deadline, "a guest that does not write"
    h1.cut()
    try:
        deadline = time.monotonic() + 60
        while ceph.images()[name]["watchers"]:
            assert time.monotonic() < deadline, "the watch of a client that is cut off does not end"
            time.sleep(0.5)
        assert ceph.images()[name]["lockers"], "its lock stays"
        cloud.oned.host("h1").state = ERROR
        said = fence(cloud, "h1")
        assert f"{h1.ip}:0/0 is on the blocklist" in said and f"{h2.ip}:0/0" not in said
        assert fence(cloud, "h1", "--check") == said
        assert write_from(h2, image, 7) == 0, "the next writer has it"
    finally:
        h1.join()
        cloud.oned.host("h1").state = MONITORED
    # A write that was done before it was cut off may be answered only now, as late as TCP tries again; what
    # comes after an error is new.
    deadline = time.monotonic() + 120
    while not guest.loop_stat("vdb")["errors"]:
        assert time.monotonic() < deadline, "the guest is not told that it is shut out"
        time.sleep(0.5)
    assert writes(guest) == 0
    assert write_from(h1, image, 9), "neither does a client that it starts now"
    assert ceph.read(name, KIB << 10, AT << 10) == bytes([7]) * (KIB << 10)

    # A mounted store in its reach: then the blocklist is not enough.
    cloud.oned.datastores[STORE].clusters = [0]
    assert f"datastore {STORE} (semi_img) was not there then" in fence(cloud, "h1", "--check", code=1)
    assert "until it is off" in fence(cloud, "h1", "--even-if-alive", code=1)
    cloud.oned.datastores[STORE].clusters = [1]
    fence(cloud, "h1", "--even-if-alive")

    assert "its boot id is the one that is shut out" in fence(cloud, "h1", "--lift", code=1)
    h1.run(["virsh", "-q", "-c", "qemu:///system", "destroy", f"one-{vm}"])
    # The hosts of a lab share a kernel: this is what another one says, that has just been started.
    h1.run(
        [
            "bash",
            "-euc",
            f"echo 11111111-0000-4000-8000-000000000001 >/run/boot; mount --bind /run/boot {BOOT_ID}; "
            "echo 0.50 0.10 >/run/uptime; mount --bind /run/uptime /proc/uptime",
        ],
        user="root",
    )
    try:
        assert "before it was started" not in fence(cloud, "h1", "--check"), (
            "monitoring has not been there yet"
        )
        monitored(cloud, h1)
        assert "before it was started the last time" in fence(cloud, "h1", "--check", code=1)
        time.sleep(1)
        assert json.loads(fence(cloud, "h1", "--lift", "--json"))["lifted"] is True
    finally:
        h1.run(["umount", BOOT_ID, "/proc/uptime"], user="root")
    assert not ceph.command("osd dump")["blocklist"].get(f"{h1.ip}:0/0")
    assert write_from(h1, image, 9) == 0
    cloud.oned.vm_recover(vm, "delete")
