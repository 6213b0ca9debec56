# SPDX-License-Identifier: Apache-2.0
"""A pool of unequal devices under running guests: everything that is done to a VM finds its disks, and a lost device costs its own VMs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lab import Node
from lab.cloud import DATASTORES, SYSTEM, Cloud
from lab.guest import content
from lab.oned import ActionFailed
from pool.conftest import COMMAND, DEVICES, bring_back, take_away

KIB = 1024
DATA = content("base", 0, KIB)
OTHER_SYSTEM = 102
LOCAL = [("overlay", {}), ("copy", {"SEMISHARED_LOCAL": "copy"}), ("remote-first", {"SEMISHARED_LOCAL": "remote-first"})]
FORMATS = ("raw", "qcow2")
DECLARED = "/mnt/a /mnt/b /mnt/c=fast:1"


def said(cloud: Cloud, *words: str, code: int = 0) -> Any:
    """Run `semishared ... --json`; return what it says."""
    done = cloud.lab.fe.run([COMMAND, *words, "--json"], check=False, timeout=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def of_pool(cloud: Cloud) -> list[str]:
    """Return what doctor has to say of pools."""
    done = cloud.lab.fe.run([COMMAND, "doctor", "--json"], check=False, timeout=120)
    found = [item for item in json.loads(done.stdout)["findings"] if "pool:" in item["what"]]
    return [f"{item['severity']} {item['machine']} {item['what']}" for item in found]


def layers(node: Node) -> list[str]:
    """Return the directories of layers on the devices of a host."""
    return sorted(f"{path}/{name}" for path in DEVICES for name in names(node, f"{path}/.semishared/layers"))


def names(node: Node, directory: str) -> list[str]:
    return node.run(["ls", directory], user="root", check=False).stdout.decode().split()


def device_of(cloud: Cloud, vm: int, disk: int) -> str:
    """Return on which device a disk lies, as status has it."""
    rows = {row["disk"]: row for row in said(cloud, "status", f"vm:{vm}")["disks"]}
    return str(rows[disk]["device"])


@pytest.fixture(scope="module", autouse=True)
def declared(cloud: Cloud) -> None:
    """Declare the pools of both hosts and make them so."""
    assert of_pool(cloud) == []
    for host in ("h1", "h2"):
        cloud.oned.host_update(cloud.oned.host(host).id, {"SEMISHARED_POOL": DECLARED})
    (found,) = said(cloud, "pool", "check", "h1", code=1)["hosts"]
    assert len(found["wrong"]) == 3 and found["devices"] == []
    assert len([line for line in of_pool(cloud) if line.startswith("warning h")]) == 6
    (found,) = said(cloud, "pool", "add", "h1")["hosts"]
    assert found["wrong"] == [] and len(found["changes"]) == 3
    said(cloud, "pool", "add", "h1,h2")
    assert of_pool(cloud) == []
    rows = [row for host in said(cloud, "pool", "list", "h1,h2")["hosts"] for row in host["devices"]]
    assert {(row["path"], row["class"], row["weight"], row["state"]) for row in rows} == {(path, "fast", 1, "") for path in DEVICES}


def test_a_mixed_vm_on_a_pool_through_all_that_is_done_to_it(cloud: Cloud) -> None:
    images = [
        cloud.os_image("os"),
        *(cloud.data_image(f"{place}-{format}", DATA, format=format, **more) for place, more in LOCAL for format in FORMATS),
        cloud.data_image("mine", DATA, persistent=True),
        cloud.data_image("diff", DATA, persistent=True, SEMISHARED_PLACE="local"),
    ]
    vm = cloud.deploy("mixed", [*({"IMAGE_ID": str(image)} for image in images), {"TYPE": "fs", "SIZE": "16", "FORMAT": "qcow2"}])
    own = {0, *range(1, 7), 8}
    assert len(layers(cloud.lab.node("h1"))) == len(own)
    rows = said(cloud, "status", f"vm:{vm}")["disks"]
    assert {row["disk"] for row in rows if row["device"]} == own and {row["device"] for row in rows} - {None} <= set(DEVICES)
    guest = cloud.guest(vm)
    written = tuple(f"vd{letter}" for letter in "bcdefgi")
    for disk in written:
        guest.write(disk, "before", 2 * KIB, 64)
        guest.loop(disk, f"loop-{disk}", 4 * KIB, 4 * KIB, 20)
    for disk in range(1, 7):
        cloud.oned.disk_snapshot_create(vm, disk, "one")
        two = cloud.oned.disk_snapshot_create(vm, disk, "two")
        cloud.oned.disk_snapshot_delete(vm, disk, two)
    saved = cloud.oned.disk_saveas(vm, 1, "saved")
    hot = cloud.oned.disk_attach(vm, images[1])
    assert device_of(cloud, vm, hot) in DEVICES
    cloud.oned.disk_detach(vm, hot)
    for target, system in (("h2", SYSTEM), ("h2", OTHER_SYSTEM), ("h1", OTHER_SYSTEM), ("h1", SYSTEM)):
        cloud.oned.vm_migrate(vm, target, system, how="live")
        assert cloud.oned.state(vm) == ("ACTIVE", 3)
        found = {node.name: len(layers(node)) for node in cloud.lab.hosts}
        # Of a volatile disk a layer is made when it moves live.
        assert found == {target: len(own) + 1, "h2" if target == "h1" else "h1": 0}
        cloud.guest(vm).check("vdb", "before", 2 * KIB, 64)
    guest = cloud.guest(vm)
    for disk in written:
        counts = guest.loop_stop(disk)
        assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, (disk, counts)
    cloud.oned.vm_poweroff(vm)
    cloud.oned.vm_migrate(vm, "h2", SYSTEM)
    cloud.oned.disk_snapshot_revert(vm, 1, 0)
    cloud.oned.vm_resume(vm)
    cloud.oned.vm_undeploy(vm)
    assert layers(cloud.lab.node("h2")) == []
    cloud.oned.vm_deploy(vm, "h1", SYSTEM)
    for disk in written:
        cloud.guest(vm).check(disk, "before", 2 * KIB, 64)
    cloud.terminate(vm)
    assert cloud.oned.image(saved).source
    assert [layers(node) for node in cloud.lab.hosts] == [[], []]
    assert cloud.leftovers() == []


def test_a_lost_device_costs_its_own_vms_and_no_others(cloud: Cloud) -> None:
    h1 = cloud.lab.node("h1")
    image = cloud.os_image("lost")
    vms = [cloud.deploy(f"lost{number}", [{"IMAGE_ID": str(image)}]) for number in range(2)]
    on = {vm: device_of(cloud, vm, 0) for vm in vms}
    lost = on[vms[0]]
    for vm in vms:
        cloud.guest(vm)
        cloud.oned.vm_poweroff(vm)
    take_away(h1, lost)
    with pytest.raises(ActionFailed, match=re.escape(f"on the device {lost} of h1, which is not there") + ".*SS161"):
        cloud.oned.vm_resume(vms[0])
    assert of_pool(cloud) == [f"broken h1 pool: {lost} is not there: disks on it cannot start, and it takes no new ones"]
    other = cloud.deploy("other", [{"IMAGE_ID": str(image)}])
    assert device_of(cloud, other, 0) != lost
    cloud.guest(other)
    assert names(h1, lost) == [] and ".semishared" not in h1.run(["ls", "-a", lost], user="root").stdout.decode()
    bring_back(h1, lost)
    assert of_pool(cloud) == []
    cloud.oned.vm_resume(vms[0])
    cloud.guest(vms[0])
    for vm in (*vms, other):
        cloud.terminate(vm)
    cloud.lab.fe.run([COMMAND, "gc", "--now"])
    assert layers(h1) == [] and cloud.leftovers() == []
    assert [name for path in DEVICES for name in names(h1, f"{path}/.semishared/bases") if name.startswith(f"100-{image}-")] == [
        name for name in names(h1, f"{DATASTORES}/.semishared/bases") if name.startswith(f"100-{image}-")
    ], "the one that was made again, and no other"
