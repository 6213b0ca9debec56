# SPDX-License-Identifier: Apache-2.0
"""One of three OSDs dies or hangs under a guest that writes, while a commit is under way, and comes back: no
disk has an error, no byte is wrong, and the commit ends as if nothing had been.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lab.ceph import POOL, Cluster
from lab.cloud import RBD_STORE, Cloud
from lab.guest import Guest, content

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
KIB = 64
DATA = content("base", 0, KIB)
DIFF_MIB = 24
SLOW_MBIT = 40
"""Of the cluster's cable: the guest writes a quarter of that, and the diff takes six seconds at the least."""
ON_CEPH = {"vdb": "in place", "vdc": "a clone"}
LOCAL = "vdd"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=1, ceph=3, forks=True) as up:
        yield up


@pytest.fixture(scope="module")
def ceph(cloud: Cloud) -> Cluster:
    return cloud.lab.ceph


@pytest.fixture(autouse=True)
def only_this_test(cloud: Cloud) -> Iterator[None]:
    yield
    cloud.delete_all()


@contextmanager
def killed(ceph: Cluster, osd: int) -> Iterator[None]:
    ceph.stop(f"osd.{osd}")
    try:
        yield
    finally:
        ceph.start(f"osd.{osd}")


@contextmanager
def hanging(ceph: Cluster, osd: int) -> Iterator[None]:
    """No connection breaks: the others have to find it out."""
    (pid,) = ceph.pids(f"osd.{osd}")
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def primary(ceph: Cluster, image: str) -> int:
    """Return the OSD that all requests for the first 4 MiB of an image go to."""
    prefix = json.loads(ceph.rbd("info", "--format", "json", f"{POOL}/{image}"))["block_name_prefix"]
    return int(ceph.command("osd map", pool=POOL, object=f"{prefix}.{0:016x}")["acting_primary"])


def go_on(guest: Guest) -> None:
    """See that all disks are written on from here."""
    for disk in (*ON_CEPH, LOCAL):
        guest.wait_written(disk, guest.loop_stat(disk)["writes"] + 10)


@pytest.mark.parametrize("lost", [killed, hanging])
def test_an_osd_is_lost_under_guests_that_write_and_comes_back(
    cloud: Cloud, ceph: Cluster, lost: Callable[[Cluster, int], Any]
) -> None:
    made = {
        "mine": {"persistent": True},
        "beside": {"SEMISHARED_PLACE": "shared"},
        "local": {"persistent": True, "SEMISHARED_PLACE": "local", "mib": 2 * DIFF_MIB},
    }
    images = {
        name: cloud.data_image(f"{lost.__name__}-{name}", DATA, store=RBD_STORE, **more)  # type: ignore[arg-type]
        for name, more in made.items()
    }
    disks = [{"IMAGE_ID": str(image)} for image in (cloud.os_image(lost.__name__), *images.values())]
    vm = cloud.deploy(lost.__name__, disks, context=False)
    guest = cloud.guest(vm)
    mine, local = (cloud.source(images[name]).removeprefix(f"{POOL}/") for name in ("mine", "local"))
    for disk in (*ON_CEPH, LOCAL):
        guest.check(disk, "base", 0, KIB)
    guest.write(LOCAL, "diff", 1024, DIFF_MIB << 10)
    for disk in (*ON_CEPH, LOCAL):
        guest.loop(disk, f"loop-{disk}", 1024 if disk in ON_CEPH else (DIFF_MIB + 4) << 10, 2048)
    go_on(guest)

    osd = primary(ceph, mine)
    before = ceph.allocated({"local": f"{POOL}/{local}"})["local"]
    ceph.node.limit(SLOW_MBIT)
    try:
        commit = cloud.lab.fe.popen(
            [COMMAND, "commit", str(vm)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        wait_for(
            lambda: ceph.allocated({"local": f"{POOL}/{local}"})["local"] > before + (2 << 20), "no commit"
        )
        with lost(ceph, osd):
            assert commit.poll() is None, "the commit was quicker"
            ceph.ask(["wait", ["lost"], {}])
            go_on(guest)
            for disk in ON_CEPH:
                guest.write(disk, "lost", 8192, KIB)
            said, _ = commit.communicate(timeout=120)
            assert (commit.returncode, b"committed" in said) == (0, True), said
            assert ceph.command("osd stat")["num_up_osds"] == 2, "all this was without it"
    finally:
        ceph.node.limit(None)
    go_on(guest)
    ceph.ask(["wait", ["clean"], {}])
    # What is read now is of the one that was lost, too.
    with ceph.stopped(f"osd.{(osd + 1) % 3}"):
        ceph.ask(["wait", ["lost"], {}])
        assert primary(ceph, mine) == osd
        for disk in ON_CEPH:
            guest.check(disk, "lost", 8192, KIB)
        go_on(guest)
        for offset in range(1024, DIFF_MIB << 10, 4096):
            assert ceph.read(local, KIB << 10, offset << 10) == content("diff", offset, KIB), offset
    ceph.ask(["wait", ["clean"], {}])
    for disk in (*ON_CEPH, LOCAL):
        counts = guest.loop_stop(disk)
        assert (counts["errors"], counts["mismatches"]) == (0, 0), (disk, counts)
        guest.check(disk, "base", 0, KIB)
    guest.check(LOCAL, "diff", 1024, DIFF_MIB << 10)
    cloud.terminate(vm)
    assert ceph.read(mine, KIB << 10, 8192 << 10) == content("lost", 8192, KIB)
    assert ceph.read(local, KIB << 10, 1024 << 10) == content("diff", 1024, KIB)
    assert cloud.leftovers() == [] and cloud.left_in_pool() == []
