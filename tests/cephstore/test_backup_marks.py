# SPDX-License-Identifier: Apache-2.0
"""Increments of a disk on a real Ceph cluster whose VM is off, by snapshots: each, laid over the ones before
as OpenNebula's backup drivers do it, is what the image held.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Dict, List

import pytest
import rbd

from semishared.model import steps as s
from semishared.model.store import image_steps as i
from tools.ceph_chain import DISK, SIZE, Chain
from tools.world import MiB, World

if TYPE_CHECKING:
    from tools.ceph_site import Site

KINDS = ("in-place", "store-clone")
GONE = "its snapshot of that increment is gone"


@pytest.mark.fault(90, "an increment of a disk on Ceph has what changed alone")
@pytest.mark.parametrize("how", KINDS)
def test_a_chain_and_a_failure_in_it(site: Site, world: World, tmp_path: Path, how: str) -> None:
    chain = Chain(site, world, tmp_path, how)
    for number in range(6):
        chain.write()
        if number == 3:
            # The store fails: oned asks for the same again, from the same parent.
            chain.back_up(stores=False)
            assert len(chain.marks()) == 2
            chain.write()
        chain.back_up()
        assert len(chain.marks()) == (2 if number else 1)
        assert {int(mark.rpartition("-")[2]) for mark in chain.marks()} == {number, max(number - 1, 0)}
    assert chain.whole == [""] * 6
    assert max(chain.sizes[1:]) < SIZE // 4, chain.sizes
    chain.check()
    assert chain.merged() == chain.sums[-1]


@pytest.mark.fault(90, "an increment of a disk on Ceph has what changed alone")
def test_what_happens_between_two(site: Site, world: World, tmp_path: Path) -> None:
    chain = Chain(site, world, tmp_path)
    image = chain.image

    def after(*steps: s.Step) -> str:
        site.on(*steps)
        chain.write()
        chain.back_up()
        return chain.whole[-1]

    chain.back_up()
    chain.write()
    chain.back_up()
    assert after(i.KeepSnapshot(image, 3)) == ""
    assert after(i.GrowImage(image, 20 * MiB)) == ""
    assert after(i.HoldMoment(image)) == ""
    # An administrator's own roll-back is told by Ceph: to content of before the mark.
    with rbd.Image(site.ioctx, chain.name) as opened:
        opened.rollback_to_snap("3")
    assert after() == ""
    assert GONE in after(i.RevertImage(image, 3))
    assert after(i.ForgetSnapshot(image, 3)) == ""
    assert GONE in after(i.BeginChange(image, 24 * MiB), i.EndChange(image, whole=True))
    # A snapshot that somebody has removed, and an image that took the place of this one.
    with rbd.Image(site.ioctx, chain.name) as opened:
        for name in chain.marks():
            opened.remove_snap(name)
    assert GONE in after()
    with rbd.Image(site.ioctx, chain.name) as opened:
        opened.copy(site.ioctx, "other")
    site.on(i.RemoveImage(image))
    site.rbd.rename(site.ioctx, "other", chain.name)
    assert GONE in after()
    assert after() == ""
    chain.check()


def test_marks_end_with_the_vm_the_session_and_the_image(site: Site, world: World, tmp_path: Path) -> None:
    chain = Chain(site, world, tmp_path)
    chain.back_up()
    chain.write()
    chain.back_up()
    # The mark of another VM, which oned has forgotten.
    other = "semishared-backup-4-0123456789abcdef-9"
    with rbd.Image(site.ioctx, chain.name) as image:
        image.create_snap(other)
        image.create_snap(f"{other}0")
        (left,) = (snap["id"] for snap in image.list_snaps() if snap["name"] == f"{other}0")
    assert len(chain.marks()) == 4
    # What gc finds of such is removed by its id.
    site.on(i.DropSnapshot(chain.image, left))
    assert len(chain.marks()) == 3 and not site.protected(chain.name, chain.marks()[0])
    site.on(s.RemoveDisk(chain.disk, ""))
    assert chain.marks() == [other]
    site.on(i.BeginSession(chain.image, readonly=False))
    assert chain.marks() == []


def test_marks_go_with_a_full_backup_and_with_the_image(site: Site, world: World, tmp_path: Path) -> None:
    chain = Chain(site, world, tmp_path, "store-clone")
    chain.back_up()
    site.on(chain.step()._replace(since=None, chain=-1))
    chain.end()
    assert chain.marks() == [] and not os.path.exists(f"{chain.disk.vm_dir}/.semishared/marks.json")
    chain.last = -1
    chain.back_up()
    assert len(chain.marks()) == 1
    site.on(i.RemoveImage(chain.image._replace(source=f"one/{chain.name}")))
    site.on(i.RemoveImage(chain.image))
    assert site.names() == []


def test_an_image_in_the_trash_keeps_no_marks(site: Site, world: World, tmp_path: Path) -> None:
    chain = Chain(site, world, tmp_path)
    chain.back_up()
    found = site.rbd
    site.on(i.RemoveImage(chain.image, trash=True))
    (trashed,) = found.trash_list(site.ioctx)
    assert trashed["name"] == chain.name
    found.trash_remove(site.ioctx, trashed["id"])
    assert list(found.trash_list(site.ioctx)) == []


def test_an_image_without_exclusive_lock_has_no_marks(site: Site, world: World, tmp_path: Path) -> None:
    chain = Chain(site, world, tmp_path)
    with rbd.Image(site.ioctx, chain.name) as image:
        maps = rbd.RBD_FEATURE_FAST_DIFF | rbd.RBD_FEATURE_OBJECT_MAP
        image.update_features(maps | rbd.RBD_FEATURE_EXCLUSIVE_LOCK, False)
    for _ in range(3):
        chain.write()
        chain.back_up()
    assert chain.marks() == [] and all("lacks exclusive-lock" in why for why in chain.whole[1:])
    chain.check()


def test_note_of_an_older_version_makes_it_whole_once(site: Site, world: World, tmp_path: Path) -> None:
    chain = Chain(site, world, tmp_path)
    chain.back_up()
    note = Path(chain.disk.vm_dir, ".semishared", "marks.json")
    data: Dict[str, List[Dict[str, object]]] = json.loads(note.read_text())
    for mark in data["marks"]:
        del mark["snapshots"]
        mark.update(disks=[], lost={str(DISK): "it is on Ceph"})
    note.write_text(json.dumps(data))
    with rbd.Image(site.ioctx, chain.name) as image:
        image.remove_snap(chain.marks()[0])
    chain.write()
    chain.back_up()
    assert chain.whole[-1].endswith("it is on Ceph")
    assert len(chain.marks()) == 1
    chain.write()
    chain.back_up()
    assert chain.whole[-1] == ""
    chain.check()
