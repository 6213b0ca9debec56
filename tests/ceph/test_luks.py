# SPDX-License-Identifier: Apache-2.0
"""Encrypted images on Ceph: guests read and write them by libvirt's secret, in place, as clones, and as
copies on the host.
"""

from __future__ import annotations

from typing import Any, Iterator

import pytest

from lab import Node
from lab.ceph import Cluster
from lab.cloud import RBD_STORE, SYSTEM, Cloud
from lab.luks import DIRECT, KIB, PASSPHRASE, SECRET, forget, know, luks_image
from lab.oned import ActionFailed

PLACES = {"vda": {}, "vdb": {"SEMISHARED_PLACE": "shared"}, "vdc": {"SEMISHARED_LOCAL": "copy"}}


@pytest.fixture()
def host(cloud: Cloud) -> Iterator[Node]:
    for host in cloud.lab.hosts:
        know(host, PASSPHRASE)
    yield cloud.lab.hosts[0]
    for host in cloud.lab.hosts:
        forget(host)


def upload(cloud: Cloud, path: str, name: str, persistent: bool, attributes: dict[str, str]) -> int:
    own: dict[str, Any] = {"LUKS_SECRET": SECRET, **attributes}
    return cloud.oned.image_create(
        RBD_STORE, name, path=path, type="DATABLOCK", persistent=persistent, prefix="vd", attributes=own
    )


@pytest.mark.long
def test_guest_on_encrypted_disks_of_ceph(cloud: Cloud, ceph: Cluster, host: Node) -> None:
    path = luks_image(cloud)
    images = [upload(cloud, path, f"luks-{name}", name == "vda", more) for name, more in PLACES.items()]
    vm = cloud.oned.vm_create(
        cloud.template("luks", [{"IMAGE_ID": str(image)} for image in images], OS=DIRECT)
    )
    cloud.oned.vm_deploy(vm, host.name, SYSTEM)
    guest = cloud.guest(vm)
    for name in PLACES:
        guest.check(name, "luks", 0, KIB)
        guest.write(name, "old", 0, KIB)
    # Below QEMU: Ceph copies ciphertext, so a running guest's disk may be snapshotted and saved; a copy on
    # the host may not.
    snapshots = [cloud.oned.disk_snapshot_create(vm, disk, "live") for disk in (0, 1)]
    saved = cloud.oned.disk_saveas(vm, 1, "luks-saved")
    for action in (
        lambda: cloud.oned.disk_snapshot_create(vm, 2, "never"),
        lambda: cloud.oned.disk_saveas(vm, 2, "never"),
    ):
        with pytest.raises(ActionFailed, match="SS074"):
            action()
    cloud.oned.image_delete(max(cloud.oned.images))
    for name in PLACES:
        guest.write(name, "new", 0, KIB)

    later = upload(cloud, path, "luks-later", True, {})
    cloud.oned.image(saved).template["LUKS_SECRET"] = SECRET
    cloud.oned.image_persistent(saved, True)
    for image, name, seed in ((later, "vdd", "luks"), (saved, "vde", "old")):
        cloud.oned.disk_attach(vm, image)
        guest.wait_disk(name)
        guest.check(name, seed, 0, KIB)
    cloud.oned.vm_poweroff(vm, hard=True)
    for disk, snapshot in enumerate(snapshots):
        cloud.oned.disk_snapshot_revert(vm, disk, snapshot)
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for name, seed in (("vda", "old"), ("vdb", "old"), ("vdc", "new")):
        guest.check(name, seed, 0, KIB)
    cloud.terminate(vm)
    for image in (*images, later, saved):  # with their snapshots: what comes after looks at all there is
        cloud.oned.image_delete(image)
