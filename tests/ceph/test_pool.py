# SPDX-License-Identifier: Apache-2.0
"""Disks of images on Ceph on a pool of devices: what is done to a running VM finds them there, and its devices are emptied and evened out.

The same with mounted stores: tests/pool, whose steps these are.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from lab.cloud import DATASTORES, RECORDS, SYSTEM, Cloud
from pool.conftest import COMMAND, DEVICES
from pool.devices import Disk
from pool.test_pool import (
    PATHS,
    SLOW,
    Mixed,
    attached_and_detached,
    layers,
    of_pool,
    said,
    target,
    while_it_runs,
)
from pool.test_running import moved

REMOTE = "lies over .* on the network: it moves while its VM is off"


@pytest.fixture()
def devices(cloud: Cloud, tmp_path: Path) -> Iterator[None]:
    """Give both hosts pools, and take them away with all that is of them: the other tests here have none."""
    disks = []
    try:
        for host, paths in PATHS.items():
            disks += [Disk(cloud.lab.node(host), path, mib, tmp_path) for path, mib in zip(paths, DEVICES.values())]
            cloud.oned.host_update(cloud.oned.host(host).id, {"SEMISHARED_POOL": " ".join(paths)})
        said(cloud, "pool", "add", "h1,h2")
        yield
    finally:
        cloud.delete_all()
        for host in cloud.lab.hosts:
            cloud.oned.host(host.name).template.pop("SEMISHARED_POOL", None)
            host.run(["rm", "-rf", *(f"{DATASTORES}/{RECORDS}/{name}" for name in ("bases", "staging", "devices"))], user="root")
        for key in SLOW:
            cloud.oned.datastores[SYSTEM].template.pop(key, None)
        for disk in disks:
            disk.close()


def emptied(mixed: Mixed, host: str, stays: Collection[int] = ()) -> None:
    """Drain each device of a host in turn, and take it back: each disk moves, but for those that have to stay, and it is said why."""
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


def test_disks_of_images_on_ceph_are_emptied_from_devices_under_their_guest_and_while_it_is_off(cloud: Cloud, devices: None) -> None:
    mixed = Mixed(cloud, ("rbd",))
    guest, remote = cloud.guest(mixed.vm), mixed.numbers["remote-first", "rbd"]
    mixed.lies_on("h1")
    mixed.write("one")
    for disk in mixed.of_images:
        guest.loop(target(disk), f"loop-{disk}", 4096, 4096, 2)
    while_it_runs(mixed)
    attached_and_detached(mixed)
    emptied(mixed, "h1", stays=[remote])
    for disk in mixed.of_images:
        counts = guest.loop_stop(target(disk))
        assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, (disk, counts)
    mixed.oned.vm_poweroff(mixed.vm, hard=True)
    emptied(mixed, "h1")
    moved(cloud, "rebalance", "h1")
    assert of_pool(cloud) == []
    cloud.lab.fe.run([COMMAND, "gc", "--now"], timeout=120)
    mixed.oned.vm_resume(mixed.vm)
    mixed.check("one")
    cloud.terminate(mixed.vm)
    assert [layers(node) for node in cloud.lab.hosts] == [[], []]
    assert cloud.leftovers() == [] and cloud.left_in_pool() == []
    mixed.check_stored("one")
