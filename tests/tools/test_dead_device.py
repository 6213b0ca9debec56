# SPDX-License-Identifier: Apache-2.0
"""A device of a host's pool that has died for good: let go of when no disk needs it, also with another one in
its place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from semishared.errors import DeviceMissing, NotOwner, SemisharedError
from semishared.host import probe
from semishared.model import steps as s
from semishared.model.base import names as base_names
from semishared.model.device import names as device_names
from semishared.model.disk.commit_steps import CreateDiff, FinishDisk
from semishared.plan.device import choose as plan
from semishared.tools import locks
from tools.test_lost_device import about_to_boot, apart, can_boot
from tools.test_pool import Pool, device_of
from tools.world import MiB, World, qemu_io


def die(path: object) -> None:
    subprocess.run(["umount", "-l", str(path)], check=True)


def replace(pool: Pool, path: Path) -> None:
    """Mount another one in the place of a device that has died."""
    die(path)
    pool.mount(path, pool.sizes[pool.paths.index(path)])


def is_well(world: World, pool: Pool, *paths: object) -> bool:
    """Tell whether the host is as it is to be with these devices: to its monitoring, and to `pool check`."""
    declared = [plan.Declared(str(path)) for path in paths]
    wrong = plan.differences(declared, pool.devices())
    return not wrong and 'HEALTH = "OK"' in probe.report(str(world.location))


def links(world: World, part: str) -> list[Path]:
    return (
        [path for path in (world.root / part).iterdir() if path.is_symlink()]
        if (world.root / part).is_dir()
        else []
    )


def test_one_that_held_nothing_is_let_go_of_and_taken_again_when_it_is_back(world: World, pool: Pool) -> None:
    pool.set()
    dead, left = pool.paths[0], list(map(str, pool.paths[1:]))
    uuid = pool.rows()[str(dead)]["uuid"]
    subprocess.run(["mount", "--move", str(dead), pool.aside()], check=True)
    assert f"device {dead} is not there" in probe.report(str(world.location))
    assert pool.set(*left) == {"labelled": [], "closed": [], "gone": [str(dead)]}
    assert is_well(world, pool, *left) and len(list((world.root / "devices").iterdir())) == 4
    subprocess.run(["mount", "--move", pool.aside(), str(dead)], check=True)
    assert is_well(world, pool, *left), "it has an owner, who has let go of it"
    assert pool.set()["labelled"] == [str(dead)]
    assert pool.rows()[str(dead)]["uuid"] == uuid and is_well(world, pool, *pool.paths)


def test_another_one_in_its_place_is_all_that_is_left_once_its_vms_are_deleted(
    world: World, pool: Pool
) -> None:
    pool.set()
    world.clone(world.image(), world.disk())
    dead = Path(device_of(f"{world.disk().path}.snap"))
    was = pool.rows()[str(dead)]["uuid"]
    replace(pool, dead)
    assert pool.set() == {"labelled": [str(dead)], "closed": [str(dead)], "gone": []}, "its VM is there"
    assert not is_well(world, pool, *pool.paths)
    world.clone(s.ImageRef(100, 7, "raw", str(world.store / "image")), world.disk(6))
    can_boot(world, 6)
    world.on(s.RemoveVm(5, world.disk().vm_dir))
    assert pool.set() == {"labelled": [], "closed": [], "gone": [str(dead)]}
    assert pool.rows()[str(dead)]["uuid"] != was and is_well(world, pool, *pool.paths)
    can_boot(world, 6)
    assert not pool.leftovers()


def test_a_base_over_which_a_disk_lies_is_waited_for_until_that_has_it_from_elsewhere(
    world: World, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at every point of letting go, too; and not while somebody is about to make a base whose link
    leads there.
    """
    pool.set()
    image, lost = apart(world, pool)
    world.on(s.RemoveVm(6, world.disk(6).vm_dir))
    other = world.image("other", size=4 * MiB)._replace(id=8)
    pool.set(lost)  # the others take nothing, for as long as a disk and its base are made here
    world.clone(other, world.disk(20))
    assert device_of(f"{world.disk(20).path}.snap") == lost
    assert device_of(next(base for base in world.bases() if base.name.startswith("100-8-"))) == lost
    pool.set()
    staging = world.root / "staging" / "100-9"
    uuid = str(pool.rows()[lost]["uuid"])
    staging.parent.mkdir(exist_ok=True)
    staging.symlink_to(device_names.target_of(device_names.Link(uuid, "staging", "100-9")))
    left = [str(path) for path in pool.paths if str(path) != lost]
    die(lost)
    world.on(s.RemoveVm(20, world.disk(20).vm_dir))
    assert pool.set(*left)["closed"] == [lost] and len(links(world, "bases")) == 2, (
        "VM 5 would miss one of them"
    )
    assert about_to_boot(world) == []
    can_boot(world)
    with locks.exclusive(base_names.image_lock(str(world.root), "100-9"), 1):
        assert pool.set(*left)["closed"] == [lost] and [path.name for path in links(world, "staging")] == [
            "100-9"
        ]
    assert f"device {lost} is not there" in probe.report(str(world.location))
    for at in range(1, 30):
        monkeypatch.setenv("SEMISHARED_KILL_AT", str(at))
        try:
            done = pool.set(*left)
            break
        except SemisharedError:
            pass
        finally:
            monkeypatch.delenv("SEMISHARED_KILL_AT")
    assert 1 < at < 29 and done["gone"] in ([lost], [])
    assert is_well(world, pool, *left) and not links(world, "staging") and len(links(world, "devices")) == 2
    (base,) = world.bases()
    assert base.name.startswith("100-7-") and device_of(base) in left
    can_boot(world)
    qemu_io(world.disk().path, "qcow2", "read -P 0x31 2M 64k")


def test_what_is_kept_of_a_deleted_vm_is_waited_for_until_it_is_given_up(world: World, pool: Pool) -> None:
    pool.set()
    world.on(s.PrepareVm(9, world.disk(9).vm_dir), CreateDiff(world.disk(9), world.image(), 0, ""))
    qemu_io(f"{world.disk(9).path}.snap/0", "qcow2", "write -P 0x77 2M 64k")
    dead = device_of(f"{world.disk(9).path}.snap")
    left = [str(path) for path in pool.paths if str(path) != dead]
    die(dead)
    world.on(s.RemoveVm(9, world.disk(9).vm_dir))
    (kept,) = world.system.glob(".kept-9-*")
    assert pool.set(*left)["closed"] == [dead], "it may come back"
    shutil.rmtree(kept)
    assert pool.set(*left)["gone"] == [dead] and is_well(world, pool, *left)


def test_what_is_kept_of_a_deleted_vm_is_not_taken_for_gone_since_its_device_is_away(
    world: World, pool: Pool
) -> None:
    """Its image has another VM by now, so that all that is known of it is what lies there."""
    pool.set()
    persistent = world.image()
    world.on(s.PrepareVm(9, world.disk(9).vm_dir), CreateDiff(world.disk(9), persistent, 0, ""))
    qemu_io(f"{world.disk(9).path}.snap/0", "qcow2", "write -P 0x77 2M 64k")
    device = device_of(f"{world.disk(9).path}.snap")
    world.on(
        s.RemoveVm(9, world.disk(9).vm_dir),
        s.PrepareVm(10, world.disk(10).vm_dir),
        CreateDiff(world.disk(10), persistent, 0, ""),
    )
    (kept,) = world.system.glob(".kept-9-*")
    finish = FinishDisk(s.DiskRef(9, 1, str(kept)), "", 0)
    subprocess.run(["mount", "--make-private", device], check=True)
    aside = world.top / "aside"
    aside.mkdir()
    subprocess.run(["mount", "--move", device, str(aside)], check=True)
    with pytest.raises(DeviceMissing, match="the layers of disk.1: on the device"):
        world.on(finish)
    subprocess.run(["mount", "--move", str(aside), device], check=True)
    with pytest.raises(NotOwner):
        world.on(finish)
    qemu_io(kept / "disk.1.snap" / "0", "qcow2", "read -P 0x77 2M 64k")


def test_one_that_is_there_and_not_well_is_not_let_go_of(world: World, pool: Pool) -> None:
    pool.set()
    sick, left = pool.paths[0], list(map(str, pool.paths[1:]))
    subprocess.run(["mount", "-o", "remount,ro", str(sick)], check=True)
    assert pool.set(*left)["closed"] == [str(sick)], "what it has can be read"
    die(sick)
    # Nothing is mounted there, whatever else is wrong.
    sick.rmdir()
    sick.symlink_to(sick)
    assert str(pool.rows()[str(sick)]["state"]).startswith("broken: ")
    assert pool.set(*left)["gone"] == [str(sick)]


def test_one_that_another_host_has_by_now_is_let_go_of(world: World, pool: Pool) -> None:
    pool.set()
    label = pool.paths[0] / ".semishared" / "device.json"
    theirs = label.read_text().replace('"owner": "', '"owner": "0').replace(f"{os.uname().nodename}:", "h9:")
    label.write_text(theirs)
    assert "in the pool of h9" in str(pool.rows()[str(pool.paths[0])]["state"])
    left = list(map(str, pool.paths[1:]))
    assert pool.set(*left)["gone"] == [str(pool.paths[0])] and label.read_text() == theirs
    assert is_well(world, pool, *left)
