# SPDX-License-Identifier: Apache-2.0
"""The `dir` store on a file system that is really shared: CephFS, mounted by the front-end and each host for
itself.

What only shows here, a bind mount having one kernel's caches and locks: what one machine publishes is what
another reads, locks hold between machines and end with their holder, and libvirt does not take the place for
a local disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest

from lab import Node
from lab.ceph import fs
from lab.cloud import DATASTORES, STORE, Cloud
from lab.guest import content
from lab.oned import ActionFailed

KIB = 64
DATA = content("base", 0, KIB)
STORE_DIR = f"{DATASTORES}/{STORE}"
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
Kind = Tuple[str, str, bool, Dict[str, Any]]
DISKS: List[Kind] = [
    # (name, format, persistent, attributes); what lies on the shared file system in both formats
    ("mine", "raw", True, {}),
    ("mineq", "qcow2", True, {}),
    ("beside", "raw", False, {"SEMISHARED_PLACE": "shared"}),
    ("besideq", "qcow2", False, {"SEMISHARED_PLACE": "shared"}),
    ("cow", "raw", False, {}),
    ("full", "qcow2", False, {"SEMISHARED_LOCAL": "copy"}),
]
SOME = [DISKS[0], DISKS[3], DISKS[4]]
"""In place, beside the image and on the host, in either format: with `make test` tests/system has the others,
without CephFS.
"""


def left_over(cloud: Cloud, *options: str) -> set[str]:
    """Run `semishared gc`; return the kinds of what it found, but for bases of images that were deleted:
    those are due.
    """
    done = cloud.lab.fe.run([COMMAND, "gc", "--json", "--now", *options], check=False)
    assert done.returncode in (0, 1), done.stderr
    return {finding["kind"] for finding in json.loads(done.stdout)["findings"]} - {"base"}


def opens(node: Node, path: str, format: str = "raw") -> bool:
    """Tell whether a second program on `node` gets the image for writing."""
    words = [
        "timeout",
        "-k",
        "1",
        "10",
        "qemu-io",
        "-f",
        format,
        "-c",
        "read 0 512",
        path,
    ]  # a lock may be waited for
    done = node.run(
        words, check=False, timeout=180
    )  # nor does a program end that waits for a dead client's session to
    return done.returncode == 0 and b"lock" not in done.stderr


def test_each_machine_has_a_mount_of_its_own(cloud: Cloud) -> None:
    nodes = [cloud.lab.fe, *cloud.lab.hosts]
    clients = {client["client_metadata"]["hostname"] for client in cloud.lab.ceph.mds("session ls")}
    assert clients == {"fe", "h1", "h2"}
    assert len({os.stat(node.path(STORE_DIR)).st_dev for node in nodes}) == len(nodes)


def test_locks_hold_between_machines_and_end_with_their_holder(cloud: Cloud) -> None:
    here, there = cloud.lab.hosts
    take = (
        "import fcntl,sys,time; f=open(sys.argv[1],'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, "
        "flush=True); time.sleep(600)"
    )
    path = f"{STORE_DIR}/lock"
    holder = here.popen(["python3", "-c", take, path], stdout=subprocess.PIPE)
    assert holder.stdout and holder.stdout.readline() == b"1\n"
    with open(there.path(path)) as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        wait_for(lambda: gets(file))
    there.path(path).unlink()


def gets(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("kinds", [SOME, pytest.param(DISKS, marks=pytest.mark.long)], ids=["some", "all"])
def test_every_kind_of_disk_through_snapshots_save_as_undeploy_and_migration(
    cloud: Cloud, os_image: int, kinds: List[Kind]
) -> None:
    data = [
        cloud.data_image(name, DATA, persistent=persistent, format=format, **attributes)
        for name, format, persistent, attributes in kinds
    ]
    vm = cloud.deploy("life", [{"IMAGE_ID": str(image)} for image in (os_image, *data)])
    disks = {f"vd{'bcdefg'[number]}": number + 1 for number in range(len(kinds))}
    volatile = cloud.oned.disk_attach(vm, attributes={"TYPE": "fs", "SIZE": "16", "FORMAT": "qcow2"})
    last = f"vd{'bcdefgh'[len(kinds)]}"
    guest = cloud.guest(vm)
    guest.wait_disk(last)
    for name in disks:
        guest.check(name, "base", 0, KIB)
        guest.write(name, "one", 1024, 64)
    guest.write(last, "volatile", 0, 64)
    for disk in disks.values():
        assert cloud.oned.disk_snapshot_create(vm, disk, "live") == 0
    for name, disk in disks.items():
        guest.write(name, "two", 1024, 64)
        format = kinds[disk - 1][1]
        for image, seed in (
            (cloud.oned.disk_saveas(vm, disk, f"saved-{name}"), "two"),
            (cloud.oned.disk_saveas(vm, disk, f"snap-{name}", snapshot=0), "one"),
        ):
            assert cloud.read(cloud.source(image), format, 64 << 10, 1024 << 10) == content(seed, 1024, 64)
            cloud.oned.image_delete(image)
    cloud.oned.vm_poweroff(vm, hard=True)
    for disk in disks.values():
        cloud.oned.disk_snapshot_revert(vm, disk, 0)
        assert cloud.oned.disk_snapshot_create(vm, disk, "off") == 1
        cloud.oned.disk_snapshot_delete(vm, disk, 1)
        cloud.oned.disk_resize(vm, disk, 24)
    cloud.oned.vm_undeploy(vm)
    cloud.oned.vm_deploy(vm, "h2", 101)
    guest = cloud.guest(vm)
    for name in disks:
        guest.check(name, "base", 0, KIB)
        guest.check(name, "one", 1024, 64)
        assert guest.disks()[name] == 24 << 20
    guest.check(last, "volatile", 0, 64)
    cloud.oned.disk_detach(vm, volatile)
    cloud.oned.vm_migrate(vm, "h1", how="poweroff-hard", datastore_id=102)
    guest = cloud.guest(vm)
    for name in disks:
        guest.check(name, "one", 1024, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    for image, (_, format, persistent, _) in zip(data, kinds):
        expected = content("one", 1024, 64) if persistent else bytes(64 << 10)
        assert cloud.read(cloud.source(image), format, 64 << 10, 1024 << 10) == expected
        if persistent:
            cloud.oned.image_snapshot(image, "snap_delete", 0)
        cloud.oned.image_delete(image)
    assert left_over(cloud, "--dry-run") == set()


def test_bases_are_sparse_although_the_store_tells_no_holes(cloud: Cloud, os_image: int) -> None:
    """Every file looks full on ceph-fuse: what was written as zeros must not become blocks of a host's
    disk.
    """
    image = cloud.data_image("holes", DATA, 256)
    vm = cloud.create("holes", [{"IMAGE_ID": str(image)}])
    cloud.oned.vm_deploy(vm, "h1", 101)
    (base,) = cloud.lab.hosts[0].path(f"{DATASTORES}/.semishared/bases").glob(f"{STORE}-{image}-*/image")
    assert base.stat().st_size == 256 << 20
    assert base.stat().st_blocks * 512 < 4 << 20
    cloud.terminate(vm)


@pytest.mark.parametrize(
    "format", [pytest.param("raw", marks=pytest.mark.long), "qcow2"]
)  # the file is hashed, whatever is in it
def test_one_image_cloned_at_once_by_two_hosts_is_one_generation(cloud: Cloud, format: str) -> None:
    """Both hosts are cold and hash the image; store clones are made beside it at the same time."""
    image = cloud.data_image(f"both-{format}", DATA, 64, format=format)
    beside = cloud.data_image(f"both-beside-{format}", DATA, format=format, SEMISHARED_PLACE="shared")
    vms = [
        cloud.create(f"both-{format}-{number}", [{"IMAGE_ID": str(image)}, {"IMAGE_ID": str(beside)}])
        for number in range(4)
    ]
    with ThreadPoolExecutor(len(vms)) as pool:
        list(pool.map(lambda vm, host: cloud.oned.vm_deploy(vm, host, 101), vms, ["h1", "h2"] * 2))
    names = set()
    for host in cloud.lab.hosts:
        names |= {
            path.name for path in host.path(f"{DATASTORES}/.semishared/bases").glob(f"{STORE}-{image}-*")
        }
    assert len(names) == 1, names
    header = json.loads(
        cloud.lab.fe.path(
            f"{STORE_DIR}/.semishared/{Path(cloud.source(image)).name}/generation.json"
        ).read_text()
    )
    assert names == {f"{STORE}-{image}-{header['generation']}"}
    for number, vm in enumerate(vms):
        host = cloud.lab.hosts[number % 2]
        for disk, source in ((0, image), (1, beside)):
            path = host.run(["readlink", "-f", f"{cloud.vm_dir(vm)}/disk.{disk}"]).stdout.decode().strip()
            words = ["qemu-img", "compare", "-U", "-F", format, path, cloud.source(source)]
            assert b"identical" in host.run([*words[:3], "-f", "qcow2", *words[3:]]).stdout
        cloud.terminate(vm)
    cloud.oned.image_delete(image)
    cloud.oned.image_delete(beside)
    assert cloud.leftovers() == []


def test_what_one_machine_ends_no_other_takes_for_current(cloud: Cloud, os_image: int) -> None:
    """persistent -> non-persistent, each time on another host: never a stale base out of somebody's cache."""
    image = cloud.data_image("flip", DATA)
    hosts = ["h1", "h2"]
    for turn in range(2):
        cloud.oned.image_persistent(image, True)
        vm = cloud.deploy(
            f"flip-{turn}", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}], host=hosts[turn % 2]
        )
        cloud.guest(vm).write("vdb", f"turn-{turn}", 0, KIB)
        cloud.terminate(vm)
        cloud.oned.image_persistent(image, False)
        for host in cloud.lab.hosts:
            vm = cloud.create(f"flop-{turn}", [{"IMAGE_ID": str(image)}])
            cloud.oned.vm_deploy(vm, host.name, 101)
            assert cloud.read(f"{cloud.vm_dir(vm)}/disk.0", "qcow2", KIB << 10, node=host) == content(
                f"turn-{turn}", 0, KIB
            )
            cloud.terminate(vm)
    cloud.oned.image_delete(image)
    assert cloud.leftovers() == []


def test_a_disk_in_use_is_locked_for_other_hosts_until_its_qemu_or_its_host_is_gone(
    cloud: Cloud, os_image: int
) -> None:
    here, there = cloud.lab.hosts
    image = cloud.data_image("held", DATA, persistent=True)
    vm = cloud.deploy("held", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
    cloud.guest(vm).write("vdb", "held", 1024, 64)
    assert not opens(there, cloud.source(image))
    assert not opens(cloud.lab.fe, cloud.source(image))
    here.run(["bash", "-c", "kill -9 $(cat /run/libvirt/qemu/one-*.pid)"], user="root")
    wait_for(lambda: opens(there, cloud.source(image)))
    cloud.oned.vm_recover(vm, "delete")
    cloud.oned.image_enable(image)

    # A host without power: nobody says so to the file system, and its locks stay until its client is shut
    # out.
    vm = cloud.deploy("held-2", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
    cloud.guest(vm).write("vdb", "last", 2048, 64)
    here.kill()
    assert not opens(there, cloud.source(image))
    fs.fence(cloud.lab.ceph, here)
    here.start()
    fs.mount(here, STORE_DIR)
    cloud.oned.vm_recover(vm, "delete")
    cloud.oned.image_enable(image)
    vm = cloud.deploy("held-3", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}], host="h2")
    guest = cloud.guest(vm)
    guest.check("vdb", "held", 1024, 64)
    guest.check("vdb", "last", 2048, 64)
    cloud.terminate(vm)
    cloud.oned.image_delete(image)
    left_over(cloud)
    assert cloud.leftovers() == []


def test_vm_in_place_is_migrated_live_though_libvirt_does_not_know_the_file_system(cloud: Cloud) -> None:
    system = cloud.os_image("live-os", persistent=True)
    mine = cloud.data_image("live-mine", DATA, persistent=True, format="qcow2")
    vm = cloud.deploy("live", [{"IMAGE_ID": str(system)}, {"IMAGE_ID": str(mine)}])
    guest = cloud.guest(vm)
    guest.loop("vdb", "loop", 4096, 4096)
    cloud.oned.vm_migrate(vm, "h2", how="live")
    guest = cloud.guest(vm)
    counts = guest.loop_stop("vdb")
    assert (counts["errors"], counts["mismatches"]) == (0, 0)
    assert counts["writes"] > 10
    assert not opens(cloud.lab.hosts[0], cloud.source(mine), "qcow2")
    cloud.terminate(vm)
    assert cloud.leftovers() == []


def test_store_that_is_not_mounted_on_one_host_is_named(cloud: Cloud) -> None:
    image = cloud.data_image("unmounted", DATA)
    cloud.lab.hosts[1].run(["umount", STORE_DIR], user="root")
    vm = cloud.create("unmounted", [{"IMAGE_ID": str(image)}])
    with pytest.raises(ActionFailed, match="on h2 is not the datastore's store"):
        cloud.oned.vm_deploy(vm, "h2", 101)
    fs.mount(cloud.lab.hosts[1], STORE_DIR)
    cloud.oned.vm_recover(vm, "retry")
    cloud.terminate(vm)
    assert cloud.leftovers() == []


def test_uploads_clones_and_what_killed_ones_leave(cloud: Cloud) -> None:
    """Staged files of a killed upload are found and removed from the front-end, which alone knows that nobody
    holds them.
    """
    first = cloud.data_image("first", DATA, format="qcow2")
    second = cloud.oned.image_clone(first, "second")
    blank = cloud.oned.image_create(STORE, "blank", size=16, type="DATABLOCK", format="raw", prefix="vd")
    assert cloud.read(cloud.source(second), "qcow2", KIB << 10) == DATA
    assert cloud.read(cloud.source(blank), "raw", 4096) == bytes(4096)
    uploads = cloud.lab.hosts[0].path(f"{STORE_DIR}/.semishared/.uploads/killed")
    uploads.mkdir(parents=True)
    (uploads / "image").write_bytes(b"half")
    cloud.lab.hosts[0].run(["chown", "-R", "oneadmin:", f"{STORE_DIR}/.semishared/.uploads"], user="root")
    assert left_over(cloud) == {"upload"}
    wait_for(lambda: not uploads.exists())
    for image in (first, second, blank):
        cloud.oned.image_delete(image)
    assert left_over(cloud, "--dry-run") == set()
