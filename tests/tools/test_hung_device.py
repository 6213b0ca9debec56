# SPDX-License-Identifier: Apache-2.0
"""A device of a host's pool that hangs: whoever touches it waits for ever. It costs its own VMs, and nobody else waits with them."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from typing import Iterator

import pytest

from semishared.errors import BadPool, DeviceMissing
from semishared.host import host_probe, vm_sizes
from semishared.model import steps as s
from semishared.model import steps_device as d
from semishared.model.steps_base import ListBases, ReportDisks
from system.test_monitoring import HANG
from tools.test_lost_device import can_boot
from tools.test_pool import Pool, device_of
from tools.world import World, qemu_io

LONG_AGO = (0, 0)
LIMIT_S = 30
"""Seconds for all that is asked while it hangs: twice it is waited for, 8 s each."""


def asked_long_ago(world: World) -> None:
    """Let nobody know any more how the devices answered."""
    for link in (world.root / "devices").iterdir():
        if link.is_symlink():
            os.utime(link, LONG_AGO, follow_symlinks=False)


@contextmanager
def hung(world: World, path: str) -> Iterator[None]:
    """Let everything below `path` hang; none of ours may be left at it when that is over."""
    with subprocess.Popen(["/usr/bin/python3", "-c", HANG, path], stdout=subprocess.PIPE) as server:
        assert server.stdout
        try:
            assert server.stdout.readline() == b"mounted\n"
            asked_long_ago(world)
            yield
        finally:
            server.kill()
            subprocess.run(["umount", "-l", path], check=True)
    asked_long_ago(world)


def test_a_device_that_hangs_costs_its_own_vms_and_nobody_waits_for_it(world: World, pool: Pool) -> None:
    pool.set()
    world.clone(world.image(), world.disk())
    lost = device_of(f"{world.disk().path}.snap")
    qemu_io(world.disk().path, "qcow2", "write -P 0x31 2M 64k")
    number = next(number for number in range(8, 30) if clone_elsewhere(world, number, lost))
    started = time.monotonic()
    with hung(world, lost):
        states = {path: row["state"] for path, row in pool.rows().items()}
        assert states == {str(path): "hung" if str(path) == lost else "" for path in pool.paths}
        # New disks go elsewhere, with a base of their own if theirs is there.
        for vm in (40, 41):
            world.clone(s.ImageRef(100, 7, "raw", str(world.store / "image")), world.disk(vm))
            assert device_of(f"{world.disk(vm).path}.snap") in set(map(str, pool.paths)) - {lost}
            can_boot(world, vm)
        can_boot(world, number)
        with pytest.raises(DeviceMissing, match=f"the layers of disk.1: on the device {lost} of .*, which is hung"):
            can_boot(world)
        world.on(s.AddLayer(world.disk(40), 1, 0, "qcow2"))
        world.on(ReportDisks(str(world.location), (101,)), ListBases(str(world.root)), d.ListHeld(str(world.root)))
        world.on(s.LookAround(str(world.location), (101,), (), libvirt=False))
        assert f"device {lost} is hung" in host_probe.report(str(world.location))
        assert vm_sizes.report(str(world.system)).count("VM = ") >= 3
        with pytest.raises(BadPool, match=f"{lost} on .* is hung: it does not answer"):
            pool.set()
        assert time.monotonic() - started < LIMIT_S
        world.on(s.RemoveVm(41, world.disk(41).vm_dir))
    assert {row["state"] for row in pool.rows().values()} == {""}, "it is back"
    can_boot(world)
    qemu_io(world.disk().path, "qcow2", "read -P 0x31 2M 64k")
    pool.set()
    assert not pool.leftovers()


def clone_elsewhere(world: World, vm: int, lost: str) -> bool:
    """Make a disk of a VM over an image of its own; tell whether neither it nor its base is on that device."""
    world.clone(world.image(f"image{vm}")._replace(id=vm), world.disk(vm))
    (base,) = [base for base in world.bases() if base.name.startswith(f"100-{vm}-")]
    return lost not in (device_of(base), device_of(f"{world.disk(vm).path}.snap"))


def test_a_device_that_is_slow_once_is_asked_again(world: World, pool: Pool) -> None:
    """What puts a device aside is a link: killed or not, whoever looks next makes it what is true."""
    pool.set()
    world.clone(world.image(), world.disk())
    lost = device_of(f"{world.disk().path}.snap")
    (link,) = [link for link in (world.root / "devices").iterdir() if os.readlink(link) == f"{lost}/.semishared"]
    link.unlink()
    link.symlink_to(f"hung:{lost}/.semishared")
    row = pool.rows()[lost]
    assert row["state"] == "hung", "it was asked just now"
    asked_long_ago(world)
    assert pool.rows()[lost]["state"] == "" and os.readlink(link) == f"{lost}/.semishared"
    can_boot(world)
