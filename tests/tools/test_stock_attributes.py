# SPDX-License-Identifier: Apache-2.0
"""Attributes of OpenNebula's own drivers, through the executables as oned calls them: what cannot work is
refused by name where it is first read, and stops nothing from going; what can work does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator

import pytest

from lab.oned import ActionFailed
from tools.oned_site import HERE, STORE, SYSTEM, ActionSite

REFUSED_OF_DATASTORES = {
    "NFS_AUTO_ENABLE": "YES",
    "CACHE_ENABLE": "yes",
    "RBD_FORMAT": "1",
    "DISK_TYPE": "BLOCK",
    "LVM_THIN_ENABLE": "YES",
    "CEPH_KEY": "/etc/key",
}
REFUSED_OF_DISKS = {
    "QCOW2_STANDALONE": "YES",
    "RECOVERY_SNAPSHOT_FREQ": "3600",
    "RBD_FORMAT": "1",
    "LVM_THIN_ENABLE": "yes",
}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[ActionSite]:
    with ActionSite.up(tmp_path) as up:
        yield up


def vm_with(site: ActionSite, **disk: Any) -> int:
    return site.oned.vm_create({"NAME": "vm", "DISK": [{key: str(value) for key, value in disk.items()}]})


@pytest.mark.fault(57, "an action that would read such an attribute refuses it by name, and no other does")
@pytest.mark.parametrize("name", REFUSED_OF_DATASTORES)
def test_a_datastore_with_what_cannot_work_makes_nothing_and_lets_all_go(site: ActionSite, name: str) -> None:
    value = REFUSED_OF_DATASTORES[name]
    image, kept = site.image("one"), site.image("kept", persistent=True)
    vm, other = site.vm(image), site.vm(kept)
    site.make("clone", vm)
    site.make("ln", other)
    site.oned.datastore_update(STORE, {name: value})
    words = f"{name} = {value!r} of datastore {STORE} is refused: "
    for action, number in (("clone", vm), ("ln", other)):
        assert words in site.refused("SS002", site.make, action, number)
    before = sorted(path.name for path in site.store.iterdir())
    with pytest.raises(ActionFailed, match=words.split(" ", 1)[0]):
        site.image("two")
    assert sorted(path.name for path in site.store.iterdir()) == before
    for number in (vm, other):
        site.tm("delete", f"{HERE}:{site.system}/{number}", number, SYSTEM)
        assert not (site.system / str(number)).exists()


@pytest.mark.parametrize("name", REFUSED_OF_DISKS)
def test_a_disk_with_what_cannot_work_is_not_made(site: ActionSite, name: str) -> None:
    value = REFUSED_OF_DISKS[name]
    words = f"{name} = {value!r} of disk 0 is refused: "
    vm = vm_with(site, IMAGE_ID=site.image(), **{name: value})
    assert words in site.refused("SS002", site.make, "clone", vm)
    empty = vm_with(site, TYPE="FS", SIZE=8, FORMAT="raw", **{name: value})
    asked = ("mkimage", 8, "raw", f"{HERE}:{site.disk(empty)}", empty, SYSTEM)
    assert words in site.refused("SS002", site.tm, *asked)
    assert not site.disk(vm).exists() and not site.disk(empty).exists()


def test_harmless_words_of_stock_are_taken(site: ActionSite) -> None:
    harmless: Dict[str, str] = {
        **{"NFS_AUTO_ENABLE": "NO", "RBD_FORMAT": "2", "CACHE_ENABLE": "no", "DISK_TYPE": "file"},
        **{"CEPH_TRASH": "no", "SPARSE": "yes"},
    }
    site.oned.datastore_update(STORE, harmless)
    vm = vm_with(site, IMAGE_ID=site.image(), SPARSE="YES", QCOW2_STANDALONE="NO")
    assert site.make("clone", vm).exists()
