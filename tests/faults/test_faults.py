# SPDX-License-Identifier: Apache-2.0
"""Full disks, dead and silent hosts, stores that are not there: one clear line each, nothing left, a rerun
that works.
"""

from __future__ import annotations

import subprocess
import time
from typing import Iterator

import pytest

from rot import dated

from .cloud import BASES, STORE, SYSTEM, Cloud, one_line, until
from .rig import image_bytes

CONTENT = image_bytes("faults")
MID_WAY = 128 << 10
"""Free bytes for less than half of the image's data, which is 320 KiB."""
HOST_LIMIT_S = 30
"""What a dead or silent host may cost."""


@pytest.fixture(scope="module")
def source(cloud: Cloud) -> str:
    path = cloud.upload(CONTENT)
    cloud.image(1)
    cloud.vm(7, {0: 1})
    cloud.image(2, attributes="<SEMISHARED_LOCAL>copy</SEMISHARED_LOCAL>")
    cloud.vm(8, {0: 2})
    cloud.image(3, attributes="<SEMISHARED_PLACE>shared</SEMISHARED_PLACE>")
    cloud.vm(9, {0: 3})
    return path


@pytest.fixture(autouse=True)
def clean(cloud: Cloud, source: str) -> Iterator[None]:
    """Each test leaves hosts that work, without VMs and bases."""
    yield
    cloud.forget(7, 8, 9, 10)


def works(cloud: Cloud, source: str, vm: int = 7, host: str = "h1") -> None:
    """The action, issued again, succeeds, and the guest reads its image."""
    done = cloud.clone(source, vm, host=host)
    assert done.returncode == 0, done.stderr.decode()
    node = cloud.lab.node(host)
    format = "raw" if vm == 8 else "qcow2"
    assert cloud.guest_sees(node, f"{SYSTEM}/{vm}/disk.0", format) == CONTENT


# -- no space ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", [0, MID_WAY], ids=["at 0 %", "mid-way"])
@pytest.mark.parametrize("where", ["base store", "VM directory, copy", "VM directory, volatile"])
def test_host_disk_full(cloud: Cloud, source: str, where: str, free: int) -> None:
    size = 1 << 20
    fill = size if not free else size - free
    directory = BASES if where == "base store" else SYSTEM
    vm = 7 if where == "base store" else 8
    # mkswap writes a page, ext4 more than what is free: the sparse rest of a volatile disk needs none.
    cloud.vm(10, {0: -1}, fs="ext4")
    with cloud.small(cloud.h1, directory, str(size), fill):
        if where.endswith("volatile"):
            done = cloud.tm("mkimage", "512", "qcow2", f"h1:{SYSTEM}/10/disk.0", "10", "101")
        else:
            done = cloud.clone(source, vm)
        one_line(done, "no space" if free == 0 or where != "VM directory, volatile" else "space", "h1")
        left = [
            path
            for path in cloud.left_of(vm, cloud.h1) + cloud.left_of(10, cloud.h1)
            if "disk." in path or "staged" in path
        ]
        assert not left
        assert not cloud.h1.run(["find", BASES, "-name", "image"], check=False).stdout
    works(cloud, source, vm)


@pytest.mark.parametrize("free", [0, MID_WAY], ids=["at 0 %", "mid-way"])
def test_store_full_for_an_upload(cloud: Cloud, free: int) -> None:
    cloud.fe.path("/var/tmp/full.raw").write_bytes(CONTENT)
    cloud.fe.path("/var/tmp/full.raw").chmod(0o644)
    with cloud.small(cloud.fe, STORE, str(1 << 20), (1 << 20) - free):
        done = cloud.datastore("cp", "<ID>1</ID><TYPE>0</TYPE><PATH>/var/tmp/full.raw</PATH>")
        one_line(done, "space", "fe")
        assert cloud.images() in ([], [f"{STORE}/filler"])
    assert cloud.upload(CONTENT, "full.raw")


@pytest.mark.parametrize("free", [0, MID_WAY], ids=["at 0 %", "mid-way"])
def test_store_full_for_a_saved_disk(cloud: Cloud, source: str, free: int) -> None:
    works(cloud, source, 8)
    words = [f"h1:{SYSTEM}/8/disk.0", f"{STORE}/saved", "-1", "8", "100"]
    with cloud.small(cloud.h1, STORE, str(1 << 20), (1 << 20) - free):
        one_line(cloud.tm("cpds", *words), "space", "h1")
        assert cloud.h1.run(["ls", "-A", STORE]).stdout in (b"", b"filler\n")
    done = cloud.tm("cpds", *words)
    assert done.returncode == 0, done.stderr.decode()
    assert cloud.guest_sees(cloud.fe, f"{STORE}/saved", "raw") == CONTENT
    cloud.fe.run(["rm", f"{STORE}/saved"])


# -- hosts ---------------------------------------------------------------------------------------------------


def test_dead_host(cloud: Cloud, source: str) -> None:
    cloud.h2.kill()
    try:
        for action, words in (
            ("clone", cloud.clone_words(source, host="h2")),
            ("delete", [f"h2:{SYSTEM}/7", "7", "101"]),
        ):
            started = time.monotonic()
            one_line(cloud.tm(action, *words), "h2")
            assert time.monotonic() - started < HOST_LIMIT_S
    finally:
        cloud.h2.start()
    works(cloud, source, host="h2")


def test_host_cut_off_while_it_works(cloud: Cloud, source: str) -> None:
    with cloud.held(cloud.h1, "base-100-1"):
        driver = cloud.start("clone", *cloud.clone_words(source))
        cloud.wait_for_hostside(cloud.h1)
        cloud.h1.cut()
        try:
            started = time.monotonic()
            out, err = driver.communicate(timeout=HOST_LIMIT_S)
            one_line(subprocess.CompletedProcess([], driver.returncode, out, err), "h1")
            assert time.monotonic() - started < HOST_LIMIT_S
        finally:
            cloud.h1.join()
        # Its next sign of life meets a connection that is no more.
        cloud.wait_for_no_hostside(cloud.h1, 90)
        assert not [path for path in cloud.left_of(7, cloud.h1) if "disk." in path]
    works(cloud, source)


def test_host_side_killed(cloud: Cloud, source: str) -> None:
    with cloud.held(cloud.h1, "base-100-1"):
        driver = cloud.start("clone", *cloud.clone_words(source))
        cloud.wait_for_hostside(cloud.h1)
        for pid in cloud.hostsides(cloud.h1):
            cloud.h1.run(["kill", "-KILL", str(pid)])
        out, err = driver.communicate(timeout=30)
        one_line(subprocess.CompletedProcess([], driver.returncode, out, err), "h1")
    works(cloud, source)


@pytest.mark.parametrize("state", ["another version", "not installed", "older without records"])
def test_host_that_was_not_synced(cloud: Cloud, source: str, state: str) -> None:
    package = "/var/tmp/one/lib/semishared"
    if state == "another version":
        cloud.h1.run(["sed", "-i", 's/^VERSION = .*/VERSION = "0.0.9"/', f"{package}/__init__.py"])
    elif state == "not installed":
        cloud.h1.run(["mv", "/var/tmp/one/lib", "/var/tmp/one/lib.away"])
    else:
        cloud.h1.run(["rm", "-r", f"{package}/disk"])
    try:
        done = cloud.clone(source)
        if state == "older without records":
            one_line(done, "h1")
        else:
            one_line(done, "h1", "onehost sync")
        assert not cloud.left_of(7, cloud.h1)
    finally:
        cloud.lab.sync()
    works(cloud, source)


def test_host_that_refuses_the_key(cloud: Cloud, source: str) -> None:
    """Its sshd has a banner as law departments write them, which is no reason."""
    keys, configuration = "/var/lib/one/.ssh/authorized_keys", cloud.h1.path("/etc/ssh/sshd_lab")
    before = configuration.read_text()
    cloud.h1.path("/etc/ssh/banner").write_text("* This system is for authorised use only *\n" * 90)
    configuration.write_text(f"Banner /etc/ssh/banner\n{before}")
    cloud.h1.run(["mv", keys, f"{keys}.away"])
    try:
        cloud.h1.run(["sh", "-c", "kill -HUP $(cat /run/sshd.pid); sleep 1"], user="root")
        line = one_line(cloud.clone(source), "h1", "Permission denied")
        assert "authorised use" not in line
    finally:
        configuration.write_text(before)
        cloud.h1.run(["sh", "-c", "kill -HUP $(cat /run/sshd.pid); sleep 1"], user="root")
        cloud.h1.run(["mv", f"{keys}.away", keys])
    works(cloud, source)


# -- stores --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vm", [7, 8, 9], ids=["overlay", "copy", "clone on the store"])
def test_store_not_mounted_on_a_host(cloud: Cloud, source: str, vm: int) -> None:
    cloud.h1.run(["mkdir", "-p", "/mnt/aside"], user="root")
    cloud.h1.run(["mount", "--bind", STORE, "/mnt/aside"], user="root")
    cloud.h1.wait_for(["umount", STORE], 30, user="root")
    try:
        done = cloud.clone(source, vm)
        one_line(done, STORE, "not mounted", "h1")
        assert not cloud.h1.run(["find", STORE, "-mindepth", "1"]).stdout, "written below the mount point"
        assert not [path for path in cloud.left_of(vm, cloud.h1) if "disk." in path or "staged" in path]
    finally:
        cloud.h1.run(["mount", "--bind", "/mnt/aside", STORE], user="root")
        cloud.h1.run(["umount", "/mnt/aside"], user="root")
    if vm != 9:
        works(cloud, source, vm)


def test_image_gone_from_the_store(cloud: Cloud, source: str) -> None:
    one_line(cloud.clone(f"{STORE}/nothing-here"), f"{STORE}/nothing-here", "h1")
    assert not [path for path in cloud.left_of(7, cloud.h1) if "disk." in path]


def test_image_changed_behind_our_back(cloud: Cloud) -> None:
    """Bit rot with size and time as they were: the base copy notices, nothing is published."""
    path = cloud.upload(CONTENT)
    file = cloud.fe.path(path)
    info = file.stat()
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"rot")
    dated(file, info)
    one_line(cloud.clone(path), path, "generation")
    assert not cloud.h1.run(["find", BASES, "-name", "image"], check=False).stdout
    assert not [found for found in cloud.left_of(7, cloud.h1) if "disk." in found]


def test_base_store_with_a_half_copy(cloud: Cloud, source: str) -> None:
    cloud.h1.run(["mkdir", "-p", f"{BASES}/staging/100-1/leases"])
    cloud.h1.run(["dd", "if=/dev/urandom", f"of={BASES}/staging/100-1/image", "bs=64k", "count=3"])
    works(cloud, source)
    assert not cloud.h1.run(["find", f"{BASES}/staging", "-mindepth", "1"]).stdout


# -- overlap -------------------------------------------------------------------------------------------------


def overlap(
    cloud: Cloud, action: str, words: list[str], lock: str, vm: int
) -> subprocess.CompletedProcess[bytes]:
    """Let an action wait, delete its VM, let it go on; return how it ended."""
    with cloud.held(cloud.h1, lock):
        driver = cloud.start(action, *words)
        cloud.wait_for_hostside(cloud.h1)
        if lock.startswith("base-"):
            cloud.delete(vm)
    if not lock.startswith("base-"):
        cloud.delete(vm)
    out, err = driver.communicate(timeout=30)
    return subprocess.CompletedProcess([], driver.returncode, out, err)


def test_clone_overlapping_its_own_delete(cloud: Cloud, source: str) -> None:
    done = overlap(cloud, "clone", cloud.clone_words(source), "base-100-1", 7)
    one_line(done, "VM 7 was deleted")
    assert not cloud.left_of(7)
    works(cloud, source)


def test_delete_planned_before_a_new_clone_does_not_stop_it(cloud: Cloud, source: str) -> None:
    works(cloud, source)
    cloud.delete(7)
    works(cloud, source)


def test_nothing_is_at_work_in_the_end(cloud: Cloud) -> None:
    for node in cloud.lab.hosts:
        until(lambda node=node: not cloud.hostsides(node), 10, f"no host side on {node.name}")
        assert node.run(["pgrep", "qemu-img"], check=False).returncode == 1
