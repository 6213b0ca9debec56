# SPDX-License-Identifier: Apache-2.0
"""SEMISHARED_IO_CLASS: what a guest's disks may read and write, as libvirt says it and as the guest feels
it.
"""

from __future__ import annotations

import json
import time
from typing import Iterator

import pytest

from lab.cloud import Cloud
from lab.oned import ActionFailed

MIB = 1 << 20
LIMITS = MIB, 4
NONE = 0, 0
COMMAND = "/var/lib/one/remotes/lib/semishared/semishared"
CONF = "[io_class]\nscratch_bytes = 1M\nscratch_iops = 4\n"
BLOCKS = 60
"""How many blocks of 64 KiB a second a guest is to write and verify: far more than the limits let through,
two requests each.
"""


@pytest.fixture
def slow(cloud: Cloud) -> Iterator[None]:
    """Have hosts whose scratch disks may do little."""
    paths = [node.path("/var/tmp/one/etc/semishared.conf") for node in cloud.lab.hosts]
    before = [path.read_text() for path in paths]
    for path in paths:
        path.write_text(CONF)
    yield
    for path, text in zip(paths, before):
        path.write_text(text)


def status(cloud: Cloud, *words: str) -> str:
    """Return what the command says of disks."""
    return cloud.lab.fe.run([COMMAND, "status", *words]).stdout.decode()


def test_scratch_disk_is_limited_and_production_disk_is_not(cloud: Cloud, slow: None) -> None:
    scratch = cloud.data_image("scratch", b"", SEMISHARED_IO_CLASS="scratch")
    mine = cloud.data_image("mine", b"", persistent=True, SEMISHARED_IO_CLASS="Scratch")
    production = cloud.data_image("production", b"", SEMISHARED_IO_CLASS="production")
    own = {"IMAGE_ID": str(scratch), "TOTAL_IOPS_SEC": "400"}
    vm = cloud.deploy(
        "classes", [{"IMAGE_ID": str(image)} for image in (cloud.os_image(), scratch, production)] + [own]
    )
    guest = cloud.guest(vm)
    assert [cloud.limits(vm, name) for name in ("vda", "vdb", "vdc")] == [NONE, LIMITS, NONE]
    # What OpenNebula itself is told of a disk is neither replaced nor completed.
    assert cloud.limits(vm, "vdd") == (0, 400)
    attached = [cloud.oned.disk_attach(vm, image) for image in (mine, production)]
    assert [cloud.limits(vm, name) for name in ("vde", "vdf")] == [LIMITS, NONE]
    guest.wait_disk("vde")

    shown = json.loads(status(cloud, "--json", f"vm:{vm}"))["disks"]
    assert [row["io_class"] for row in shown] == [
        "normal",
        "scratch",
        "production",
        "scratch",
        "scratch",
        "production",
    ]
    assert "local, overlay, scratch" in status(cloud, f"vm:{vm}")

    # One guest, side by side: what slows the machine down slows both down.
    guest.loop("vdb", "scratch", 0, 8 << 10, BLOCKS)
    guest.loop("vdc", "production", 0, 8 << 10, BLOCKS)
    time.sleep(4)
    counts = {name: guest.loop_stop(name) for name in ("vdb", "vdc")}
    for found in counts.values():
        assert (found["errors"], found["mismatches"]) == (0, 0), counts
    assert counts["vdc"]["writes"] > 2 * counts["vdb"]["writes"] > 0, counts

    snapshot = cloud.oned.disk_snapshot_create(vm, 1, "kept")
    assert cloud.limits(vm, "vdb") == LIMITS
    for disk in attached:
        cloud.oned.disk_detach(vm, disk)
    cloud.oned.disk_snapshot_delete(vm, 1, snapshot)
    cloud.oned.vm_migrate(vm, "h2", how="live")
    # QEMU mirrors each disk into another file, and goes on with that.
    cloud.oned.vm_migrate(vm, "h2", datastore_id=102, how="live")
    cloud.oned.vm_suspend(vm)
    cloud.oned.vm_resume(vm)
    assert [cloud.limits(vm, name) for name in ("vda", "vdb", "vdc")] == [NONE, LIMITS, NONE]

    # While it is off the classes change places.
    cloud.oned.vm_poweroff(vm, hard=True)
    cloud.oned.image_update(scratch, {"SEMISHARED_IO_CLASS": "production"})
    cloud.oned.image_update(production, {"SEMISHARED_IO_CLASS": "scratch"})
    cloud.oned.vm_resume(vm)
    assert [cloud.limits(vm, name) for name in ("vda", "vdb", "vdc")] == [NONE, NONE, LIMITS]

    cloud.oned.image_update(mine, {"SEMISHARED_IO_CLASS": "fast"})
    with pytest.raises(
        ActionFailed,
        match=rf"SEMISHARED_IO_CLASS of image {mine} is 'fast', not one of production, normal, scratch",
    ):
        cloud.oned.disk_attach(vm, mine)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
