# SPDX-License-Identifier: Apache-2.0
"""Backup of a running and of a switched-off guest, and restore: every place and format, called as OpenNebula
calls.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator

import pytest

import matrix
from lab import roots
from lab.cloud import DATASTORES, STORE, Cloud
from lab.guest import content
from lab.oned.objects import Datastore, Image

FORMATS = ("raw", "qcow2")
PLACES: Dict[str, Dict[str, Any]] = {
    "in-place": {},
    "diff": {"SEMISHARED_PLACE": "local"},
    "overlay": {},
    "copy": {"SEMISHARED_LOCAL": "copy"},
    "remote-first": {"SEMISHARED_LOCAL": "remote-first"},
    "store-clone": {"SEMISHARED_PLACE": "shared"},
}
DATA = content("base", 0, 64)
REPOSITORY, NAME = 107, "8e4cbd"


def restored_as_an_image(cloud: Cloud, url: str) -> None:
    """Upload a disk from the backup, as `oneimage restore` lets oned ask (the size is the backup driver's
    affair).
    """

    def upload(path: str, template: str, user: int = 0) -> subprocess.CompletedProcess[bytes]:
        xml = (
            f"<DS_DRIVER_ACTION_DATA><IMAGE><ID>999</ID><UID>{user}</UID><GID>{user}</GID><TYPE>0</TYPE><PATH>{path}</PATH><TEMPLATE>{template}</TEMPLATE></IMAGE>"
            f"<DATASTORE><ID>{STORE}</ID><TYPE>0</TYPE><BASE_PATH>{DATASTORES}/{STORE}</BASE_PATH><TEMPLATE><DISK_TYPE>FILE</DISK_TYPE></TEMPLATE></DATASTORE>"
            "</DS_DRIVER_ACTION_DATA>"
        )
        argv = ["/var/lib/one/remotes/datastore/semishared/cp", "999"]
        return cloud.lab.fe.run(argv, input=base64.b64encode(xml.encode()), check=False)

    mine = f"<FROM_BACKUP_DS>{REPOSITORY}</FROM_BACKUP_DS>"
    elsewhere = url.replace("/disk.1.0", "/../../../x/disk.1.0")
    other, part = url.replace(f":{NAME}", f":{NAME[:-1]}"), url.replace(f":{NAME}", f":{NAME},1:1234")
    tries = [(url, "", 0), (url, "<FROM_BACKUP_DS>1</FROM_BACKUP_DS>", 0), (elsewhere, mine, 0)]
    for path, template, user in (*tries, (other, mine, 0), (part, mine, 0), (url, mine, 7)):
        refused = upload(path, template, user)
        assert refused.returncode == 1
        assert re.match(rb"SS0(22|03) ", refused.stderr), refused.stderr
    done = upload(url, mine)
    assert done.returncode == 0, done.stderr.decode()
    source, format = done.stdout.decode().split()
    assert format == "qcow2"
    assert cloud.read(source, format, 64 << 10, 1024 << 10) == content("one", 1024, 64)
    assert cloud.read(source, format, 64 << 10) == DATA
    xml = f"<DS_DRIVER_ACTION_DATA><IMAGE><ID>999</ID><SOURCE>{source}</SOURCE></IMAGE><DATASTORE><ID>{STORE}</ID>"  # noqa: E501
    xml += f"<BASE_PATH>{DATASTORES}/{STORE}</BASE_PATH><TEMPLATE><DISK_TYPE>FILE</DISK_TYPE></TEMPLATE>"
    xml += "</DATASTORE></DS_DRIVER_ACTION_DATA>"
    cloud.lab.fe.run(
        ["/var/lib/one/remotes/datastore/semishared/rm", "999"], input=base64.b64encode(xml.encode())
    )


def check_copies(cloud: Cloud, vm: int, disks: int, seed: str) -> None:
    """See that the copies beside the VM hold what the guest had written, and depend on nothing."""
    node = cloud.lab.node(cloud.oned.vm(vm).last.host.name)
    for disk in range(1, disks + 1):
        path = f"{cloud.vm_dir(vm)}/backup/disk.{disk}.0"
        assert b"backing file" not in node.run(["qemu-img", "info", "-U", "-f", "qcow2", path]).stdout
        assert cloud.read(path, "qcow2", 64 << 10, 1024 << 10, node=node) == content(seed, 1024, 64)


def keep(cloud: Cloud, vm: int) -> str:
    """Take the copies beside the VM into the repository, as the backup driver does; return where they are."""
    there, node = f"{DATASTORES}/{REPOSITORY}/{vm}/{NAME}", cloud.lab.node(cloud.oned.vm(vm).last.host.name)
    cloud.lab.fe.run(["mkdir", "-p", there])
    shutil.copytree(node.path(f"{cloud.vm_dir(vm)}/backup"), cloud.lab.fe.path(there), dirs_exist_ok=True)
    cloud.lab.fe.run(["chown", "-R", "oneadmin:", there], user="root")
    return there


@contextmanager
def in_repository(cloud: Cloud, vm: int) -> Iterator[int]:
    """Let oned know what was kept of the VM; yield the number of that image."""
    oned, image = cloud.oned, max(cloud.oned.images) + 1
    oned.datastores[REPOSITORY] = Datastore(
        REPOSITORY, "repository", 3, "rsync", "-", f"{DATASTORES}/{REPOSITORY}", {"TYPE": "BACKUP_DS"}
    )
    oned.images[image] = Image(
        image, "backup", 6, False, REPOSITORY, "repository", {}, source=NAME, format="raw", vms=[vm]
    )
    try:
        yield image
    finally:
        del oned.images[image], oned.datastores[REPOSITORY]
        shutil.rmtree(cloud.lab.fe.path(f"{DATASTORES}/{REPOSITORY}"))


@pytest.mark.skipif(roots.LIBVIRT_7_0, reason="libvirt 7.0 has no backups of running guests")
def test_backup_running_and_off_and_restore(
    cloud: Cloud, os_image: int, image_for: Callable[[str, str], int], cell: Callable[..., None]
) -> None:
    images = [
        cloud.data_image(f"places-{place}-{format}", DATA, persistent=True, format=format, **attributes)
        if place in ("in-place", "diff")
        else image_for(place, format)
        for place, attributes in PLACES.items()
        for format in FORMATS
    ]
    disks = [{"IMAGE_ID": str(image)} for image in (os_image, *images)]
    disks += [{"TYPE": "fs", "SIZE": "16", "FORMAT": format} for format in FORMATS]
    vm = cloud.deploy("places", disks, context=False)
    count = len(disks) - 1
    targets = [f"vd{letter}" for letter in "bcdefghijklmno"[:count]]
    words = (":".join(str(disk) for disk in range(1, count + 1)), f"one-{vm}", "-", str(vm), "101")
    guest = cloud.guest(vm)
    for target in targets:
        guest.write(target, "one", 1024, 64)
    host = cloud.lab.node("h1")
    before = cloud.files(host, cloud.vm_dir(vm))
    cloud.tm("prebackup_live", vm, *words)
    check_copies(cloud, vm, count, "one")
    there = keep(cloud, vm)
    cloud.tm("postbackup_live", vm, *words)
    assert cloud.files(host, cloud.vm_dir(vm)) == before

    for target in targets:
        guest.write(target, "two", 1024, 64)
    cloud.oned.vm_poweroff(vm, hard=True)
    cloud.tm("prebackup", vm, *words)
    check_copies(cloud, vm, count, "two")
    cloud.tm("postbackup", vm, *words)
    assert cloud.files(host, cloud.vm_dir(vm)) == before

    with in_repository(cloud, vm) as image:
        cloud.tm("restore", vm, str(vm), str(image), "-1", "-1")
        restored_as_an_image(cloud, f"rsync://{REPOSITORY}//0:{NAME}{there}/disk.1.0")
    cloud.oned.vm_resume(vm)
    guest = cloud.guest(vm)
    for target, place in zip(targets, [place for place in PLACES for _ in FORMATS] + ["volatile"] * 2):
        guest.check(target, "zero" if place == "volatile" else "base", 0, 64)
        guest.check(target, "one", 1024, 64)
    cloud.terminate(vm)
    assert cloud.leftovers() == []
    for source, format in zip(images[:4], FORMATS * 2):
        assert cloud.read(cloud.source(source), format, 64 << 10, 1024 << 10) == content("one", 1024, 64)
    cell("backup", matrix.PLACES, FORMATS, ("off", "live"))
    cell("restore", matrix.PLACES, FORMATS, "off")
