# SPDX-License-Identifier: Apache-2.0
"""What happens to VMs and actions when Ceph is away, full, or not as OpenNebula believes: real guests, a real
cluster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import pytest

from lab.ceph import BRIDGE, POOL, SECRET, Cluster
from lab.cloud import RBD_STORE, Cloud
from lab.guest import content
from lab.oned import ActionFailed

KIB = 64
DATA = content("base", 0, KIB)
BOUND_S = 110
"""Three limits of 30 s, which an action may meet one after the other, and what a busy machine adds."""


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=1, ceph=True, forks=True) as up:
        yield up


@pytest.fixture(scope="module")
def ceph(cloud: Cloud) -> Cluster:
    return cloud.lab.ceph


@pytest.fixture(scope="module")
def os_image(cloud: Cloud) -> int:
    return cloud.os_image(store=RBD_STORE)


@pytest.fixture(autouse=True)
def only_this_test(cloud: Cloud) -> Iterator[None]:
    """Remove the VMs that a failing test leaves, so that the next one is judged for itself."""
    yield
    cloud.delete_all()


def data(
    cloud: Cloud, name: str, *, persistent: bool = False, store: int = RBD_STORE, **attributes: Any
) -> int:
    return cloud.data_image(name, DATA, persistent=persistent, store=store, **attributes)


def name(cloud: Cloud, image: int) -> str:
    return cloud.source(image).split("/")[1]


def left(cloud: Cloud, ceph: Cluster) -> list[str]:
    """Return what is in the pool although oned does not know it, and what somebody still holds."""
    known = {
        name(cloud, image.id)
        for image in cloud.oned.images.values()
        if image.datastore_id == RBD_STORE and image.source
    }
    there = ceph.images()
    found = [image for image in there if image not in known]
    found += [f"{image} held by {one['watchers']}" for image, one in there.items() if one["watchers"]]
    return found + [f"trash: {entry}" for entry in ceph.ask(["trash", [POOL], {}])[0]]


def fails(work: Callable[[], object], match: str = "") -> str:
    """Do what must fail: in bounded time, with one line that names an id; return the line."""
    started = time.monotonic()
    with pytest.raises(ActionFailed, match=match) as failure:
        work()
    took = time.monotonic() - started
    line = str(failure.value)
    assert took < BOUND_S, f"{took:.0f} s: {line}"
    assert "\n" not in line and line.endswith("]") and line.startswith("SS"), line
    return line


def test_guest_waits_for_ceph_and_goes_on_while_its_local_disks_do_not_notice(
    cloud: Cloud, os_image: int
) -> None:
    """The OS disk lies on the host though its image is on Ceph; the data disk is attached in place."""
    mine = data(cloud, "mine", persistent=True)
    disks = [
        {"IMAGE_ID": str(os_image)},
        {"IMAGE_ID": str(mine)},
        {"TYPE": "fs", "SIZE": "32", "FORMAT": "raw"},
    ]
    vm = cloud.deploy("waits", disks, context=False)
    guest = cloud.guest(vm)
    guest.check("vdb", "base", 0, KIB)
    for disk in ("vda", "vdb", "vdc"):
        guest.loop(disk, f"loop-{disk}", *((1024, 2048) if disk != "vda" else (16384, 1024)))
    time.sleep(2)
    with cloud.lab.ceph.stopped():
        time.sleep(2)
        before = {disk: guest.loop_stat(disk)["writes"] for disk in ("vda", "vdb", "vdc")}
        time.sleep(8)
        after = {disk: guest.loop_stat(disk)["writes"] for disk in before}
        assert after["vdb"] == before["vdb"], "it waits"
        assert after["vda"] > before["vda"] and after["vdc"] > before["vdc"], "local disks go on"
    deadline = time.monotonic() + 60
    while guest.loop_stat("vdb")["writes"] < after["vdb"] + 10:
        assert time.monotonic() < deadline, "the disk on Ceph did not go on"
        time.sleep(0.2)
    for disk in ("vda", "vdb", "vdc"):
        counts = guest.loop_stop(disk)
        assert (counts["errors"], counts["mismatches"]) == (0, 0), (disk, counts)
    guest.write("vdb", "after", 0, KIB)
    cloud.terminate(vm)
    assert cloud.lab.ceph.read(name(cloud, mine), KIB << 10) == content("after", 0, KIB)


def test_every_action_while_ceph_is_away_fails_in_time_in_one_line_and_works_when_repeated(
    cloud: Cloud, ceph: Cluster, os_image: int
) -> None:
    """All at the same time: what takes long is the waiting. A disk on a warm base needs no cluster and is not
    among them.
    """
    oned = cloud.oned
    made = {what: data(cloud, f"away-{what}") for what in ("clone", "rm", "copied")}
    made["beside"] = data(cloud, "away-beside", SEMISHARED_PLACE="shared")
    held = {
        what: data(cloud, f"away-{what}", persistent=True)
        for what in ("ln", "snap", "resize", "saveas", "revert")
    }
    vms = {
        what: cloud.create(f"away-{what}", [{"IMAGE_ID": str(image)}])
        for what, image in (
            ("clone", made["clone"]),
            ("beside", made["beside"]),
            ("ln", held["ln"]),
            ("snap", held["snap"]),
            ("resize", held["resize"]),
            ("saveas", held["saveas"]),
            ("revert", held["revert"]),
        )
    }
    off = ("snap", "resize", "saveas", "revert")
    for what in off:
        oned.vm_deploy(vms[what], "h1", 101)
        oned.vm_poweroff(vms[what], hard=True)
    oned.disk_snapshot_create(vms["revert"], 0, "first")
    uploads = iter(range(100))

    def upload() -> None:
        data(cloud, f"away-upload-{next(uploads)}")

    def blank() -> None:
        oned.image_create(
            RBD_STORE, f"away-blank-{next(uploads)}", size=16, type="DATABLOCK", format="raw", prefix="vd"
        )

    first: dict[str, Callable[[], object]] = {
        "cp": upload,
        "mkfs": blank,
        "image clone": lambda: oned.image_clone(made["copied"], f"away-copy-{next(uploads)}"),
        "rm": lambda: oned.image_delete(made["rm"]),
        "monitor": lambda: oned.datastore_monitor(RBD_STORE),
        "clone": lambda: oned.vm_deploy(vms["clone"], "h1", 101),
        "clone beside": lambda: oned.vm_deploy(vms["beside"], "h1", 101),
        "ln": lambda: oned.vm_deploy(vms["ln"], "h1", 101),
        "snap_create": lambda: oned.disk_snapshot_create(vms["snap"], 0, "one"),
        "resize": lambda: oned.disk_resize(vms["resize"], 0, 24),
        "cpds": lambda: oned.disk_saveas(vms["saveas"], 0, f"away-saved-{next(uploads)}"),
        "snap_revert": lambda: oned.disk_snapshot_revert(vms["revert"], 0, 0),
    }
    with ceph.stopped(), ThreadPoolExecutor(len(first)) as pool:
        lines = dict(zip(first, pool.map(fails, first.values())))
    for what, line in lines.items():
        assert "eph" in line or "monitor" in line or POOL in line, (what, line)
    again = dict(first)
    for what in ("clone", "clone beside", "ln"):
        vm = vms[what.split()[-1]]
        again[what] = lambda vm=vm: oned.vm_recover(vm, "retry")  # type: ignore[misc]
    for what, work in again.items():
        try:
            work()
        except ActionFailed as failure:
            raise AssertionError(f"{what} repeated: {failure}") from None
    assert ceph.read(name(cloud, held["revert"]), KIB << 10) == DATA
    for vm in vms.values():
        cloud.terminate(vm)
    for image in list(oned.images.values()):
        if image.name.startswith("away-"):
            oned.image_delete(image.id)
    assert cloud.leftovers() == []
    wait_for(lambda: not left(cloud, ceph))


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    """What a client held when the cluster went away is free when its watch has ended."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1)


def test_terminate_while_ceph_is_away_saves_and_removes_when_repeated(cloud: Cloud, ceph: Cluster) -> None:
    mine, beside = (
        data(cloud, "end-mine", persistent=True),
        data(cloud, "end-beside", SEMISHARED_PLACE="shared"),
    )
    vm = cloud.create("end", [{"IMAGE_ID": str(mine)}, {"IMAGE_ID": str(beside)}])
    cloud.oned.vm_deploy(vm, "h1", 101)
    cloud.oned.vm_poweroff(vm, hard=True)
    with ceph.stopped("osd"):
        fails(lambda: cloud.terminate(vm))
    cloud.oned.vm_recover(vm, "retry")
    assert cloud.oned.state(vm)[0] == "DONE"
    for image in (mine, beside):
        cloud.oned.image_delete(image)
    assert cloud.leftovers() == []
    wait_for(lambda: not left(cloud, ceph))


def test_full_cluster_is_said_and_nothing_half_stays(cloud: Cloud, ceph: Cluster, os_image: int) -> None:
    ceph.command("osd set-full-ratio", ratio=0.0001)
    ceph.command("osd set-backfillfull-ratio", ratio=0.00009)
    ceph.command("osd set-nearfull-ratio", ratio=0.00008)
    try:
        wait_for(lambda: "OSD_FULL" in ceph.command("health")["checks"])
        fails(lambda: data(cloud, "full"), "full|space|answer")
    finally:
        for kind, ratio in (("full", 0.97), ("backfillfull", 0.96), ("nearfull", 0.95)):
            ceph.command(f"osd set-{kind}-ratio", ratio=ratio)
    wait_for(lambda: "OSD_FULL" not in ceph.command("health")["checks"])
    image = data(cloud, "full-again")
    cloud.oned.image_delete(image)
    forget_failed(cloud)
    wait_for(lambda: not left(cloud, ceph))


def forget_failed(cloud: Cloud) -> None:
    for image in list(cloud.oned.images.values()):
        if not image.source:
            cloud.oned.image_delete(image.id)


def test_key_that_is_refused_and_pool_that_is_missing_are_named(cloud: Cloud, ceph: Cluster) -> None:
    path = cloud.lab.fe.path(f"/etc/ceph/ceph.client.{BRIDGE}.keyring")
    right = path.read_text()
    path.write_text(f"[client.{BRIDGE}]\n\tkey = AQAAAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAAAA==\n")
    try:
        line = fails(lambda: data(cloud, "keyless"), f"client.{BRIDGE}")
        assert "AQAA" not in line
    finally:
        path.write_text(right)
    fails(
        lambda: cloud.oned.datastore_create(ceph.datastore("nopool", POOL_NAME="nopool"), 120), "pool nopool"
    )
    fails(lambda: data(cloud, "poolless", store=120), "pool nopool")
    forget_failed(cloud)
    assert SECRET not in "".join(call.stderr for call in cloud.oned.calls)


def test_image_removed_behind_our_back_is_missed_and_can_be_deleted(cloud: Cloud, ceph: Cluster) -> None:
    images = [
        data(cloud, "gone"),
        data(cloud, "gone-mine", persistent=True),
        data(cloud, "gone-beside", SEMISHARED_PLACE="shared"),
    ]
    for image in images:
        ceph.remove(name(cloud, image))
        vm = cloud.create("gone", [{"IMAGE_ID": str(image)}], context=False)
        fails(lambda vm=vm: cloud.oned.vm_deploy(vm, "h1", 101), name(cloud, image))  # type: ignore[misc]
        cloud.oned.vm_recover(vm, "delete")
        cloud.oned.image_enable(image)
        cloud.oned.image_delete(image)
    assert cloud.leftovers() == []
    assert left(cloud, ceph) == []


def test_snapshot_that_the_stock_driver_left_is_no_base_and_goes_with_the_next_session(
    cloud: Cloud, ceph: Cluster, os_image: int
) -> None:
    image = data(cloud, "stock", persistent=True)
    ceph.snapshot(name(cloud, image), "snap", protect=True)
    vm = cloud.deploy("stock", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
    cloud.guest(vm).write("vdb", "session", 0, KIB)
    assert [snap["name"] for snap in ceph.images()[name(cloud, image)]["snaps"]] == []
    cloud.terminate(vm)
    ceph.snapshot(name(cloud, image), "snap", protect=True)
    cloud.oned.image_persistent(image, False)
    vm = cloud.create("stock-2", [{"IMAGE_ID": str(image)}])
    cloud.oned.vm_deploy(vm, "h1", 101)
    assert cloud.read(f"{cloud.vm_dir(vm)}/disk.0", "qcow2", KIB << 10, node=cloud.lab.hosts[0]) == content(
        "session", 0, KIB
    )
    cloud.terminate(vm)
    cloud.oned.image_delete(image)
    assert cloud.leftovers() == []
    assert left(cloud, ceph) == []
