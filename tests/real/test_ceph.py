# SPDX-License-Identifier: Apache-2.0
"""A real Ceph cluster beside the mounted store: VMs with disks of both."""

from __future__ import annotations

from typing import Dict
from xml.etree import ElementTree

from lab.ceph import POOL
from lab.cloud import RBD_STORE
from lab.guest import Guest, content
from lab.oned import Lcm
from real.conftest import RealCloud
from real.injected import DATA, KIB, nothing_to_remove

RUNNING = ("ACTIVE", Lcm.RUNNING)


def in_pool(cloud: RealCloud, image: int, offset: int = 8192) -> bytes:
    """Return 64 KiB of an image, from an offset in KiB, as the cluster's admin reads it."""
    pool, _, name = cloud.source(image).partition("/")
    assert pool == POOL
    return cloud.lab.ceph.read(name, KIB << 10, offset << 10)


def domain_disks(cloud: RealCloud, vm: int) -> Dict[str, str]:
    """Return the type of each disk of the running domain, by target."""
    node = cloud.lab.node(cloud.oned.vm(vm).last.host.name)
    said = node.run(["virsh", "-q", "-c", "qemu:///system", "dumpxml", f"one-{vm}"]).stdout
    found = ElementTree.fromstring(said).findall("devices/disk")
    return {
        target.get("dev", ""): disk.get("type", "") for disk in found for target in disk.findall("target")
    }


class Both:
    """A VM with a disk in place on RBD, one of its own from RBD, and what boots from the mounted store."""

    def __init__(self, cloud: RealCloud, os_image: int, name: str) -> None:
        self.cloud = cloud
        self.mine = cloud.data_image(f"{name}-mine", DATA, persistent=True, store=RBD_STORE)
        self.own = cloud.data_image(f"{name}-own", DATA, store=RBD_STORE)
        disks = [{"IMAGE_ID": str(image)} for image in (os_image, self.mine, self.own)]
        self.vm = cloud.deploy(name, disks)
        assert domain_disks(cloud, self.vm) == {"vda": "file", "vdb": "network", "vdc": "file", "hda": "file"}

    @property
    def guest(self) -> Guest:
        return self.cloud.guest(self.vm)

    def write(self, seed: str, offset: int) -> None:
        guest = self.guest
        for disk in ("vdb", "vdc"):
            guest.write(disk, seed, offset, KIB)
        guest.sync()

    def check(self, host: str, **written: int) -> None:
        """See that it runs on a host, and what its disks hold where."""
        oned = self.cloud.oned
        assert (oned.state(self.vm), oned.vm(self.vm).last.host.name) == (RUNNING, host)
        guest = self.guest
        for disk in ("vdb", "vdc"):
            guest.check(disk, "base", 0, KIB)
            for seed, offset in written.items():
                guest.check(disk, seed, offset, KIB)

    def gone(self) -> None:
        """End it, and see that nothing is left, on Ceph neither."""
        self.cloud.terminate(self.vm)
        assert self.cloud.leftovers() == [] and self.cloud.left_in_pool() == []
        nothing_to_remove(self.cloud)
        for image in (self.mine, self.own):
            self.cloud.oned.image_delete(image)
        names = {image.source.partition("/")[2] for image in self.cloud.oned.images.values()}
        assert set(self.cloud.lab.ceph.images()) <= names


def test_a_vm_with_a_disk_in_place_on_rbd_through_all_that_is_done_to_it(
    cloud: RealCloud, os_image: int
) -> None:
    oned, both = cloud.oned, Both(cloud, os_image, "both")
    both.write("one", 4096)
    oned.vm_poweroff(both.vm, hard=True)
    assert in_pool(cloud, both.mine, 4096) == content("one", 4096, KIB)
    assert in_pool(cloud, both.own, 4096) == bytes(KIB << 10)
    oned.disk_snapshot_create(both.vm, 1, "off")
    oned.disk_snapshot_create(both.vm, 2, "off")
    oned.vm_resume(both.vm)
    both.check("h1", one=4096)
    both.write("two", 6144)
    oned.vm_poweroff(both.vm, hard=True)
    for disk in (1, 2):
        oned.disk_snapshot_revert(both.vm, disk, 0)
    oned.disk_snapshot_delete(both.vm, 1, 0)
    oned.vm_resume(both.vm)
    both.check("h1", one=4096)
    guest = both.guest
    for target in ("vdb", "vdc"):
        guest.check(target, "zero", 6144, KIB)
    oned.vm_undeploy(both.vm, hard=True)
    assert cloud.files(cloud.lab.node("h1"), f"/var/lib/one/datastores/101/{both.vm}") == []
    oned.vm_deploy(both.vm, "h2", 101)
    both.check("h2", one=4096)
    both.gone()


def test_a_vm_with_a_disk_in_place_on_rbd_moves_live_and_is_saved(cloud: RealCloud, os_image: int) -> None:
    oned, both = cloud.oned, Both(cloud, os_image, "moving")
    both.write("one", 4096)
    oned.vm_migrate(both.vm, "h2", how="live")
    both.check("h2", one=4096)
    assert domain_disks(cloud, both.vm)["vdb"] == "network"
    both.write("two", 6144)
    saved = [oned.disk_saveas(both.vm, disk, f"saved-{disk}") for disk in (1, 2)]
    for image in saved:
        assert in_pool(cloud, image, 6144) == content("two", 6144, KIB)
        oned.image_delete(image)
    more = cloud.data_image("plugged-rbd", DATA, persistent=True, store=RBD_STORE)
    disk = oned.disk_attach(both.vm, more)
    guest = both.guest
    guest.wait_disk("vdd")
    guest.check("vdd", "base", 0, KIB)
    guest.write("vdd", "more", 4096, KIB)
    oned.disk_detach(both.vm, disk)
    assert in_pool(cloud, more, 4096) == content("more", 4096, KIB)
    oned.image_delete(more)
    both.check("h2", one=4096, two=6144)
    both.gone()


def test_a_vm_on_rbd_that_is_deleted_leaves_nothing(cloud: RealCloud, os_image: int) -> None:
    both = Both(cloud, os_image, "deleted-rbd")
    both.write("one", 4096)
    cloud.oned.vm_recover(both.vm, "delete")
    assert cloud.oned.state(both.vm)[0] == "DONE"
    assert cloud.leftovers() == [] and cloud.left_in_pool() == []
    assert in_pool(cloud, both.mine, 4096) == content("one", 4096, KIB)
    cloud.oned.image_enable(both.mine)
    for image in (both.mine, both.own):
        cloud.oned.image_delete(image)
