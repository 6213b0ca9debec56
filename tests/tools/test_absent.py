# SPDX-License-Identifier: Apache-2.0
"""What cannot even be looked at (ENOTCONN, EIO, ESTALE of a stat) is not absent: nothing is removed, given up
or taken for done by that.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from semishared.disk import recovery
from semishared.errors import SemisharedError, UnknownHistory
from semishared.front import vm_location
from semishared.model import steps as s
from semishared.model.disk import names as disk_names
from semishared.model.share import names as share_names
from semishared.model.share.share import Tree
from semishared.model.store import dir_names
from semishared.opennebula.args import VmPlace
from semishared.share.plain import Directories
from semishared.store.dir import clones, content, upload
from semishared.store.dir.image import Stored
from semishared.tools import files
from tools.test_commit import active, attach, kept
from tools.test_left_begun import Begun
from tools.unreadable import dead
from tools.world import MiB, World, make_image, qemu_io


def written(world: World) -> tuple[s.ImageRef, s.DiskRef]:
    """Have a diff with something in it that its image has not."""
    image, disk = world.image(), world.disk()
    attach(world, image, disk, seq=1)
    qemu_io(active(disk), "qcow2", "write -P 0x77 3M 64k")
    return image, disk


@pytest.mark.fault(30, "a late removal does not take a VM's history that cannot be looked at for none")
def test_a_late_removal_of_a_vm_whose_history_cannot_be_looked_at(world: World) -> None:
    _, disk = written(world)
    with dead(Path(disk_names.history_note(disk.vm_dir))), pytest.raises(UnknownHistory, match="vm.json"):
        world.on(s.RemoveDisk(disk, str(world.store)), seq=0)
    qemu_io(active(disk), "qcow2", "read -P 0x77 3M 64k")


@pytest.mark.fault(30, "the base of a kept diff that cannot be looked at stays leased, and the diff is named")
def test_the_lease_of_a_kept_diff(world: World) -> None:
    _, disk = written(world)
    world.on(s.RemoveDisk(disk, str(world.store)), seq=1)
    (found,), leases = kept(world), world.leases()
    layer = Path(found["path"], "disk.1.snap/0")
    with dead(layer):
        world.on(s.RemoveVm(disk.vm, disk.vm_dir), seq=1)
        assert leases and world.leases() == leases
        (row,) = kept(world)
        assert row["disk"] == 1 and row["error"]
    qemu_io(str(layer), "qcow2", "read -P 0x77 3M 64k", "read -P 0xa1 1M 64k")


@pytest.mark.fault(
    30, "what a guest that died wrote last is not dropped because its delta cannot be looked at"
)
def test_what_a_guest_that_died_wrote_last(world: World) -> None:
    begun = Begun(world, "older delta")
    with dead(begun.folder / "1000000"), pytest.raises((SemisharedError, OSError)):
        recovery.recover(begun.disk.vm_dir, "")
    with dead(Path(begun.disk.vm_dir, ".semishared/deltas.json")), pytest.raises((SemisharedError, OSError)):
        recovery.recover(begun.disk.vm_dir, "")
    recovery.recover(begun.disk.vm_dir, "")
    begun.check()


@pytest.mark.fault(30, "a decided commit that cannot be looked at is not taken for none")
def test_a_decided_commit(world: World) -> None:
    stored = Stored(world.image().source)
    commit = Path(dir_names.commit(stored.side))
    commit.parent.mkdir(parents=True)
    commit.touch()
    with dead(commit), pytest.raises((SemisharedError, OSError)):
        content.settle(stored)


@pytest.mark.fault(
    30, "a layer that is to be put back and cannot be looked at is not taken for one that is gone"
)
def test_a_layer_that_is_to_be_put_back_on_a_store(world: World) -> None:
    stored = Stored(world.image().source)
    clone = stored.clone(5, 1)
    folder = Path(disk_names.layers(clone))
    folder.mkdir(parents=True)
    for name in ("0", "1"):
        make_image(folder / name, "qcow2", MiB)
    note = Path(dir_names.pull_note(str(folder)))
    note.write_text(json.dumps({"version": 1, "layer": "1", "below": "0", "format": "qcow2"}))
    with dead(folder / "1"), pytest.raises((SemisharedError, OSError)):
        clones.put_back(stored, clone)
    assert note.exists()
    clones.put_back(stored, clone)
    assert not note.exists()


@pytest.mark.fault(
    30, "the clones of an image that cannot be looked at do not go with what a killed upload has left"
)
def test_the_clones_of_an_image_that_an_upload_was_killed_over(world: World) -> None:
    name = "ab" * 16
    image = world.image(name)
    side, uploads = world.store / ".semishared", world.store / ".semishared/.uploads"
    (uploads / name).mkdir(parents=True)
    (side / name / "clones").mkdir(parents=True)
    with dead(Path(image.source)):
        upload.sweep(str(world.store), str(side), str(uploads))
    assert not (uploads / name).exists() and (side / name / "clones").exists()


@pytest.mark.fault(
    30, "a stopped VM whose directory cannot be looked at is where it is, not on its last host"
)
def test_where_a_stopped_vm_is(tmp_path: Path) -> None:
    path = tmp_path / "101/5"
    path.parent.mkdir()
    path.touch()
    place = VmPlace("h1.example", str(path), 5)
    with dead(path):
        assert vm_location.source_of_copy(place, "h1.example") == "localhost"
        assert vm_location.source_of_copy(VmPlace("localhost", str(path), 5), "h1.example") == "localhost"
        assert vm_location.is_on_front_end(str(path))
    path.unlink()
    assert vm_location.source_of_copy(
        place, "h1.example"
    ) == "h1.example" and not vm_location.is_on_front_end(str(path))


@pytest.mark.fault(30, "the tree of a share that cannot be looked at is not taken for removed")
def test_the_tree_of_a_share_that_is_removed(tmp_path: Path) -> None:
    tree: Any = Directories(Tree("plain", str(tmp_path), "0123456789abcdef" * 2))
    path = tmp_path / share_names.tree(7)
    path.touch()
    with dead(path), pytest.raises((SemisharedError, OSError)):
        tree.remove(7)
    assert path.exists()


@pytest.mark.fault(30, "absence is what ENOENT and ENOTDIR say, and no other error")
def test_absence_is_enoent_alone(tmp_path: Path) -> None:
    there, gone = tmp_path / "there", tmp_path / "gone"
    there.touch()
    os.symlink(gone, tmp_path / "link")
    os.symlink("loop", tmp_path / "loop")
    assert (
        not files.is_absent(str(there)) and files.is_absent(str(gone)) and files.is_absent(f"{there}/below")
    )
    assert not files.is_absent(f"{tmp_path}/link") and files.is_absent(f"{tmp_path}/link", follow=True)
    assert not files.is_absent(f"{tmp_path}/loop", follow=True)
    with dead(there):
        assert not files.is_absent(str(there)) and files.exists(str(there)) and not os.path.exists(there)
