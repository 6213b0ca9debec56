# SPDX-License-Identifier: Apache-2.0
"""What is done to running VMs, on the host of the newer release, by a front-end of that release: commit,
detach, backups and their cancel, directories.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lab import roots
from lab.cloud import Cloud
from lab.guest import content
from shares.conftest import loop_of, mounted_btrfs
from shares.guests import Shares
from system.test_backup import call, cut_short, number, ok

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
HOST = "h2"
ALL_11 = os.environ.get(roots.PLATFORM) == "11"
KIB = 64
DATA = content("base", 0, KIB)


def said(cloud: Cloud, *words: str) -> bytes:
    """Run `semishared`; return what it prints."""
    done = cloud.lab.fe.run([COMMAND, *words], check=False, timeout=300)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return bytes(done.stdout)


def deploy(cloud: Cloud, name: str, *images: int) -> int:
    return cloud.deploy(name, [{"IMAGE_ID": str(image)} for image in images], HOST)


def test_a_local_disk_is_committed_while_its_guest_writes_and_when_it_ends(
    cloud: Cloud, os_image: int
) -> None:
    mine = cloud.data_image("local", DATA, persistent=True, SEMISHARED_PLACE="local")
    vm = deploy(cloud, "commits", os_image, mine)
    guest = cloud.guest(vm)
    guest.write("vdb", "one", 1024, KIB)
    guest.loop("vdb", "loop", 8192, 4096, 4)
    assert cloud.read(cloud.source(mine), "raw", KIB << 10, 1 << 20) == bytes(KIB << 10)
    said(cloud, "commit", str(vm))
    assert cloud.read(cloud.source(mine), "raw", KIB << 10, 1 << 20) == content("one", 1024, KIB)
    guest.wait_written("vdb")
    counts = guest.loop_stop("vdb")
    assert (counts["errors"], counts["mismatches"]) == (0, 0), counts
    guest.write("vdb", "two", 2048, KIB)
    cloud.terminate(vm)
    assert cloud.read(cloud.source(mine), "raw", KIB << 10, 2 << 20) == content("two", 2048, KIB)
    assert cloud.leftovers() == []


def test_a_guest_lets_go_of_the_store(cloud: Cloud, os_image: int) -> None:
    remote: dict[str, Any] = {"SEMISHARED_LOCAL": "remote-first"}
    vm = deploy(cloud, "letgo", os_image, cloud.data_image("remote", DATA, format="qcow2", **remote))
    guest = cloud.guest(vm)
    guest.write("vdb", "before", 1024, KIB)
    guest.loop("vdb", "loop", 4096, 4096, 4)
    summary = json.loads(said(cloud, "detach", str(vm), "--json").splitlines()[-1])
    assert [(row["disk"], row["how"]) for row in summary["rows"]] == [(1, "detached")]
    guest.wait_written("vdb")
    counts = guest.loop_stop("vdb")
    assert (counts["errors"], counts["mismatches"]) == (0, 0), counts
    guest.check("vdb", "base", 0, KIB)
    guest.check("vdb", "before", 1024, KIB)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


@pytest.mark.skipif(roots.LIBVIRT_7_0, reason="libvirt 7.0 has no backups of running guests")
def test_a_backup_is_of_one_moment_and_ends_when_it_is_cancelled(cloud: Cloud, os_image: int) -> None:
    images = [cloud.data_image(name, content("n0", 0, 4), persistent=True) for name in ("first", "second")]
    vm = deploy(cloud, "backup", os_image, *images)
    guest = cloud.guest(vm)
    written, stop = [0], threading.Event()

    def write() -> None:
        while not stop.is_set():
            for disk in ("vdb", "vdc"):
                guest.write(disk, f"n{written[0] + 1}", 0, 4)
            written[0] += 1
            time.sleep(0.005)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for freeze in ("NONE", "SUSPEND"):
            ok(call(cloud, vm, "prebackup_live", freeze))
            first, second = (
                number(
                    cloud.read(f"{cloud.vm_dir(vm)}/backup/disk.{disk}.0", "qcow2", 4 << 10, node=guest.node),
                    written[0] + 1,
                )
                for disk in (1, 2)
            )
            assert second in (first, first - 1), f"{first} on one disk, {second} on the other"
            ok(call(cloud, vm, "postbackup_live", freeze))
        assert any(cut_short(cloud, vm, 0.0, "cancelled") for _ in range(3)), "no backup was cancelled"
    finally:
        stop.set()
        writer.join(60)
    for disk in ("vdb", "vdc"):
        guest.check(disk, f"n{written[0]}", 0, 4)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


@pytest.fixture
def shares(cloud: Cloud, tmp_path: Path) -> Any:
    with mounted_btrfs(tmp_path) as where:
        yield Shares(cloud, loop_of(where))
        for host in cloud.lab.hosts:
            host.run(["umount", "/srv/shares"], user="root")


@pytest.mark.skipif(ALL_11, reason="sudo 1.9.5 knows no regular expressions, which the rule for shares has")
@pytest.mark.fault(50, "a VM with a share starts under libvirt 11, with the daemon in Rust")
def test_guests_on_hosts_of_both_releases_see_one_directory(shares: Shares) -> None:
    both = shares.image("both", "32M", uid=5)
    vms = [shares.deploy(f"on-{host}", both, host=host) for host in ("h1", "h2")]
    guests = [shares.mounted(vm) for vm in vms]
    for number_, guest in enumerate(guests):
        assert guest.run(f"echo {number_} >/both/{number_} && sync") == (0, "")
    for guest in guests:
        assert guest.run("sleep 1; cat /both/0 /both/1") == (0, "0\n1\n")
    for vm in vms:
        shares.cloud.terminate(vm)
    shares.oned.image_delete(both)
