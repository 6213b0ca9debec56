# SPDX-License-Identifier: Apache-2.0
"""A host is evacuated, as `onehost flush` does it: eight VMs, each another mix of disks, move at once while
their guests write and verify.

There and back again twenty times is for `make test-full`; else two of them go once, and a mixed VM in
test_migration.py.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Callable, Dict, List, Sequence, Tuple

import pytest

from lab.cloud import DATASTORES, SYSTEM, Cloud
from lab.domains import names
from lab.guest import LINUX, GuestError, content

KIB = 64
DATA = content("base", 0, KIB)
FORMATS = ("raw", "qcow2")
PLACES: Dict[str, Dict[str, Any]] = {
    "overlay": {},
    "copy": {"SEMISHARED_LOCAL": "copy"},
    "store-clone": {"SEMISHARED_PLACE": "shared"},
    "in-place": {},
}
MIXES: Dict[str, Sequence[str]] = {
    # what a VM boots from, and has two disks more of, one in each format
    "overlays": ("overlay",),
    "snapshots": ("overlay",),
    "copies": ("copy",),
    "volatile": ("copy", "volatile"),
    "clones": ("store-clone",),
    "in-place": ("in-place",),
    "own": ("overlay", "copy", "volatile"),
    "mixed": ("in-place", "overlay", "copy", "store-clone", "volatile"),
}
SOME = ("snapshots", "own")
"""All that does not stay on the store."""
BEFORE_KIB, LOOP_KIB = 8 << 10, 4 << 10
"""Where a guest writes on each disk before it moves, and while it does."""
PER_SECOND = 4
"""Blocks that a guest writes to each of its disks: two cores carry eight guests."""

GOES_ON_S = 120
PIECE = 64 << 12
"""Bytes whose dirty memory QEMU notes at once."""


class Images:
    """What the VMs are made of: images that are not persistent are shared."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._shared: Dict[Tuple[str, str], int] = {}

    def disk(self, place: str, format: str, vm: str) -> Dict[str, str]:
        """Return the disk of a place for a VM; format `os`: the one it boots from."""
        if place == "volatile":
            return {"TYPE": "fs", "SIZE": "16", "FORMAT": format}
        name = f"evacuated-{place}-{format}"
        if place == "in-place":
            return {"IMAGE_ID": str(self._made(f"{name}-{vm}", place, format, persistent=True))}
        if (place, format) not in self._shared:
            self._shared[place, format] = self._made(name, place, format, persistent=False)
        return {"IMAGE_ID": str(self._shared[place, format])}

    def _made(self, name: str, place: str, format: str, persistent: bool) -> int:
        if format == "os":
            return self._cloud.os_image(name, persistent=persistent, **PLACES[place])
        return self._cloud.data_image(name, DATA, format=format, persistent=persistent, **PLACES[place])


class Vm:
    """A VM of one mix, whose guest writes to all of its disks but the one it boots from, and verifies."""

    def __init__(self, cloud: Cloud, mix: str, images: Images) -> None:
        places = MIXES[mix]
        disks = [
            images.disk(places[0], "os", mix),
            *(images.disk(place, format, mix) for place in places for format in FORMATS),
        ]
        self._cloud, self.mix = cloud, mix
        self._written = [f"vd{chr(ord('a') + number)}" for number in range(1, len(disks))]
        self.id = cloud.create(f"evacuated-{mix}", disks)

    def start(self, host: str) -> None:
        """Deploy it and have its guest begin."""
        self._cloud.oned.vm_deploy(self.id, host, SYSTEM)
        guest = self._cloud.guest(self.id, timeout=300)
        for disk in self._written:
            guest.write(disk, "before", BEFORE_KIB, KIB)
        if self.mix == "snapshots":
            for number in range(1, len(self._written) + 1):
                for snapshot in ("one", "two"):
                    self._cloud.oned.disk_snapshot_create(self.id, number, snapshot)
        for disk in self._written:
            guest.loop(disk, f"loop-{disk}", LOOP_KIB, 2 << 10, PER_SECOND)

    def move(self, host: str) -> None:
        """Move it, and see that its guest goes on on each disk."""
        self._cloud.oned.vm_migrate(self.id, host, how="live")
        guest = self._cloud.guest(self.id, timeout=300)
        arrived = {disk: guest.loop_stat(disk) for disk in self._written}
        for disk in self._written:
            deadline = time.monotonic() + GOES_ON_S
            while (now := guest.loop_stat(disk))["writes"] == arrived[disk]["writes"]:
                assert time.monotonic() < deadline, (self.mix, disk, now)
                time.sleep(0.2)
            self._is_well(disk, now)

    def end(self) -> None:
        """See that the guest has all that it has ever written, and remove the VM."""
        guest = self._cloud.guest(self.id)
        for disk in self._written:
            counts = guest.loop_stop(disk)
            self._is_well(disk, counts)
            assert counts["writes"] > 10
            guest.check(disk, "before", BEFORE_KIB, KIB)
        self._cloud.terminate(self.id)

    def _is_well(self, disk: str, counts: Dict[str, int]) -> None:
        assert (counts["errors"], counts["mismatches"]) == (0, 0), (self.mix, disk, counts)


def at_once(work: Callable[[Vm], None], vms: List[Vm]) -> None:
    """Do `work` for all VMs at the same time; raise what the first that failed raised."""
    with ThreadPoolExecutor(len(vms)) as pool:
        list(pool.map(work, vms))


def is_empty(cloud: Cloud, host: str) -> None:
    """See that nothing of any VM is left on a host."""
    node = cloud.lab.node(host)
    assert node.run(["virsh", "-q", "-c", "qemu:///system", "list", "--all", "--name"]).stdout.split() == []
    assert [name for name in cloud.files(node, f"{DATASTORES}/{SYSTEM}") if not name.startswith(".m")] == []


@pytest.mark.parametrize(
    ("mixes", "turns"), [(SOME, 1), pytest.param(tuple(MIXES), 20, marks=pytest.mark.long)]
)
def test_evacuated_host_gives_its_vms_away_and_gets_them_back(
    cloud: Cloud, mixes: Sequence[str], turns: int
) -> None:
    images = Images(cloud)
    vms = [Vm(cloud, mix, images) for mix in mixes]
    at_once(lambda vm: vm.start("h1"), vms)
    found = []
    for _ in range(turns):
        for host, left in (("h2", "h1"), ("h1", "h2")):
            at_once(partial(Vm.move, host=host), vms)
            is_empty(cloud, left)
        found.append([cloud.files(cloud.lab.node("h1"), cloud.vm_dir(vm.id)) for vm in vms])
    # A plain file becomes a layer when it moves first; nothing is added by the moves that follow.
    assert found == found[:1] * turns
    assert not [name for files in found[0] for name in files if "1000000" in name or "go-over" in name]
    for vm in vms:
        vm.end()
    assert cloud.leftovers() == []


def test_memory_that_a_guest_writes_while_it_moves_goes_with_it(cloud: Cloud) -> None:
    """If not, then by QEMU (lab/cloud.odd_memory): its kernel panics there, or it takes what it has written
    before for lost.

    That does not happen at each move, so QEMU is asked how much memory it gives the guest, too.
    """
    vm = cloud.deploy("remembers", [{"IMAGE_ID": str(cloud.os_image("remembers"))}])
    size = '{"execute":"query-memory-size-summary"}'
    argv = ["virsh", "-q", "-c", "qemu:///system", "qemu-monitor-command", cloud.oned.vm(vm).deploy_id, size]
    given = json.loads(cloud.lab.node("h1").run(argv).stdout)["return"]["base-memory"]
    assert cloud.lab.virt == "kvm" or given % PIECE
    cloud.guest(vm).loop_memory(64, 400)
    for host in ("h2", "h1"):
        cloud.oned.vm_migrate(vm, host, how="live")
    counts = cloud.guest(vm).loop_stop("memory")
    assert (counts["errors"], counts["mismatches"]) == (0, 0) and counts["writes"] > 10, counts
    cloud.terminate(vm)


def test_guest_that_panics_does_not_begin_anew_and_its_console_says_why(cloud: Cloud) -> None:
    vm = cloud.deploy("panics", [{"IMAGE_ID": str(cloud.os_image("panics", system=LINUX))}])
    guest = cloud.guest(vm)
    with pytest.raises(GuestError):
        guest.run("echo c >/proc/sysrq-trigger", timeout=20)
    until_gone(cloud, vm)
    with pytest.raises(
        GuestError, match="console on h1: .*Kernel panic - not syncing: sysrq triggered crash"
    ):
        guest.wait_up(1)
    cloud.oned.vm_recover(vm, "delete")


def until_gone(cloud: Cloud, vm: int) -> None:
    """Wait until the host of a VM has its domain no more."""
    deadline = time.monotonic() + GOES_ON_S
    record = cloud.oned.vm(vm)
    while record.deploy_id in names(cloud.lab.node(record.last.host.name)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
