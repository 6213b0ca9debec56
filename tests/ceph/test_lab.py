# SPDX-License-Identifier: Apache-2.0
"""The lab's cluster itself: who can do what with which key, and that it stops and comes back."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator

import pytest

from lab import roots
from lab.ceph import BRIDGE, POOL, READER, REMOTE, REMOTE_SECRET, SECRET, USER, Cluster
from lab.cloud import Cloud
from lab.node import Node
from semishared.plan.store import ceph_caps

PLATFORM = os.environ.get(roots.PLATFORM, "")
WRITES = ("bench", "--io-type", "write", "--io-size", "1M", "--io-total")


def rbd(node: Node, user: str, *words: str) -> int:
    return node.run(["rbd", "--id", user, *words], check=False, stdout=subprocess.DEVNULL).returncode


@pytest.fixture()
def image(cloud: Cloud, ceph: Cluster) -> Iterator[str]:
    name = "probe"
    assert rbd(cloud.lab.fe, BRIDGE, "create", f"{POOL}/{name}", "--size", "16M") == 0
    yield name
    ceph.remove(name)


def test_it_is_healthy(ceph: Cluster) -> None:
    deadline = time.monotonic() + 60
    # What a daemon has not reported yet is a warning for seconds.
    while (health := ceph.command("health"))["status"] != "HEALTH_OK":
        assert time.monotonic() < deadline, health
        time.sleep(0.5)


def test_it_has_the_version_that_the_platform_says(ceph: Cluster) -> None:
    """And its clients that of their own release."""
    (version,) = ceph.command("versions")["overall"]
    wanted = [int(part.removeprefix("ceph")) for part in PLATFORM.split("+") if part in roots.CEPH]
    assert re.match(r"ceph version ([0-9]+)\.", version).groups() == (str(*wanted or [16]),)  # type: ignore[union-attr]


def test_keys_lie_only_where_their_role_is(cloud: Cloud) -> None:
    def users(node: Node) -> list[str]:
        return sorted(path.name.split(".")[2] for path in node.path("/etc/ceph").glob("*.keyring"))

    assert users(cloud.lab.fe) == [BRIDGE]
    for host in cloud.lab.hosts:
        assert users(host) == sorted([USER, READER, REMOTE])
        known = host.run(["virsh", "-q", "-c", "qemu:///system", "secret-list"]).stdout.decode()
        assert SECRET in known and REMOTE_SECRET in known


def test_keys_are_made_of_the_printed_capabilities(ceph: Cluster) -> None:
    for key in ceph_caps.keys(USER, POOL, READER, BRIDGE, remote=REMOTE):
        there = ceph.command("auth get", entity=f"client.{key.user}")[0]["caps"]
        assert there == dict(key.caps)


def test_the_printed_commands_make_those_keys(cloud: Cloud, ceph: Cluster) -> None:
    say = ["/var/lib/one/remotes/lib/semishared/semishared", "caps"]
    env = {"ONE_XMLRPC": cloud.oned.rpc.url} if cloud.oned.rpc else {}
    assert (
        cloud.lab.fe.run([*say, "semi_rbd"], env=env).stdout
        == cloud.lab.fe.run(
            [
                *say,
                "--user",
                USER,
                "--reader",
                READER,
                "--bridge-user",
                BRIDGE,
                "--remote",
                REMOTE,
                "--pool",
                POOL,
            ]
        ).stdout
    )
    printed = cloud.lab.fe.run(
        [*say, "--user", "a", "--reader", "b", "--bridge-user", "c", "--remote", "d", "--pool", POOL]
    ).stdout
    assert cloud.lab.ceph.node.run(["bash", "-eu"], user="root", input=printed, cwd="/").returncode == 0
    for key in ceph_caps.keys("a", POOL, "b", "c", remote="d"):
        assert ceph.command("auth get", entity=f"client.{key.user}")[0]["caps"] == dict(key.caps)
        ceph.command("auth del", entity=f"client.{key.user}")


def test_a_host_writes_images_but_makes_and_removes_none(cloud: Cloud, image: str) -> None:
    host = cloud.lab.hosts[0]
    assert rbd(host, USER, *WRITES, "1M", f"{POOL}/{image}") == 0
    assert rbd(host, USER, "resize", "--size", "32M", f"{POOL}/{image}") == 0
    assert rbd(host, USER, "create", f"{POOL}/other", "--size", "16M") != 0
    assert rbd(host, USER, "rename", f"{POOL}/{image}", f"{POOL}/other") != 0
    assert rbd(host, USER, "rm", f"{POOL}/{image}") != 0


def test_a_reader_reads_and_cannot_write(cloud: Cloud, image: str) -> None:
    host = cloud.lab.hosts[0]
    assert rbd(host, READER, "export", "--no-progress", f"{POOL}/{image}", "-") == 0
    assert rbd(host, READER, *WRITES, "1M", f"{POOL}/{image}") != 0
    assert rbd(host, READER, "snap", "create", f"{POOL}/{image}@s") != 0
    assert rbd(host, READER, "resize", "--size", "32M", f"{POOL}/{image}") != 0


def test_who_reads_for_guests_opens_snapshots_as_qemu_does_and_writes_no_data(
    cloud: Cloud, ceph: Cluster, image: str
) -> None:
    host = cloud.lab.hosts[0]
    ceph.snapshot(image, "s")
    assert (
        host.run(
            ["qemu-img", "info", "-f", "raw", f"rbd:{POOL}/{image}@s:id={REMOTE}"], check=False
        ).returncode
        == 0
    )
    # librbd caches what it cannot write, and rbd is none the wiser.
    rbd(host, REMOTE, *WRITES, "16M", f"{POOL}/{image}")
    assert ceph.read(image, 16 << 20) == bytes(16 << 20)
    assert rbd(host, USER, *WRITES, "16M", f"{POOL}/{image}") == 0
    assert ceph.read(image, 16 << 20) != bytes(16 << 20)
    assert rbd(host, REMOTE, "create", f"{POOL}/other", "--size", "16M") != 0
    assert rbd(host, REMOTE, "rm", f"{POOL}/{image}") != 0


def test_what_is_read_is_counted(cloud: Cloud, ceph: Cluster, image: str) -> None:
    host = cloud.lab.hosts[0]
    rbd(host, USER, *WRITES, "4M", f"{POOL}/{image}")
    counted = []
    for _ in range(3):
        before = ceph.bytes_read()
        rbd(host, READER, "export", "--no-progress", f"{POOL}/{image}", "-")
        counted.append(ceph.bytes_read() - before)
    # The cluster's own may read in that pool, too, but not each time.
    assert 4 << 20 <= min(counted) < (4 << 20) + (64 << 10), counted


def test_images_can_be_looked_into(cloud: Cloud, ceph: Cluster, image: str) -> None:
    ceph.snapshot(image, "s")
    cloud.lab.fe.run(["rbd", "--id", BRIDGE, "clone", f"{POOL}/{image}@s", f"{POOL}/{image}-clone"])
    try:
        there = ceph.images()
        assert [snap["name"] for snap in there[image]["snaps"]] == ["s"]
        assert there[f"{image}-clone"]["parent"] == f"{POOL}/{image}@s"
        assert ceph.read(f"{image}-clone", 4096) == bytes(4096)
    finally:
        ceph.remove(f"{image}-clone")


def test_it_stops_and_comes_back_with_its_data(cloud: Cloud, ceph: Cluster, image: str) -> None:
    with ceph.stopped("osd"):
        assert ceph.pids("osd") == []
        assert ceph.pids("mon") != []
    assert image in ceph.images()
    with ceph.stopped():
        assert [ceph.pids(kind) for kind in ("mon", "mgr", "osd")] == [[], [], []]
    assert ceph.images()[image]["size"] == 16 << 20
