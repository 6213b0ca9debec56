# SPDX-License-Identifier: Apache-2.0
"""Memory that is promised three times over gets full: its disks go to other devices under their guests, which
notice nothing, or wait.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Callable

import pytest

from lab import Node
from lab.cloud import DATASTORES, Cloud
from lab.guest import content
from pool.conftest import COMMAND, DEVICES
from pool.test_pool import DECLARED, device_of, names, said
from pool.test_ram import MEMORY, declare, layers, mount, rows

KIB = 1024
DATA = content("base", 0, KIB)
WATCH = ["/usr/bin/python3", "-IS", "/var/tmp/one/lib/semishared/host/watch.py", DATASTORES, "0"]
MUCH, LITTLE = (10 * KIB, 130 * KIB), (10 * KIB, 70 * KIB)
"""From where on a guest writes how much: memory has room for the one or the other."""
POINTS = (1, 3, 6, 9, 12, 16, 20, 24, 27, 30)
"""At which a round is killed, each time anew: what the one before has begun the next one finds."""


@pytest.fixture(autouse=True)
def _memory(cloud: Cloud) -> Iterator[None]:
    for host in cloud.lab.hosts:
        mount(host)
    declare(cloud, f"{DECLARED} {MEMORY}=ram:3")
    yield
    cloud.delete_all()
    declare(cloud, DECLARED)
    for host in cloud.lab.hosts:
        host.run(["umount", "-l", MEMORY], user="root")


def until(is_so: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"no {what} in {seconds} s"
        time.sleep(0.2)


def is_watched(cloud: Cloud) -> bool:
    return rows(cloud)[MEMORY]["watched"] is True


@contextmanager
def watching(cloud: Cloud) -> Iterator[None]:
    """Look after memory as the unit does, within the block."""
    watcher = cloud.lab.node("h1").popen(WATCH, stdin=subprocess.DEVNULL)
    try:
        until(lambda: is_watched(cloud), "watcher", 20)
        yield
    finally:
        watcher.kill()
        watcher.wait(20)
    # What it has begun goes on to its end.
    until(lambda: not is_watched(cloud), "end of its last round")


def once(node: Node, kill_at: int = 0) -> int:
    env = {"SEMISHARED_KILL_AT": str(kill_at)} if kill_at else {}
    return node.run([*WATCH, "round"], env=env, check=False, timeout=180).returncode


def state(cloud: Cloud, vm: int) -> str:
    words = ["virsh", "-c", "qemu:///system", "domstate", "--reason", cloud.oned.vm(vm).deploy_id]
    return cloud.lab.node("h1").run(words).stdout.decode().strip()


def start_libvirtd_anew(node: Node) -> None:
    pid = node.run(["pgrep", "-x", "libvirtd"], user="root").stdout.decode().strip()
    node.run(["kill", pid], user="root")
    until(
        lambda: not node.run(["pgrep", "-x", "libvirtd"], user="root", check=False).stdout,
        "end of libvirtd",
        20,
    )
    node.run(["/usr/sbin/libvirtd", "-d"], user="root")
    until(
        lambda: node.run(["virsh", "-c", "qemu:///system", "list"], check=False).returncode == 0,
        "libvirtd",
        20,
    )


def deploy(cloud: Cloud, count: int) -> list[int]:
    """Have guests with a disk each in memory, which takes one of them and a bit at its largest."""
    os = cloud.os_image("spill-os")
    image = cloud.data_image("spill", DATA, 150, SEMISHARED_CLASS="ram any")
    disks = [{"IMAGE_ID": str(os)}, {"IMAGE_ID": str(image)}]
    vms = [cloud.deploy(f"spill{number}", disks, context=False) for number in range(count)]
    assert [device_of(cloud, vm, 1) for vm in vms] == [MEMORY] * count
    for vm in vms:
        cloud.guest(vm).write("vdb", "first", 2 * KIB, 32)
    return vms


def check(cloud: Cloud, vm: int, much: tuple[int, int] = MUCH) -> None:
    cloud.guest(vm).check("vdb", "first", 2 * KIB, 32)
    cloud.guest(vm).check("vdb", f"much{vm}", *much)


def test_guests_fill_memory_that_is_promised_to_both_and_go_on(cloud: Cloud) -> None:
    h1 = cloud.lab.node("h1")
    (found,) = said(cloud, "pool", "check", "h1", code=1)["hosts"]
    assert any("nothing moves disks away when it is full" in wrong for wrong in found["wrong"]), found[
        "wrong"
    ]
    vms = deploy(cloud, 2)
    for vm in vms:
        cloud.guest(vm).loop("vdb", f"loop{vm}", 4 * KIB, 4 * KIB, 5)
    with watching(cloud), ThreadPoolExecutor(len(vms)) as threads:
        assert said(cloud, "pool", "check", "h1")["hosts"][0]["wrong"] == []
        assert h1.run(WATCH, timeout=20).returncode == 0, "one on each host"
        list(threads.map(lambda vm: cloud.guest(vm).write("vdb", f"much{vm}", *MUCH, 200), vms))
        until(lambda: any(device_of(cloud, vm, 1) != MEMORY for vm in vms), "disk that has left memory")
    assert all(state(cloud, vm).startswith("running") for vm in vms)
    for vm in vms:
        cloud.guest(vm).wait_written("vdb")
        counts = cloud.guest(vm).loop_stop("vdb")
        assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, counts
        check(cloud, vm)
    left = [vm for vm in vms if device_of(cloud, vm, 1) in DEVICES]
    assert (
        left
        and len(layers(h1)) == len(vms) - len(left)
        and len(names(h1, f"{MEMORY}/.semishared/spare")) == 4
    )
    for vm in vms:
        cloud.oned.vm_poweroff(vm)
        cloud.oned.vm_resume(vm)
        check(cloud, vm)
    for vm in vms:
        cloud.terminate(vm)
    assert layers(h1) == [] and cloud.leftovers() == []


def test_a_guest_waits_while_who_looks_after_memory_is_killed_again_and_again(cloud: Cloud) -> None:
    h1 = cloud.lab.node("h1")
    assert once(h1) == 1 and len(names(h1, f"{MEMORY}/.semishared/spare")) == 4, (
        "nothing to do, but to keep room"
    )
    other, waiting, paused = vms = deploy(cloud, 3)
    h1.run(["virsh", "-c", "qemu:///system", "suspend", cloud.oned.vm(paused).deploy_id])
    cloud.guest(other).write("vdb", f"much{other}", *LITTLE)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(cloud.guest(waiting).write, "vdb", f"much{waiting}", *MUCH, 400)
        until(lambda: state(cloud, waiting) == "paused (I/O error)", "guest that waits")
        said = cloud.lab.fe.run([COMMAND, "attention", "--json"], check=False).stdout
        stopped = [item["what"] for item in json.loads(said)["items"] if item["kind"] == "guest-paused"]
        assert len(stopped) == 1 and stopped[0].startswith(f"guest one-{waiting} "), stopped
        assert "no room" in stopped[0]
        killed = [once(h1, number) for number in POINTS[:5]]
        start_libvirtd_anew(h1)
        assert state(cloud, waiting) == "paused (I/O error)" and state(cloud, paused) == "paused (user)"
        killed += [once(h1, number) for number in POINTS[5:]]
        assert len([code for code in killed if code in (-9, 137)]) > len(POINTS) // 2, killed
        with watching(cloud):
            writing.result()
            until(
                lambda: not any(name.startswith("go-over") for vm in vms for name in records(h1, vm)),
                "end of what was begun",
            )
    assert state(cloud, paused) == "paused (user)", "nobody else wakes whom somebody has paused"
    h1.run(["virsh", "-c", "qemu:///system", "resume", cloud.oned.vm(paused).deploy_id])
    cloud.guest(paused).check("vdb", "first", 2 * KIB, 32)
    check(cloud, other, LITTLE)
    check(cloud, waiting)
    assert device_of(cloud, waiting, 1) in DEVICES, "the one that takes most: its guest stood still meanwhile"
    for vm in vms:
        cloud.terminate(vm)
    assert layers(h1) == [] and cloud.leftovers() == []


def records(node: Node, vm: int) -> list[str]:
    return names(node, f"{DATASTORES}/101/{vm}/.semishared")
