# SPDX-License-Identifier: Apache-2.0
"""The real scheduler between our datastores and OpenNebula's own."""

from __future__ import annotations

import pytest

from lab.guest import METAL, content, write_guest_image
from lab.oned import Refused
from real.conftest import RealCloud

KIB = 64
DATA = content("base", 0, KIB)


def stock_image(cloud: RealCloud, name: str) -> int:
    """Upload a bootable image into OpenNebula's default datastore."""
    path = cloud.upload_file(f"{name}.img")
    write_guest_image(path, METAL)
    cloud.give(path)
    image = cloud.oned.image_create(1, name, path=f"/var/tmp/{name}.img", type="OS", prefix="vd")
    cloud._bootable[str(image)] = METAL
    return image


def waiting(cloud: RealCloud, name: str, image: int, *more: int) -> int:
    disks = [{"IMAGE_ID": str(one)} for one in (image, *more)]
    return cloud.create(name, disks)


def test_a_vm_of_both_kinds_and_a_stock_vm_are_placed_by_the_scheduler(
    cloud: RealCloud, os_image: int
) -> None:
    mine = cloud.data_image("beside-mine", DATA, persistent=True)
    theirs = stock_image(cloud, "stock")
    stock, ours = waiting(cloud, "stock", theirs), waiting(cloud, "ours", os_image, mine)
    for vm in (stock, ours):
        cloud.oned.vm_scheduled(vm)
    assert cloud.oned.vm(stock).last.ds_id == 0
    assert cloud.oned.vm(ours).last.ds_id in (101, 102)
    guest = cloud.guest(ours)
    guest.check("vdb", "base", 0, KIB)
    guest.write("vdb", "new", 8192, 64)
    guest.write("vda", "new", 8192, 64)
    cloud.guest(stock).write("vda", "new", 8192, 64)
    for vm in (stock, ours):
        cloud.terminate(vm)
    assert cloud.read(cloud.source(mine), "raw", 64 << 10, 8192 << 10) == content("new", 8192, 64)
    assert cloud.leftovers() == []
    for image in (mine, theirs):
        cloud.oned.image_delete(image)


def test_a_vm_of_both_drivers_is_refused(cloud: RealCloud, os_image: int) -> None:
    """By what setup wrote, when it is created; without that, at deploy."""
    theirs = stock_image(cloud, "mixed")
    with pytest.raises(Refused, match="(?i)system datastore"):
        waiting(cloud, "mixed", os_image, theirs)
    cloud.oned.image_delete(theirs)
