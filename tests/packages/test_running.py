# SPDX-License-Identifier: Apache-2.0
"""A VM runs on while its front-end's drivers are replaced from a package."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from lab.cloud import Cloud
from lab.hosts import REMOTES
from packages.packaged import built, repacked
from semishared import VERSION

OLDER = "0.1.9"
INSTALL = ["/opt/package/usr/share/semishared/install.sh", "--remotes", REMOTES]


def install(cloud: Cloud, package: Path) -> str:
    """Have the front-end's drivers be those of a package, and the hosts'; return what was said."""
    lab = cloud.lab
    # Nothing writes below /usr in a lab: what dpkg does is proved in roots (test_debian.py).
    target = lab.fe.path("/opt/package")
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True)
    said = lab.fe.run(INSTALL).stdout.decode()
    lab.sync()
    return said


def installed(cloud: Cloud) -> str:
    said = cloud.lab.fe.run([f"{REMOTES}/lib/semishared/semishared", "--version"]).stdout.decode()
    return said.split()[1]


@pytest.mark.fault(
    79, "a VM runs on while drivers are upgraded from a package, and the new ones do all with it"
)
def test_vm_runs_on_through_an_upgrade(tmp_path: Path) -> None:
    new = built("deb")[0]
    with Cloud.up(hosts=1) as cloud:
        shutil.rmtree(cloud.lab.fe.path(f"{REMOTES}/lib/semishared"))
        install(cloud, repacked(new, tmp_path, OLDER))
        assert installed(cloud) == OLDER
        data = cloud.data_image("data", b"", persistent=True, SEMISHARED_PLACE="local")
        disks = [{"IMAGE_ID": str(image)} for image in (cloud.os_image(), data)]
        vm = cloud.deploy("on", disks)
        guest = cloud.guest(vm)
        guest.write("vdb", "old", 0, 64)
        assert f"replace {REMOTES}/lib/semishared" in install(cloud, new)
        assert installed(cloud) == VERSION
        guest.write("vdb", "new", 8192, 64)
        guest.check("vdb", "old", 0, 64)
        number = cloud.oned.disk_snapshot_create(vm, 0, "s")
        cloud.oned.disk_snapshot_delete(vm, 0, number)
        guest.check("vdb", "new", 8192, 64)
        cloud.terminate(vm)
        cloud.lab.fe.run(INSTALL)
        assert cloud.leftovers() == []
        source = cloud.source(data)
        assert cloud.read(source, "raw", 4096)[:4096] != bytes(4096), "what was written before is committed"
        assert cloud.read(source, "raw", 4096, 8192 << 10)[:4096] != bytes(4096), "and after it"
