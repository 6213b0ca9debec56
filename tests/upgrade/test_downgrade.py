# SPDX-License-Identifier: Apache-2.0
"""The version before, installed over this one: VMs that this one has made go on, and end, under that
(docs/how-to/downgrade.md).
"""

from __future__ import annotations

import re

import pytest

from lab.cloud import SYSTEM, Cloud
from lab.forks import serve
from lab.oned import ActionFailed
from upgrade import versions
from upgrade.world import COMMAND, KIB, OTHER_SYSTEM, Old, installed

CONF = "/var/lib/one/remotes/etc/semishared.conf"


def go_to(cloud: Cloud, version: str) -> str:
    """Install a version on all machines, as its page says; return what install.sh says."""
    said = versions.install(cloud.lab, version)
    versions.sync(cloud.lab)
    serve(cloud.lab)
    return said


def test_vms_go_on_under_the_version_before() -> None:
    with installed("dir", (SYSTEM, OTHER_SYSTEM), versions.KILLED) as cloud:
        go_to(cloud, "")
        cloud.lab.fe.run([COMMAND, "setup", "--apply", "--system", f"semi_sys_{SYSTEM}"])
        old = Old(cloud, "dir")
        old.upload()
        old.begin("run")
        old.begin("off", "h2")
        cloud.oned.vm_poweroff(old.vms["off"], hard=True)
        old.check("run")
        # As where this version was installed first: it has keys that the older one does not know.
        path = cloud.lab.fe.path(CONF)
        path.write_text(cloud.lab.fe.path(f"{versions.TREES['']}/etc/semishared.conf").read_text())
        go_to(cloud, versions.KILLED)
        with pytest.raises(ActionFailed, match=r"semishared\.conf"):
            cloud.oned.disk_snapshot_create(old.vms["run"], old.kept("run")[0].id, "refused")
        path.write_text(re.sub(r"(?ms)^\[(?:network|backup)\].*?(?=^\[)", "", path.read_text()))
        versions.sync(cloud.lab)
        serve(cloud.lab)
        goes_on(old)


def goes_on(old: Old) -> None:
    oned = old.cloud.oned
    vm = old.vms["run"]
    guest = old.check("run")
    for disk in old.kept("run"):
        assert oned.disk_snapshot_create(vm, disk.id, "older") > 0
        guest.write(disk.target, "three", 4096, KIB)
        oned.disk_snapshot_delete(vm, disk.id, 0)
    oned.vm_migrate(vm, "h2", SYSTEM, how="live")
    guest = old.check("run")
    for disk in old.kept("run"):
        guest.check(disk.target, "three", 4096, KIB)
    oned.vm_resume(old.vms["off"])
    old.check("off")
    for name in ("run", "off"):
        old.end(name, "two")
    assert old.cloud.leftovers() == []
