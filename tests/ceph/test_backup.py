# SPDX-License-Identifier: Apache-2.0
"""Backup of a running and of a switched-off guest with disks on Ceph, and restore, called as OpenNebula
calls.
"""

from __future__ import annotations

import shutil
from typing import Any, Callable, Iterator

import pytest

from lab import roots
from lab.ceph import POOL, Cluster
from lab.cloud import DATASTORES, RBD_STORE, Cloud
from lab.guest import content
from lab.oned.objects import Datastore, Image

PLACES: dict[str, dict[str, Any]] = {
    "in-place": {},
    "overlay": {},
    "copy": {"SEMISHARED_LOCAL": "copy"},
    "store-clone": {"SEMISHARED_PLACE": "shared"},
    "remote-first": {"SEMISHARED_LOCAL": "remote-first"},
    "diff": {"SEMISHARED_PLACE": "local"},
}
TARGETS = ("vdb", "vdc", "vdd", "vde", "vdf", "vdg")
DATA = content("base", 0, 64)
REPOSITORY, NAME = 107, "8e4cbd"


@pytest.fixture(autouse=True)
def only_this_test(cloud: Cloud) -> Iterator[None]:
    yield
    cloud.delete_all()


@pytest.mark.skipif(roots.LIBVIRT_7_0, reason="libvirt 7.0 has no backups of running guests")
def test_backup_running_and_off_and_restore(
    cloud: Cloud, ceph: Cluster, os_image: int, cell: Callable[..., None]
) -> None:
    images = [
        cloud.data_image(
            f"backup-{place}", DATA, persistent=place in ("in-place", "diff"), store=RBD_STORE, **attributes
        )
        for place, attributes in PLACES.items()
    ]
    vm = cloud.deploy("backup", [{"IMAGE_ID": str(image)} for image in (os_image, *images)], context=False)
    words = ("1:2:3:4:5:6", f"one-{vm}", "-", str(vm), "101")
    host, directory = cloud.lab.node("h1"), cloud.vm_dir(vm)
    guest = cloud.guest(vm)
    for target in TARGETS:
        guest.write(target, "one", 1024, 64)

    def check_copies(seed: str) -> None:
        for disk in range(1, 7):
            path = f"{directory}/backup/disk.{disk}.0"
            assert b"backing file" not in host.run(["qemu-img", "info", "-U", "-f", "qcow2", path]).stdout
            assert cloud.read(path, "qcow2", 64 << 10, 1024 << 10, node=host) == content(seed, 1024, 64)
            assert cloud.read(path, "qcow2", 64 << 10, node=host) == DATA

    before = cloud.files(host, directory)
    cloud.tm("prebackup_live", vm, *words)
    check_copies("one")
    there = f"{DATASTORES}/{REPOSITORY}/{vm}/{NAME}"
    cloud.lab.fe.run(["mkdir", "-p", there])
    shutil.copytree(host.path(f"{directory}/backup"), cloud.lab.fe.path(there), dirs_exist_ok=True)
    cloud.lab.fe.run(["chown", "-R", "oneadmin:", there], user="root")
    cloud.tm("postbackup_live", vm, *words)
    assert cloud.files(host, directory) == before
    for target in TARGETS:
        guest.write(target, "two", 1024, 64)
    cloud.oned.vm_poweroff(vm, hard=True)
    cloud.tm("prebackup", vm, *words)
    check_copies("two")
    cloud.tm("postbackup", vm, *words)
    assert cloud.files(host, directory) == before
    cell("backup", PLACES, "rbd", ("off", "live"))

    oned = cloud.oned
    image = max(oned.images) + 1
    base = f"{DATASTORES}/{REPOSITORY}"
    oned.datastores[REPOSITORY] = Datastore(
        REPOSITORY, "repository", 3, "rsync", "-", base, {"TYPE": "BACKUP_DS"}
    )
    oned.images[image] = Image(
        image, "backup", 6, False, REPOSITORY, "repository", {}, source=NAME, format="raw", vms=[vm]
    )
    try:
        cloud.tm("restore", vm, str(vm), str(image), "-1", "-1")
    finally:
        del oned.images[image], oned.datastores[REPOSITORY]
        shutil.rmtree(cloud.lab.fe.path(base))
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for target in TARGETS:
        guest.check(target, "base", 0, 64)
        guest.check(target, "one", 1024, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    assert [image["watchers"] for image in ceph.images().values() if image["watchers"]] == []
    for image in (images[0], images[5]):
        source = cloud.source(image).removeprefix(f"{POOL}/")
        assert ceph.read(source, 64 << 10, 1024 << 10) == content("one", 1024, 64)
    cell("restore", PLACES, "rbd", "off")
