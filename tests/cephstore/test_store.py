# SPDX-License-Identifier: Apache-2.0
"""An image datastore on a real Ceph cluster, hosts behind real ssh: every action for every place a disk can
have there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from lab import moved
from lab.cloud import RBD_STORE, Cloud
from lab.guest import content
from lab.hosts import SCRIPTS
from lab.oned import ActionFailed
from semishared.tools.extents import EXTENT

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
KIB = 64
DATA = content("base", 0, KIB)
PLACES: dict[str, tuple[bool, dict[str, Any]]] = {
    # target in the guest: persistent, attributes
    "vdb": (True, {}),
    "vdc": (False, {}),
    "vdd": (False, {"SEMISHARED_LOCAL": "copy"}),
    "vde": (False, {"SEMISHARED_PLACE": "shared"}),
}
HOW = {"vdb": "in-place", "vdc": "overlay", "vdd": "copy", "vde": "store-clone"}
NUMBERS = {target: disk for disk, target in enumerate(PLACES, 1)}


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with Cloud.up(hosts=2, ceph=True, forks=True) as up:
        yield up


@pytest.fixture(scope="module")
def os_image(cloud: Cloud) -> int:
    return cloud.os_image("ceph-os", store=RBD_STORE)


def images(cloud: Cloud, prefix: str) -> list[int]:
    return [
        cloud.data_image(f"{prefix}-{target}", DATA, persistent=persistent, store=RBD_STORE, **attributes)
        for target, (persistent, attributes) in PLACES.items()
    ]


def deployed(cloud: Cloud, name: str, os_image: int, data: list[int], host: str = "h1") -> int:
    return cloud.deploy(name, [{"IMAGE_ID": str(image)} for image in (os_image, *data)], host)


def record(cloud: Cloud, vm: int, disk: int) -> dict[str, Any]:
    node = cloud.lab.node(cloud.oned.vm(vm).last.host.name)
    found: dict[str, Any] = json.loads(
        node.path(f"{cloud.vm_dir(vm)}/.semishared/disk.{disk}.json").read_text()
    )
    return found


def stored(cloud: Cloud, source: str, offset: int, count: int) -> bytes:
    """Return bytes of an image in the pool."""
    return cloud.lab.ceph.read(source.partition("/")[2], count, offset)


def in_pool(cloud: Cloud) -> dict[str, list[str]]:
    """Return the images of the pool and the snapshots of each, ours by their kind alone."""

    def shown(name: str) -> str:
        return name if name.isdigit() else "semishared-<hash>" if len(name) == 43 else name

    found = cloud.lab.ceph.images()
    return {name: sorted(shown(snap["name"]) for snap in image["snaps"]) for name, image in found.items()}


def check_nothing_left(cloud: Cloud, *sources: str) -> None:
    """No directory, lease, clone, staged image, watcher or lock is there; only images, and generations of
    them.
    """
    assert cloud.leftovers() == []
    pool = cloud.lab.ceph.images()
    known = {
        image.source.split("/")[1] for image in cloud.oned.images.values() if image.source.startswith("one/")
    }
    assert set(pool) <= known, f"left in the pool: {set(pool) - known}"
    for name, image in pool.items():
        assert not image["watchers"], f"{name}: {image['watchers']}"
        assert not image["lockers"], f"{name}: {image['lockers']}"
        for snap in image["snaps"]:
            assert snap["name"].isdigit() or len(snap["name"]) == 43 or snap["name"] == "semishared-new", (
                name,
                snap,
            )


def test_upload_is_stored_raw_whatever_it_came_as_and_removed_without_a_trace(cloud: Cloud) -> None:
    raw = cloud.data_image("up-raw", DATA, store=RBD_STORE)
    qcow2 = cloud.data_image("up-qcow2", DATA, format="qcow2", store=RBD_STORE)
    blank = cloud.oned.image_create(RBD_STORE, "up-blank", type="DATABLOCK", size=32)
    copy = cloud.oned.image_clone(raw, "up-copy")
    for image in (raw, qcow2, copy):
        assert cloud.source(image) == f"one/one-{image}"
        assert stored(cloud, cloud.source(image), 0, KIB << 10) == DATA
        assert cloud.oned.image(image).format == "raw"
    assert in_pool(cloud)[f"one-{raw}"] == ["semishared-<hash>"]
    cloud.oned.datastore_monitor(RBD_STORE)
    for image in (raw, qcow2, blank, copy):
        cloud.oned.image_delete(image)
    check_nothing_left(cloud)


@pytest.mark.long  # tests/ceph has the same with more places in one VM
def test_every_place_through_the_life_of_a_vm(cloud: Cloud, os_image: int) -> None:
    """Deploy, write, snapshot live, save, power off, revert, resize, stop, undeploy, migrate cold,
    terminate.
    """
    data = images(cloud, "life")
    sources = dict(zip(PLACES, map(cloud.source, data)))
    vm = deployed(cloud, "ceph-life", os_image, data)
    for target, disk in NUMBERS.items():
        found = record(cloud, vm, disk)
        assert found["how"] == HOW[target]
        if target in ("vdb", "vde"):
            name = sources[target] if target == "vdb" else f"{sources[target]}-{vm}-{disk}"
            assert found["network"]["name"] == name
            assert found["path"] == ""
    guest = cloud.guest(vm)
    for target in PLACES:
        guest.check(target, "base", 0, KIB)
        guest.write(target, "one", 1024, 64)
    for disk in NUMBERS.values():
        assert cloud.oned.disk_snapshot_create(vm, disk, "first") == 0
    for target in PLACES:
        guest.write(target, "two", 1024, 64)
    for target, disk in NUMBERS.items():
        now = cloud.oned.disk_saveas(vm, disk, f"live-{target}")
        then = cloud.oned.disk_saveas(vm, disk, f"then-{target}", snapshot=0)
        assert stored(cloud, cloud.source(now), 1024 << 10, 64 << 10) == content("two", 1024, 64)
        assert stored(cloud, cloud.source(then), 1024 << 10, 64 << 10) == content("one", 1024, 64)
        assert stored(cloud, cloud.source(then), 0, KIB << 10) == DATA
        cloud.oned.image_delete(now)
        cloud.oned.image_delete(then)
    for disk in NUMBERS.values():
        assert cloud.oned.disk_snapshot_create(vm, disk, "second") == 1
        cloud.oned.disk_snapshot_delete(vm, disk, 1)
    for target, disk in NUMBERS.items():
        cloud.oned.disk_resize(vm, disk, 24)
        assert guest.disks()[target] == 24 << 20

    cloud.oned.vm_poweroff(vm, hard=True)
    for target, disk in NUMBERS.items():
        saved = cloud.oned.disk_saveas(vm, disk, f"off-{target}")
        assert stored(cloud, cloud.source(saved), 1024 << 10, 64 << 10) == content("two", 1024, 64)
        cloud.oned.image_delete(saved)
        assert cloud.oned.disk_snapshot_create(vm, disk, "third") == 2
        cloud.oned.disk_snapshot_revert(vm, disk, 0)
        cloud.oned.disk_snapshot_delete(vm, disk, 2)
        cloud.oned.disk_resize(vm, disk, 32)
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for target in PLACES:
        guest.check(target, "base", 0, KIB)
        guest.check(target, "one", 1024, 64)
        guest.write(target, "four", 2048, 64)
        assert guest.disks()[target] == 32 << 20

    for leave, back in ((cloud.oned.vm_undeploy, "h2"), (cloud.oned.vm_stop, "h1")):
        leave(vm)
        for target, disk in NUMBERS.items():
            saved = cloud.oned.disk_saveas(vm, disk, f"away-{target}")
            assert stored(cloud, cloud.source(saved), 2048 << 10, 64 << 10) == content("four", 2048, 64)
            cloud.oned.image_delete(saved)
        cloud.oned.vm_resume(vm)
        cloud.oned.vm_deploy(vm, back, 101)
        guest = cloud.guest(vm)
        for target in PLACES:
            guest.check(target, "one", 1024, 64)
            guest.check(target, "four", 2048, 64)
    cloud.oned.vm_migrate(vm, "h2")
    guest = cloud.guest(vm)
    for target in PLACES:
        guest.check(target, "four", 2048, 64)
    cloud.terminate(vm)
    assert stored(cloud, sources["vdb"], 2048 << 10, 64 << 10) == content("four", 2048, 64)
    for target in ("vdc", "vdd", "vde"):
        assert stored(cloud, sources[target], 2048 << 10, 64 << 10) == bytes(64 << 10)
    check_nothing_left(cloud)
    # The snapshots of the persistent disk are the image's now.
    assert "0" in in_pool(cloud)[sources["vdb"].split("/")[1]]
    cloud.oned.image_snapshot(data[0], "snap_revert", 0)
    assert stored(cloud, sources["vdb"], 1024 << 10, 64 << 10) == content("one", 1024, 64)
    cloud.oned.image_snapshot(data[0], "snap_flatten", 0)
    assert in_pool(cloud)[sources["vdb"].split("/")[1]] == []
    for image in data:
        cloud.oned.image_delete(image)
    check_nothing_left(cloud)


def test_second_vm_of_an_image_reads_nothing_from_ceph(cloud: Cloud, os_image: int) -> None:
    # No base of another image has these extents, whichever tests have left theirs on h2.
    image = cloud.data_image("warm", DATA + b"warm", 64, store=RBD_STORE)
    first = cloud.create("warm-1", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
    cloud.oned.vm_deploy(first, "h1", 101)
    calls = len(cloud.said("clone"))
    second = cloud.create("warm-2", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
    before = cloud.lab.ceph.bytes_read()
    cloud.oned.vm_deploy(second, "h1", 101)
    assert cloud.lab.ceph.bytes_read() - before < 64 << 10, "headers alone"
    assert not any(moved.total(said, "store_read") for said in cloud.said("clone")[calls:])
    for vm in (first, second):
        cloud.guest(vm).check("vdb", "base", 0, KIB)
    # A host without the bases has them from the one that has, or where that is quicker, as it may be with one
    # extent, from the store.
    calls, before = len(cloud.said("clone")), cloud.lab.ceph.bytes_read()
    third = cloud.deploy("warm-3", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}], host="h2")
    assert cloud.lab.ceph.bytes_read() - before < 256 << 10, "headers, and what there is in that extent"
    assert any(map(moved.by_host, cloud.said("clone")[calls:]))
    cloud.guest(third).check("vdb", "base", 0, KIB)
    for vm in (first, second, third):
        cloud.terminate(vm)
    cloud.oned.image_delete(image)


def test_staged_image_is_read_once_for_all_hosts(cloud: Cloud) -> None:
    image = cloud.data_image("staged", content("staged", 0, KIB), 64, store=RBD_STORE)
    before = cloud.lab.ceph.bytes_read()
    done = cloud.lab.fe.run([COMMAND, "stage", str(image), "--hosts", "h1,h2", "--json"], timeout=120)
    found = json.loads(done.stdout.decode().splitlines()[-1])
    assert found["complete"] and found["bytes"] == {
        "stream": 0,
        "peers": found["bytes"]["peers"],
        "store": EXTENT,
        "here": 0,
    }
    assert found["bytes"]["peers"] > 0 and cloud.lab.ceph.bytes_read() - before < EXTENT + (256 << 10)
    for host in cloud.lab.hosts:
        health = host.run(
            ["/usr/bin/python3", "-I", f"{SCRIPTS}/lib/semishared/host/probe.py"], input=b""
        ).stdout.decode()
        assert 'HEALTH = "OK"' in health, "a store that is mounted nowhere is not missed"
    # Written to behind our back: nobody knows what it is, until one host has read it.
    cloud.lab.ceph.rbd(
        "bench", "--io-type", "write", "--io-total", "1M", "--io-size", "1M", cloud.source(image)
    )
    again = cloud.lab.fe.run([COMMAND, "stage", str(image), "--hosts", "h1,h2", "--json"], timeout=120)
    other = json.loads(again.stdout.decode().splitlines()[-1])
    assert other["complete"] and other["images"] != found["images"] and other["bytes"]["store"] == EXTENT
    cloud.oned.image_delete(image)


def test_images_with_much_in_common_are_read_as_if_they_were_one(cloud: Cloud) -> None:
    """Nobody has a base of them: what they have in common is known by the manifests in their metadata."""
    common = random.Random(1).randbytes(3 * EXTENT)
    numbers = [
        cloud.data_image(f"alike-{seed}", common + random.Random(seed).randbytes(EXTENT), 64, store=RBD_STORE)
        for seed in (2, 3)
    ]
    words = [f"{image}@h{place}" for place, image in enumerate(numbers, 1)]
    before = cloud.lab.ceph.bytes_read()
    done = cloud.lab.fe.run([COMMAND, "stage", *words, "--json"], timeout=120)
    found = json.loads(done.stdout.decode().splitlines()[-1])
    assert found["complete"] and (found["common"], found["unique"]) == (3 * EXTENT, 2 * EXTENT)
    assert found["bytes"]["store"] == 5 * EXTENT and cloud.lab.ceph.bytes_read() - before < 5 * EXTENT + (
        512 << 10
    )
    for image in numbers:
        cloud.oned.image_delete(image)


@pytest.mark.long  # tests/ceph has the same with more places in one VM
def test_attached_and_detached_while_it_runs(cloud: Cloud, os_image: int) -> None:
    data = images(cloud, "hot")
    vm = cloud.deploy("ceph-hot", [{"IMAGE_ID": str(os_image)}])
    guest = cloud.guest(vm)
    for (target, (persistent, _)), image in zip(PLACES.items(), data):
        disk = cloud.oned.disk_attach(vm, image)
        guest.wait_disk("vdb")
        assert record(cloud, vm, disk)["how"] == HOW[target]
        guest.check("vdb", "base", 0, KIB)
        guest.write("vdb", "new", 4096, 64)
        cloud.oned.disk_detach(vm, disk)
        guest.wait_disk("vdb", present=False)
        wanted = content("new", 4096, 64) if persistent else bytes(64 << 10)
        assert stored(cloud, cloud.source(image), 4096 << 10, 64 << 10) == wanted
        cloud.oned.image_delete(image)
    cloud.terminate(vm)
    check_nothing_left(cloud)


@pytest.mark.long  # tests/ceph has the same with more places in one VM
def test_flips_of_persistent_lose_nothing_and_serve_nothing_stale(cloud: Cloud, os_image: int) -> None:
    """one#6207, with guests."""
    image = cloud.data_image("flip", DATA, store=RBD_STORE)
    for round in range(2):
        vm = cloud.deploy(f"flip-n-{round}", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
        cloud.guest(vm).check("vdb", f"p{round - 1}" if round else "base", 0, KIB)
        cloud.guest(vm).write("vdb", "gone", 0, KIB)
        cloud.terminate(vm)
        cloud.oned.image_persistent(image, True)
        vm = cloud.deploy(
            f"flip-p-{round}", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}], host=f"h{round + 1}"
        )
        cloud.guest(vm).check("vdb", f"p{round - 1}" if round else "base", 0, KIB)
        cloud.guest(vm).write("vdb", f"p{round}", 0, KIB)
        cloud.terminate(vm)
        cloud.oned.image_persistent(image, False)
    assert stored(cloud, cloud.source(image), 0, KIB << 10) == content("p1", 0, KIB)
    cloud.oned.image_delete(image)
    check_nothing_left(cloud)


def test_bridge_list_host_does_what_the_front_end_cannot(cloud: Cloud, os_image: int) -> None:
    """With BRIDGE_LIST the front-end needs no key: uploads cross to the bridge and nothing is staged
    there.
    """
    lab = cloud.lab
    from lab.ceph import BRIDGE

    key = lab.ceph.key(BRIDGE)
    lab.ceph.give_key(lab.node("h2"), BRIDGE, key)
    keyring = lab.fe.path(f"/etc/ceph/ceph.client.{BRIDGE}.keyring")
    text = keyring.read_text()
    keyring.unlink()
    cloud.oned.datastore_update(RBD_STORE, {"BRIDGE_LIST": "h2"})
    try:
        image = cloud.data_image("bridged", DATA, store=RBD_STORE, SEMISHARED_PLACE="shared")
        assert stored(cloud, cloud.source(image), 0, KIB << 10) == DATA
        vm = cloud.deploy("bridged", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
        cloud.guest(vm).check("vdb", "base", 0, KIB)
        cloud.terminate(vm)
        cloud.oned.image_delete(image)
        check_nothing_left(cloud)
    finally:
        keyring.write_text(text)
        keyring.chmod(0o600)
        lab.fe.run(["chown", "oneadmin:", str("/etc/ceph/" + keyring.name)], user="root")
        cloud.oned.datastore_update(RBD_STORE, {"BRIDGE_LIST": ""})


@pytest.mark.fault(62, "a bridge of a store on Ceph that is off is passed over too, by VMs as by images")
def test_bridge_that_is_off_is_passed_over(cloud: Cloud, os_image: int) -> None:
    """Of two images in a row one would be h1's, the other h2's."""
    from lab.ceph import BRIDGE

    lab, h1, h2 = cloud.lab, cloud.lab.node("h1"), cloud.lab.node("h2")
    for node in (h1, h2):
        lab.ceph.give_key(node, BRIDGE, lab.ceph.key(BRIDGE))
    cloud.oned.datastore_update(RBD_STORE, {"BRIDGE_LIST": "h1 h2"})
    h1.kill()
    try:
        begun = len(cloud.oned.calls)
        places: list[tuple[bool, dict[str, Any]]] = [(False, {"SEMISHARED_PLACE": "shared"}), (True, {})]
        made = [
            cloud.data_image(f"off-{number}", DATA, persistent=persistent, store=RBD_STORE, **more)
            for number, (persistent, more) in enumerate([*places, *reversed(places)])
        ]
        vm = deployed(cloud, "off", os_image, made, "h2")
        for target in ("vdb", "vdc", "vdd", "vde"):
            cloud.guest(vm).check(target, "base", 0, KIB)
        for disk in (2, 3):
            cloud.oned.disk_snapshot_create(vm, disk, f"of-{disk}")
        saved = [cloud.oned.disk_saveas(vm, disk, f"saved-{disk}") for disk in (1, 2, 3, 4)]
        for image in saved:
            assert stored(cloud, cloud.source(image), 0, KIB << 10) == DATA
        cloud.terminate(vm)
        for image in (*made, *saved):
            cloud.oned.image_delete(image)
        cloud.oned.datastore_monitor(RBD_STORE)
        check_nothing_left(cloud)
        said = {
            call.action
            for call in cloud.oned.calls[begun:]
            if f"bridge h1 of datastore {RBD_STORE} is passed over: " in call.stderr
        }
        assert {"cp", "clone", "ln", "snap_create_live", "cpds", "delete", "rm"} <= said
        bases = [cloud.data_image(f"staged-{number}", DATA, store=RBD_STORE) for number in range(2)]
        words = [COMMAND, "stage", f"{bases[0]},{bases[1]}", "--hosts", "h2", "--json"]
        done = lab.fe.run(words, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        notes = [json.loads(line) for line in done.stdout.decode().splitlines()]
        assert "h1" in [it["host"] for it in notes if it.get("event") == "note"], "the bridge that is off"
        done = lab.fe.run([COMMAND, "gc", "--dry-run"], timeout=120, check=False)
        assert f"bridge h1 of datastore {RBD_STORE}: " in done.stderr.decode()
        for image in bases:
            cloud.oned.image_delete(image)
        h2.kill()
        try:
            with pytest.raises(ActionFailed, match=f"no bridge of datastore {RBD_STORE} answers, of h"):
                cloud.data_image("nowhere", DATA, store=RBD_STORE)
        finally:
            h2.start()
    finally:
        h1.start()
        cloud.oned.datastore_update(RBD_STORE, {"BRIDGE_LIST": ""})


@pytest.mark.long  # tests/cephfaults has every action
def test_action_while_ceph_is_down_fails_clearly_and_succeeds_after(cloud: Cloud, os_image: int) -> None:
    image = cloud.data_image("down", DATA, store=RBD_STORE)
    vm = cloud.create("down", [{"IMAGE_ID": str(os_image)}, {"IMAGE_ID": str(image)}])
    with cloud.lab.ceph.stopped(), pytest.raises(ActionFailed, match="SS027"):
        cloud.oned.vm_deploy(vm, "h1", 101)
    cloud.oned.vm_recover(vm, "retry")
    cloud.guest(vm).check("vdb", "base", 0, KIB)
    cloud.terminate(vm)
    cloud.oned.image_delete(image)
    check_nothing_left(cloud)
