# SPDX-License-Identifier: Apache-2.0
"""Devices are emptied, and evened out again, under guests that write and verify all the while; then those VMs
have a power cycle.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lab import Node
from lab.cloud import Cloud
from lab.guest import content
from pool.conftest import COMMAND, DEVICES
from pool.test_pool import DECLARED, FORMATS, LOCAL, layers, names, said

KIB = 1024
DATA = content("base", 0, KIB)
POWEROFF = 8
WRITTEN = tuple(f"vd{letter}" for letter in "bcdefgh")
PER_SECOND = 5
"""Blocks that a guest writes to each of its disks."""


@pytest.fixture(autouse=True)
def _declared(cloud: Cloud) -> None:
    for host in ("h1", "h2"):
        cloud.oned.host_update(cloud.oned.host(host).id, {"SEMISHARED_POOL": DECLARED})
    said(cloud, "pool", "add", "h1,h2")


def moved(cloud: Cloud, *words: str, code: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Run `semishared pool ... --json`; return its summary, and what it notes."""
    done = cloud.lab.fe.run([COMMAND, "pool", *words, "--json"], check=False, timeout=400)
    assert done.returncode == code, (done.stdout, done.stderr)
    events = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert events[-1]["event"] == "summary"
    return events[-1], [event["text"] for event in events if event["event"] == "note"]


def opened(cloud: Cloud, vms: list[int], path: str) -> list[str]:
    """Return the files on a device that QEMUs of VMs have open on h1, also those without a name any more."""
    node, found = cloud.lab.node("h1"), []
    for vm in vms:
        pid = node.path(f"/run/libvirt/qemu/one-{vm}.pid").read_text().strip()
        lines = node.run(["ls", "-l", f"/proc/{pid}/fd"], user="root").stdout.decode().splitlines()
        found += [line.partition(" -> ")[2] for line in lines if f" -> {path}/" in line]
    return found


def held(cloud: Cloud, path: str) -> tuple[int, int]:
    """Return how many disks and bases `pool list` counts on a device of h1."""
    (found,) = said(cloud, "pool", "list", "h1")["hosts"]
    (row,) = [row for row in found["devices"] if row["path"] == path]
    return row["disks"], row["bases"]


def fullest(node: Node) -> str:
    """Return the device with most layers."""
    return max(DEVICES, key=lambda path: sum(place.startswith(f"{path}/") for place in layers(node)))


def test_devices_are_drained_and_evened_out_under_guests_that_write(cloud: Cloud) -> None:
    h1 = cloud.lab.node("h1")
    images = [
        cloud.os_image("running-os"),
        *(
            cloud.data_image(f"running-{place}-{format}", DATA, format=format, **more)
            for place, more in LOCAL
            for format in FORMATS
        ),
        cloud.data_image("running-diff", DATA, persistent=True, SEMISHARED_PLACE="local"),
    ]
    disks = (images, images[:3])
    vms = {
        cloud.deploy(f"running{at}", [{"IMAGE_ID": str(image)} for image in of], context=False): WRITTEN[
            : len(of) - 1
        ]
        for at, of in enumerate(disks)
    }
    for vm, written in vms.items():
        guest = cloud.guest(vm)
        for disk in written:
            guest.write(disk, "before", 2 * KIB, 64)
            guest.loop(disk, f"loop-{disk}", 4 * KIB, 4 * KIB, PER_SECOND)
    # A chain of several layers, and of a copy one over its raw layer.
    for number in (1, 3):
        cloud.oned.disk_snapshot_create(min(vms), number, "one")
    drained = fullest(h1)
    count = sum(place.startswith(f"{drained}/") for place in layers(h1))
    assert count
    dry, _ = moved(cloud, "drain", "h1", drained, "--dry-run")
    assert {row["how"] for row in dry["rows"]} == {"would move"}
    summary, notes = moved(cloud, "drain", "h1", drained, "--rate", "100M")
    assert {row["how"] for row in summary["rows"]} == {"moved"} and summary["empty"] is True
    assert len([row for row in summary["rows"] if row["vm"] in vms]) == count
    assert held(cloud, drained) == (0, 0) and not [place for place in layers(h1) if place.startswith(drained)]
    # Nobody has a disk open there any more; a base only who is said to.
    left = opened(cloud, list(vms), drained)
    assert all("/bases/" in path and path.endswith("(deleted)") for path in left) and bool(left) is bool(
        notes
    ), (left, notes)
    # Elsewhere what was moved is less, or even: the device is brought back, and is to be filled again.
    said(cloud, "pool", "add", "h1")
    summary, _ = moved(cloud, "rebalance", "h1")
    assert {row["how"] for row in summary["rows"]} <= {"moved"}
    for vm, written in vms.items():
        guest = cloud.guest(vm)
        for disk in written:
            guest.wait_written(disk)
            counts = guest.loop_stop(disk)
            assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, (
                vm,
                disk,
                counts,
            )
            guest.check(disk, "before", 2 * KIB, 64)
    for vm, written in vms.items():
        cloud.oned.vm_poweroff(vm)
        if vm == min(vms):
            cloud.oned.disk_snapshot_revert(vm, 1, 0)
        cloud.oned.vm_resume(vm)
        guest = cloud.guest(vm)
        for disk in written:
            guest.check(disk, "before", 2 * KIB, 64)
    for vm in vms:
        cloud.terminate(vm)
    assert layers(h1) == [] and cloud.leftovers() == []


def test_a_raw_layer_moves_at_its_rate_from_the_first_moment_on(cloud: Cloud) -> None:
    h1, rate = cloud.lab.node("h1"), 4 << 20
    images = [cloud.os_image("paced-os"), cloud.data_image("paced", DATA, mib=24, SEMISHARED_LOCAL="copy")]
    vm = cloud.deploy("paced", [{"IMAGE_ID": str(image)} for image in images], context=False)
    guest = cloud.guest(vm)
    guest.write("vdb", "paced", 0, 24 * KIB)
    (was,) = of_disk(h1, vm)
    with ThreadPoolExecutor(1) as pool:
        device = next(path for path in DEVICES if was.startswith(f"{path}/.semishared/"))
        command = pool.submit(moved, cloud, "drain", "h1", device, "--rate", str(rate))
        seen = []
        while not command.done():
            for place in set(of_disk(h1, vm)) - {was}:
                seen.append(
                    (time.monotonic(), sum(file.stat().st_blocks * 512 for file in h1.path(place).iterdir()))
                )
            time.sleep(0.02)
        summary, _ = command.result()
    assert {row["how"] for row in summary["rows"]} == {"moved"} and len(
        {size for _, size in seen if size < 24 << 20}
    ) > 10, seen
    # QEMU copies 16 MiB at once if nobody tells it otherwise, and whoever reads from the device waits for
    # that.
    early = [(at - seen[0][0], size) for at, size in seen if size > rate * (at - seen[0][0]) + rate / 2]
    assert not early, early
    guest.check("vdb", "paced", 0, 24 * KIB)
    cloud.terminate(vm)
    said(cloud, "pool", "add", "h1")


def of_disk(node: Node, vm: int) -> list[str]:
    """Return where the layers of a VM's disk 1 lie, and are about to."""
    places = [f"{path}/.semishared/layers" for path in DEVICES]
    return [
        f"{place}/{name}" for place in places for name in names(node, place) if name.startswith(f"{vm}-1-")
    ]


def test_what_is_under_way_in_a_vm_leaves_its_disks_where_they_are_and_says_so(cloud: Cloud) -> None:
    vm = cloud.deploy("busy", [{"IMAGE_ID": str(cloud.os_image("busy-os"))}], context=False)
    cloud.guest(vm)
    h1 = cloud.lab.node("h1")
    drained = fullest(h1)
    h1.run(["virsh", "-c", "qemu:///system", "snapshot-create-as", cloud.oned.vm(vm).deploy_id, "whole"])
    summary, _ = moved(cloud, "drain", "h1", drained, code=1)
    (row,) = [row for row in summary["rows"] if row["vm"] == vm]
    assert row["how"] == "failed" and "1 system snapshots" in row["why"] and row["id"] == "SS164", row
    assert summary["empty"] is False and len(layers(h1)) == 1
    h1.run(["virsh", "-c", "qemu:///system", "snapshot-delete", cloud.oned.vm(vm).deploy_id, "whole"])
    # oned takes it to be off, as after a monitoring that went wrong: its guest runs all the same.
    known = cloud.oned.vm(vm)
    was = known.state, known.lcm
    known.state, known.lcm = POWEROFF, 0
    summary, _ = moved(cloud, "drain", "h1", drained, code=1)
    known.state, known.lcm = was
    (row,) = [row for row in summary["rows"] if row["vm"] == vm]
    assert (
        row["how"] == "failed" and row["id"] == "SS164" and f" of VM {vm} is running on h1" in row["why"]
    ), row
    summary, _ = moved(cloud, "drain", "h1", drained)
    assert {row["how"] for row in summary["rows"]} == {"moved"}
    cloud.guest(vm)
    cloud.terminate(vm)
    said(cloud, "pool", "add", "h1")
