# SPDX-License-Identifier: Apache-2.0
"""What Sunstone shows of a VM through its life: real drivers, guests and hosts, and the timer's command after
each action.
"""

from __future__ import annotations

from typing import Any, Dict

import pytest

from lab.cloud import STORE, Cloud
from lab.guest import content

COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
NOTES = "/var/lib/one/.one/semishared_vms"
KIB = 1024


def run(cloud: Cloud, *words: str, code: int = 0) -> str:
    done = cloud.lab.fe.run([COMMAND, *words], check=False, timeout=120)
    assert done.returncode == code, (done.stdout, done.stderr)
    return str(done.stdout.decode())


def due(cloud: Cloud, vm: int) -> Dict[str, Any]:
    """Do what the timer does, and return what Sunstone shows then."""
    run(cloud, "publish", "--due")
    found: Any = cloud.oned.vm(vm).user_template["SEMISHARED"]
    return dict(found)


@pytest.mark.fault(64, "where each disk is, and what is not committed of it, is to be seen in Sunstone")
def test_the_life_of_a_vm(cloud: Cloud) -> None:
    data = content("base", 0, KIB)
    boot = cloud.os_image("shown-os")
    cow = cloud.data_image("shown-cow", data, SEMISHARED_LOCAL="remote-first")
    mine = cloud.data_image("shown-mine", data, persistent=True, SEMISHARED_PLACE="local")
    vm = cloud.deploy("shown", [{"IMAGE_ID": str(image)} for image in (boot, cow, mine)], context=False)
    user = {"NOTE": "of its user"}
    cloud.oned.vm_update(vm, dict(user))
    assert due(cloud, vm) == {
        "DISK0": f"overlay on h1, base image {boot}",
        "DISK1": f"remote-first on h1, reads image {cow} on store {STORE}",
        "DISK2": f"diff on h1, of image {mine}",
        "DETACHED": f"no: disk 1 on store {STORE}",
        "UNCOMMITTED": "no",
    }
    run(cloud, "detach", str(vm))
    shown = cloud.oned.vm(vm).user_template["SEMISHARED"]
    assert isinstance(shown, dict)
    assert (shown["DISK1"], shown["DETACHED"]) == (f"overlay on h1, base image {cow}", "yes")
    cloud.guest(vm).write("vdc", "mine", 0, 64)
    run(cloud, "publish", str(vm))
    shown = cloud.oned.vm(vm).user_template["SEMISHARED"]
    assert isinstance(shown, dict) and "KiB since 20" in shown["UNCOMMITTED"]
    assert "not committed" in str(cloud.oned.image(mine).template["SEMISHARED_STATE"])
    run(cloud, "commit", str(vm))
    shown = cloud.oned.vm(vm).user_template["SEMISHARED"]
    assert isinstance(shown, dict) and shown["UNCOMMITTED"] == "no"
    cloud.oned.vm_migrate(vm, "h2", how="live")
    assert due(cloud, vm)["DISK0"] == f"overlay on h2, base image {boot}"
    assert "on h2, disk 2" in str(cloud.oned.image(mine).template["SEMISHARED_STATE"])
    cloud.oned.disk_snapshot_create(vm, 1, "s0")
    assert due(cloud, vm)["DISK1"] == f"overlay on h2, base image {cow}, 1 snapshot"
    cloud.oned.vm_undeploy(vm, hard=True)
    assert due(cloud, vm)["DISK0"] == f"overlay on {cloud.lab.fe.name}, base image {boot}"
    cloud.oned.vm_terminate(vm)
    run(cloud, "publish", "--due")
    assert "SEMISHARED_STATE" not in cloud.oned.image(mine).template
    left = cloud.lab.fe.run(["ls", NOTES]).stdout.decode().split()
    assert [name for name in left if name.startswith(f"{vm}.")] == []
    assert user.items() <= cloud.oned.vm(vm).user_template.items(), "nothing of the user's is lost"
