# SPDX-License-Identifier: Apache-2.0
"""Many VMs at once, to the end of their prolog: warm bases, no guests; against a copy of the image for each
of them.

All of it goes through the simulated oned's driver, in as many threads as install.sh gives the real one. The
copies are `tar | ssh`, as the stock ssh driver makes them, in as many as a stock oned.conf gives; both use
the same two ends of the same disk, and the same cores.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Dict, List, Sequence

import block
from figures import Figure, rounds_within

from lab import Node
from lab.cloud import DATASTORES, STORE, SYSTEM, Cloud
from semishared.install.configuration import STOCK_THREADS

MIB = 256
CASES = {"30 on 2": (30, 2), "100 on 8": (100, 8)}
EXPECTED = {"30 on 2": 6.0, "100 on 8": 6.0}
COPIED = 30
"""Of more copies than that the rate is the same, and the bench as much longer."""


SSHD = """set -eu
kill "$(cat /run/sshd.pid)"
while [ -e /run/sshd.pid ]; do sleep 0.01; done
exec /usr/sbin/sshd -r -f /etc/ssh/sshd_lab -o MaxStartups=200 -o MaxSessions=100
"""
"""By its default it turns some away of more than ten that come at once. Ours come again, a copy does not: it
would fail.
"""


class Rig:
    """The cloud, its image, and VMs without a host, which can have a disk on any."""

    def __init__(self, cloud: Cloud, most: int, mib: int) -> None:
        self.cloud = cloud
        self.settings = cloud.oned.settings
        path = cloud.upload_file("many.img")
        block.fill(path, mib << 20)
        cloud.give(path)
        self.image = cloud.oned.image_create(
            STORE, "many", path=f"/var/tmp/{path.name}", type="OS", prefix="vd"
        )
        path.unlink()
        self.vms = [cloud.create(f"many-{number}", [{"IMAGE_ID": str(self.image)}]) for number in range(most)]

    def transfer(self, vm: int, *lines: str) -> None:
        """Run a transfer file of a VM as one_tm does, when a thread is free."""
        path = f"{self.settings.vms}/{vm}/transfer.0.{lines[0].split()[0].lower()}"
        self.cloud.oned.runner.write(path, "".join(f"{line}\n" for line in lines))
        self.cloud.oned.drivers.transfer(path)

    def place(self, vm: int, host: Node) -> str:
        """Return HOST:VMDIR."""
        return f"{host.name}:{self.settings.location}/{SYSTEM}/{vm}"

    def prolog(self, vm: int, host: Node) -> None:
        """Bring a VM's disk to a host."""
        source = self.cloud.source(self.image)
        self.transfer(
            vm,
            f"CLONE semishared {self.settings.front_end}:{source} {self.place(vm, host)}/disk.0 {vm} {STORE}",
        )

    def epilog(self, vm: int, host: Node) -> None:
        """Take it away again."""
        place = self.place(vm, host)
        self.transfer(
            vm, f"DELETE semishared {place}/disk.0 {vm} {STORE}", f"DELETE semishared {place} {vm} {SYSTEM}"
        )

    def copy(self, number: int, host: Node) -> None:
        """Bring a copy of the image to a host."""
        folder, name = os.path.split(self.cloud.source(self.image))
        target = f"{DATASTORES}/{SYSTEM}/copy-{number}"
        script = f"tar -C {folder} -cSf - {name} | ssh {host.name} 'mkdir {target} && tar -C {target} -xSf -'"
        done = self.cloud.oned.runner.local(
            ["bash", "-o", "pipefail", "-c", script], "", self.settings.environment
        )
        if done.rc:
            raise RuntimeError(done.stderr)
        shutil.rmtree(host.path(target))


def rate(
    work: Callable[[int, Node], None], items: Sequence[int], hosts: Sequence[Node], at_once: int
) -> float:
    """Do `work` for all items, on the hosts in turn, `at_once` at the same time; return how many a minute
    were done.
    """
    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        for _ in pool.map(lambda number: work(items[number], hosts[number % len(hosts)]), range(len(items))):
            pass
    return 60 * len(items) / (time.monotonic() - started)


def many(quick: bool) -> List[Figure]:
    """Measure VMs per minute, in turns with copies."""
    cases = {"6 on 2": (6, 2)} if quick else CASES
    samples: Dict[str, List[float]] = defaultdict(list)
    copies: Dict[str, List[float]] = defaultdict(list)
    with Cloud.up(hosts=max(count for _, count in cases.values())) as cloud:
        for host in cloud.lab.hosts:
            host.run(["sh", "-c", SSHD], user="root")
        rig = Rig(cloud, max(count for count, _ in cases.values()), 64 if quick else MIB)
        for vm, host in zip(rig.vms, cloud.lab.hosts):
            # From now on each host has the base.
            rig.prolog(vm, host)
            rig.epilog(vm, host)
        for name, (count, on) in cases.items():
            vms, hosts = rig.vms[:count], cloud.lab.hosts[:on]
            for _ in rounds_within(70, 2 if quick else 4):
                samples[name].append(rate(rig.prolog, vms, hosts, cloud.oned.settings.tm_threads))
                rate(rig.epilog, vms, hosts, STOCK_THREADS)
                copies[name].append(rate(rig.copy, range(min(count, COPIED)), hosts, STOCK_THREADS))
    return [
        Figure(
            f"many/{name}",
            f"VMs at once from a warm base of {MIB} MiB, {name} hosts, to the end of prolog",
            "VMs/min",
            samples[name],
            f"a copy by `tar | ssh` for each, {STOCK_THREADS} at once",
            copies[name],
            expected=EXPECTED.get(name),
            because="two interpreters and one ssh each, on the cores of one machine, where a copy has all "
            "bytes through a cipher",
        )
        for name in cases
    ]
