# SPDX-License-Identifier: Apache-2.0
"""Running VMs that let go of the store their disks read from: their guests lose nothing, and afterwards their
disks are overlays.
"""

from __future__ import annotations

import json
import os
from typing import Any, Callable

import pytest

from lab import Node, roots
from lab.cloud import DATASTORES, SYSTEM, Cloud
from lab.guest import Guest, content
from trimming import trimmed

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
KIB = 1024
DATA = content("base", 0, KIB)
FORMATS = ("raw", "qcow2")
PER_SECOND = 4
"""Blocks that a guest writes to each of its disks: two cores carry two guests with five."""
REMOTE: dict[str, Any] = {"SEMISHARED_LOCAL": "remote-first"}


def detach(cloud: Cloud, *words: str, code: int = 0) -> list[dict[str, Any]]:
    """Run `semishared detach`; return the rows of its summary."""
    done = cloud.lab.fe.run([COMMAND, "detach", *words, "--json"], check=False, timeout=300)
    assert done.returncode == code, (done.stdout, done.stderr)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["event"] == "summary"
    return list(summary["rows"])


def how(cloud: Cloud, vm: int) -> dict[int, str]:
    """Return how each disk of a VM is, as status says it."""
    found = json.loads(cloud.lab.fe.run([COMMAND, "status", "--json", f"vm:{vm}"]).stdout)
    return {row["disk"]: row["how"] for row in found["disks"]}


def open_images(node: Node, cloud: Cloud, vm: int) -> list[str]:
    """Return which images of the store a guest's QEMU has open."""
    pid = node.path(f"/run/libvirt/qemu/one-{vm}.pid").read_text().strip()
    said = node.run(["ls", "-l", f"/proc/{pid}/fd"], user="root").stdout.decode()
    return [
        image.name
        for image in cloud.oned.images.values()
        if image.source and f"/{os.path.basename(image.source)}" in said
    ]


def start(guest: Guest, disks: str) -> None:
    for letter in disks:
        guest.loop(f"vd{letter}", f"loop-{letter}", 4 * KIB, 4 * KIB, PER_SECOND)


def stop(guest: Guest, disks: str) -> int:
    """End the writers; return the longest time that one of them waited, in ms."""
    gaps = []
    for letter in disks:
        guest.wait_written(f"vd{letter}")
        counts = guest.loop_stop(f"vd{letter}")
        assert (counts["errors"], counts["mismatches"]) == (0, 0), (letter, counts)
        assert counts["writes"] > 10
        gaps.append(counts["maxgap_ms"])
    return max(gaps)


def images(cloud: Cloud, name: str, **more: Any) -> list[int]:
    return [cloud.data_image(f"{name}-{format}", DATA, format=format, **REMOTE, **more) for format in FORMATS]


def test_running_vms_let_go_of_the_store_and_their_disks_are_overlays_to_every_action(
    cloud: Cloud, os_image: int, cell: Callable[..., None], figure: Callable[[str, object], None]
) -> None:
    """Ten disks of two VMs on two hosts: with snapshots, of both formats, beside disks that have nothing to
    let go of.
    """
    raw, qcow2 = images(cloud, "letgo")
    mine = cloud.data_image("letgo-mine", DATA, persistent=True)
    disks = [{"IMAGE_ID": str(image)} for image in (os_image, raw, qcow2, raw, qcow2, raw, mine)]
    first = cloud.deploy("letgo", disks)
    second = cloud.deploy(
        "letgo-2",
        [{"IMAGE_ID": str(image)} for image in (os_image, raw, qcow2, raw, qcow2, raw)],
        "h2",
        context=False,
    )
    h1, h2 = (cloud.lab.node(name) for name in ("h1", "h2"))
    guest, other = cloud.guest(first), cloud.guest(second)
    for disk, letter in ((1, "b"), (2, "c")):
        guest.write(f"vd{letter}", "before", 2 * KIB, 64)
        cloud.oned.disk_snapshot_create(first, disk, "s0")
        cloud.oned.disk_snapshot_create(first, disk, "s1")
    # The layer of one that is deleted is replaced under the guest: QEMU goes on with the one it had open.
    cloud.oned.disk_snapshot_delete(first, 2, 0)
    assert {"letgo-raw", "letgo-qcow2"} < set(open_images(h1, cloud, first))
    start(guest, "bcdef")
    start(other, "bcdef")
    rows = detach(cloud, f"{first},letgo-2")
    figure("detach: longest gap ms", max(stop(guest, "bcdef"), stop(other, "bcdef")))
    assert sorted((row["vm"], row["disk"], row["how"]) for row in rows) == [
        (vm, disk, "detached") for vm in (first, second) for disk in range(1, 6)
    ]
    assert open_images(h1, cloud, first) == ["letgo-mine"] and open_images(h2, cloud, second) == []
    assert how(cloud, first) == {0: "overlay", **dict.fromkeys(range(1, 6), "overlay"), 6: "in-place"}
    trimmed(cloud, first, "vdb", "vdc", "vdd")
    for now, letters in ((guest, "bcdefg"), (other, "bcdef")):
        for letter in letters:
            now.check(f"vd{letter}", "base", 0, KIB)
    assert [
        name
        for name in cloud.files(h1, cloud.vm_dir(first))
        if ".kept" in name or "1000000" in name or "go-over" in name
    ] == []
    (again,) = detach(cloud, str(first))
    assert (again["how"], again["disk"], again["why"]) == ("skipped", -1, "no disk of it reads from a store")
    lives_on(cloud, first, guest)
    cloud.terminate(first)
    cloud.terminate(second)
    assert cloud.leftovers() == []
    cell("detach", "remote-first", FORMATS, "live")


def lives_on(cloud: Cloud, vm: int, guest: Guest) -> None:
    """Do to a VM what is done to one with overlays: snapshots, a backup, a migration, a restart, a way
    back.
    """
    start(guest, "bcdef")
    cloud.oned.disk_snapshot_create(vm, 1, "after")
    cloud.oned.disk_snapshot_delete(vm, 1, 0)
    cloud.oned.disk_snapshot_create(vm, 3, "after")
    words = (":".join(str(disk) for disk in range(1, 6)), f"one-{vm}", "-", str(vm), str(SYSTEM))
    if not roots.LIBVIRT_7_0:
        cloud.tm("prebackup_live", vm, *words)
        cloud.tm("postbackup_live", vm, *words)
    cloud.oned.vm_migrate(vm, "h2", SYSTEM, how="live")
    guest = cloud.guest(vm)
    stop(guest, "bcdef")
    guest.check("vdb", "before", 2 * KIB, 64)
    trimmed(cloud, vm, "vdb", "vdc", "vdd")
    cloud.oned.vm_suspend(vm)
    cloud.oned.vm_resume(vm)
    cloud.oned.vm_poweroff(vm)
    cloud.oned.disk_snapshot_revert(vm, 3, 0)
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for letter in "bcdef":
        guest.check(f"vd{letter}", "base", 0, KIB)
    for letter in "bc":
        guest.check(f"vd{letter}", "before", 2 * KIB, 64)


def test_vm_that_is_off_lets_go_by_its_headers_and_one_in_between_is_left_alone(
    cloud: Cloud, os_image: int, cell: Callable[..., None]
) -> None:
    vm = cloud.deploy(
        "off", [{"IMAGE_ID": str(image)} for image in (os_image, *images(cloud, "off"))], context=False
    )
    guest = cloud.guest(vm)
    for letter in "bc":
        guest.write(f"vd{letter}", "mine", 2 * KIB, 64)
    cloud.oned.disk_snapshot_create(vm, 1, "s0")
    cloud.oned.vm_suspend(vm)
    (row,) = detach(cloud, "off", code=1)
    assert (row["how"], row["disk"]) == ("skipped", -1) and "neither running nor powered off" in row["why"]
    cloud.oned.vm_resume(vm)
    cloud.oned.vm_poweroff(vm)
    assert {(row["disk"], row["how"]) for row in detach(cloud, "--host", "h1") if row["vm"] == vm} == {
        (1, "detached"),
        (2, "detached"),
    }
    assert how(cloud, vm) == dict.fromkeys(range(3), "overlay")
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    assert open_images(cloud.lab.node("h1"), cloud, vm) == []
    for letter in "bc":
        guest.check(f"vd{letter}", "base", 0, KIB)
        guest.check(f"vd{letter}", "mine", 2 * KIB, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    cell("detach", "remote-first", FORMATS, "off")


def test_timer_detaches_what_its_image_wants_after_its_boot(cloud: Cloud, os_image: int) -> None:
    (soon, _), (asked, _) = images(cloud, "due", SEMISHARED_DETACH="after-boot"), images(cloud, "due-not")
    vm = cloud.deploy("due", [{"IMAGE_ID": str(image)} for image in (os_image, soon, asked)], context=False)
    cloud.guest(vm)
    assert [(row["disk"], row["how"]) for row in detach(cloud, "--due") if row["vm"] == vm] == [
        (1, "detached")
    ]
    assert how(cloud, vm) == {0: "overlay", 1: "overlay", 2: "remote-first"}
    assert {row["how"] for row in detach(cloud, "--due")} <= {"skipped"}
    cloud.oned.image_update(asked, {"SEMISHARED_DETACH": "soon"})
    done = cloud.lab.fe.run([COMMAND, "detach", "--due", "--json"], check=False)
    assert (
        b"SEMISHARED_DETACH of image" in done.stderr
        and b"'soon', not one of on-request, after-boot" in done.stderr
    )
    cloud.guest(vm).check("vdc", "base", 0, KIB)
    cloud.terminate(vm)


def test_store_that_is_away_leaves_the_guest_as_it_was(cloud: Cloud, os_image: int) -> None:
    raw, _ = images(cloud, "room")
    vm = cloud.deploy("room", [{"IMAGE_ID": str(image)} for image in (os_image, raw)], context=False)
    guest, h1 = cloud.guest(vm), cloud.lab.node("h1")
    guest.write("vdb", "mine", 0, 8 * KIB)
    bases = f"{DATASTORES}/.semishared/bases"
    before = cloud.files(h1, cloud.vm_dir(vm))
    image = cloud.lab.fe.path(cloud.source(raw))
    away = image.with_suffix(".away")
    image.rename(away)
    (row,) = detach(cloud, "room", code=1)
    assert row["how"] == "failed" and row["why"], row
    away.rename(image)
    assert cloud.files(h1, cloud.vm_dir(vm)) == before
    assert not [name for name in cloud.files(h1, bases) if name.endswith(f"{vm}-1")]
    guest.check("vdb", "mine", 0, 8 * KIB)
    assert {row["how"] for row in detach(cloud, "room")} == {"detached"}
    guest.check("vdb", "mine", 0, 8 * KIB)
    cloud.terminate(vm)
    assert cloud.leftovers() == []


@pytest.mark.long  # 200 switches of guests that write: ten are in the first test
def test_two_hundred_disks_let_go_of_the_store(cloud: Cloud, os_image: int) -> None:
    raw, qcow2 = images(cloud, "many")
    vm = cloud.deploy("many", [{"IMAGE_ID": str(os_image)}])
    guest = cloud.guest(vm)
    for turn in range(25):
        letters = "bcdefghi"
        disks = [cloud.oned.disk_attach(vm, (raw, qcow2)[number % 2]) for number in range(8)]
        for letter in letters:
            guest.wait_disk(f"vd{letter}")
        if turn % 3 == 0:
            cloud.oned.disk_snapshot_create(vm, disks[0], "s")
        start(guest, letters)
        rows = detach(cloud, str(vm))
        stop(guest, letters)
        assert [row["how"] for row in rows] == ["detached"] * 8
        for letter in letters:
            guest.check(f"vd{letter}", "base", 0, KIB)
        assert open_images(cloud.lab.node("h1"), cloud, vm) == []
        for disk, letter in zip(disks, letters):
            cloud.oned.disk_detach(vm, disk)
            guest.wait_disk(f"vd{letter}", present=False)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
