# SPDX-License-Identifier: Apache-2.0
"""A device of a host's pool that is gone, or is going: it costs the VMs whose layers it has, and no others."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Iterator

import pytest

from semishared.config import Config
from semishared.errors import DeviceMissing, SemisharedError
from semishared.model import steps as s
from semishared.vmm import records as vmm_records
from semishared.wire.session import Session
from tools.test_pool import Pool, device_of
from tools.world import MiB, World, qemu_io


@pytest.fixture
def pool(world: World) -> Iterator[Pool]:
    made = Pool(world)
    try:
        yield made
    finally:
        made.close()


def uuid_of(root: Path, path: str) -> str:
    return next(entry.name for entry in (root / "devices").iterdir() if os.readlink(entry) == f"{path}/.semishared")



def apart(world: World, pool: Pool) -> "tuple[s.ImageRef, str]":
    """Make a disk of VM 5 over a base on another device; return the image, and on which device the base lies."""
    image = world.image(size=4 * MiB)
    world.clone(image, world.disk(6))
    lost = device_of(world.bases()[0])
    filler = Path(lost, "filler")
    filler.write_bytes(b"x" * (pool.sizes[[str(path) for path in pool.paths].index(lost)] // 2 * MiB))
    world.clone(image, world.disk())
    assert device_of(f"{world.disk().path}.snap") != lost, "it is too full"
    filler.unlink()
    qemu_io(world.disk().path, "qcow2", "write -P 0x31 2M 64k")
    return image, lost


def about_to_boot(world: World, vm: int = 5) -> "list[str]":
    """Do what `tm/context` does before each boot; return the warnings."""
    with Session("localhost", "context", Config()) as session:
        session.run([s.PrepareVm(vm, world.disk(vm).vm_dir), s.ReplaceLostBases(vm, world.disk(vm).vm_dir)])
        return list(session.warnings)


def can_boot(world: World, vm: int = 5) -> None:
    """See what `vmm/deploy` sees of a disk; raise as it does."""
    directory = world.disk(vm).vm_dir
    for record in vmm_records.read_records(directory, [1]):
        vmm_records.check_disk(directory, record)
        vmm_records.read_chain(record.path, record)


def test_a_disk_whose_base_was_on_a_lost_device_boots_over_the_same_base_from_the_store(world: World, pool: Pool) -> None:
    pool.set()
    image, lost = apart(world, pool)
    subprocess.run(["umount", "-l", lost], check=True)
    with pytest.raises(DeviceMissing, match=f"the base of disk.1: on the device {lost} "):
        can_boot(world)
    assert about_to_boot(world) == []
    can_boot(world)
    (base,) = world.bases()
    assert device_of(base) != lost and os.listdir(lost) == []
    qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k")
    qemu_io(world.disk().path, "qcow2", "read -P 0x31 2M 64k")
    assert not pool.leftovers()
    assert about_to_boot(world) == [] and about_to_boot(world, 6) == [], "of a VM whose own layers are gone nothing is fetched"
    with pytest.raises(DeviceMissing, match=f"the layers of disk.1: on the device {lost} "):
        can_boot(world, 6)


def test_a_base_that_nobody_has_any_more_is_lost_with_its_device(world: World, pool: Pool) -> None:
    pool.set()
    image, lost = apart(world, pool)
    subprocess.run(["umount", "-l", lost], check=True)
    qemu_io(image.source, "raw", "write -P 0x99 0 64k")
    (said,) = about_to_boot(world)
    assert said.startswith("the base of disk 1 lay on a device that is not there, and cannot be had again: "), said
    with pytest.raises(DeviceMissing, match=f"the base of disk.1: on the device {lost} "):
        can_boot(world)
    assert os.listdir(lost) == [] and not pool.leftovers()


def test_replacing_a_lost_base_killed_at_every_point_and_done_again(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.set()
    _, lost = apart(world, pool)
    subprocess.run(["umount", "-l", lost], check=True)
    uuid = uuid_of(world.root, lost)
    for number in range(1, 60):
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(number))
        try:
            about_to_boot(world)
            break
        except SemisharedError:
            pass
        finally:
            monkeypatch.delenv("SEMISHARED_KILL_AT")
        assert about_to_boot(world) == []
        can_boot(world)
        qemu_io(world.disk().path, "qcow2", "read -P 0xa1 1M 64k")
        for left in pool.leftovers():
            assert os.path.dirname(left).endswith("/staging") and not os.path.exists(left), f"killed at {number}: a link is left, for gc"
            os.unlink(left)
        # As it was: its link leads to the lost device again.
        (base,) = world.bases()
        shutil.rmtree(os.path.realpath(base))
        base.unlink()
        base.symlink_to(f"../devices/{uuid}/bases/{base.name}")
    assert 5 < number < 59
