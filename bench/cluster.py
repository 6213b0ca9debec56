# SPDX-License-Identifier: Apache-2.0
"""A virtual cluster from one image on Ceph: its VMs boot over that image, let go of it while they run, and
bring back what they wrote.

On hosts of a lab, 1, 2, 4 and 8 VMs at once: seconds and bytes read from the pool for each phase. Every VM
has two disks: one over the image that all have in common, of which it reads WORKING_SET_MIB as a system does
that boots; and one of a persistent image of its own, empty, that lives on its host, to which it writes
DIRTY_MIB. The guests' processors are emulated by this machine's, and each host stays on one of those: so what
grows is the number of VMs of the busiest host. A line through the times of 1, 2 and 4 VMs must predict those
of 8 before anybody draws it further.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Callable, List, Sequence, Tuple

import rates
from block import Disk, MiB
from cluster_figures import COUNTS, DATA_MIB, HOSTS, PER_SECOND, PHASES, WORKING_SET_MIB, Samples, all_of
from figures import Figure, rounds_within

from lab.cloud import RBD_STORE, SYSTEM, Cloud
from lab.guest import LINUX, Guest

SIZE_MIB = 1024
DIRTY_MIB = 8
PATIENCE_S = 240
"""For a guest to come up, and as much more for each beside it: on a busy machine they take what is left of
it.
"""
PHASES_S = 200
RAW = "/var/tmp/bench-raw"


def image(cloud: Cloud, name: str, mib: int = DATA_MIB, persistent: bool = False, **attributes: Any) -> int:
    """Upload an image to the pool whose first MiB are incompressible."""
    path = cloud.upload_file(f"{name}.img")
    with path.open("wb") as file:
        for _ in range(mib // 16):
            file.write(os.urandom(16 << 20))
        file.truncate(SIZE_MIB << 20)
    cloud.give(path)
    found = cloud.oned.image_create(
        RBD_STORE,
        name,
        path=f"/var/tmp/{path.name}",
        type="DATABLOCK",
        persistent=persistent,
        prefix="vd",
        attributes=attributes,
    )
    path.unlink()
    return found


def at_once(works: Sequence[Callable[[], object]]) -> float:
    """Do all of it at once; return the seconds until the last has ended, raise what the first that failed has
    raised.
    """
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
        self.system = cloud.os_image(system=LINUX)
        self.vms: List[int] = []

    def _read(self) -> float:
        return self.cloud.lab.ceph.bytes_read() / MiB

    def create(self, *disks: Sequence[int]) -> None:
        """Create a VM for each of some sets of images."""
        self.vms = []
        for number, images in enumerate(disks):
            attached = [{"IMAGE_ID": str(image)} for image in (self.system, *images)]
            self.vms.append(self.cloud.create(f"c{number}-{images[-1]}", attached))

    def guest(self, vm: int) -> Guest:
        return self.cloud.guest(vm, PATIENCE_S * (1 + len(self.vms)))

    def own(self, name: str) -> int:
        """Make an empty persistent image whose disk lives on its host."""
        return self.cloud.data_image(
            name, b"", SIZE_MIB // 16, persistent=True, store=RBD_STORE, SEMISHARED_PLACE="local"
        )

    def phase(self, work: Callable[[], float]) -> Tuple[float, float]:
        """Return the seconds that `work` says it took, and the MiB read from the pool meanwhile."""
        before = self._read()
        return work(), self._read() - before

    def boot(self) -> float:
        """Deploy all VMs at once, on the hosts in turns; return the seconds until each has read what it
        needs.
        """
        return self.boot_on([host.name for host in self.cloud.lab.hosts])

    def boot_on(self, hosts: Sequence[str]) -> float:
        """The same on some hosts."""

        def up(vm: int, host: str) -> None:
            self.cloud.oned.vm_deploy(vm, host, SYSTEM)
            self.guest(vm).sum("vdb", 0, WORKING_SET_MIB << 10, timeout=PATIENCE_S * (1 + len(self.vms)))

        return at_once([partial(up, vm, host) for vm, host in zip(self.vms, cycle(hosts))])

    def command(self, *words: str) -> float:
        """Run our command on the front-end; return the seconds."""
        started = time.monotonic()
        self.cloud.lab.fe.run(["/var/lib/one/remotes/lib/semishared/semishared", *words], timeout=900)
        return time.monotonic() - started

    def cluster(self, verb: str) -> float:
        """Do it with all VMs; return the seconds."""
        return self.command("cluster", verb, "--vms", ",".join(map(str, self.vms)), "--json")

    def dirty(self) -> None:
        """Let every guest write to its own disk."""
        for vm in self.vms:
            self.guest(vm).write("vdc", "dirty", 0, DIRTY_MIB << 10, timeout=PATIENCE_S)

    def end(self) -> float:
        """Terminate all VMs at once; return the seconds."""
        seconds = at_once([partial(self.cloud.terminate, vm) for vm in self.vms])
        self.vms = []
        return seconds

    def forget(self) -> None:
        """Empty the base stores of all hosts, where no VM is."""
        for host in self.cloud.lab.hosts:
            host.run(["bash", "-c", "rm -rf /var/lib/one/datastores/.semishared/bases/*"], user="root")


def phases(rig: Rig, samples: Samples, counts: Sequence[int], rounds: int) -> None:
    """Boot over the image, detach, commit and terminate so many VMs."""
    shared = image(rig.cloud, "cluster", SEMISHARED_LOCAL="remote-first")
    for core, host in enumerate(rig.cloud.lab.hosts):
        host.stay_on(core % (os.cpu_count() or 1))
    for number in rounds_within(PHASES_S, rounds):
        for count in counts:
            rig.forget()
            rig.create(*([shared, rig.own(f"own-{number}-{count}-{vm}")] for vm in range(count)))
            for name in PHASES:
                if name == "commit":
                    rig.dirty()
                seconds, read = rig.phase(
                    rig.end if name == "end" else rig.boot if name == "boot" else partial(rig.cluster, name)
                )
                print(f"  {count} VMs: {name} {seconds:.1f} s, {read:.1f} MiB read from the pool", flush=True)
                samples[name, f"{count} s"].append(seconds)
                samples[name, f"{count} MiB"].append(read)


def gaps(rig: Rig, samples: Samples, rounds: int) -> None:
    """Have a guest write while it is detached, and as long while nothing happens: the longest wait of a
    write.
    """
    shared = image(rig.cloud, "gap", SEMISHARED_LOCAL="remote-first")
    for _ in rounds_within(35, rounds):
        rig.forget()
        rig.create([shared])
        rig.boot()
        (vm,) = rig.vms
        for name, work in (
            ("switch", partial(rig.cluster, "detach")),
            ("control", lambda: time.sleep(samples["gap", "seconds"][-1])),
        ):
            guest = rig.guest(vm)
            guest.loop("vdb", name, (DATA_MIB + 16) << 10, 16 << 10, PER_SECOND)
            time.sleep(2)
            started = time.monotonic()
            work()
            samples["gap", "seconds"].append(time.monotonic() - started)
            counts = rig.guest(vm).loop_stop("vdb")
            if counts["errors"] or counts["mismatches"]:
                raise RuntimeError(f"{name}: {counts}")
            samples["gap", name].append(counts["maxgap_ms"])
        rig.end()


def disk_rates(rig: Rig, samples: Samples, rounds: int) -> None:
    """Measure the files of VMs that are off: before and after they were detached, and what there is else."""
    host = rig.cloud.lab.hosts[0]
    shared = image(rig.cloud, "rates", rates.DATA_MIB, SEMISHARED_LOCAL="remote-first")
    plain, place = (
        image(rig.cloud, "rates-overlay", rates.DATA_MIB),
        image(rig.cloud, "rates-in-place", rates.DATA_MIB, persistent=True),
    )
    vms = {}
    for name, disk in (("remote-first", shared), ("detached", shared), ("overlay", plain)):
        rig.create([disk])
        vms[name] = rig.vms[0]
        rig.boot_on([host.name])
        if name == "detached":
            rig.cluster("detach")
        rig.cloud.oned.vm_poweroff(vms[name])
    disks = [rates.layers(host, name, f"{rig.cloud.vm_dir(vm)}/disk.1") for name, vm in vms.items()]
    base = next(disk.base for disk in disks if disk.name == "overlay")
    host.run(["cp", base, RAW], user="root")
    disks += [
        Disk("raw", Path(RAW)),
        Disk("in place", None, network=rates.rbd(rig.cloud.source(place).partition("/")[2])),
    ]
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
        disk_rates(rig, samples, 1 if quick else rates.MOST)
        gaps(rig, samples, 1 if quick else 5)
        phases(rig, samples, COUNTS[:2] if quick else COUNTS, 1 if quick else 2)
    return all_of(samples)
