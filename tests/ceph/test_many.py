# SPDX-License-Identifier: Apache-2.0
"""Many clones that wait for one base, and what oned's driver has to do meanwhile."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lab import Node, moved
from lab.ceph import Cluster
from lab.cloud import RBD_STORE, SYSTEM, Cloud
from lab.guest import content, serial_xml
from lab.oned.drivers import Call

CLONES = 30
PAUSED = "<!-- lab: paused -->"
MIB = 24
PATIENCE_S = 10


def transfer(cloud: Cloud, vm: int, *lines: str) -> None:
    """Run a transfer of a VM that has no host yet, as oned's driver runs it among all others."""
    path = f"{cloud.oned.settings.vms}/{vm}/transfer.0.{lines[0].split()[0].lower()}"
    cloud.oned.runner.write(path, "".join(f"{line}\n" for line in lines))
    cloud.oned.drivers.transfer(path)


def begun(cloud: Cloud, since: int, action: str) -> list[Call]:
    return [call for call in cloud.oned.calls[since:] if call.action == action]


def there(host: Node) -> int:
    """Return how many sessions wait on a host, or work."""
    return int(host.run(["pgrep", "-fc", "python3 .*hostside"], check=False).stdout)


def test_delete_begins_while_thirty_clones_wait_for_one_base(cloud: Cloud, ceph: Cluster) -> None:
    """A host takes a base from a cluster whose cable is slow; all of the clones end well, with one reading of
    the store.
    """
    image = cloud.data_image("many-cold", os.urandom(MIB << 20), mib=MIB, store=RBD_STORE)
    other = cloud.data_image("many-other", content("base", 0, 64))
    paused: dict[str, Any] = {
        "RAW": {"TYPE": "kvm", "DATA": serial_xml("many-other") + PAUSED},
        "MEMORY": "32",
    }
    leaving = cloud.oned.vm_create({**cloud.template("many-other", [{"IMAGE_ID": str(other)}]), **paused})
    cloud.oned.vm_deploy(leaving, "h1", SYSTEM)
    cloud.oned.vm_poweroff(leaving, hard=True)
    vms = [cloud.create(f"many-{number}", [{"IMAGE_ID": str(image)}]) for number in range(CLONES)]
    host, since = cloud.lab.node("h1"), len(cloud.oned.calls)
    places = {vm: f"h1:{cloud.oned.settings.location}/{SYSTEM}/{vm}" for vm in vms}
    with ThreadPoolExecutor(CLONES + 1) as pool:
        ceph.node.limit(2)
        try:
            waiting = [
                pool.submit(
                    transfer,
                    cloud,
                    vm,
                    f"CLONE semishared fe:{cloud.source(image)} {place}/disk.0 {vm} {RBD_STORE}",
                )
                for vm, place in places.items()
            ]
            limit = time.monotonic() + 60
            while there(host) < min(CLONES, cloud.oned.settings.tm_threads) and time.monotonic() < limit:
                time.sleep(0.5)
            # However long the delete takes on a busy machine, the base takes longer.
            ceph.node.limit(0.2)
            asked = time.monotonic()
            ending = pool.submit(cloud.oned.vm_terminate, leaving)
            while not begun(cloud, since, "delete") and time.monotonic() < asked + PATIENCE_S:
                time.sleep(0.1)
            assert begun(cloud, since, "delete"), (
                f"{CLONES} clones that wait keep a delete waiting for more than {PATIENCE_S} s"
            )
            ending.result(60)
            assert not any(clone.done() for clone in waiting), "so they waited all that time"
        finally:
            ceph.node.limit(None)
        for clone in waiting:
            clone.result(300)
    read = sum(moved.total(call.stderr, "store_read") for call in begun(cloud, since, "clone"))
    assert MIB << 20 <= read < 1.1 * (MIB << 20)
    for vm, place in places.items():
        assert host.path(f"{place.partition(':')[2]}/disk.0").exists()
        transfer(
            cloud,
            vm,
            f"DELETE semishared {place}/disk.0 {vm} {RBD_STORE}",
            f"DELETE semishared {place} {vm} {SYSTEM}",
        )
        cloud.oned.vm_terminate(vm)
    assert cloud.leftovers() == []
