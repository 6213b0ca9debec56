# SPDX-License-Identifier: Apache-2.0
"""A host loses its power; OpenNebula's own monitoring and hook manager have its VMs come up elsewhere."""

from __future__ import annotations

from lab.guest import content
from real.conftest import SEMISHARED, RealCloud, wait_on, wait_until

KIB = 64
DATA = content("base", 0, KIB)
HOOK = "/var/lib/one/remotes/lib/semishared"


def test_vms_of_a_dead_host_come_up_elsewhere_by_the_hook(cloud: RealCloud) -> None:
    os_image = cloud.os_image("dead-os", SEMISHARED_PLACE="shared")
    mine = cloud.data_image("dead-mine", DATA, persistent=True)
    vm = cloud.deploy("dead", [{"IMAGE_ID": str(image)} for image in (os_image, mine)])
    guest = cloud.guest(vm)
    guest.write("vdb", "kept", 8192, 64)
    guest.sync()
    host, h1 = cloud.oned.host("h1").id, cloud.lab.node("h1")
    printed = cloud.lab.fe.run([SEMISHARED, "failover", "--print-hook"]).stdout
    template = cloud.lab.fe.path("/var/tmp/hook")
    template.write_bytes(printed)
    cloud.give(template)
    hook = int(cloud.one.cli("onehook", "create", "/var/tmp/hook").split()[-1])
    try:
        h1.kill()
        wait_until(lambda: cloud.oned.host("h1").state in (3, 5), "h1 is not seen to be down")
        cloud.lab.fe.run([SEMISHARED, "fence", "h1", "--confirmed-off"], timeout=120)
        wait_until(
            lambda: cloud.oned.vm(vm).is_idle
            and cloud.oned.vm(vm).last.host.name == "h2"
            and cloud.oned.state(vm) == ("ACTIVE", 3),
            "the VM does not come up",
        )
        guest = cloud.guest(vm)
        guest.check("vdb", "kept", 8192, 64)
        guest.check("vdb", "base", 0, KIB)
    finally:
        cloud.one.cli("onehook", "delete", str(hook))
        cloud.terminate(vm)
        h1.start()
        cloud.oned.api.call("host.status", host, 0)
    wait_on(cloud.oned, 2)
