# SPDX-License-Identifier: Apache-2.0
"""Disks of images on Ceph on a pool of devices: all that is done to a VM finds them there, and its devices
are emptied and evened out.

The same with mounted stores: tests/pool, whose steps these are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Callable

import pytest

from lab.cloud import DATASTORES, RECORDS, SYSTEM, Cloud
from lab.oned import ActionFailed
from pool.conftest import COMMAND, DEVICES
from pool.devices import Disk
from pool.test_pool import (
    KIB,
    OTHER_SYSTEM,
    PATHS,
    SCRATCH,
    SLOW,
    Mixed,
    attached_and_detached,
    device_of,
    layers,
    moved_while_it_runs,
    of_pool,
    said,
    saved_and_moved,
    taken_back_from_a_backup,
    target,
    while_it_is_off,
    while_it_runs,
)
from pool.test_running import moved
from system.test_migration import in_its_midst

PLACES = ("overlay", "copy", "remote-first", "diff")
REMOTE = "lies over .* on the network: it moves while its VM is off"


@pytest.fixture()
def devices(cloud: Cloud, tmp_path: Path) -> Iterator[None]:
    """Give both hosts pools, and take them away with all that is of them: the other tests here have none."""
    disks = []
    try:
        for host, paths in PATHS.items():
            disks += [
                Disk(cloud.lab.node(host), path, mib, tmp_path) for path, mib in zip(paths, DEVICES.values())
            ]
            cloud.oned.host_update(cloud.oned.host(host).id, {"SEMISHARED_POOL": " ".join(paths)})
        said(cloud, "pool", "add", "h1,h2")
        yield
    finally:
        cloud.delete_all()
        for node in cloud.lab.hosts:
            cloud.oned.host(node.name).template.pop("SEMISHARED_POOL", None)
            node.run(
                [
                    "rm",
                    "-rf",
                    *(f"{DATASTORES}/{RECORDS}/{name}" for name in ("bases", "staging", "devices")),
                ],
                user="root",
            )
        for key in SLOW:
            cloud.oned.datastores[SYSTEM].template.pop(key, None)
        for disk in disks:
            disk.close()


def emptied(mixed: Mixed, host: str, stays: Collection[int] = ()) -> None:
    """Drain each device of a host in turn, and take it back: each disk moves, but for those that have to
    stay, and it is said why.
    """
    cloud, seen = mixed.cloud, set()
    for path in PATHS[host]:
        rows = said(cloud, "status", f"vm:{mixed.vm}")["disks"]
        there = {row["disk"] for row in rows if row["device"] == path}
        left = bool(there & set(stays))
        summary, _ = moved(cloud, "drain", host, path, "--rate", "100M", code=int(left))
        found = {row["disk"]: row for row in summary["rows"] if row["vm"] == mixed.vm}
        assert set(found) == there and summary["empty"] is not left
        assert {row["how"] for row in summary["rows"] if row["disk"] not in stays} <= {"moved"}, summary
        for row in (found[disk] for disk in there & set(stays)):
            assert (row["how"], row["id"]) == ("failed", "SS164") and re.search(REMOTE, row["why"]), row
        said(cloud, "pool", "add", host)
        seen |= there
    assert seen == mixed.own
    mixed.lies_on(host)


@contextmanager
def full(cloud: Cloud, host: str) -> Iterator[None]:
    """Let no device of a host have room."""
    with ExitStack() as stack:
        for path in PATHS[host]:
            filler = cloud.lab.node(host).path(f"{path}/filler")
            stat = os.statvfs(filler.parent)
            with filler.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, stat.f_bavail * stat.f_frsize - (1 << 20))
            stack.callback(filler.unlink)
        yield


def stays_while_it_runs(mixed: Mixed) -> None:
    """See that it stays on its devices where it cannot move live, and that nothing is left on those it was to
    have.
    """
    cloud, vm = mixed.cloud, mixed.vm
    with full(cloud, "h2"), pytest.raises(ActionFailed, match="no space for .* in the pool of h2"):
        mixed.oned.vm_migrate(vm, "h2", how="live")
    with pytest.raises(ActionFailed, match=r"disk \d+ \(remote-first\) reads from Ceph"):
        mixed.oned.vm_migrate(vm, "h1", OTHER_SYSTEM, how="live")
    in_its_midst(
        cloud,
        vm,
        lambda: cloud.lab.node("h1").run(["virsh", "-c", "qemu:///system", "domjobabort", f"one-{vm}"]),
    )
    assert mixed.oned.state(vm) == ("ACTIVE", 3)
    assert cloud.files(cloud.lab.node("h2"), cloud.vm_dir(vm)) == []
    assert cloud.files(cloud.lab.node("h1"), f"{DATASTORES}/{OTHER_SYSTEM}/{vm}") == []
    mixed.lies_on("h1")


def stays_while_it_is_off(mixed: Mixed) -> None:
    """See that it stays on its devices where there is no room for it to move to, and moves when there is."""
    with full(mixed.cloud, "h1"), pytest.raises(ActionFailed, match="no space for .* in the pool of h1"):
        mixed.oned.vm_migrate(mixed.vm, "h1", SYSTEM)
    assert layers(mixed.cloud.lab.node("h1")) == []
    mixed.oned.vm_recover(mixed.vm, "retry")
    mixed.lies_on("h1")


def let_go_while_it_runs(mixed: Mixed) -> None:
    """Start it with two more disks that read from Ceph: one is detached, the other lets go, and moves under
    its guest from then on.
    """
    cloud, vm = mixed.cloud, mixed.vm
    mixed.oned.vm_poweroff(vm, hard=True)
    disks = [mixed.oned.disk_attach(vm, mixed.images["remote-first", "rbd"]) for _ in range(2)]
    mixed.oned.vm_resume(vm)
    gone, stays = (target(len(mixed.numbers) + number) for number in (1, 2))
    guest = cloud.guest(vm)
    guest.check(gone, "base", 0, KIB)
    mixed.oned.disk_detach(vm, disks[0])
    guest.wait_disk(gone, present=False)
    mixed.own.add(disks[1])
    mixed.lies_on("h2")
    guest.loop(stays, "loop", 4096, 4096, 20)
    assert mixed.let_go() == disks[1:]
    path = device_of(cloud, vm, disks[1])
    summary, _ = moved(cloud, "drain", "h2", path, "--rate", "100M")
    assert summary["empty"] is True and {row["how"] for row in summary["rows"]} == {"moved"}, summary
    said(cloud, "pool", "add", "h2")
    assert device_of(cloud, vm, disks[1]) != path
    mixed.lies_on("h2")
    counts = guest.loop_stop(stays)
    assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, counts
    guest.check(stays, "base", 0, KIB)


def test_a_vm_of_images_on_ceph_through_all_that_is_done_to_it_on_a_pool(
    cloud: Cloud, devices: None, cell: Callable[..., None]
) -> None:
    mixed = Mixed(cloud, ("rbd",))
    guest = cloud.guest(mixed.vm)
    mixed.lies_on("h1")
    assert [cloud.limits(mixed.vm, target(disk)) for disk in mixed.of_images] == [SCRATCH] * len(PLACES)
    mixed.write("one")
    for disk in mixed.of_images:
        guest.loop(target(disk), f"loop-{disk}", 4096, 4096, 2)
    while_it_runs(mixed)
    attached_and_detached(mixed)
    emptied(mixed, "h1", stays=[mixed.numbers["remote-first", "rbd"]])
    stays_while_it_runs(mixed)
    moved_while_it_runs(mixed, (("h2", SYSTEM), ("h1", SYSTEM)))
    guest = cloud.guest(mixed.vm)
    for disk in mixed.of_images:
        counts = guest.loop_stop(target(disk))
        assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, (disk, counts)
    saved_and_moved(mixed)
    mixed.oned.vm_poweroff(mixed.vm, hard=True)
    emptied(mixed, "h2")
    moved(cloud, "rebalance", "h2")
    stays_while_it_is_off(mixed)
    while_it_is_off(mixed)
    taken_back_from_a_backup(mixed)
    let_go_while_it_runs(mixed)
    assert of_pool(cloud) == []
    cloud.lab.fe.run([COMMAND, "gc", "--now"], timeout=120)
    mixed.check("three")
    cloud.terminate(mixed.vm)
    assert [layers(node) for node in cloud.lab.hosts] == [[], []]
    assert cloud.leftovers() == [] and cloud.left_in_pool() == []
    mixed.check_stored("three")
    ours = PLACES[:-1]
    cell(
        ("clone", "delete", "limit", "resize", "backup", "cpds", "snap_create", "snap_delete"),
        PLACES,
        "rbd",
        "off",
        "pool",
    )
    cell(
        ("clone", "delete", "resize", "backup", "cpds", "snap_create", "snap_delete"),
        PLACES,
        "rbd",
        "live",
        "pool",
    )
    cell("limit", [place for place in PLACES if place != "remote-first"], "rbd", "live", "pool")
    cell(("mv", "restore", "snap_revert"), PLACES, "rbd", "off", "pool")
    cell("migrate", PLACES, "rbd", "live", "pool")
    cell("cpds-snapshot", ours, "rbd", ("off", "live"), "pool")
    cell("detach", "remote-first", "rbd", ("off", "live"), "pool")
