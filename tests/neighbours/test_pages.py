# SPDX-License-Identifier: Apache-2.0
"""The pages for a site that has other drivers' datastores: bring in, leave again, stand beside; followed line
by line with our real drivers.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterator

import pytest

from lab.oned import ActionFailed, Refused
from lab.oned.objects import Image
from lab.oned.states import Img
from neighbours.admin import HOW_TO, Admin, commands
from neighbours.conftest import Site
from semishared.store.dir import snapshots
from tools.oned_site import HERE, STORE, ActionSite
from tools.world import make_image, qemu_io

BRING, LEAVE = "stock-images.md", "uninstall.md"
OLD = 1
NOT_PROVED = {
    "onevm backup -d BACKUPS VM": "BACKUPS.md; the copies of ours: tests/system/test_backup_places.py",
    "oneimage restore -d semi_img BACKUP": "its uploads: restored_as_an_image in test_backup_places.py",
    "oneimage restore -d default BACKUP": "the uploads are those of the other driver",
    "oneimage persistent NEW": "datastore_mad/remotes/rsync/restore makes images without PERSISTENT",
    "onetemplate update TEMPLATE": "DISK_LIST of tm_mad/lib/backup.rb has no TM_MAD_SYSTEM",
    "onevm undeploy VM": "oned, as any",
    "onetemplate instantiate TEMPLATE": "oned, as any",
}
"""Commands of which a real oned and a backup driver would be the proof, and what is known of each."""


@pytest.fixture
def admin(tmp_path: Path) -> Iterator[Admin]:
    with ActionSite.up(tmp_path) as site:
        (site.location / str(OLD)).mkdir()
        site.oned.runner.extra["HOME"] = str(tmp_path)  # type: ignore[attr-defined]
        scripts = tmp_path / "fe/var/lib/one/remotes/datastore/fs"
        scripts.mkdir(parents=True)
        # Python, which is what the site forks (lab/forks.py).
        (scripts / "monitor").write_text("#!/usr/bin/python3\nprint('USED_MB=1 TOTAL_MB=3 FREE_MB=2')\n")
        (scripts / "monitor").chmod(0o755)
        site.oned.datastore_create('NAME="system" TYPE="SYSTEM_DS" TM_MAD="shared"', 0)
        site.oned.datastore_create('NAME="default" TYPE="IMAGE_DS" DS_MAD="fs" TM_MAD="shared"', OLD)
        yield Admin(site)


def stock_image(admin: Admin, name: str, format: str, persistent: bool = False) -> int:
    """Have an image as the `fs` driver leaves one, of 8 MiB with 0xa1 at 1 MiB."""
    oned, number = admin.oned, max(admin.oned.images, default=-1) + 1
    path = admin.site.location / str(OLD) / os.urandom(16).hex()
    make_image(path, format, 8 << 20, "write -P 0xa1 1M 64k")
    image = Image(number, name, 0, persistent, OLD, "default", {}, source=str(path), format=format, size=8)
    image.set_state(Img.READY)
    oned.images[number] = image
    oned.datastores[OLD].images.append(number)
    return number


def stock_ln(source: str) -> str:
    """Return what tm/shared/ln or tm/qcow2/ln of OpenNebula gives a guest of a persistent image."""
    found = (
        [name for name in os.listdir(f"{source}.snap") if name.isdigit()]
        if os.path.isdir(f"{source}.snap")
        else []
    )
    return f"{source}.snap/{max(found, key=int)}" if found else source


def test_a_datastore_gets_our_drivers_and_its_old_ones_back(admin: Admin) -> None:
    site = admin.site
    raw, layer = stock_image(admin, "raw", "raw"), stock_image(admin, "qcow", "qcow2", persistent=True)
    old = site.vm(raw)
    site.cli("setup", "--apply", "--stock-compatible")
    assert site.oned.datastores[OLD].template["COMPATIBLE_SYS_DS"] == "0"
    lines = commands(BRING, "Change the drivers of a datastore")
    assert lines[-2:] == ["semishared doctor", "oneimage clone IMAGE NEW -d semi_img"]
    admin.follow(lines[:-2])
    assert "The store is marked" in admin.said and site.oned.datastores[OLD].template["SEMISHARED_STORE"]
    assert site.oned.datastores[OLD].template["COMPATIBLE_SYS_DS"] == "101"
    assert site.oned.vm(old).disks[0]["TM_MAD"] == "shared", "a VM keeps the driver of each disk"
    vm = site.vm(raw, layer)
    for number, action in enumerate(("clone", "ln")):
        disk = site.disk(vm, number)
        site.tm(action, f"fe:{site.source((raw, layer)[number])}", f"{HERE}:{disk}", vm, OLD)
        qemu_io(disk, "qcow2", "read -P 0xa1 1M 64k")
    admin.follow(lines[-1:], IMAGE="raw", NEW="copied")
    qemu_io(site.source(admin.image("copied")), "raw", "read -P 0xa1 1M 64k")
    # Its guest writes, has a snapshot, and ends.
    disk = site.disk(vm, 1)
    site.tm("snap_create", f"{HERE}:{disk}", 0, vm, OLD)
    qemu_io(disk, "qcow2", "write -P 0xb1 1M 64k")
    site.tm("mvds", f"{HERE}:{disk}", site.source(layer), vm, OLD)
    site.oned._release(site.oned.vm(vm), site.oned.vm(vm).disks[1])
    site.oned.image(layer).snapshots.update(
        NEXT_SNAPSHOT="1", SNAPSHOT={"ID": "0", "SIZE": "8", "DATE": "1", "PARENT": "-1"}
    )
    back = commands(LEAVE, "Give a datastore its drivers back")
    assert [line.split()[1] for line in back[:2]] == ["snapshot-delete", "snapshot-flatten"]
    source = str(site.source(layer))
    assert stock_ln(source) != source, "the page says why no snapshot may be left"
    admin.follow([back[0], *back[2:]], IMAGE="qcow", SNAPSHOT=0, STORE=OLD, SYSTEMS=0)
    store = site.oned.datastores[OLD]
    assert store.tm_mad == "shared" and store.template["COMPATIBLE_SYS_DS"] == "0"
    assert stock_ln(source) == source and not snapshots.is_layered(source, "qcow2")
    qemu_io(source, "qcow2", "read -P 0xb1 1M 64k")
    assert not (site.location / str(OLD) / ".semishared").exists()


def test_images_are_copied_in_and_nothing_stays_open(admin: Admin) -> None:
    site = admin.site
    stock_image(admin, "old", "qcow2", persistent=True)
    source = site.source(admin.image("old"))
    before = source.read_bytes()
    site.oned.datastore_update(STORE, {"SAFE_DIRS": str(admin.scratch)})
    with pytest.raises(ActionFailed, match="may not be read by this datastore"):
        site.oned.image_create(STORE, "too-early", path=str(source))
    admin.follow(commands(BRING, "Copy images"), IMAGE="old", NEW="new", OLD=OLD, SOURCE=source)
    new = site.oned.image(admin.image("new"))
    assert new.persistent and source.read_bytes() == before
    qemu_io(new.source, new.format, "read -P 0xa1 1M 64k")
    with pytest.raises(ActionFailed, match="may not be read by this datastore"):
        site.oned.image_create(STORE, "too-late", path=str(source))


def test_what_only_a_real_oned_shows_is_named() -> None:
    vm = commands(BRING, "Bring a VM through a backup") + commands(LEAVE, "Bring VMs back")
    assert set(vm) == set(NOT_PROVED)
    assert commands(LEAVE, "Copy images out") == [
        "oneimage create -d default --name NEW --type OS --path SOURCE"
    ]
    # VirtualMachineAPI::disk_save_as: ds_id = img->get_ds_id().
    for page in (BRING, LEAVE):
        assert "of the disk's" in " ".join((HOW_TO / page).read_text().replace("\n", " ").split())


# -- beside-stock.md ------------------------------------------------------------------------------------


def said(words: str) -> str:
    page = (HOW_TO / "beside-stock.md").read_text()
    assert f'"{words}"' in page
    return words


def pair(site: Site) -> None:
    site.oned.datastore_create('NAME="sys101" TYPE="SYSTEM_DS" TM_MAD="semishared"', 101)
    site.oned.datastore_create('NAME="img100" TYPE="IMAGE_DS" DS_MAD="semishared" TM_MAD="semishared"', 100)


def test_a_vm_of_both_is_refused_where_the_page_says_so(site: Site) -> None:
    pair(site)
    mixed = site.vm(site.image(100, "ours"), site.image(OLD, "stock"))
    with pytest.raises(Refused, match=said("Image Datastore does not support transfer mode: semishared")):
        site.oned.vm_deploy(mixed, "h1", 101)
    with pytest.raises(Refused, match="transfer mode: qcow2"):
        site.oned.vm_deploy(mixed, "h1", 0)
    site.setup("--apply", "--stock-compatible", "--image", "img100", "--system", "sys101")
    with pytest.raises(Refused, match=said("Incompatible system datastore in DISK")):
        site.vm(site.image(100, "ours-too"), site.image(OLD, "stock-too"))
