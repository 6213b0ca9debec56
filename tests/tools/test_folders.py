# SPDX-License-Identifier: Apache-2.0
"""One folder, placed, filled, listed, published and removed by the same calls: on the host's own disk, and on
a device.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semishared.device import devices, folders
from semishared.disk import on_devices
from semishared.errors import CannotMove, DeviceMissing, NoDeviceOfClass, UnexpectedLink
from semishared.model.base import names as base_names
from semishared.model.device.classes import Want
from tools.test_pool import Pool, device_of
from tools.world import MiB, World


@pytest.mark.parametrize("has_pool", [False, True], ids=["own disk", "devices"])
def test_a_folder_is_used_alike_wherever_it_lies(world: World, pool: Pool, has_pool: bool) -> None:
    if has_pool:
        pool.set()
    root, disk = str(world.root), world.disk()
    os.makedirs(disk.vm_dir)
    os.makedirs(base_names.bases(root))
    space = devices.lasting(root)
    assert [bool(device.uuid) for device in space] == ([True] * 3 if has_pool else [False])

    layers = on_devices.place(disk.vm_dir, disk.vm, disk.disk, MiB)
    staged_layer = layers.staged("disk.1")
    Path(staged_layer).touch()
    os.makedirs(layers.path, exist_ok=True)
    os.rename(staged_layer, f"{layers.path}/0")
    assert folders.at(layers.path).listed("they") == ["0"] == os.listdir(layers.real())
    assert bool(layers.uuid) == has_pool == (device_of(layers.path) == layers.mount())
    assert not (layers.is_away() or layers.fails()) and on_devices.members(disk.vm_dir)
    layers.give_up()
    assert os.path.exists(layers.path), "it is not empty"

    folders.stage(root, "100-7", MiB, near=layers.device)
    staged = folders.at(base_names.staging(root, "100-7"))
    os.makedirs(f"{staged.path}/leases")
    staged.clear()
    folders.stage(root, "100-7")
    os.makedirs(f"{staged.path}/leases")
    staged.publish(base_names.base(root, "100-7-0"))
    base = folders.at(base_names.base(root, "100-7-0"))
    assert base.listed("it") == ["leases"] and bool(base.uuid) == has_pool
    assert not os.path.lexists(staged.path)
    base.refuse_link()

    for folder in (layers, base):
        folder.remove()
        assert not os.path.lexists(folder.path)
    assert not pool.layers() and not list(folders.unlinked(str(world.location)))


def test_what_only_a_device_can_do_is_refused_on_the_own_disk(world: World, pool: Pool) -> None:
    disk = world.disk()
    os.makedirs(disk.vm_dir)
    with pytest.raises(CannotMove, match="stays here"):
        folders.at(f"{disk.path}.snap").to_move("it stays here")
    with pytest.raises(NoDeviceOfClass):
        on_devices.place(disk.vm_dir, disk.vm, disk.disk, MiB, want=Want(("fast",), MiB))
    assert on_devices.place(disk.vm_dir, disk.vm, disk.disk, MiB, want=Want(("ram", "any"), MiB)).uuid == ""
    os.symlink("/", f"{disk.path}.snap")
    with pytest.raises(UnexpectedLink):
        folders.at(f"{disk.path}.snap").refuse_link()
    folders.remove(f"{disk.path}.snap")
    assert os.path.islink(f"{disk.path}.snap"), "no link that leads elsewhere is followed, or removed"
    os.unlink(f"{disk.path}.snap")
    pool.set()
    link = on_devices.place(disk.vm_dir, disk.vm, disk.disk, MiB)
    os.unlink(link.device)
    with pytest.raises(DeviceMissing, match="the layers"):
        folders.at(link.path).require("the layers")
    assert on_devices.is_away(disk.path) and folders.at(link.path).fails()
