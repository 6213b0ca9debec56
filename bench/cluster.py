# SPDX-License-Identifier: Apache-2.0
"""A virtual cluster from one image on Ceph: its VMs boot over that image, and let go of it while they run.

What they bring back is in commits.py.

On hosts of a lab, 1, 2, 4 and 8 VMs at once: seconds and bytes read from the pool for each phase. A line through 1, 2 and 4 must
predict 8 before anybody draws it further. Every guest reads WORKING_SET_MIB of its disk, as a system does that boots.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Callable, Dict, List, Sequence, Tuple

import rates
from block import Disk, MiB
from figures import Figure, median, rounds_within

from lab.cloud import RBD_STORE, SYSTEM, Cloud

HOSTS = 2
COUNTS = (1, 2, 4, 8)
FITTED = (1, 2, 4)
DATA_MIB, SIZE_MIB = 256, 1024
WORKING_SET_MIB = 32
PER_SECOND = 50
"""Blocks of 64 KiB that a guest writes while it is detached."""
RAW = "/var/tmp/bench-raw"

Samples = Dict[Tuple[str, str], List[float]]


def image(cloud: Cloud, name: str, persistent: bool = False, **attributes: str) -> int:
    """Upload an image to the pool whose first DATA_MIB are incompressible."""
    path = cloud.upload_file(f"{name}.img")
    with path.open("wb") as file:
        for _ in range(DATA_MIB // 16):
            file.write(os.urandom(16 << 20))
        file.truncate(SIZE_MIB << 20)
    cloud.give(path)
    found = cloud.oned.image_create(
        RBD_STORE, name, path=f"/var/tmp/{path.name}", type="DATABLOCK", persistent=persistent, prefix="vd", attributes=attributes
    )
    path.unlink()
    return found


def at_once(works: Sequence[Callable[[], object]]) -> float:
    """Do all of it at once; return the seconds until the last has ended, raise what the first that failed has raised."""
    failed: List[BaseException] = []

    def do(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - of another thread: told to whoever waits
            failed.append(e)

    threads = [threading.Thread(target=do, args=(work,)) for work in works]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return time.monotonic() - started


class Rig:
    """A cloud whose VMs boot from a file of their host and have one disk from the pool."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        self.system = cloud.os_image()
        self.vms: List[int] = []

    def _read(self) -> float:
        return self.cloud.lab.ceph.bytes_read() / MiB

    def create(self, images: Sequence[int]) -> None:
        """Create a VM for each image."""
        self.vms = [
            self.cloud.create(f"c{number}-{disk}", [{"IMAGE_ID": str(self.system)}, {"IMAGE_ID": str(disk)}])
            for number, disk in enumerate(images)
        ]

    def phase(self, work: Callable[[], float]) -> Tuple[float, float]:
        """Return the seconds that `work` says it took, and the MiB read from the pool meanwhile."""
        before = self._read()
        return work(), self._read() - before

    def boot(self) -> float:
        """Deploy all VMs at once, on the hosts in turns; return the seconds until each has read what it needs."""
        return self.boot_on([host.name for host in self.cloud.lab.hosts])

    def boot_on(self, hosts: Sequence[str]) -> float:
        """The same on some hosts."""

        def up(vm: int, host: str) -> None:
            self.cloud.oned.vm_deploy(vm, host, SYSTEM)
            self.cloud.guest(vm).sum("vdb", 0, WORKING_SET_MIB << 10)

        return at_once([partial(up, vm, host) for vm, host in zip(self.vms, cycle(hosts))])

    def command(self, *words: str) -> float:
        """Run our command on the front-end; return the seconds."""
        started = time.monotonic()
        self.cloud.lab.fe.run(["/var/lib/one/remotes/lib/semishared/semishared", *words], timeout=900)
        return time.monotonic() - started

    def detach(self) -> float:
        return self.command("detach", ",".join(map(str, self.vms)))

    def end(self) -> float:
        """Terminate all VMs at once; return the seconds."""
        seconds = at_once([partial(self.cloud.terminate, vm) for vm in self.vms])
        self.vms = []
        return seconds

    def forget(self) -> None:
        """Empty the base stores of all hosts."""
        for host in self.cloud.lab.hosts:
            host.run(["bash", "-c", "rm -rf /var/lib/one/datastores/.semishared/bases/*"], user="root")


def phases(rig: Rig, samples: Samples, counts: Sequence[int], rounds: int) -> None:
    """Boot over the image, detach and terminate so many VMs."""
    shared = image(rig.cloud, "cluster", SEMISHARED_LOCAL="remote-first")
    for _ in rounds_within(900, rounds):
        for count in counts:
            rig.forget()
            rig.create([shared] * count)
            for name, work in (("boot", rig.boot), ("detach", rig.detach), ("end", rig.end)):
                seconds, read = rig.phase(work)
                samples[name, f"{count} s"].append(seconds)
                samples[name, f"{count} MiB"].append(read)


def gaps(rig: Rig, samples: Samples, rounds: int) -> None:
    """Have a guest write while it is detached, and as long while nothing happens: the longest wait of a write."""
    shared = image(rig.cloud, "gap", SEMISHARED_LOCAL="remote-first")
    for _ in rounds_within(300, rounds):
        rig.forget()
        rig.create([shared])
        rig.boot()
        (vm,) = rig.vms
        for name, work in (("switch", rig.detach), ("control", lambda: time.sleep(samples["gap", "seconds"][-1]))):
            guest = rig.cloud.guest(vm)
            guest.loop("vdb", name, (DATA_MIB + 16) << 10, 16 << 10, PER_SECOND)
            time.sleep(2)
            started = time.monotonic()
            work()
            samples["gap", "seconds"].append(time.monotonic() - started)
            counts = rig.cloud.guest(vm).loop_stop("vdb")
            if counts["errors"] or counts["mismatches"]:
                raise RuntimeError(f"{name}: {counts}")
            samples["gap", name].append(counts["maxgap_ms"])
        rig.end()


def disk_rates(rig: Rig, samples: Samples, rounds: int) -> None:
    """Measure the files of VMs that are off: before and after they were detached, and what there is else."""
    host = rig.cloud.lab.hosts[0]
    shared = image(rig.cloud, "rates", SEMISHARED_LOCAL="remote-first")
    plain, place = image(rig.cloud, "rates-overlay"), image(rig.cloud, "rates-in-place", persistent=True)
    vms = {}
    for name, disk in (("remote-first", shared), ("detached", shared), ("overlay", plain)):
        rig.create([disk])
        vms[name] = rig.vms[0]
        rig.boot_on([host.name])
        if name == "detached":
            rig.detach()
        rig.cloud.oned.vm_poweroff(vms[name])
    disks = [rates.layers(host, name, f"{rig.cloud.vm_dir(vm)}/disk.1") for name, vm in vms.items()]
    base = next(disk.base for disk in disks if disk.name == "overlay")
    host.run(["cp", base, RAW], user="root")
    disks += [Disk("raw", Path(RAW)), Disk("in place", None, network=rates.rbd(rig.cloud.source(place).partition("/")[2]))]
    for key, values in rates.measure(host, disks, rounds).items():
        samples[key] = values
    host.run(["rm", "-f", RAW], user="root")
    rig.vms = list(vms.values())
    rig.end()


def cluster(quick: bool) -> List[Figure]:
    """Measure; `quick`: once each."""
    samples: Samples = defaultdict(list)
    with Cloud.up(hosts=HOSTS, ceph=True) as cloud:
        rig = Rig(cloud)
        disk_rates(rig, samples, 1 if quick else 4)
        gaps(rig, samples, 1 if quick else 5)
        phases(rig, samples, COUNTS[:2] if quick else COUNTS, 1 if quick else 3)
    return [*_phases(samples, COUNTS[:2] if quick else COUNTS), *_rates(samples), *_gap(samples)]


# -- figures ----------------------------------------------------------------------------------------


def line(points: Dict[int, float]) -> Tuple[float, float]:
    """Return a and b of a + b * n, fitted by least squares."""
    mean_n, mean_v = sum(points) / len(points), sum(points.values()) / len(points)
    slope = sum((n - mean_n) * (value - mean_v) for n, value in points.items()) / sum((n - mean_n) ** 2 for n in points)
    return mean_v - slope * mean_n, slope


EXPECTED_S = {"boot": (4.0, 3.0), "detach": (8.0, 0.8), "end": (2.0, 0.5)}
"""Seconds of one VM, and of each that is added; said before the first measurement: an emulated boot takes 2.5 s of one of two cores."""


def _phases(samples: Samples, counts: Sequence[int]) -> List[Figure]:
    found = []
    for name, (one, more) in EXPECTED_S.items():
        for count in counts:
            found += [
                Figure(
                    f"cluster/{name}/{count}", f"{name} of {count} VMs at once", "s", samples[name, f"{count} s"],
                    expected=one + more * (count - 1), because="two cores emulate all guests",
                ),
                Figure(
                    f"cluster/{name}-read/{count}", f"read from the pool by {name} of {count} VMs", "MiB", samples[name, f"{count} MiB"],
                ),
            ]  # fmt: skip
        if counts != COUNTS:
            continue
        first, slope = line({count: median(samples[name, f"{count} s"]) for count in FITTED})
        last = COUNTS[-1]
        found.append(Figure(
            f"cluster/{name}-model", f"{name} of {last} VMs", "s", samples[name, f"{last} s"],
            f"of the line through {', '.join(map(str, FITTED))}", [first + slope * last], paired=False, expected=1.0,
            because="each VM costs the same", budget=("ratio", "<=", 1.15), budget_from="a model that may be drawn further",
        ))  # fmt: skip
    return found


WAYS = ("raw", "overlay", "in place", "remote-first", "detached")


def _rates(samples: Samples) -> List[Figure]:
    found = []
    for workload in rates.WORKLOADS:
        for way in WAYS[1:]:
            after = way == "detached"
            against = "overlay" if after else "raw"
            found.append(Figure(
                f"cluster/rate/{workload}/{way}", f"{workload}, {way}", "MiB/s", samples[way, workload], against,
                samples[against, workload], expected=1.0 if after else None, because="it is an overlay like any other" if after else "",
                budget=("ratio", ">=", 0.97) if after else None, budget_from="after detach" if after else "",
            ))  # fmt: skip
    return found


def _gap(samples: Samples) -> List[Figure]:
    return [Figure(
        "cluster/gap", f"longest wait of one of {PER_SECOND} writes per second while a guest is detached", "ms", samples["gap", "switch"],
        "while nothing happens to it", samples["gap", "control"], expected=3.0,
        because="it rests for the moment of the switch, until QEMU has flushed",
    )]  # fmt: skip
