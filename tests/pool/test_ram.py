# SPDX-License-Identifier: Apache-2.0
"""Guests with disks in the memory of their host: all that is done to a VM finds them there, and a restart
costs theirs and no others.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from xml.etree import ElementTree

import pytest

from lab import Node
from lab.cloud import DATASTORES, SYSTEM, Cloud
from lab.guest import content
from lab.oned import ActionFailed
from pool.conftest import COMMAND, DEVICES
from pool.test_pool import DECLARED, device_of, names, said

KIB = 1024
DATA = content("base", 0, KIB)
MEMORY, SIZE = "/mnt/ram", 192


def mount(node: Node) -> None:
    node.run(["mkdir", "-p", MEMORY], user="root")
    node.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}m,mode=755", "device", MEMORY], user="root")
    node.run(["chown", "oneadmin:oneadmin", MEMORY], user="root")


def lose(node: Node) -> bytes:
    """Let memory be gone; return its label."""
    label = node.run(["cat", f"{MEMORY}/.semishared/device.json"], user="root").stdout
    node.run(["umount", MEMORY], user="root")
    return label


def return_empty(node: Node, label: bytes) -> None:
    """Let memory be as the script of the boot leaves it: empty, with the label of before."""
    mount(node)
    node.run(["install", "-d", "-o", "oneadmin", "-g", "oneadmin", f"{MEMORY}/.semishared"], user="root")
    node.run(["tee", f"{MEMORY}/.semishared/device.json"], user="root", input=label)
    node.run(["chown", "oneadmin:oneadmin", f"{MEMORY}/.semishared/device.json"], user="root")


def restart(node: Node) -> None:
    return_empty(node, lose(node))


def declare(cloud: Cloud, words: str) -> None:
    for host in ("h1", "h2"):
        cloud.oned.host_update(cloud.oned.host(host).id, {"SEMISHARED_POOL": words})
    said(cloud, "pool", "add", "h1,h2")


def rows(cloud: Cloud, host: str = "h1") -> dict[str, dict[str, object]]:
    (found,) = said(cloud, "pool", "list", host)["hosts"]
    return {row["path"]: row for row in found["devices"]}


def layers(node: Node) -> list[str]:
    return names(node, f"{MEMORY}/.semishared/layers")


@pytest.fixture(autouse=True)
def _memory(cloud: Cloud) -> Iterator[None]:
    """Give both hosts memory for disks beside their devices."""
    for host in cloud.lab.hosts:
        mount(host)
    declare(cloud, f"{DECLARED} {MEMORY}=ram")
    yield
    cloud.delete_all()
    declare(cloud, DECLARED)
    for host in cloud.lab.hosts:
        host.run(["umount", "-l", MEMORY], user="root")


def test_a_guest_in_memory_through_all_that_is_done_to_it(cloud: Cloud) -> None:
    h1, h2 = cloud.lab.hosts
    ram: dict[str, Any] = {"SEMISHARED_CLASS": "ram"}
    images = [
        cloud.os_image("ram-os", **ram),
        cloud.data_image("ram-raw", DATA, **ram),
        cloud.data_image("ram-copy", DATA, SEMISHARED_LOCAL="copy", format="qcow2", **ram),
        cloud.data_image("disk", DATA),
        cloud.data_image("diff", DATA, persistent=True, SEMISHARED_PLACE="local", **ram),
    ]
    vm = cloud.deploy("in-memory", [{"IMAGE_ID": str(image)} for image in images])
    where = {disk: device_of(cloud, vm, disk) for disk in range(5)}
    assert [where[disk] for disk in range(3)] == [MEMORY] * 3 and {where[3], where[4]} <= set(DEVICES)
    assert "SEMISHARED_CLASS = ram is not for it" in "".join(cloud.said("clone") + cloud.said("ln"))
    guest = cloud.guest(vm)
    written = ("vdb", "vdc", "vdd", "vde")
    for disk in written:
        guest.write(disk, "before", 2 * KIB, 64)
        guest.loop(disk, f"loop-{disk}", 4 * KIB, 4 * KIB, 5)
    one = cloud.oned.disk_snapshot_create(vm, 1, "one")
    guest.write("vdb", "later", 2 * KIB, 64)
    cloud.oned.vm_migrate(vm, "h2", SYSTEM, how="live")
    assert (layers(h1), len(layers(h2))) == ([], 3) and rows(cloud)[MEMORY]["promised"] == 0
    for disk in written:
        cloud.guest(vm).wait_written(disk)
    counts = [cloud.guest(vm).loop_stop(disk) for disk in written]
    assert all(
        (found["errors"], found["mismatches"]) == (0, 0) and found["writes"] > 10 for found in counts
    ), counts
    cloud.oned.vm_suspend(vm)
    cloud.oned.vm_resume(vm)
    cloud.guest(vm).check("vdb", "later", 2 * KIB, 64)
    cloud.oned.vm_poweroff(vm)
    cloud.oned.disk_snapshot_revert(vm, 1, one)
    cloud.oned.vm_resume(vm)
    for disk in written:
        cloud.guest(vm).check(disk, "before", 2 * KIB, 64)
    cloud.oned.vm_undeploy(vm)
    assert layers(h2) == []
    cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    assert device_of(cloud, vm, 1) == MEMORY
    cloud.guest(vm).check("vdb", "before", 2 * KIB, 64)
    cloud.terminate(vm)
    assert layers(h1) == [] and cloud.leftovers() == []


def test_a_restart_loses_what_is_in_memory_and_costs_nobody_else(cloud: Cloud) -> None:
    h1 = cloud.lab.node("h1")
    os, usual = cloud.os_image("lost-os", SEMISHARED_CLASS="ram"), cloud.os_image("usual-os")
    lost, other = (
        cloud.deploy(name, [{"IMAGE_ID": str(image)}], context=False)
        for name, image in (("lost", os), ("other", usual))
    )
    cloud.guest(lost).write("vda", "mine", 2 * KIB, 64)
    cloud.guest(other).loop("vda", "on", 2 * KIB, 64, 5)
    cloud.oned.vm_poweroff(lost)
    restart(h1)
    why = (
        rf"SS168 (?=.*layers of disk.0 lay in memory of h1, \S+, which is empty since the host was "
        rf"started again).*{MEMORY}"
    )
    with pytest.raises(ActionFailed, match=why):
        cloud.oned.vm_resume(lost)
    assert rows(cloud)[MEMORY]["lost"] == [f"{lost}-0"]
    found = json.loads(cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False).stdout)["findings"]
    assert any(re.search(r"lost", item["what"]) and item["machine"] == "h1" for item in found), found
    cloud.oned.vm_recover(lost, "recreate")
    cloud.oned.vm_deploy(lost, "h1", SYSTEM)
    guest = cloud.guest(lost)
    assert device_of(cloud, lost, 0) == MEMORY
    guest.write("vda", "again", 2 * KIB, 64)
    guest.check("vda", "again", 2 * KIB, 64)
    cloud.guest(other).wait_written("vda")
    counts = cloud.guest(other).loop_stop("vda")
    assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, counts
    for vm in (lost, other):
        cloud.terminate(vm)
    assert layers(h1) == [] and cloud.leftovers() == []


def test_one_too_many_is_refused_or_goes_where_it_may(cloud: Cloud) -> None:
    large = cloud.data_image("large", DATA, 100, SEMISHARED_CLASS="ram")
    first = cloud.deploy("first", [{"IMAGE_ID": str(large)}], context=False)
    why = (
        rf"SS166 .*no device of class ram on h1 for a disk of up to 100.0 MiB: {MEMORY} has [0-9.]+ MiB that "
        rf"are not promised"
    )
    with pytest.raises(ActionFailed, match=why):
        cloud.deploy("refused", [{"IMAGE_ID": str(large)}], context=False)
    either = cloud.data_image("either", DATA, 100, SEMISHARED_CLASS="ram any")
    second = cloud.deploy("second", [{"IMAGE_ID": str(either)}], context=False)
    assert [device_of(cloud, vm, 0) == MEMORY for vm in (first, second)] == [True, False]
    cloud.terminate(first)
    third = cloud.deploy("third", [{"IMAGE_ID": str(either)}], context=False)
    assert device_of(cloud, third, 0) == MEMORY


def below(cloud: Cloud, vm: int, node: Node) -> list[str]:
    """Return what the disks of a running guest lie over at the bottom, by libvirt."""
    words = ["virsh", "-c", "qemu:///system", "dumpxml", cloud.oned.vm(vm).deploy_id]
    disks = ElementTree.fromstring(node.run(words).stdout).iterfind("devices/disk[@device='disk']")
    chains = [[source.get("file", "") for source in disk.iter("source")] for disk in disks]
    return [chain[-1] for chain in chains]


def test_a_guest_waits_where_memory_that_was_promised_twice_is_full(cloud: Cloud) -> None:
    h1 = cloud.lab.node("h1")
    declare(cloud, f"{DECLARED} {MEMORY}=ram:3")
    assert rows(cloud)[MEMORY]["weight"] == 3
    image = cloud.data_image("over", DATA, 150, SEMISHARED_CLASS="ram")
    os = cloud.os_image("over-os")
    vms = [
        cloud.deploy(f"over{number}", [{"IMAGE_ID": str(os)}, {"IMAGE_ID": str(image)}], context=False)
        for number in range(2)
    ]
    assert [device_of(cloud, vm, 1) for vm in vms] == [MEMORY] * 2 and int(
        str(rows(cloud)[MEMORY]["promised"])
    ) == 300 << 20
    for vm in vms:
        cloud.guest(vm).write("vdb", "first", 2 * KIB, 32)
    cloud.guest(vms[0]).write("vdb", "much", 10 * KIB, 120 * KIB)
    waiting = cloud.oned.vm(vms[1]).deploy_id
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(cloud.guest(vms[1]).write, "vdb", "more", 10 * KIB, 120 * KIB, 200)
        state = ""
        for _ in range(600):
            state = (
                h1.run(["virsh", "-c", "qemu:///system", "domstate", "--reason", waiting])
                .stdout.decode()
                .strip()
            )
            if state.startswith("paused") or writing.done():
                break
            time.sleep(0.2)
        assert state == "paused (I/O error)" and not writing.done()
        assert cloud.oned.state(vms[0]) == ("ACTIVE", 3)
        cloud.guest(vms[0]).check("vdb", "first", 2 * KIB, 32)
        cloud.terminate(vms[0])
        h1.run(["virsh", "-c", "qemu:///system", "resume", waiting])
        writing.result()
    cloud.guest(vms[1]).check("vdb", "more", 10 * KIB, 120 * KIB)
    cloud.guest(vms[1]).check("vdb", "first", 2 * KIB, 32)
    xml = h1.run(["virsh", "-c", "qemu:///system", "dumpxml", waiting]).stdout
    drivers = [
        dict(driver.attrib)
        for driver in ElementTree.fromstring(xml).iterfind("devices/disk[@device='disk']/driver")
    ]
    assert [driver.get("error_policy") == driver.get("rerror_policy") == "stop" for driver in drivers] == [
        False,
        True,
    ]


@pytest.mark.long
def test_guests_read_their_base_from_memory_through_all_that_is_done_to_them(cloud: Cloud) -> None:
    h1, h2 = cloud.lab.hosts
    hot: dict[str, Any] = {"SEMISHARED_BASES": "ram"}
    images = [
        cloud.os_image("hot-os", **hot),
        cloud.data_image("hot-qcow2", DATA, format="qcow2", **hot),
        cloud.data_image("cold", DATA),
    ]
    vm = cloud.deploy("hot", [{"IMAGE_ID": str(image)} for image in images])
    guest = cloud.guest(vm)
    in_memory, on_disk = f"{MEMORY}/.semishared/hot/", f"{DATASTORES}/.semishared/bases/"
    reads = below(cloud, vm, h1)
    assert [path.startswith(in_memory) for path in reads] == [True, True, False] and reads[2].startswith(
        on_disk
    )
    said_of = {row["disk"]: row["hot"] for row in said(cloud, "status", f"vm:{vm}")["disks"]}
    assert [bool(said_of[disk] and said_of[disk]["path"]) for disk in range(3)] == [True, True, False]
    guest.write("vdb", "before", 2 * KIB, 64)
    guest.loop("vdb", "loop", 4 * KIB, 4 * KIB, 20)
    one = cloud.oned.disk_snapshot_create(vm, 1, "one")
    two = cloud.oned.disk_snapshot_create(vm, 1, "two")
    cloud.oned.disk_snapshot_delete(vm, 1, two)
    with pytest.raises(
        ActionFailed, match="SS003 .*reads the base of disk 1 from memory.*can be deleted while the VM is off"
    ):
        cloud.oned.disk_snapshot_delete(vm, 1, one)
    saved = cloud.oned.disk_saveas(vm, 1, "hot-saved")
    cloud.oned.vm_migrate(vm, "h2", SYSTEM, how="live")
    assert all(path.startswith(on_disk) for path in below(cloud, vm, h2))
    cloud.oned.vm_migrate(vm, "h1", SYSTEM, how="live")
    cloud.oned.vm_suspend(vm)
    restart(h1)
    cloud.oned.vm_resume(vm)
    assert [path.startswith(in_memory) for path in below(cloud, vm, h1)] == [True, True, False], "made again"
    cloud.oned.vm_suspend(vm)
    label = lose(h1)
    cloud.oned.vm_resume(vm)
    assert [path for path in below(cloud, vm, h1) if not path.startswith(on_disk)] == []
    counts = cloud.guest(vm).loop_stop("vdb")
    assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, counts
    cloud.oned.vm_poweroff(vm)
    cloud.oned.disk_snapshot_delete(vm, 1, one)
    return_empty(h1, label)
    cloud.oned.vm_resume(vm)
    cloud.guest(vm).check("vdb", "before", 2 * KIB, 64)
    cloud.guest(vm).check("vdb", "base", 0, 64)
    assert [path.startswith(in_memory) for path in below(cloud, vm, h1)] == [True, True, False]
    # What no guest reads from goes, what one reads from does not.
    large = cloud.data_image("large-hot", DATA, 150, SEMISHARED_CLASS="ram")
    with pytest.raises(ActionFailed, match="SS166"):
        cloud.deploy("refused", [{"IMAGE_ID": str(large)}], context=False)
    cloud.terminate(vm)
    assert device_of(cloud, cloud.deploy("fits", [{"IMAGE_ID": str(large)}]), 0) == MEMORY
    assert len(names(h1, in_memory)) == 1 and cloud.oned.image(saved).source, "no more than had to go"
